import asyncio
import contextlib
import os
import random
import struct

import pytest

from proxy.drain import Stage, in_order
from proxy.exchange.breaker import Breaker, QueueFull, SharedBreaker, shared_limit
from proxy.exchange.load import LoadMeter, LoadReport, encode_stat


def breaker(limit: int, depth: int) -> tuple[Breaker, LoadMeter]:
    meter = LoadMeter(0.0, lambda: 0.0)
    return Breaker(meter, limit=limit, queue_depth=depth), meter


class Request:
    """One request that runs until it is told to end."""

    def __init__(self, breaker: Breaker, name: str = "", log: list[str] | None = None) -> None:
        self.breaker, self.name, self.log = breaker, name, [] if log is None else log
        self.state = "waiting"
        if breaker.enter(self, 0.0):
            self.granted()

    def granted(self) -> None:
        self.state = "running"
        self.log.append(self.name)

    def end(self) -> None:
        """Its answer has come, or its client has gone."""
        state, self.state = self.state, "ended"
        if state == "running":
            self.breaker.leave(0.0)
        elif state == "waiting":
            self.breaker.cancel(self, 0.0)


def test_so_many_run_so_many_wait_and_the_rest_is_turned_away() -> None:
    limited, meter = breaker(2, 1)
    log: list[str] = []
    requests = [Request(limited, str(i), log) for i in range(3)]
    with pytest.raises(QueueFull, match="pending request queue full"):
        Request(limited)
    assert (log, limited.running, limited.waiting, meter.concurrency) == (["0", "1"], 2, 1, 3)
    for request in requests:
        request.end()
    assert (limited.running, limited.waiting, meter.concurrency) == (0, 0, 0)


@pytest.mark.parametrize("shared", [False, True])
def test_one_that_is_turned_away_has_arrived_all_the_same(shared: bool) -> None:
    """As Knative counts: else a model under too much load would seem to have less."""
    limited, meter = breaker(1, 0)
    if shared:
        limited = SharedBreaker(meter, *shared_limit(1, 0))
    request = Request(limited)
    for _ in range(4):
        with pytest.raises(QueueFull):
            Request(limited)
    request.end()
    report = meter.report(1.0)
    assert (report.requests, report.average_concurrency) == (5, 0)


def test_the_one_that_waited_longest_is_next() -> None:
    limited, _ = breaker(1, 10)
    log: list[str] = []
    for request in [Request(limited, str(i), log) for i in range(5)]:
        request.end()
    assert log == ["0", "1", "2", "3", "4"]


def test_one_that_leaves_while_it_waits_leaves_no_trace() -> None:
    limited, meter = breaker(1, 2)
    log: list[str] = []
    first, second, third = (Request(limited, name, log) for name in "abc")
    second.end()
    assert (limited.waiting, meter.concurrency) == (1, 2)
    first.end()
    assert log == ["a", "c"]
    third.end()
    assert (limited.running, meter.concurrency) == (0, 0)


def test_nobody_overtakes_those_who_wait() -> None:
    limited, _ = breaker(1, 2)
    first, _second = Request(limited), Request(limited)
    assert not limited.enter_at_once(0.0)
    first.end()
    assert not limited.enter_at_once(0.0)


async def test_no_limit_is_still_counted() -> None:
    limited, meter = breaker(0, 0)
    requests = [Request(limited) for _ in range(50)]
    assert (limited.running, meter.concurrency) == (50, 50)
    idle = asyncio.create_task(limited.idle())
    await asyncio.sleep(0)
    for request in requests:
        assert not idle.done()
        request.end()
    await asyncio.wait_for(idle, 1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shared", [False, True])
async def test_the_limit_holds_whatever_comes_and_goes(seed: int, shared: bool) -> None:
    """Also for three breakers, as of three processes, that share one limit."""
    rng = random.Random(seed)
    if shared:
        descriptors = shared_limit(3, 4)
        meters = [LoadMeter(0.0, lambda: 0.0) for _ in range(3)]
        breakers: list[Breaker] = [SharedBreaker(meter, *map(os.dup, descriptors)) for meter in meters]
    else:
        limited, meter = breaker(3, 4)
        breakers, meters = [limited], [meter]
    requests: list[Request] = []
    for _ in range(300):
        if rng.random() < 0.5:
            with contextlib.suppress(QueueFull):
                requests.append(Request(rng.choice(breakers)))
        elif requests:
            requests.pop(rng.randrange(len(requests))).end()
        if rng.random() < 0.3:
            await asyncio.sleep(0)  # a breaker hears of slots that others give back
        assert sum(one.running for one in breakers) <= 3
        assert sum(one.waiting for one in breakers) <= 4
        assert sum(one.running + one.waiting for one in breakers) == len(requests)
    while requests:
        while not (found := [request for request in requests if request.state == "running"]):
            await asyncio.sleep(0.001)
        running = found[0]
        requests.remove(running)
        running.end()
    assert sum(meter.concurrency for meter in meters) == 0
    if shared:
        assert [os.eventfd_read(one) for one in descriptors for _ in range(3)] == [1] * 6
        for one in descriptors:
            os.close(one)


def test_the_average_is_exact() -> None:
    """Against the sum of what each request contributes to each period."""
    rng, meter, now = random.Random(7), LoadMeter(0.0, lambda: 0.0), 0.0
    spans: list[list[float]] = []
    running: list[list[float]] = []
    for period in range(50):
        arrived = 0
        for moment in sorted(rng.uniform(period, period + 1) for _ in range(rng.randrange(40))):
            now = moment
            if running and rng.random() < 0.5:
                running.pop(rng.randrange(len(running)))[1] = now
                meter.leave(now)
            else:
                running.append([now, float("inf")])
                spans.append(running[-1])
                meter.enter(now)
                arrived += 1
        report = meter.report(period + 1.0)
        expected = sum(max(0.0, min(end, period + 1) - max(start, period)) for start, end in spans)
        assert report.average_concurrency == pytest.approx(expected, abs=1e-9)
        assert report.requests == arrived


def test_average_concurrency_is_weighted_by_time() -> None:
    meter = LoadMeter(0.0, lambda: 42.0)
    meter.enter(0.25)
    meter.enter(0.5)
    meter.leave(0.75)
    report = meter.report(1.0)
    assert report == LoadReport(
        average_concurrency=(0.25 * 1 + 0.25 * 2 + 0.25 * 1), requests=2.0, uptime_seconds=1.0, timestamp=42.0
    )
    later = meter.report(2.0)  # one is still in flight, and has arrived before
    assert (later.average_concurrency, later.requests) == (1.0, 0)


def test_knatives_stat_on_the_wire() -> None:
    encoded = encode_stat(LoadReport(1.5, 3.0, 60.0, 1700000000.9), pod_name="p")
    assert encoded == (
        b"\x0a\x01p"
        + b"\x11"
        + struct.pack("<d", 1.5)
        + b"\x21"
        + struct.pack("<d", 3.0)
        + b"\x31"
        + struct.pack("<d", 60.0)
        + b"\x38\x80\xe2\xcf\xaa\x06"
    )


async def test_an_end_comes_to_its_end_in_order() -> None:
    log: list[str] = []

    async def note(name: str) -> None:
        log.append(name)

    async def fails() -> None:
        raise RuntimeError("boom")

    stages = [
        Stage("one", lambda: note("one"), 1),
        Stage("stuck", lambda: asyncio.sleep(60), 0.05),
        Stage("broken", fails, 1),
        Stage("last", lambda: note("last"), 1),
    ]
    async with asyncio.timeout(5):
        await in_order(stages)
    assert log == ["one", "last"]
