"""The binding cycle: the writes that give assumed pods their nodes and GPUs, and what becomes of each.

No answer says nothing: the API server may hold the request and write it later. The same Binding is posted again then, and
the assumption stands, until it is certain what becomes of all tries: the pod has a node, or none can be given to it any
more. A refusal settles only what was not in doubt before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from berth.contract.ids import PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, is_deleting, node_of
from berth.contract.quantity import format_bytes
from berth.kube import paths
from berth.kube.errors import KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from binder.cache.state import ClusterState
from binder.engine.decision import Placement
from binder.loop.fenced import FencedClient, NotLeading, PodClient
from binder.loop.metrics import BinderMetrics
from binder.pod.demand import Demand

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]
T = TypeVar("T")

BINDS_AT_ONCE = 64
_STOP_SECONDS = 20.0
# Until a replica that is not sure to lead looks whether it does.
_LEADING_SECONDS = 1.0


async def post_binding(client: PodClient, keys: Keys, ref: PodRef, placement: Placement) -> None:
    """Bind the pod. Raises KubeError; whether it took effect is then for `may_have_happened` to say.

    The uid is a precondition, and the annotations are merged into the pod in the same write.
    """
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": ref.name,
            "namespace": ref.namespace,
            "uid": ref.uid,
            "annotations": {keys.gpu: placement.gpu.encode()},
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": placement.node},
    }
    await client.create(f"{paths.pod(ref.namespace, ref.name)}/binding", body)


def is_answer(error: KubeError) -> bool:
    """Silence, a server that fails and one that is too busy do not say what becomes of the Binding."""
    return error.status is not None and error.status < 500 and error.status not in (408, 429)


def may_have_happened(error: KubeError) -> bool:
    """A refusal is certain, and so is what was not sent; silence and the server's own failure leave it open."""
    return not isinstance(error, NotLeading) and (error.status is None or error.status >= 500)


async def current_pod(client: PodClient, ref: PodRef) -> JsonObject | None:
    """The pod as it is now, None if it is gone. Asks until there is an answer."""
    backoff = Backoff(initial_seconds=0.2, cap_seconds=15.0)
    while True:
        try:
            pod = await client.get(paths.pod(ref.namespace, ref.name))
        except NotFound:
            return None
        except KubeError as error:
            log.warning("binding unknown", extra=fields(pod=ref, error=error))
            await asyncio.sleep(backoff.next())
            continue
        return pod if pod["metadata"]["uid"] == ref.uid else None


@dataclass(frozen=True, slots=True)
class BindingOutcome:
    """How a Binding ended. `failure`: why the pod is not bound as decided, "" where it is. `pod`: as it is now, where an
    error made it be looked up and it exists. `is_unsent`: nothing was tried."""

    failure: str = ""
    pod: JsonObject | None = None
    is_unsent: bool = False


def _can_be_bound(pod: JsonObject | None) -> bool:
    """A Binding that is under way may still be written."""
    return pod is not None and node_of(pod) is None and not is_deleting(pod)


def _retries() -> Backoff:
    """The pauses between the tries of one Binding."""
    return Backoff(initial_seconds=0.5, cap_seconds=15.0)


class BindingCycle:
    """`wake` is set when the scheduler has something to do: a slot is free, or memory has come free."""

    def __init__(
        self,
        client: FencedClient,
        state: ClusterState,
        events: EventRecorder,
        metrics: BinderMetrics,
        *,
        keys: Keys,
        wake: asyncio.Event,
        sleep: Callable[[float], Awaitable[object]],
    ) -> None:
        self._client, self._state, self._events, self._metrics = client, state, events, metrics
        self._keys, self._wake, self._sleep = keys, wake, sleep
        self._tasks: set[asyncio.Task[Any]] = set()
        # Bindings on their way or without an answer, and the pauses between the tries of some of them.
        self._in_doubt: set[PodUid] = set()
        self._pauses: set[asyncio.Future[object]] = set()
        self._posts = asyncio.Semaphore(BINDS_AT_ONCE)
        self._is_stopping = False

    @property
    def in_doubt(self) -> bool:
        """Some Binding may still be written although no task waits for it any more."""
        return bool(self._in_doubt)

    @property
    def has_slot(self) -> bool:
        """One more Binding may be begun."""
        return not self._is_stopping and len(self._tasks) - len(self._pauses) < BINDS_AT_ONCE

    def may_write(self) -> bool:
        """No other replica can lead for as long as a write that begins now can take."""
        return self._client.may_write()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that writes, in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def in_flight(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that writes: it is waited for at the end, and ends with the leadership."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def drain(self) -> None:
        """Wait, within bounds, for the Bindings in flight."""
        self._is_stopping = True
        for pause in self._pauses:
            pause.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_SECONDS)

    async def abandon(self) -> None:
        """A leader that is not sure to lead any more must not write: its successor decides now."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def bind(self, demand: Demand, placement: Placement) -> BindingOutcome:
        """Bind an assumed pod; the assumption is settled, unless the process ends before that is known."""
        ref, backoff = demand.model.ref, _retries()
        while self._client.may_write() and not (backoff.failures and self._is_stopping):
            try:
                await self._post(ref, placement)
            except NotLeading:
                break
            except KubeError as error:
                self._metrics.attempted("error")
                log.warning("binding failed", extra=fields(pod=ref, node=placement.node, error=error))
                pod = None if isinstance(error, NotFound) else await current_pod(self._client, ref)
                if not _can_be_bound(pod) or (is_answer(error) and ref.uid not in self._in_doubt):
                    return self._settle(ref, placement, error, pod)
                if not backoff.failures:
                    message = f"binding to node {placement.node} has no answer and is sent again: {error}"
                    self._events.record(ref, "Warning", "FailedScheduling", message)
                await self._pause(backoff.next())
            else:
                self._bound(ref, placement)
                return BindingOutcome()
        return await self._give_way(demand, placement)

    async def _post(self, ref: PodRef, placement: Placement) -> None:
        """One try. Raises KubeError. The pod is in doubt until an answer says what became of all tries."""
        async with self._posts:
            doubted = ref.uid in self._in_doubt
            self._in_doubt.add(ref.uid)
            try:
                with self._metrics.bind_seconds.time():
                    await post_binding(self._client, self._keys, ref, placement)
            except KubeError as error:
                if not doubted and not may_have_happened(error):
                    self._in_doubt.discard(ref.uid)
                raise

    async def _pause(self, seconds: float) -> None:
        """Not longer than the process has left."""
        pause = asyncio.ensure_future(self._sleep(seconds))
        self._pauses.add(pause)
        self._wake.set()  # another pod can have the slot
        try:
            await asyncio.wait({pause})
        finally:
            pause.cancel()
            self._pauses.discard(pause)

    async def _give_way(self, demand: Demand, placement: Placement) -> BindingOutcome:
        """Not sure to lead: stopped, suspended or starved for so long that another replica may lead soon."""
        if demand.model.ref.uid not in self._in_doubt:
            self._state.forget(demand.model.ref.uid)
            return BindingOutcome("this replica is not sure to lead any more", is_unsent=True)
        if self._is_stopping:
            return BindingOutcome("this replica ends, and nothing says whether the pod is bound")
        await self._pause(_LEADING_SECONDS)
        return await self.bind(demand, placement)

    def _settle(
        self, ref: PodRef, placement: Placement, error: KubeError, pod: JsonObject | None
    ) -> BindingOutcome:
        """After an error only the pod itself can tell whether it is bound, and where."""
        doubted = ref.uid in self._in_doubt
        self._in_doubt.discard(ref.uid)
        self._wake.set()
        if pod is not None and node_of(pod) is not None:
            if node_of(pod) != placement.node:
                return BindingOutcome(str(error), pod)
            self._bound(ref, placement)
            return BindingOutcome(pod=pod)
        if pod is None and doubted:
            self._state.remove_pod(ref.uid)  # bound and deleted since, perhaps: a stale model
        else:
            self._state.forget(ref.uid)
        return BindingOutcome(str(error), pod)

    def _bound(self, ref: PodRef, placement: Placement) -> None:
        self._in_doubt.discard(ref.uid)
        self._metrics.attempted("scheduled")
        node, gpu = placement.node, placement.gpu
        where = ", ".join(f"GPU {one.index} ({one.uuid})" for one in gpu.gpus)
        log.info("placed", extra=fields(pod=ref, node=node, gpu=gpu.uuid, bytes=gpu.bytes))
        message = f"placed {ref} on {node}, {where}, {format_bytes(gpu.bytes)}"
        self._events.record(ref, "Normal", "Scheduled", message)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("binding broke", exc_info=error)
