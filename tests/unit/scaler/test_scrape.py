"""Asking gateways, real sockets: what is slow, broken or hostile costs that node's second and nothing else."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Container
from typing import Any

import msgspec
import pytest
from aiohttp import web

from berth.contract.endpoint import Endpoint
from berth.contract.scaling import ReplicaLoad
from scaler import scrape
from scaler.scrape import ANSWER_BYTES, Gateway, Scraper, next_moment, phase_of, read_loads, scraping_session

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Metrics:
    def __init__(self) -> None:
        self.results: list[str] = []
        self.rows_left = 0

    def scraped(self, result: str, seconds: float) -> None:
        assert seconds >= 0
        self.results.append(result)

    def rejected(self, rows: int) -> None:
        self.rows_left += rows


class Here:
    """A scraper of nodes whose gateways answer as a test says."""

    def __init__(self, session: Any) -> None:
        self.gateways: dict[str, Gateway] = {}
        self.recorded: list[ReplicaLoad] = []
        # So many answers are taken by nobody.
        self.breaks = 0
        self.metrics = Metrics()
        self.scraper = Scraper(session, lambda: self.gateways, self._take, self.metrics)
        self._runners: list[web.AppRunner] = []

    def _take(self, loads: list[ReplicaLoad], replicas: Container[str]) -> None:
        if self.breaks:
            self.breaks -= 1
            raise RuntimeError("boom")
        self.recorded += [load for load in loads if load.pod_uid in replicas]

    async def node(self, name: str, answer: Handler, *replicas: str) -> None:
        application = web.Application()
        application.router.add_get("/stat", answer)
        application.router.add_get("/elsewhere", answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runners.append(runner)
        self.gateways[name] = Gateway(Endpoint("127.0.0.1", runner.addresses[0][1]), frozenset(replicas))

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


@pytest.fixture
async def here() -> Any:
    async with scraping_session() as session:
        one = Here(session)
        yield one
        await one.close()


def stat(*uids: str, second: int = 1, **more: Any) -> bytes:
    rows = [{"namespace": "n", "podName": "p", "podUid": uid, "second": second, **more} for uid in uids]
    return json.dumps(rows).encode()


def answering(body: bytes, **more: Any) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, **more)

    return answer


async def test_each_second_is_one_request_on_a_connection_that_stays(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "PERIOD_SECONDS", 0.02)
    peers, three = set(), asyncio.Event()
    count = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        if count >= 3:
            three.set()
        return web.Response(body=stat("u", second=count))

    await here.node("a", answer, "u")
    task = asyncio.create_task(here.scraper.run())
    async with asyncio.timeout(10):
        await three.wait()
    here.gateways.clear()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(peers) == 1
    assert [load.second for load in here.recorded][:2] == [1, 2]


async def stall(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(b" " * 65536)
    except ConnectionError:
        return response


async def dribble(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)
    except ConnectionError:
        return response


async def hangs_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def elsewhere(_: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "/elsewhere"})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (stall, "no answer within"),
        (endless, f"more than {ANSWER_BYTES} bytes"),
        (dribble, "no answer within"),
        (hangs_up, "ServerDisconnectedError"),
        (elsewhere, "status 302"),
        (answering(b"x", status=503), "status 503"),
        (answering(b"not json"), "not a list of loads"),
        (answering(b"[" * 100_000), "not a list of loads"),
        (answering(stat("u"), headers={"Content-Encoding": "gzip"}), ""),
        (answering(b"\x1f\x8b" + bytes(100), headers={"Content-Encoding": "gzip"}), "not a list of loads"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_bad_answer_is_a_second_without_one(
    here: Here, answer: Handler, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Long enough for the good one on a busy machine.
    monkeypatch.setattr(scrape, "DEADLINE_SECONDS", 1.0 if said == "no answer within" else 20.0)
    await here.node("bad", answer, "u")
    await here.node("good", answering(stat("v", second=9)), "v")
    await asyncio.gather(here.scraper.ask("bad"), here.scraper.ask("good"))
    assert [load.second for load in here.recorded if load.pod_uid == "v"] == [9]
    if said:
        assert sorted(here.metrics.results) == ["failed", "ok"]
        (record,) = [one for one in caplog.records if "does not report" in one.message]
        assert said in str(getattr(record, "fields", record.__dict__))
    await here.scraper.ask("bad")
    assert len([one for one in caplog.records if "does not report" in one.message]) <= 1  # once


async def test_nobody_remembers_what_a_gateway_sets(here: Here) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Cookie", ""))
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=stat("u"), headers={"Set-Cookie": "a=b"})

    await here.node("a", answer, "u")
    await here.scraper.ask("a")
    await here.scraper.ask("a")
    assert seen == ["", ""]


async def test_a_defect_costs_one_second(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "PERIOD_SECONDS", 0.02)
    here.breaks = 2
    await here.node("a", answering(stat("u")), "u")
    task = asyncio.create_task(here.scraper.run())
    async with asyncio.timeout(10):
        while not here.recorded:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_who_has_gone_is_asked_no_more_and_is_new_when_it_comes_again(
    here: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scrape, "PERIOD_SECONDS", 0.02)

    def asking() -> int:
        return sum(task.get_name() == "gateway of a" for task in asyncio.all_tasks())

    async def until(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_so():
                await asyncio.sleep(0.01)

    def problems() -> int:
        return sum("does not report" in one.message for one in caplog.records)

    await here.node("a", answering(b"no JSON"), "u")
    gateways = dict(here.gateways)
    task = asyncio.create_task(here.scraper.run())
    for times in (1, 2):
        here.gateways.update(gateways)
        await until(lambda times=times: problems() == times)  # type: ignore[misc]
        assert asking() == 1
        here.gateways.clear()
        await until(lambda: asking() == 0)
    here.gateways.update(gateways)
    await until(lambda: asking() == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert asking() == 0


async def test_rows_that_say_nothing_are_counted(here: Here) -> None:
    await here.node("a", answering(b'[7, {"namespace":"n","podName":"p","podUid":"u","second":3}]'), "u")
    await here.scraper.ask("a")
    assert (here.metrics.rows_left, len(here.recorded)) == (1, 1)


async def test_a_gateway_is_not_believed_about_others_replicas(here: Here) -> None:
    await here.node("a", answering(stat("u", "of another node")), "u")
    await here.scraper.ask("a")
    assert [load.pod_uid for load in here.recorded] == ["u"]


async def test_a_node_without_a_gateway_is_not_asked(here: Here) -> None:
    await here.scraper.ask("a")
    assert here.metrics.results == []
    here.gateways["a"] = Gateway(Endpoint("127.0.0.1", 1), frozenset("u"))
    await here.scraper.ask("a")
    assert here.metrics.results == ["failed"]


def test_nodes_are_spread_over_the_second() -> None:
    phases = [phase_of(f"node-{number}") for number in range(1000)]
    assert all(0 <= phase < 1 for phase in phases)
    per_tenth = [sum(tenth / 10 <= phase < (tenth + 1) / 10 for phase in phases) for tenth in range(10)]
    assert min(per_tenth) > 60


@pytest.mark.parametrize(
    ("at", "now", "then"), [(5.0, 5.1, 6.0), (5.0, 6.0, 6.0), (5.0, 9.2, 10.0), (5.0, 4.0, 6.0)]
)
def test_what_was_missed_is_not_made_up_for(at: float, now: float, then: float) -> None:
    assert next_moment(at, now) == pytest.approx(then)


# What a gateway answers.


def row(**more: Any) -> dict[str, Any]:
    return {"namespace": "n", "podName": "p", "podUid": "u", "second": 1, **more}


BAD_ROWS: list[Any] = [
    None,
    7,
    "text",
    [],
    {},
    row(podUid=7),
    row(second="1"),
    row(averageConcurrentRequests="much"),
    row(averageConcurrentRequests=-1),
    row(averageConcurrentRequests=1e300),
    row(requestCount=-0.5),
    row(requestCount=None),
    row(waiting=-1),
    row(waiting=1.5),
    row(inTriton=2**62),
    row(podUid=["u"]),
]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=repr)
def test_an_invalid_row_is_rejected_and_the_others_count(bad: Any) -> None:
    loads, rejected = read_loads(json.dumps([row(podUid="before"), bad, row(podUid="after")]).encode())
    assert [one.pod_uid for one in loads] == ["before", "after"]
    assert rejected == 1


def test_unknown_fields_of_a_later_gateway_are_ignored() -> None:
    loads, rejected = read_loads(json.dumps([row(later={"x": [1]})]).encode())
    assert (len(loads), rejected) == (1, 0)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"7", b"[", b"\xff", b"null", b"[" * 10_000, b'{"a":' * 10_000, b"[1e999", b'"'],
    ids=lambda b: repr(b[:9]),
)
def test_an_answer_that_is_no_list_is_one_error(body: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        read_loads(body)


def test_garbage_never_ends_a_scraper() -> None:
    rng = random.Random(3)
    good = json.dumps([row(podUid=f"{n}", requestCount=1.5, waiting=2) for n in range(5)]).encode()
    for _ in range(3000):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            loads, _ = read_loads(bytes(body))
        except (msgspec.DecodeError, UnicodeError):
            continue
        assert all(0 <= one.request_count <= 1e9 and 0 <= one.waiting <= 1e9 for one in loads)
