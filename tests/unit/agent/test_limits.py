"""How much of the agent one pod may take, and how little that is of what others have."""

import asyncio
from contextlib import ExitStack

import pytest

from agent.limits import (
    CALL_BURST,
    CALL_RATE,
    OPEN_CALLS,
    READ_CALLS,
    Busy,
    CallLimiter,
    FairReader,
    MinimumRate,
    RateLimiter,
)
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef


def ref(name: str, namespace: str = "team") -> PodRef:
    return PodRef(namespace, name, PodUid(f"{namespace}-{name}"))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_at_once_and_its_rate_in_the_long_run() -> None:
    clock = Clock()
    rates = RateLimiter(rate=2, burst=4, clock=clock)
    assert [rates.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert rates.take("b") == 0  # each key for itself
    clock.now += 0.25
    assert rates.take("a") == 0.25  # what was refused has cost nothing
    clock.now += 0.25
    assert [rates.take("a"), rates.take("a")] == [0, 0.5]
    clock.now += 1000
    assert [rates.take("a") > 0 for _ in range(5)] == [False] * 4 + [True]


def test_buckets_are_few_and_the_least_used_goes_first() -> None:
    rates = RateLimiter(rate=1, burst=1, most=2, clock=Clock())
    rates.take("a"), rates.take("b"), rates.take("a"), rates.take("c")
    assert rates.take("a") > 0
    assert rates.take("b") == 0


def test_a_pod_has_few_calls_open_and_another_as_many() -> None:
    callers = CallLimiter(clock=Clock())
    with ExitStack() as calls:
        for _ in range(OPEN_CALLS):
            calls.enter_context(callers.call(ref("evil")))
        for _ in range(3):
            with pytest.raises(Busy, match=f"pod team/evil has {OPEN_CALLS} calls open"):
                calls.enter_context(callers.call(ref("evil")))
        calls.enter_context(callers.call(ref("good")))
    with callers.call(ref("evil")):
        pass


async def reads(reading: FairReader, who: PodRef, *, until: asyncio.Event) -> None:
    async with reading.place(who):
        await until.wait()


async def crowd(reading: FairReader, *whose: str, until: asyncio.Event) -> list["asyncio.Task[None]"]:
    """One call for each, NAMESPACE/POD, that are all let in or wait when this returns."""
    refs = [PodRef(one.split("/")[0], one, PodUid(one)) for one in whose]
    tasks = [asyncio.create_task(reads(reading, one, until=until)) for one in refs]
    await asyncio.sleep(0)
    return tasks


def read_of(reading: FairReader) -> list[str]:
    return [one.uid for one in reading._read]


async def test_of_a_pod_few_requests_are_read_at_once_and_the_next_when_one_is_done() -> None:
    reading, end, go_on = FairReader(), asyncio.Event(), asyncio.Event()
    await crowd(reading, *["a/evil"] * READ_CALLS, until=end)
    later = await crowd(reading, "a/evil", "a/good", until=go_on)
    assert read_of(reading) == ["a/evil"] * READ_CALLS + ["a/good"]
    end.set()
    go_on.set()
    await asyncio.wait_for(asyncio.gather(*later), 20)
    assert (reading._read, reading._waiting) == ([], {})


async def test_pods_without_number_have_few_requests_read_at_once_and_keep_no_other_namespace_out() -> None:
    """node D2: each request that is read may be as large as gRPC takes it, whatever the pod is."""
    reading, end = FairReader(most=8), asyncio.Event()
    evil = await crowd(reading, *(f"a/{n}" for n in range(50)), until=end)
    assert len(read_of(reading)) == 4
    await crowd(reading, *(f"b/{n}" for n in range(50)), until=end)
    assert len(read_of(reading)) == 6
    others = await crowd(reading, *(f"{name}/1" for name in "cdef"), until=end)
    assert read_of(reading)[-2:] == ["c/1", "d/1"]
    for one in evil:  # those that are read, and those that wait
        one.cancel()
    await asyncio.wait(evil)
    assert [one for one in read_of(reading) if one[0] in "ef"] == ["e/1", "f/1"]
    end.set()
    await asyncio.wait_for(asyncio.gather(*others), 20)
    await asyncio.wait_for(until_empty(reading), 20)


async def until_empty(reading: FairReader) -> None:
    while reading._read or reading._waiting:
        await asyncio.sleep(0)


async def test_who_waits_to_be_read_is_told_to_come_again_and_few_wait() -> None:
    """node D2"""
    reading, end = FairReader(most=2, wait_seconds=0.01), asyncio.Event()
    first = await crowd(reading, "a/1", until=end)
    (waits,) = await crowd(reading, "a/2", until=end)
    with pytest.raises(Busy, match="too many calls send"):
        await asyncio.wait_for(waits, 20)
    assert (read_of(reading), reading._waiting) == (["a/1"], {})
    end.set()
    await asyncio.wait_for(asyncio.gather(*first), 20)


async def test_few_wait_to_be_read_and_of_a_namespace_no_more_than_are_free() -> None:
    """node D2"""
    reading, end = FairReader(most=2, places=4, wait_seconds=1000), asyncio.Event()
    waiting = [*await crowd(reading, "a/1", "a/2", "a/3", until=end)]
    (refused,) = await crowd(reading, "a/4", until=end)
    with pytest.raises(Busy, match="too many calls send"):
        await asyncio.wait_for(refused, 20)
    waiting += await crowd(reading, "b/1", "b/2", until=end)
    assert (read_of(reading), len(reading._waiting)) == (["a/1", "b/1"], 3)
    end.set()
    await asyncio.wait_for(asyncio.gather(*waiting), 20)


async def test_who_leaves_lets_one_in_and_not_two() -> None:
    reading, soon, end = FairReader(most=4), asyncio.Event(), asyncio.Event()
    first = await crowd(reading, "a/1", "a/2", until=soon)
    later = await crowd(reading, "b/1", "c/1", "a/3", "a/4", until=end)
    soon.set()
    await asyncio.wait_for(asyncio.gather(*first), 20)
    assert read_of(reading) == ["b/1", "c/1", "a/3"]
    end.set()
    await asyncio.wait_for(asyncio.gather(*later), 20)


def test_a_pod_that_calls_too_often_is_told_when_to_come_again() -> None:
    clock = Clock()
    callers = CallLimiter(clock=clock)
    for _ in range(int(CALL_BURST)):
        with callers.call(ref("evil")):
            pass
    with pytest.raises(Busy, match="calls too often") as busy, callers.call(ref("evil")):
        pass
    assert busy.value.retry_seconds == 1 / CALL_RATE
    with callers.call(ref("good")):
        pass
    clock.now += busy.value.retry_seconds
    with callers.call(ref("evil")):
        pass


def test_who_trickles_uses_up_our_patience_and_who_sends_does_not() -> None:
    patience = MinimumRate(seconds=30, bytes_per_second=1000)
    for _ in range(100):
        patience.waited(1, then_came_bytes=1000)
    assert patience.left_seconds == 30
    for _ in range(10):
        patience.waited(1, then_came_bytes=1)
    assert 20 < patience.left_seconds < 20.1
    patience.waited(1, then_came_bytes=10**9)
    assert patience.left_seconds == 30  # nobody earns more than there was
