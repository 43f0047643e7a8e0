"""Places pods: takes one from the queue, decides, assumes, and binds in the background.

Between a decision and its assumption there is no await, so no two decisions see the same free
memory. An assumption is given up only when it is certain that the Binding did not happen.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.ids import PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, has_ended, is_deleting, node_of, pod_ref
from berth.contract.quantity import format_bytes
from berth.kube.client import KubeClient
from berth.kube.errors import KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.kube.informer import Change, ChangeKind
from berth.kube.lease import Freshness
from berth.kube.times import utc_now
from berth.runtime.logs import fields
from berth.runtime.tasks import supervise, wait_until_set
from binder.binding import current_pod, may_have_happened, post_binding
from binder.decision import Placement, Refusal, Strategy, decide
from binder.demand import parse_demand
from binder.explain import summary
from binder.metrics import BinderMetrics
from binder.notices import Notices, told
from binder.queue import SchedulingQueue, Waiting
from binder.state import ClusterState

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]

BINDS_AT_ONCE = 16
# Ghosts and stale heartbeats are matters of time, not of events: look now and then.
_TICK_SECONDS = 1.0
_STOP_SECONDS = 20.0


@dataclass(slots=True)
class _Unreadable:
    """A pod that only its owner's change can help."""

    ref: PodRef
    message: str
    told: str


class Scheduler:
    """`on_*` take what the watches tell, on a standby too; only `run()` writes anything."""

    def __init__(
        self,
        client: KubeClient,
        *,
        keys: Keys,
        scheduler_name: str,
        by: Strategy,
        events: EventRecorder,
        metrics: BinderMetrics,
        lease_prefix: str,
    ) -> None:
        self._client, self._keys, self._name, self._by = client, keys, scheduler_name, by
        self._events, self._metrics, self._lease_prefix = events, metrics, lease_prefix
        self._notices = Notices(client, events)
        self.state = ClusterState(keys, clock=time.monotonic)
        self.queue = SchedulingQueue(time.monotonic)
        metrics.follow(self.queue, self.state)
        self._fresh = Freshness()
        self._unreadable: dict[PodUid, _Unreadable] = {}
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(BINDS_AT_ONCE)
        self._binds: set[asyncio.Task[None]] = set()
        self._stopping = False

    def on_node(self, change: Change) -> None:
        if change.kind is ChangeKind.GONE:
            self.state.remove_node(change.object["metadata"]["name"])
        elif self.state.set_node(change.object):
            self._wake_all()

    def on_lease(self, change: Change) -> None:
        name = change.object["metadata"]["name"]
        if not name.startswith(self._lease_prefix):
            return
        if change.kind is ChangeKind.GONE:
            self._fresh.forget(name)
            return
        was_fresh = self._fresh.is_fresh(name, monotonic=time.monotonic())
        self._fresh.observe(change.object, monotonic=time.monotonic(), wall=utc_now())
        if not was_fresh:
            self._wake_all()

    def on_pod(self, change: Change) -> None:
        pod = change.object
        if node_of(pod) is not None:
            # Also of a pod that is gone: its last state may be the first that we see of its node.
            self._set_bound(pod)
        if change.kind is ChangeKind.GONE:
            self._remove(pod_ref(pod).uid)
        elif node_of(pod) is None and pod["spec"].get("schedulerName") == self._name:
            self._set_pending(pod)

    async def run(self) -> None:
        """Place pods until cancelled; nothing is in flight any more when it ends."""
        self._metrics.leader.set(1)
        try:
            async with supervise() as tasks:
                tasks.eternal("notices", self._notices.run())
                while True:
                    await self._pass()
        finally:
            self._metrics.leader.set(0)
            await self._abandon_binds()

    async def drain(self) -> None:
        """Decide nothing more and wait, within bounds, for the Bindings in flight."""
        self._stopping = True
        if self._binds:
            await asyncio.wait(self._binds, timeout=_STOP_SECONDS)

    def is_fresh(self, node: str) -> bool:
        return self._fresh.is_fresh(self._lease_prefix + node, monotonic=time.monotonic())

    async def _pass(self) -> None:
        """Place what can be placed now, then wait for news or for the next pod's time."""
        self._wake.clear()
        if self.state.expire_ghosts():
            self.queue.wake()
        self._tell_unreadable()
        await self._place_ready()
        due = None if self._stopping else self.queue.seconds_to_next()
        pause = _TICK_SECONDS if due is None else max(0.01, min(due, _TICK_SECONDS))
        await wait_until_set(self._wake, timeout_seconds=pause)

    async def _place_ready(self) -> None:
        while True:
            await self._slots.acquire()
            # Asked only now: a pod may have changed or gone while there was no slot.
            waiting = None if self._stopping else self.queue.pop()
            if waiting is None:
                self._slots.release()
                return
            self._place(waiting)
            await asyncio.sleep(0)  # the watches must be heard between two decisions

    def _place(self, waiting: Waiting) -> None:
        """Decide and assume in one step; the slot is given back by what follows."""
        with self._metrics.decision_seconds.time():
            outcome = decide(waiting.demand, self.state.views(), fresh=self.is_fresh, by=self._by)
        if isinstance(outcome, Placement):
            self.state.assume(waiting.demand, outcome.node, outcome.gpu)
            self._bind_in_background(waiting, outcome)
        else:
            self._slots.release()
            self._park(waiting, outcome)

    def _park(self, waiting: Waiting, refusal: Refusal) -> None:
        self._metrics.attempted("unschedulable")
        self._tell(waiting, summary(refusal.verdicts))
        self.queue.park(waiting)

    def _set_bound(self, pod: JsonObject) -> None:
        uid = pod_ref(pod).uid
        self.queue.remove(uid)
        self._unreadable.pop(uid, None)
        if self.state.set_pod(pod):
            self._wake_all()

    def _set_pending(self, pod: JsonObject) -> None:
        ref = pod_ref(pod)
        if is_deleting(pod) or has_ended(pod):
            self._remove(ref.uid)
            return
        if self.state.has_place(ref.uid):
            return  # an assumption settles itself, and a watch that lags takes no node away
        try:
            demand = parse_demand(pod, self._keys)
        except InvalidPod as error:
            self.queue.remove(ref.uid)
            known = self._unreadable.get(ref.uid)
            before = told(pod) if known is None else known.told
            self._unreadable[ref.uid] = _Unreadable(ref, f"the pod cannot be placed: {error}", before)
        else:
            self._unreadable.pop(ref.uid, None)
            self.queue.put(demand, told=told(pod))
        self._wake.set()

    def _remove(self, uid: PodUid) -> None:
        self.queue.remove(uid)
        self._unreadable.pop(uid, None)
        if self.state.remove_pod(uid):
            self._wake_all()

    def _bind_in_background(self, waiting: Waiting, placement: Placement) -> None:
        task = asyncio.create_task(self._bind(waiting, placement))
        self._binds.add(task)
        task.add_done_callback(self._bind_done)

    async def _bind(self, waiting: Waiting, placement: Placement) -> None:
        ref = waiting.demand.model.ref
        try:
            await self._notices.withdraw(ref.uid)
            with self._metrics.bind_seconds.time():
                await post_binding(self._client, self._keys, ref, placement)
        except NotFound:
            self.state.forget(ref.uid)
            self._wake_all()
        except KubeError as error:
            await self._settle(waiting, placement, error)
        else:
            self._metrics.attempted("scheduled")
            self._tell_placed(ref, placement)

    async def _settle(self, waiting: Waiting, placement: Placement, error: KubeError) -> None:
        """After an error only the pod itself can tell whether it is bound, and where."""
        ref = waiting.demand.model.ref
        self._metrics.attempted("error")
        log.warning("binding failed", extra=fields(pod=ref, node=placement.node, error=error))
        pod = await current_pod(self._client, ref)
        if pod is not None and node_of(pod) is not None:
            self._set_bound(pod)
        elif pod is not None:
            self.state.forget(ref.uid)
            self._tell(waiting, f"binding to node {placement.node} failed: {error}")
            self.queue.hold(waiting)
            self._set_pending(pod)  # it may ask for something else by now, or be about to go
        elif may_have_happened(error):
            self.state.remove_pod(ref.uid)  # bound and deleted since, perhaps: a ghost
        else:
            self.state.forget(ref.uid)
        self._wake_all()

    def _tell(self, waiting: Waiting, message: str) -> None:
        """Once for each message."""
        if message == waiting.message:
            return
        ref = waiting.demand.model.ref
        log.info("no place", extra=fields(pod=ref, reason=message))
        self._notices.tell(ref, message, first=not waiting.message)
        waiting.message = message

    def _tell_unreadable(self) -> None:
        for pod in self._unreadable.values():
            if pod.message != pod.told:
                self._metrics.attempted("invalid")
                self._notices.tell(pod.ref, pod.message, first=not pod.told)
                pod.told = pod.message

    def _tell_placed(self, ref: PodRef, placement: Placement) -> None:
        node, gpu = placement.node, placement.gpu
        log.info("placed", extra=fields(pod=ref, node=node, gpu=gpu.uuid, bytes=gpu.bytes))
        message = f"placed {ref} on {node}, GPU {gpu.index} ({gpu.uuid}), {format_bytes(gpu.bytes)}"
        self._events.record(ref, "Normal", "Scheduled", message)

    def _bind_done(self, task: "asyncio.Task[None]") -> None:
        self._binds.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("binding broke", exc_info=error)

    async def _abandon_binds(self) -> None:
        """A leader that is not sure to lead any more must not write: its successor decides now."""
        binds = list(self._binds)
        for bind in binds:
            bind.cancel()
        await asyncio.gather(*binds, return_exceptions=True)

    def _wake_all(self) -> None:
        self.queue.wake()
        self._wake.set()
