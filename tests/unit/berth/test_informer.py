"""A mirror kept by list and watch."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from berth.kube.client import KubeClient
from berth.kube.errors import Denied, KubeError, KubeUnreachable, response_error
from berth.kube.informer import HEALTHY_SECONDS, Change, ChangeKind, Informer, Mirror
from tests.fakes.kube import connected

Json = dict[str, Any]


Watch = Callable[["Server"], AsyncIterator[Json]]


def item(uid: str = "a", version: int = 1) -> Json:
    return {"metadata": {"uid": uid, "name": uid, "resourceVersion": str(version)}}


class Server:
    """Answers at once, as it is told to. `requests`: when they came; each takes a millisecond."""

    def __init__(self, watch: Watch, answers: Callable[["Server"], Json]) -> None:
        self.now, self.lists, self.watches = 0.0, list[float](), list[float]()
        self._watch, self._answers = watch, answers

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        await asyncio.sleep(0)

    async def get(self, path: str, **params: str) -> Json:
        self.now += 0.001
        self.lists.append(self.now)
        await asyncio.sleep(0)
        return self._answers(self)

    async def stream(self, path: str, params: Any, **_: Any) -> AsyncIterator[Json]:
        self.now += 0.001
        self.watches.append(self.now)
        await asyncio.sleep(0)
        async for event in self._watch(self):
            yield event

    async def run(self, until: float, changes: list[Change] | None = None) -> None:
        """Let an informer mirror this server up to a time."""
        informer = Informer(
            self,  # type: ignore[arg-type]
            "/x",
            on_change=([] if changes is None else changes).append,
            clock=self.clock,
            sleep=self.sleep,
        )
        task = asyncio.create_task(informer.run())
        for _ in range(100_000):
            if self.now >= until or task.done():
                break
            await asyncio.sleep(0)
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert self.now >= until


def listing(server: Server) -> Json:
    return {"items": [item()], "metadata": {"resourceVersion": "5"}}


async def closes(_: Server) -> AsyncIterator[Json]:
    return
    yield


async def bookmarks(_: Server) -> AsyncIterator[Json]:
    yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "6"}}}


async def events(server: Server) -> AsyncIterator[Json]:
    for number in range(3):
        yield {"type": "MODIFIED", "object": item(version=10 + number)}


def says(error: Any) -> Watch:
    async def watch(_: Server) -> AsyncIterator[Json]:
        yield {"type": "ERROR", "object": error}

    return watch


def raises(error: KubeError) -> Watch:
    async def watch(_: Server) -> AsyncIterator[Json]:
        raise error
        yield

    return watch


def sends(event: Any) -> Watch:
    async def watch(_: Server) -> AsyncIterator[Json]:
        yield event

    return watch


STATUSES = (400, 401, 403, 404, 406, 408, 409, 410, 413, 415, 422, 429, 500, 502, 503, 504)


WATCHES: dict[str, Watch] = {
    "closes": closes,
    "bookmarks": bookmarks,
    "events": events,
    "no status": says(None),
    "odd status": says({"code": "410", "reason": 7}),
    "unreachable": raises(KubeUnreachable("reset")),
    "odd event": sends({"type": "ODD", "object": item()}),
    "no object": sends({"type": "ADDED"}),
    "no uid": sends({"type": "ADDED", "object": {"metadata": {"resourceVersion": "5"}}}),
    "null bookmark": sends({"type": "BOOKMARK", "object": None}),
    "no version": sends({"type": "MODIFIED", "object": {"metadata": {"uid": "a"}}}),
    **{f"answers {status}": raises(response_error(status, "", "x")) for status in STATUSES},
    **{f"says {status}": says({"code": status, "message": "x"}) for status in STATUSES},
}


def refuses(status: int) -> Callable[[Server], Json]:
    def answer(_: Server) -> Json:
        raise response_error(status, "", "x")

    return answer


LISTS: dict[str, Callable[[Server], Json]] = {
    **{str(status): refuses(status) for status in STATUSES},
    "nothing": lambda _: {},
    "no version": lambda _: {"items": [], "metadata": {}},
    "odd items": lambda _: {"items": "many", "metadata": {"resourceVersion": "5"}},
    "odd item": lambda _: {"items": [None], "metadata": {"resourceVersion": "5"}},
    "no end": lambda _: {"items": [], "metadata": {"resourceVersion": "5", "continue": "more"}},
}


# In so many seconds, with pauses of 0.2, 0.4 … 15 s: about 6 + 600 / 15, and a list beside some watch.
SECONDS, MOST = 600.0, 110


def paced(times: list[float]) -> bool:
    """No two after the first ten are close to each other."""
    return all(later - earlier > 5 for earlier, later in itertools.pairwise(times[10:]))


@pytest.mark.parametrize("case", sorted(WATCHES))
async def test_no_way_in_which_watches_end_makes_a_hot_loop(case: str) -> None:
    server = Server(WATCHES[case], listing)
    await server.run(SECONDS)
    assert 20 < len(server.watches) < MOST
    assert len(server.lists) < MOST
    assert paced(server.watches)


@pytest.mark.parametrize("case", sorted(LISTS))
async def test_no_way_in_which_lists_fail_makes_a_hot_loop(case: str) -> None:
    server = Server(closes, LISTS[case])
    await server.run(SECONDS)
    assert 20 < len(server.lists) < MOST
    assert not server.watches


async def test_pauses_differ_from_one_informer_to_the_next() -> None:
    servers = [Server(closes, listing) for _ in range(5)]
    for server in servers:
        await server.run(60.0)
    assert len({tuple(server.watches) for server in servers}) == 5


@pytest.mark.parametrize("lasts", [HEALTHY_SECONDS, 300.0])
async def test_a_watch_that_has_lasted_is_resumed_at_once(lasts: float) -> None:
    async def lasting(server: Server) -> AsyncIterator[Json]:
        server.now += lasts
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "6"}}}

    server = Server(lasting, listing)
    await server.run(100 * lasts)
    assert len(server.watches) == pytest.approx(100, abs=2)
    assert len(server.lists) == 1


async def test_a_watch_that_works_again_for_a_while_ends_the_growth_of_pauses() -> None:
    async def recovers(server: Server) -> AsyncIterator[Json]:
        if server.now >= 60:
            server.now += HEALTHY_SECONDS
        if server.now > 120:
            raise KubeUnreachable("reset")
        return
        yield

    server = Server(recovers, listing)
    await server.run(130.0)
    after = [time for time in server.watches if time > 80]
    assert max(later - earlier for earlier, later in itertools.pairwise(after)) < HEALTHY_SECONDS + 1


async def test_an_event_alone_does_not_end_the_growth() -> None:
    """A server that sends one and closes would be asked without end."""
    server = Server(events, listing)
    await server.run(SECONDS)
    assert len(server.watches) < MOST


async def test_after_a_long_time_away_one_list_follows_at_once() -> None:
    async def expires_later(server: Server) -> AsyncIterator[Json]:
        if len(server.watches) == 1:
            server.now += 300
            return
        if len(server.watches) == 2:
            raise response_error(410, "Expired", "too old")
        server.now += 300
        return
        yield

    server = Server(expires_later, listing)
    await server.run(700.0)
    assert server.lists[1] - server.watches[1] < 0.1
    assert server.watches[2] - server.watches[1] < 0.1


async def test_an_object_that_nobody_can_take_does_not_hide_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def three(_: Server) -> AsyncIterator[Json]:
        for uid in ("b", "bad", "c"):
            yield {"type": "ADDED", "object": item(uid, 10 + len(uid))}

    server, told = Server(three, listing), list[str]()

    def hear(change: Change) -> None:
        uid = change.object["metadata"]["uid"]
        if uid == "bad":
            raise KeyError("spec")
        told.append(uid)

    def keep(one: Json) -> Json:
        if one["metadata"]["uid"] == "c":
            raise TypeError("containers")
        return one

    informer = Informer(
        server,  # type: ignore[arg-type]
        "/x",
        on_change=hear,
        keep=keep,
        clock=server.clock,
        sleep=server.sleep,
    )
    task = asyncio.create_task(informer.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert told[:3] == ["a", "b", "c"]
    assert "change not taken" in caplog.text
    assert "object kept whole" in caplog.text


def listed(uid: str, version: str, name: str = "p") -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": name, "resourceVersion": version}}


def told(changes: list[Any]) -> list[tuple[str, str]]:
    return [(change.kind.value, change.object["metadata"]["uid"]) for change in changes]


def test_a_relist_tells_the_difference_deletions_first() -> None:
    mirror = Mirror()
    assert told(mirror.replace([listed("a", "1"), listed("b", "1")])) == [("set", "a"), ("set", "b")]
    # b was deleted and made anew under the same name while nobody watched
    assert told(mirror.replace([listed("a", "1"), listed("c", "2")])) == [("gone", "b"), ("set", "c")]
    assert set(mirror.objects) == {"a", "c"}


def test_a_watch_event_that_repeats_what_is_known_is_no_change() -> None:
    mirror = Mirror()
    mirror.replace([listed("a", "1")])
    assert mirror.apply("ADDED", listed("a", "1")) == []
    assert [change.kind for change in mirror.apply("MODIFIED", listed("a", "2"))] == [ChangeKind.SET]
    assert told(mirror.apply("DELETED", listed("a", "3"))) == [("gone", "a")]
    assert mirror.objects == {}


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
