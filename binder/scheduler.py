"""Places pods: takes one from the queue, decides, assumes, and binds in the background.

Between a decision and its assumption there is no await, so no two decisions see the same free
memory. The Binding carries the pod's uid as precondition and the GPU choice in its annotations,
which the API server merges into the pod in the same write.
"""

import asyncio
import logging
import time
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.ids import PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, has_ended, is_deleting, node_of, pod_ref
from berth.contract.quantity import format_bytes
from berth.kube import paths
from berth.kube.client import STRATEGIC_PATCH, KubeClient
from berth.kube.errors import Conflict, KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.kube.informer import Change, ChangeKind
from berth.kube.lease import Freshness
from berth.kube.times import rfc3339, utc_now
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from binder.decision import Placement, Refusal, Strategy, decide
from binder.demand import Demand, parse_demand
from binder.explain import summary
from binder.metrics import BinderMetrics
from binder.queue import SchedulingQueue, Waiting
from binder.state import ClusterState

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]

BINDS_AT_ONCE = 16
# Ghosts and stale heartbeats are matters of time, not of events: look now and then.
_TICK_SECONDS = 1.0
_STOP_SECONDS = 20.0


class Scheduler:
    """`on_*` take what the watches tell; `run()` places pods until cancelled."""

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
        self.state = ClusterState(keys, clock=time.monotonic)
        self.queue = SchedulingQueue(time.monotonic)
        self._fresh = Freshness()
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(BINDS_AT_ONCE)
        self._binds: set[asyncio.Task[None]] = set()
        # What the owner of a pod that cannot be read was told.
        self._refused: dict[PodUid, str] = {}
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
        uid = pod_ref(pod).uid
        if change.kind is ChangeKind.GONE:
            self._remove(uid)
        elif node_of(pod) is not None:
            self.queue.remove(uid)
            if self.state.set_pod(pod):
                self._wake_all()
        elif pod["spec"].get("schedulerName") == self._name:
            self._take_pending(pod)

    async def run(self) -> None:
        """Place pods for ever."""
        while True:
            self._wake.clear()
            if self.state.expire_ghosts():
                self.queue.wake()
            while not self._stopping and (waiting := self.queue.pop()) is not None:
                await self._slots.acquire()
                self._place(waiting)
                await asyncio.sleep(0)  # the watches must be heard between two decisions
            self._metrics.waiting.set(len(self.queue))
            self._metrics.assumed.set(self.state.assumed_count)
            self._metrics.set_nodes(self.state.views())
            due = self.queue.seconds_to_next()
            pause = _TICK_SECONDS if due is None else max(0.01, min(due, _TICK_SECONDS))
            await wait_until_set(self._wake, timeout_seconds=pause)

    async def drain(self) -> None:
        """Decide nothing more and wait, within bounds, for the Bindings in flight."""
        self._stopping = True
        if self._binds:
            await asyncio.wait(self._binds, timeout=_STOP_SECONDS)

    def is_fresh(self, node: str) -> bool:
        return self._fresh.is_fresh(self._lease_prefix + node, monotonic=time.monotonic())

    def _remove(self, uid: PodUid) -> None:
        self.queue.remove(uid)
        self._refused.pop(uid, None)
        if self.state.remove_pod(uid):
            self._wake_all()

    def _take_pending(self, pod: JsonObject) -> None:
        ref = pod_ref(pod)
        if is_deleting(pod) or has_ended(pod):
            self._remove(ref.uid)
            return
        if self.state.is_assumed(ref.uid):
            return
        try:
            demand = parse_demand(pod, self._keys)
        except InvalidPod as error:
            self.queue.remove(ref.uid)
            self._refuse_invalid(ref, str(error))
            return
        self._refused.pop(ref.uid, None)
        self.queue.put(demand)
        self._wake.set()

    def _refuse_invalid(self, ref: PodRef, message: str) -> None:
        """Told once for each message; only a change of the pod can help."""
        if self._refused.get(ref.uid) == message:
            return
        self._refused[ref.uid] = message
        self._metrics.attempted("invalid")
        self._in_background(self._tell_unschedulable(ref, f"the pod cannot be placed: {message}"))

    def _place(self, waiting: Waiting) -> None:
        """Decide and assume in one step; the slot is given back by what follows."""
        demand = waiting.demand
        with self._metrics.decision_seconds.time():
            outcome = decide(demand, self.state.views(), fresh=self.is_fresh, by=self._by)
        if isinstance(outcome, Placement):
            self.state.assume(demand, outcome.node, outcome.gpu)
            self._in_background(self._bind(waiting, outcome))
        else:
            self._slots.release()
            self._park(waiting, outcome)

    def _park(self, waiting: Waiting, refusal: Refusal) -> None:
        message = summary(refusal.verdicts)
        self._metrics.attempted("unschedulable")
        if message != waiting.message:
            waiting.message = message
            ref = waiting.demand.model.ref
            log.info("no place", extra=fields(pod=ref, reason=message))
            self._in_background(self._tell_unschedulable(ref, message))
        self.queue.park(waiting)

    async def _bind(self, waiting: Waiting, placement: Placement) -> None:
        ref = waiting.demand.model.ref
        try:
            with self._metrics.bind_seconds.time():
                await self._post_binding(ref, placement)
        except NotFound:
            self.state.forget(ref.uid)
            self._wake_all()
        except KubeError as error:
            await self._settle(waiting, error)
        else:
            self._metrics.attempted("scheduled")
            self._tell_scheduled(ref, waiting.demand, placement)
        finally:
            self._slots.release()

    async def _post_binding(self, ref: PodRef, placement: Placement) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": ref.name,
                "namespace": ref.namespace,
                "uid": ref.uid,
                "annotations": {self._keys.gpu: placement.gpu.encode()},
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": placement.node},
        }
        await self._client.create(f"{paths.pod(ref.namespace, ref.name)}/binding", body)

    async def _settle(self, waiting: Waiting, error: KubeError) -> None:
        """After an error the Binding may or may not have happened: only the pod itself can tell.

        The assumption stays until it is known, so that nothing is given away twice.
        """
        ref = waiting.demand.model.ref
        self._metrics.attempted("error")
        log.warning("binding failed", extra=fields(pod=ref, error=error))
        while True:
            try:
                pod = await self._client.get(paths.pod(ref.namespace, ref.name))
            except NotFound:
                pod = None
            except KubeError as again:
                log.warning("binding unknown", extra=fields(pod=ref, error=again))
                await asyncio.sleep(waiting.backoff.next())
                continue
            break
        if pod is None or pod["metadata"]["uid"] != ref.uid:
            self.state.forget(ref.uid)
        elif node_of(pod) is not None:
            self.state.set_pod(pod)
        else:
            self.state.forget(ref.uid)
            if not is_deleting(pod):
                self.queue.park(waiting)
        self._wake_all()

    def _tell_scheduled(self, ref: PodRef, demand: Demand, placement: Placement) -> None:
        gpu = placement.gpu
        log.info("placed", extra=fields(pod=ref, node=placement.node, gpu=gpu.uuid, bytes=gpu.bytes))
        self._events.record(
            ref,
            "Normal",
            "Scheduled",
            f"placed {ref} on {placement.node}, GPU {gpu.index} ({gpu.uuid}), "
            f"{format_bytes(demand.model.request_bytes)}",
        )

    async def _tell_unschedulable(self, ref: PodRef, message: str) -> None:
        """An event for people, and the condition that cluster autoscalers wait for."""
        self._events.record(ref, "Warning", "FailedScheduling", message)
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": rfc3339(utc_now()),
        }
        # The uid is a precondition: a successor of the same name is somebody else.
        body = {"metadata": {"uid": ref.uid}, "status": {"conditions": [condition]}}
        path = f"{paths.pod(ref.namespace, ref.name)}/status"
        try:
            await self._client.patch(path, body, content_type=STRATEGIC_PATCH)
        except (NotFound, Conflict):
            return
        except KubeError as error:
            log.warning("condition not written", extra=fields(pod=ref, error=error))

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._binds.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._binds.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)

    def _wake_all(self) -> None:
        self.queue.wake()
        self._wake.set()
