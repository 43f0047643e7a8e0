"""Reports to the owners of placed pods what is wrong with their place: node, report or GPU gone, GPU unhealthy or given out
beyond its memory. This alone evicts no pod, and no new pod comes there.
"""

from collections.abc import Iterable

from berth.contract.ids import NodeName, PodUid
from berth.kube.events import EventRecorder
from binder.cache.reservations import Reservation
from binder.cache.state import ClusterState
from binder.cache.view import NodeView
from binder.loop.verdict import PlacementFailure, gpu_failure, node_gone


def failure_of(reservation: Reservation, view: NodeView | None) -> PlacementFailure | None:
    """What is wrong with the place of one pod."""
    if view is None:
        return node_gone(reservation.node)
    if view.facts.report is None:
        return PlacementFailure("NodeReportGone", f"nothing is known of the GPUs of node {reservation.node}")
    gpus = {gpu.uuid: gpu for gpu in view.gpus}
    for uuid in reservation.gpus:
        gpu = gpus.get(uuid)
        free = None if gpu is None else view.free_on(gpu)
        if (failure := gpu_failure(uuid, gpu, reservation.node, free_bytes=free)) is not None:
            return failure
    return None


class PlacementFailures:
    """Reports each failure to each pod once; `observe` only takes note, on a standby too."""

    def __init__(self, state: ClusterState, events: EventRecorder) -> None:
        self._state, self._events = state, events
        self._changed: set[NodeName] = set()
        self._reported: dict[NodeName, dict[PodUid, str]] = {}

    def observe(self, node: NodeName) -> None:
        """Something about the node has changed."""
        self._changed.add(node)

    def report(self) -> None:
        """Record an event for each failure that is new. For a leader."""
        nodes, self._changed = self._changed, set()
        for node in nodes:
            self._report_node(node, [h for h in self._state.living_on(node) if h.has_model])

    def _report_node(self, node: NodeName, reservations: Iterable[Reservation]) -> None:
        view, before, now = self._state.find(node), self._reported.pop(node, {}), dict[PodUid, str]()
        for reservation in reservations:
            failure = failure_of(reservation, view)
            if failure is None:
                continue
            now[reservation.ref.uid] = failure.reason
            if before.get(reservation.ref.uid) != failure.reason:
                self._events.record(reservation.ref, "Warning", failure.reason, failure.message)
        if now:
            self._reported[node] = now
