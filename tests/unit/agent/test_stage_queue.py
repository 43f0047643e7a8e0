"""Few streams at once, fair between namespaces."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from agent import stage_queue as slots
from agent.limits import (
    Busy,
)
from agent.stage_queue import StageQueue
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef


def ref(name: str, namespace: str = "team") -> PodRef:
    return PodRef(namespace, name, PodUid(f"{namespace}-{name}"))


class Node:
    """Slots that note who runs."""

    def __init__(self, **given: float) -> None:
        self.slots = StageQueue(**given)  # type: ignore[arg-type]
        self.running: list[PodRef] = []
        self.done: dict[PodUid, asyncio.Event] = {}

    def begin(self, one: PodRef) -> "asyncio.Task[None]":
        self.done[one.uid] = asyncio.Event()
        return asyncio.create_task(self._stage(one))

    async def _stage(self, one: PodRef) -> None:
        async with self.slots.slot(one):
            self.running.append(one)
            try:
                await self.done[one.uid].wait()
            finally:
                self.running.remove(one)

    async def settled(self) -> dict[str, int]:
        """How many streams each namespace runs."""
        for _ in range(5):
            await asyncio.sleep(0)
        return {
            one.namespace: sum(r.namespace == one.namespace for r in self.running) for one in self.running
        }


async def test_a_namespace_gets_half_and_there_is_room_for_others() -> None:
    node = Node()
    tasks = [node.begin(ref(f"p{n}", "evil")) for n in range(30)]
    assert await node.settled() == {"evil": 4}
    for name, much in (("one", 2), ("two", 1), ("three", 1)):
        tasks += [node.begin(ref(f"p{n}", name)) for n in range(3)]
        assert (await node.settled())[name] == much
    tasks.append(late := node.begin(ref("p", "late")))
    await node.settled()
    assert len(node.running) == 8
    node.done[PodUid("evil-p0")].set()  # whoever ends first, the one of fewest is next
    assert (await node.settled())["late"] == 1
    assert not late.done()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_of_one_namespace_the_first_is_next() -> None:
    node = Node()
    tasks = [node.begin(ref(f"p{n}")) for n in range(7)]
    for n in range(3):
        assert await node.settled() == {"team": 4}
        assert node.running[-1] == ref(f"p{n + 3}")
        node.done[PodUid(f"team-p{n}")].set()
    for event in node.done.values():
        event.set()
    await asyncio.gather(*tasks)


async def test_a_pod_has_one_stream() -> None:
    node = Node()
    task = node.begin(ref("p"))
    await node.settled()
    with pytest.raises(Busy, match="pod team/p is staging already"):
        await node.slots.slot(ref("p")).__aenter__()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with node.slots.slot(ref("p")):
        pass


async def test_a_pod_that_stages_again_and_again_is_slowed_down_and_another_is_not() -> None:
    node = Node()
    for _ in range(20):
        async with node.slots.slot(ref("p")):
            pass
    with pytest.raises(Busy, match="pod team/p stages too often") as busy:
        await node.slots.slot(ref("p")).__aenter__()
    assert 0 < busy.value.retry_seconds <= 2
    async with node.slots.slot(ref("other")):
        pass


async def test_a_queue_that_is_full_for_one_namespace_has_places_for_another() -> None:
    node = Node()
    tasks = [node.begin(ref(f"p{n}", "evil")) for n in range(4 + slots.PLACES // 2)]
    await node.settled()
    with pytest.raises(Busy, match="the node is busy: it takes 4 models now and 32 wait"):
        await node.slots.slot(ref("more", "evil")).__aenter__()
    async with node.slots.slot(ref("p", "good")):
        pass
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_waits_for_too_long_is_told_to_come_again() -> None:
    node = Node(wait_seconds=0.01)
    tasks = [node.begin(ref(f"p{n}")) for n in range(4)]
    await node.settled()
    with pytest.raises(Busy, match="the node is busy") as busy:
        await node.slots.slot(ref("late")).__aenter__()
    assert busy.value.retry_seconds > 0
    for event in node.done.values():
        event.set()
    await asyncio.gather(*tasks)
    async with node.slots.slot(ref("late")):  # it has left no trace
        pass


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_is_cancelled_whenever_no_slot_and_no_place_is_lost(seed: int) -> None:
    chance, node = random.Random(seed), Node(wait_seconds=60)
    tasks: dict[PodRef, asyncio.Task[None]] = {}
    for step in range(200):
        kind = chance.random()
        if kind < 0.5:
            one = ref(f"p{step}", chance.choice("abc"))
            tasks[one] = node.begin(one)
        elif tasks:
            one = chance.choice(list(tasks))
            if kind < 0.75:
                node.done[one.uid].set()
            else:
                tasks[one].cancel()
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        assert len(node.running) <= slots.SLOTS
    for one in tasks:
        node.done[one.uid].set()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    async with AsyncExitStack() as all_of_them:  # alone again: half of the slots at once
        async with asyncio.timeout(1):
            for number in range(slots.SLOTS // 2):
                await all_of_them.enter_async_context(node.slots.slot(ref(f"last{number}")))
