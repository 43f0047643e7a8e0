"""Writes what was decided: the newest of each object wins, one write of it is under way at a time.

An API server that is slow or away holds up no decision: what was to be written is replaced by what is to be written
now, and tried again after a growing pause. Nothing is written without certain leadership: a leader that another may
have succeeded keeps still.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from berth.contract.activation import SLICE_MANAGER
from berth.contract.keys import Keys
from berth.contract.scaling import ModelKey, Scaled
from berth.kube import paths
from berth.kube.client import WRITE_SECONDS, KubeClient
from berth.kube.errors import Conflict, Denied, Invalid, KubeError, KubeResponseError, NotFound
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from scaler.activation.route import Apply, SliceAction
from scaler.core.pods import DELETION_COST

log = logging.getLogger(__name__)

# Fewer than the client has connections: the Lease is renewed beside them. What people read waits for itself alone.
WRITES_AT_ONCE: Final = 32
STATUSES_AT_ONCE: Final = 8
# For what is of no consequence, before what is.
_COSTS_SECONDS: Final = 2.0
# An object that is not written within this time is decided anew, by what there is then.
_PATIENCE_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentWrite:
    """What a Deployment is to be; None: as it is. `uid`: of that Deployment and no successor of its name."""

    model: ModelKey
    uid: str
    replicas: int | None = None
    scaled: Scaled | None = None
    # By names of pods, written before the replicas; what of it fails is of no consequence.
    costs: Mapping[str, int] = field(default_factory=dict)

    def with_newer(self, newer: "DeploymentWrite") -> "DeploymentWrite":
        """What both want, the newer one's where both want the same."""
        if newer.uid != self.uid:
            return newer
        return DeploymentWrite(
            model=self.model,
            uid=self.uid,
            replicas=self.replicas if newer.replicas is None else newer.replicas,
            scaled=self.scaled if newer.scaled is None else newer.scaled,
            costs=self.costs if newer.replicas is None else newer.costs,
        )


Write = DeploymentWrite | SliceAction
_Lane = tuple[str, str, str]
_SCALE, _STATUS, _SLICE = "scale", "status", "slice"


class WriterMetrics(Protocol):
    """What is counted."""

    def wrote(self, what: str, result: str, seconds: float) -> None: ...


class Writer:
    """`put` never waits. `run()` ends by cancellation only, `drain()` before it lets what is under way end."""

    def __init__(
        self,
        client: KubeClient,
        keys: Keys,
        metrics: WriterMetrics,
        may_write: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`may_write`: whether this replica leads for at least as long as a write takes."""
        self._client, self._keys, self._metrics, self._clock = client, keys, metrics, clock
        self._may_write = may_write
        self._wanted: dict[_Lane, Write] = {}
        self._tasks: dict[_Lane, asyncio.Task[None]] = {}
        self._slots = {what: asyncio.Semaphore(WRITES_AT_ONCE) for what in (_SCALE, _SLICE)}
        self._slots[_STATUS] = asyncio.Semaphore(STATUSES_AT_ONCE)
        self._stopping = asyncio.Event()
        # How often what was wanted has been given up.
        self._discards = 0
        # Requests on their way, and until when one without an answer may still be carried out.
        self._under_way, self._doubtful_until = 0, float("-inf")

    def put(self, write: Write) -> None:
        """To be written as soon as may be, instead of what was to be."""
        if self._stopping.is_set():
            return
        lane = _lane(write)
        before = self._wanted.get(lane)
        if isinstance(write, DeploymentWrite) and isinstance(before, DeploymentWrite):
            write = before.with_newer(write)
        self._wanted[lane] = write
        if lane not in self._tasks:
            self._tasks[lane] = asyncio.create_task(self._work(lane), name=f"write {'/'.join(lane)}")

    @property
    def waiting(self) -> int:
        """Objects that something is still to be written of."""
        return len(self._tasks)

    @property
    def in_doubt(self) -> bool:
        """Some write that is no longer waited for may still be carried out."""
        return self._under_way > 0 or self._clock() < self._doubtful_until

    def discard(self) -> None:
        """What is not under way is not to be written any more, nor is what is tried again if it fails: it will be
        decided anew."""
        self._wanted.clear()
        self._discards += 1

    async def drain(self) -> None:
        """Begin nothing more, and wait within a bound for what is under way."""
        self._stopping.set()
        self._wanted.clear()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_STOP_SECONDS)

    async def close(self) -> None:
        """Give up whatever is left."""
        self._stopping.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, lane: _Lane) -> None:
        """Write what is wanted of one object until nothing is."""
        backoff = Backoff(initial_seconds=0.2, cap_seconds=15.0)
        since = self._clock()
        try:
            while (write := self._wanted.pop(lane, None)) is not None:
                discards = self._discards
                if await self._written(write, discards):
                    backoff.reset()
                    since = self._clock()
                    continue
                if self._discards == discards:
                    self._want_again(lane, write, since)
                await wait_until_set(self._stopping, timeout_seconds=backoff.next())
        except Exception as error:  # an unforeseen error of one object must not end the others
            log.error("write broke", extra=fields(object="/".join(lane)), exc_info=error)
        finally:
            del self._tasks[lane]

    def _want_again(self, lane: _Lane, write: Write, since: float) -> None:
        """Unless something newer is wanted of it by now, or it has been tried for long."""
        if self._stopping.is_set():
            return
        newer = self._wanted.get(lane)
        if isinstance(write, DeploymentWrite) and isinstance(newer, DeploymentWrite):
            self._wanted[lane] = write.with_newer(newer)
        elif newer is None and self._clock() - since < _PATIENCE_SECONDS:
            self._wanted[lane] = write

    async def _written(self, write: Write, discards: int) -> bool:
        """Whether it is done with: written, or of no use. False: try again. `discards`: as many as there were when it
        was wanted."""
        what, began = _what(write), self._clock()
        try:
            async with self._slots[what]:
                if self._discards != discards:
                    return True
                await self._send(write)
        except (NotFound, Conflict) as error:  # gone, or another's by now
            self._count(what, "gone", began)
            log.info("not written: it is another by now", extra=fields(write=_named(write), error=error))
        except (Invalid, Denied) as error:
            self._count(what, "refused", began)
            log.warning("a write was refused", extra=fields(write=_named(write), error=error))
            return isinstance(error, Invalid)
        except KubeError as error:
            self._count(what, "failed", began)
            log.warning("not written yet", extra=fields(write=_named(write), error=error))
            return False
        except _NotLeading:
            return False
        else:
            self._count(what, "written", began)
        return True

    def _count(self, what: str, result: str, began: float) -> None:
        self._metrics.wrote(what, result, self._clock() - began)

    async def _send(self, write: Write) -> None:
        """Raises KubeError or _NotLeading."""
        if isinstance(write, DeploymentWrite):
            await self._send_costs(write)
            path = paths.deployment(*write.model)
            await self._request(self._client.patch(path, deployment_patch(write, self._keys)))
            return
        one = write.slice
        path = paths.endpoint_slice(one.service.namespace, one.name)
        if isinstance(write, Apply):
            await self._request(self._client.apply(path, one.to_json(), manager=SLICE_MANAGER))
        else:
            await self._request(self._client.delete(path))

    async def _send_costs(self, write: DeploymentWrite) -> None:
        """Which replicas are removed first is a preference: their removal does not wait for it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_COSTS_SECONDS), asyncio.TaskGroup() as group:
                for pod, cost in write.costs.items():
                    group.create_task(self._send_cost(paths.pod(write.model.namespace, pod), cost))

    async def _send_cost(self, path: str, cost: int) -> None:
        body = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
        try:
            await self._request(self._client.patch(path, body))
        except (KubeError, _NotLeading) as error:
            log.debug("cost of deletion not written", extra=fields(path=path, error=error))

    async def _request(self, request: Coroutine[Any, Any, object]) -> None:
        """Raises KubeError or _NotLeading. The last look at the leadership is right before the request."""
        if self._stopping.is_set() or not self._may_write():
            request.close()
            raise _NotLeading
        self._under_way += 1
        answered = False
        try:
            await request
            answered = True
        except KubeResponseError:
            answered = True
            raise
        finally:
            self._under_way -= 1
            if not answered:
                self._doubtful_until = self._clock() + WRITE_SECONDS


class _NotLeading(Exception):
    """Another may lead; the leadership's own task will end this process."""


def deployment_patch(write: DeploymentWrite, keys: Keys) -> dict[str, Any]:
    """With the uid as a precondition: the API server answers 409 where the name is another's by now."""
    meta: dict[str, Any] = {"uid": write.uid}
    if write.scaled is not None:
        meta["annotations"] = {keys.scaled: write.scaled.to_text()}
    body: dict[str, Any] = {"metadata": meta}
    if write.replicas is not None:
        body["spec"] = {"replicas": write.replicas}
    return body


def _lane(write: Write) -> _Lane:
    if isinstance(write, DeploymentWrite):
        return ("deployment", *write.model)
    return "slice", write.slice.service.namespace, write.slice.name


def _what(write: Write) -> str:
    if isinstance(write, DeploymentWrite):
        return _STATUS if write.replicas is None else _SCALE
    return _SLICE


def _named(write: Write) -> str:
    return " ".join([_what(write), "/".join(_lane(write)[1:])])
