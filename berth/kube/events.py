"""Events on pods and other objects, aggregated: the same thing said again raises a count instead of a new object."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from berth.contract.pod import PodRef
from berth.kube import paths
from berth.kube.client import JsonObject, KubeClient
from berth.kube.errors import KubeError, NotFound
from berth.kube.times import rfc3339, utc_now
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

EventType = Literal["Normal", "Warning"]

# Eight writers, so that events of a burst of pods are written in time; a pod has one of them, so that
# what is said of it stays in order.
_WRITERS, _QUEUE_LIMIT = 8, 2500
_REMEMBERED = 4096
# The API server refuses longer notes (events.k8s.io: 1 kB).
_MESSAGE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object that is no pod."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class _Note:
    about: PodRef | ObjectRef
    type: EventType
    reason: str
    message: str


@dataclass(slots=True)
class _Known:
    path: str
    count: int


class EventRecorder:
    """Queues events without waiting and writes them in the background. Events are help for people: a full
    queue or an API server that is away loses some, and says so in the log."""

    def __init__(
        self, client: KubeClient, *, component: str, host: str = "", now: Callable[[], datetime] = utc_now
    ) -> None:
        self._client, self._component, self._host, self._now = client, component, host, now
        self._queues: list[asyncio.Queue[_Note]] = [asyncio.Queue(_QUEUE_LIMIT) for _ in range(_WRITERS)]
        self._known: OrderedDict[_Note, _Known] = OrderedDict()

    def record(self, about: PodRef | ObjectRef, type: EventType, reason: str, message: str) -> None:
        """Say something about a pod or another object. Never waits, never raises."""
        try:
            queue = self._queues[hash(about.uid) % _WRITERS]
            queue.put_nowait(_Note(about, type, reason, message[:_MESSAGE_LIMIT]))
        except asyncio.QueueFull:
            log.warning("event lost: queue full", extra=fields(about=about, reason=reason))

    async def run(self) -> None:
        """Write events for ever."""
        await asyncio.gather(*(self._write_all(queue) for queue in self._queues))

    async def flush(self) -> None:
        """Write what is queued, and wait for what is being written, for a process that ends. Bounded by the
        client's own timeouts."""
        await asyncio.gather(*(self._write_rest(queue) for queue in self._queues))

    async def _write_all(self, queue: "asyncio.Queue[_Note]") -> None:
        while True:
            await self._write_safely(await queue.get(), queue)

    async def _write_rest(self, queue: "asyncio.Queue[_Note]") -> None:
        while not queue.empty():
            await self._write_safely(queue.get_nowait(), queue)
        await queue.join()

    async def _write_safely(self, note: _Note, queue: "asyncio.Queue[_Note]") -> None:
        try:
            await self._write(note)
        except KubeError as error:
            log.warning("event lost", extra=fields(about=note.about, reason=note.reason, error=error))
        finally:
            queue.task_done()

    async def _write(self, note: _Note) -> None:
        known = self._known.get(note)
        if known is not None and await self._raise_count(known):
            self._known.move_to_end(note)
            return
        created = await self._client.create(paths.events(note.about.namespace), self._body(note))
        name = (created.get("metadata") or {}).get("name")
        if name is None:
            return  # whatever has answered: the next one like it is created anew
        self._known[note] = _Known(f"{paths.events(note.about.namespace)}/{name}", 1)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    async def _raise_count(self, known: _Known) -> bool:
        """False when the event has expired meanwhile."""
        body = {"count": known.count + 1, "lastTimestamp": rfc3339(self._now())}
        try:
            await self._client.patch(known.path, body)
        except NotFound:
            return False
        known.count += 1
        return True

    def _body(self, note: _Note) -> JsonObject:
        stamp, about = rfc3339(self._now()), note.about
        version, kind = ("v1", "Pod") if isinstance(about, PodRef) else (about.api_version, about.kind)
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{about.name[:200]}.", "namespace": about.namespace},
            "involvedObject": {
                "apiVersion": version,
                "kind": kind,
                "namespace": about.namespace,
                "name": about.name,
                "uid": about.uid,
            },
            "type": note.type,
            "reason": note.reason,
            "message": note.message,
            "source": {"component": self._component, **({"host": self._host} if self._host else {})},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
