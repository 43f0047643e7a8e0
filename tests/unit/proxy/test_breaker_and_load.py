import asyncio
import random
import struct

import pytest

from proxy.breaker import Breaker, QueueFull
from proxy.drain import Stage, in_order
from proxy.load import LoadMeter, LoadReport, encode_stat


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker(limit: int, depth: int) -> tuple[Breaker, LoadMeter]:
    meter = LoadMeter(Clock(), lambda: 0.0)
    return Breaker(limit=limit, queue_depth=depth, meter=meter), meter


class Request:
    """One request that runs until it is told to end."""

    def __init__(self, breaker: Breaker, name: str, log: list[str]) -> None:
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._run(breaker, name, log))

    async def _run(self, breaker: Breaker, name: str, log: list[str]) -> None:
        async with breaker.slot():
            log.append(name)
            await self.end.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_so_many_run_so_many_wait_and_the_rest_is_turned_away() -> None:
    limited, meter = breaker(2, 1)
    log: list[str] = []
    requests = [Request(limited, str(i), log) for i in range(4)]
    await settle()
    assert (log, limited.running, limited.waiting, meter.concurrency) == (["0", "1"], 2, 1, 3)
    with pytest.raises(QueueFull, match="pending request queue full"):
        await requests[3].task
    for request in requests:
        request.end.set()
    await asyncio.gather(*(r.task for r in requests[:3]))
    assert (limited.running, limited.waiting, meter.concurrency) == (0, 0, 0)


async def test_the_one_that_waited_longest_is_next() -> None:
    limited, _ = breaker(1, 10)
    log: list[str] = []
    requests = [Request(limited, str(i), log) for i in range(5)]
    await settle()
    for request in requests:
        request.end.set()
        await settle()
    assert log == ["0", "1", "2", "3", "4"]


async def test_one_that_leaves_while_it_waits_leaves_no_trace() -> None:
    limited, meter = breaker(1, 2)
    log: list[str] = []
    first, second, third = (Request(limited, name, log) for name in "abc")
    await settle()
    second.task.cancel()
    await settle()
    assert (limited.waiting, meter.concurrency) == (1, 2)
    first.end.set()
    await settle()
    assert log == ["a", "c"]
    third.end.set()
    await third.task
    await limited.idle()


async def test_one_that_leaves_just_as_its_turn_comes_passes_it_on() -> None:
    limited, _ = breaker(1, 2)
    log: list[str] = []
    first, second, third = (Request(limited, name, log) for name in "abc")
    await settle()
    first.end.set()
    await asyncio.sleep(0)  # the slot is being handed to the second …
    second.task.cancel()  # … which is gone
    await settle()
    assert log[-1] == "c"
    third.end.set()
    await third.task
    assert limited.running == 0


async def test_one_that_leaves_in_the_step_of_a_release_only_leaves() -> None:
    """The release takes it out of the queue before it can do so itself."""
    limited, _ = breaker(1, 2)
    log: list[str] = []
    first, second = (Request(limited, name, log) for name in "ab")
    await settle()
    first.end.set()  # the first wakes before the second …
    second.task.cancel()  # … which has left by then
    with pytest.raises(asyncio.CancelledError):
        await second.task
    assert (limited.running, limited.waiting) == (0, 0)


async def test_no_limit_is_still_counted() -> None:
    limited, meter = breaker(0, 0)
    log: list[str] = []
    requests = [Request(limited, str(i), log) for i in range(50)]
    await settle()
    assert (limited.running, meter.concurrency) == (50, 50)
    for request in requests:
        request.end.set()
    await limited.idle()
    assert limited.running == 0


@pytest.mark.parametrize("seed", range(10))
async def test_the_limit_holds_whatever_comes_and_goes(seed: int) -> None:
    rng, log = random.Random(seed), list[str]()
    limited, meter = breaker(3, 4)
    requests: list[Request] = []
    for step in range(200):
        action = rng.random()
        if action < 0.5:
            requests.append(Request(limited, str(step), log))
        elif requests:
            request = requests.pop(rng.randrange(len(requests)))
            request.end.set() if action < 0.75 else request.task.cancel()
        if rng.random() < 0.7:
            await settle()
        assert limited.running <= 3
        assert limited.waiting <= 4
    for request in requests:
        request.end.set()
    await asyncio.gather(*(request.task for request in requests), return_exceptions=True)
    await limited.idle()
    assert (limited.running, limited.waiting, meter.concurrency) == (0, 0, 0)


def test_average_concurrency_is_weighted_by_time() -> None:
    clock = Clock()
    meter = LoadMeter(clock, lambda: 42.0)
    clock.now = 0.25
    meter.enter()
    clock.now = 0.5
    meter.enter()
    clock.now = 0.75
    meter.leave()
    clock.now = 1.0
    report = meter.report()
    assert report == LoadReport(
        average_concurrency=(0.25 * 1 + 0.25 * 2 + 0.25 * 1), requests=2.0, uptime_seconds=1.0, timestamp=42.0
    )
    clock.now = 2.0
    assert meter.report().average_concurrency == 1.0  # one is still in flight, and has arrived before
    assert meter.report().requests == 0


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
