"""The bench's own side of the API server: many writes at once, and one cheap watch of what gets bound.

Not berth.kube: answers are not parsed, for the bench shares its processors with what it measures.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from berth.kube import paths
from localcluster.controlplane import ControlPlane

T = TypeVar("T")

_AT_ONCE = 32
_REQUEST_SECONDS = 30.0
_LINE_BYTES = 4 * 1024 * 1024
_WATCH_SECONDS = 24 * 3600
_PAUSE_SECONDS = 0.02


class _PageMetadata(msgspec.Struct):
    remainingItemCount: int = 0  # noqa: N815 - the API's name


class _Page(msgspec.Struct):
    metadata: _PageMetadata
    items: list[msgspec.Raw]


class Api:
    """Requests as the cluster's admin, whom the API server never makes wait."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def create(self, path: str, body: Mapping[str, object]) -> None:
        await self._send("POST", path, msgspec.json.encode(body))

    async def create_all(self, path: str, bodies: Iterable[Mapping[str, object]]) -> None:
        await _each(bodies, lambda body: self.create(path, body))

    async def delete_pods(self, namespace: str, names: Iterable[str]) -> None:
        """At once: they are gone when this returns."""
        now = msgspec.json.encode({"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0})
        await _each(names, lambda name: self._send("DELETE", paths.pod(namespace, name), now))

    async def count(self, path: str) -> int:
        """How many objects there are, without reading them. Exact only for what has no watch cache: events."""
        async with self._session.get(path, params={"limit": "1"}) as answer:
            await _require_success(answer)
            page = msgspec.json.decode(await answer.read(), type=_Page)
        return len(page.items) + page.metadata.remainingItemCount

    @asynccontextmanager
    async def watch(self, path: str, **params: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of one watch."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        query = {"watch": "true", "timeoutSeconds": str(_WATCH_SECONDS), **params}
        async with self._session.get(path, params=query, timeout=timeout) as answer:
            await _require_success(answer)
            yield aiter(answer.content)

    async def _send(self, method: str, path: str, body: bytes) -> None:
        async with self._session.request(method, path, data=body) as answer:
            await _require_success(answer)
            await answer.read()


@asynccontextmanager
async def open_api(plane: ControlPlane) -> AsyncIterator[Api]:
    headers = {"Authorization": f"Bearer {plane.admin.token}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        plane.server,
        headers=headers,
        connector=aiohttp.TCPConnector(ssl=False, limit=2 * _AT_ONCE),
        timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS),
        read_bufsize=_LINE_BYTES,
    ) as session:
        yield Api(session)


class _Metadata(msgspec.Struct):
    name: str = ""


class _Object(msgspec.Struct):
    metadata: _Metadata


class _Event(msgspec.Struct):
    type: str
    object: _Object


class Bindings:
    """When each pod of a namespace got its node, by this process' monotonic clock."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._path = api, paths.pods(namespace)
        self.at: dict[str, float] = {}
        self._missing: set[str] = set()
        self._complete = asyncio.Event()
        self._decode = msgspec.json.Decoder(_Event).decode

    async def run(self) -> None:
        """Watch for ever the pods that have a node: each is reported once, when it is bound.

        A reader that is frozen uses up the time that the API server has for slow ones, and then it ends other
        watches too: such as this one, while pods are created for a frozen scheduler. A new one begins with
        all that is bound, so that nothing is missed.
        """
        while True:
            async with self._api.watch(self._path, fieldSelector="spec.nodeName!=") as lines:
                async for line in lines:
                    self._take(self._decode(line))
            await asyncio.sleep(_PAUSE_SECONDS)

    def count(self, names: Iterable[str]) -> int:
        return sum(name in self.at for name in names)

    async def until_all(self, names: Sequence[str], *, timeout_seconds: float) -> bool:
        """False if some are still missing when the time is over."""
        self._missing = {name for name in names if name not in self.at}
        self._complete.clear()
        if not self._missing:
            return True
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._complete.wait()
        except TimeoutError:
            return False
        return True

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            raise RuntimeError("the API server has given up the watch of the pods")
        name = event.object.metadata.name
        if event.type != "DELETED" and name not in self.at:
            self.at[name] = time.monotonic()
            self._missing.discard(name)
            if not self._missing:
                self._complete.set()


@asynccontextmanager
async def watching(api: Api, namespace: str) -> AsyncIterator[Bindings]:
    bindings = Bindings(api, namespace)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(bindings.run())
        yield bindings
        watch.cancel()


async def _each(items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """A bounded number at once; the first failure ends all."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(worker())


async def _require_success(answer: aiohttp.ClientResponse) -> None:
    if answer.status >= 400:
        raise RuntimeError(f"{answer.method} {answer.url}: {answer.status}: {(await answer.text())[:500]}")
