"""What has happened to pods that are placed: their node, its report or their GPU is gone, or the GPU has
less memory than was given out. Nothing is evicted unasked, and no new pod comes there; their owners are told.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from berth.contract.ids import NodeName, PodUid
from berth.contract.quantity import format_bytes
from berth.kube.events import EventRecorder
from binder.cache.reservations import Reservation
from binder.cache.state import ClusterState
from binder.cache.view import NodeView


@dataclass(frozen=True, slots=True)
class PlacementFailure:
    """An event's reason and message."""

    reason: str
    message: str


def failure_of(reservation: Reservation, view: NodeView | None) -> PlacementFailure | None:
    """What is wrong with the place of one pod."""
    if view is None:
        return PlacementFailure("NodeGone", f"node {reservation.node} does not exist any more")
    if view.facts.report is None:
        return PlacementFailure("NodeReportGone", f"nothing is known of the GPUs of node {reservation.node}")
    gpus = {gpu.uuid: gpu for gpu in view.gpus}
    for uuid in reservation.gpus:
        gpu = gpus.get(uuid)
        if gpu is None:
            return PlacementFailure("GPULost", f"GPU {uuid} is not on node {reservation.node} any more")
        if not gpu.healthy:
            return PlacementFailure(
                "GPUUnhealthy", f"GPU {gpu.index} ({uuid}) of node {reservation.node}: {gpu.reason}"
            )
        free = view.free_on(gpu)
        if free is not None and free < 0:
            message = f"GPU {gpu.index} ({uuid}) of node {reservation.node} is {format_bytes(-free)} over its memory"
            return PlacementFailure("GPUOvercommitted", message)
    return None


class PlacementFailures:
    """Tells each pod of each trouble once; `look_at` only takes note, on a standby too."""

    def __init__(self, state: ClusterState, events: EventRecorder) -> None:
        self._state, self._events = state, events
        self._nodes: set[NodeName] = set()
        self._told: dict[NodeName, dict[PodUid, str]] = {}

    def look_at(self, node: NodeName) -> None:
        """Something about the node has changed."""
        self._nodes.add(node)

    def tell(self) -> None:
        """Say what is new. For a leader."""
        nodes, self._nodes = self._nodes, set()
        for node in nodes:
            self._tell_node(node, [h for h in self._state.living_on(node) if h.has_model])

    def _tell_node(self, node: NodeName, reservations: Iterable[Reservation]) -> None:
        view, before, now = self._state.find(node), self._told.pop(node, {}), dict[PodUid, str]()
        for reservation in reservations:
            trouble = failure_of(reservation, view)
            if trouble is None:
                continue
            now[reservation.ref.uid] = trouble.reason
            if before.get(reservation.ref.uid) != trouble.reason:
                self._events.record(reservation.ref, "Warning", trouble.reason, trouble.message)
        if now:
            self._told[node] = now
