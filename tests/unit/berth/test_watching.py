"""The informer against a server that misbehaves as API servers and networks do."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from berth.kube.client import KubeClient
from berth.kube.errors import Denied, KubeUnreachable
from berth.kube.informer import Change, Informer
from tests.fakes.kube import connected


def pod(uid: str, version: int) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": uid, "resourceVersion": str(version)}}


class Api:
    """Lists `items`; each watch plays the next script: lines to send, then how to end."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.version = 1
        self.scripts: list[list[Any]] = []
        self.requests: list[dict[str, str]] = []
        self.idle = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.query))
        if "watch" not in request.query:
            return web.json_response(
                {"metadata": {"resourceVersion": str(self.version)}, "items": self.items}
            )
        if not self.scripts:
            self.idle.set()
        return await self._play(request, self.scripts.pop(0) if self.scripts else ["hang"])

    async def _play(self, request: web.Request, script: list[Any]) -> web.StreamResponse:
        if script[0] == 410:
            return web.json_response({"reason": "Expired", "message": "too old"}, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        for step in script:
            if step == "hang":
                await asyncio.sleep(3600)
            elif step == "reset":
                assert request.transport is not None
                request.transport.abort()
            else:
                line = step if isinstance(step, bytes) else json.dumps(step).encode() + b"\n"
                await response.write(line)
        return response

    @property
    def watched_from(self) -> list[str]:
        return [query["resourceVersion"] for query in self.requests if "watch" in query]

    @property
    def lists(self) -> int:
        return sum("watch" not in query for query in self.requests)


async def mirrored(api: Api, *, idle_timeout: float = 30.0) -> list[tuple[str, str]]:
    """Run an informer until the scripts are played out; the changes that it told."""
    changes: list[Change] = []
    async with connected(api.handle) as client:
        informer = Informer(
            client, "/api/v1/pods", on_change=changes.append, idle_timeout_seconds=idle_timeout
        )
        task = asyncio.create_task(informer.run())
        async with asyncio.timeout(10):
            await api.idle.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return [(change.kind.value, change.object["metadata"]["uid"]) for change in changes]


def event(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": item}


async def test_a_closed_watch_is_resumed_from_the_last_version_without_a_list() -> None:
    api = Api()
    api.items = [pod("a", 1)]
    api.scripts = [
        [event("ADDED", pod("b", 5)), event("BOOKMARK", {"metadata": {"resourceVersion": "9"}})],
        [event("DELETED", pod("a", 11))],
    ]
    assert await mirrored(api) == [("set", "a"), ("set", "b"), ("gone", "a")]
    assert api.watched_from == ["1", "9", "11"]
    assert api.lists == 1


@pytest.mark.parametrize(
    "expired", [[410], [event("ERROR", {"code": 410, "reason": "Expired", "message": ""})]]
)
async def test_an_expired_version_lists_again_and_tells_what_was_missed(expired: list[Any]) -> None:
    api = Api()
    api.items = [pod("a", 1), pod("b", 1)]
    gone_meanwhile = [event("ADDED", pod("c", 2))]
    api.scripts = [gone_meanwhile, expired]

    original = api.handle

    async def handle(request: web.Request) -> web.StreamResponse:
        if len(api.scripts) == 1:  # what changes between the first watch and the list after 410
            api.items, api.version = [pod("b", 1), pod("c", 7)], 8
        return await original(request)

    api.handle = handle  # type: ignore[method-assign]
    assert await mirrored(api) == [("set", "a"), ("set", "b"), ("set", "c"), ("gone", "a"), ("set", "c")]
    assert api.lists == 2


async def test_a_long_collection_is_listed_page_by_page() -> None:
    api, original = Api(), Api.handle
    pages = {None: (["a", "b"], "t1"), "t1": (["c"], "t2"), "t2": (["d"], "")}

    async def handle(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await original(api, request)
        api.requests.append(dict(request.query))
        names, token = pages[request.query.get("continue")]
        meta = {"resourceVersion": "7", **({"continue": token} if token else {})}
        return web.json_response({"metadata": meta, "items": [pod(name, 1) for name in names]})

    api.handle = handle  # type: ignore[method-assign]
    assert await mirrored(api) == [("set", "a"), ("set", "b"), ("set", "c"), ("set", "d")]
    assert (api.lists, api.watched_from) == (3, ["7"])
    assert all(100 <= int(query["limit"]) <= 1000 for query in api.requests if "watch" not in query)


async def test_a_silent_watch_is_opened_anew() -> None:
    api = Api()
    api.scripts = [["hang"]]
    assert await mirrored(api, idle_timeout=0.2) == []
    assert len(api.watched_from) == 2


@pytest.mark.parametrize(
    "script",
    [["reset"], [b'{"type":"ADDED","obj'], [b"nonsense\n"], [b"[]\n"], [{"type": "ODD", "object": {}}]],
)
async def test_a_broken_watch_is_opened_anew_and_loses_nothing(script: list[Any]) -> None:
    api = Api()
    api.scripts = [[event("ADDED", pod("a", 2))], script, [event("ADDED", pod("b", 3))]]
    assert await mirrored(api) == [("set", "a"), ("set", "b")]
    assert api.watched_from == ["1", "2", "2", "3"]


async def test_errors_of_a_request_are_ours() -> None:
    async def forbidden(_: web.Request) -> web.Response:
        return web.json_response({"reason": "Forbidden", "message": "no"}, status=403)

    api = Api()
    api.handle = forbidden  # type: ignore[method-assign]
    async with connected(api.handle) as client:
        with pytest.raises(Denied, match="403 Forbidden: no"):
            await client.get("/api/v1/pods")
        host = client.host
    configuration = Configuration()
    configuration.host = host
    async with aiohttp.ClientSession() as session:
        with pytest.raises(KubeUnreachable):
            await KubeClient(configuration, session).get("/api/v1/pods")
