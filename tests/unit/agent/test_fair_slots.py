"""Few at once, fair between namespaces: as requests are read."""

import asyncio
from typing import cast

import pytest

from agent.fair_slots import FairSlots
from agent.limits import READ_AT_ONCE, READ_CALLS, Busy, _too_many_send
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef


class CountedRef:
    """A pod's reference that counts how often it is looked at."""

    looks = 0

    def __init__(self, namespace: str, uid: str) -> None:
        self._namespace, self._uid = namespace, PodUid(uid)

    @property
    def namespace(self) -> str:
        CountedRef.looks += 1
        return self._namespace

    @property
    def uid(self) -> PodUid:
        CountedRef.looks += 1
        return self._uid


def reading_of(*, slots: int = READ_AT_ONCE, places: int = 1024, wait_seconds: float = 10.0) -> FairSlots:
    return FairSlots(
        slots=slots, places=places, wait_seconds=wait_seconds, per_pod=READ_CALLS, busy=_too_many_send
    )


async def reads(reading: FairSlots, who: PodRef, *, until: asyncio.Event) -> None:
    async with reading.slot(who):
        await until.wait()


async def crowd(reading: FairSlots, *whose: str, until: asyncio.Event) -> list["asyncio.Task[None]"]:
    """One call for each, NAMESPACE/POD, that are all let in or wait when this returns."""
    refs = [PodRef(one.split("/")[0], one, PodUid(one)) for one in whose]
    tasks = [asyncio.create_task(reads(reading, one, until=until)) for one in refs]
    await asyncio.sleep(0)
    return tasks


def read_of(reading: FairSlots) -> list[str]:
    return [one.uid for one in reading.running]


async def test_of_a_pod_few_requests_are_read_at_once_and_the_next_when_one_is_done() -> None:
    reading, end, go_on = reading_of(), asyncio.Event(), asyncio.Event()
    await crowd(reading, *["a/evil"] * READ_CALLS, until=end)
    later = await crowd(reading, "a/evil", "a/good", until=go_on)
    assert read_of(reading) == ["a/evil"] * READ_CALLS + ["a/good"]
    end.set()
    go_on.set()
    await asyncio.wait_for(asyncio.gather(*later), 20)
    assert (reading.running, reading.waiting) == ([], [])


async def test_pods_without_number_have_few_requests_read_at_once_and_keep_no_other_namespace_out() -> None:
    """node D2: each request that is read may be as large as gRPC takes it, whatever the pod is."""
    reading, end = reading_of(slots=8), asyncio.Event()
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


async def until_empty(reading: FairSlots) -> None:
    while reading.running or reading.waiting:
        await asyncio.sleep(0)


async def test_who_waits_to_be_read_is_told_to_come_again_and_few_wait() -> None:
    """node D2"""
    reading, end = reading_of(slots=2, wait_seconds=0.01), asyncio.Event()
    first = await crowd(reading, "a/1", until=end)
    (waits,) = await crowd(reading, "a/2", until=end)
    with pytest.raises(Busy, match="too many calls send"):
        await asyncio.wait_for(waits, 20)
    assert (read_of(reading), reading.waiting) == (["a/1"], [])
    end.set()
    await asyncio.wait_for(asyncio.gather(*first), 20)


async def test_few_wait_to_be_read_and_of_a_namespace_no_more_than_are_free() -> None:
    """node D2"""
    reading, end = reading_of(slots=2, places=4, wait_seconds=1000), asyncio.Event()
    waiting = [*await crowd(reading, "a/1", "a/2", "a/3", until=end)]
    (refused,) = await crowd(reading, "a/4", until=end)
    with pytest.raises(Busy, match="too many calls send"):
        await asyncio.wait_for(refused, 20)
    waiting += await crowd(reading, "b/1", "b/2", until=end)
    assert (read_of(reading), len(reading.waiting)) == (["a/1", "b/1"], 3)
    end.set()
    await asyncio.wait_for(asyncio.gather(*waiting), 20)


async def test_who_leaves_lets_one_in_and_not_two() -> None:
    reading, soon, end = reading_of(slots=4), asyncio.Event(), asyncio.Event()
    first = await crowd(reading, "a/1", "a/2", until=soon)
    later = await crowd(reading, "b/1", "c/1", "a/3", "a/4", until=end)
    soon.set()
    await asyncio.wait_for(asyncio.gather(*first), 20)
    assert read_of(reading) == ["b/1", "c/1", "a/3"]
    end.set()
    await asyncio.wait_for(asyncio.gather(*later), 20)


async def test_a_change_looks_a_few_times_at_those_that_wait_however_many_have_a_slot() -> None:
    """Else a thousand calls that wait hold the event loop for seconds."""
    reading, soon, end = reading_of(), asyncio.Event(), asyncio.Event()
    refs = [cast(PodRef, CountedRef(f"n{n % 8}", str(n // 2))) for n in range(300)]
    leaver = asyncio.create_task(reads(reading, refs[0], until=soon))
    others = [asyncio.create_task(reads(reading, one, until=end)) for one in refs[1:]]
    await asyncio.sleep(0)
    assert len(reading.running) > 20
    before = CountedRef.looks
    soon.set()
    await asyncio.wait_for(asyncio.gather(leaver), 20)
    assert CountedRef.looks - before <= 3 * len(refs)
    end.set()
    await asyncio.wait_for(asyncio.gather(*others), 20)
