"""API servers of a test: one that is any handler of requests, and a client without one that notes what is written."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kubernetes.aio.client.configuration import Configuration

from berth.kube.client import KubeClient
from berth.kube.errors import response_error
from tests.fakes.web import Handler, serving


@asynccontextmanager
async def connected(handler: Handler) -> AsyncIterator[KubeClient]:
    """A client of an API server that gives every request to `handler`."""
    configuration = Configuration()
    async with serving(handler) as configuration.host, aiohttp.ClientSession() as session:
        yield KubeClient(configuration, session)


class RecordingClient:
    """Notes each write as (verb, path, body). Objects are given names as by `generateName`."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str, Mapping[str, Any]]] = []
        self.missing: set[str] = set()
        self.answer: dict[str, Any] = {}
        self.broken: Exception | None = None
        self.waiting = 0
        self._blocked: set[str] = set()

    def block(self, name: str) -> None:
        """Writes of this pod's events wait for ever."""
        self._blocked.add(name)

    async def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._write("create", path, body)
        meta = body.get("metadata", {})
        name = meta.get("name") or f"{meta.get('generateName', '')}{len(self.written)}"
        return {**self.answer, "metadata": {**meta, "name": name}}

    async def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._write("patch", path, body)
        return {}

    async def _write(self, verb: str, path: str, body: Mapping[str, Any]) -> None:
        if body.get("involvedObject", {}).get("name") in self._blocked:
            self.waiting += 1
            await asyncio.Event().wait()
        if self.broken is not None:
            raise self.broken
        if path in self.missing and verb == "patch":
            raise response_error(404, "NotFound", path)
        self.written.append((verb, path, body))


class Answers:
    """A client whose calls get these answers, one after the other; the last one again and again."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self._answers, self.calls = list(answers), list[tuple[str, Any]]()

    async def _next(self, path: str, body: Any = None) -> dict[str, Any]:
        self.calls.append((path, body))
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    get = create = _next

    async def patch(self, path: str, body: dict[str, Any], *, content_type: str) -> dict[str, Any]:
        return await self._next(path, body)
