"""No history of events, faults and crashes makes the binder give out the same bytes twice, place a model
twice on a node, lose a pod, or leave one waiting that fits."""

import asyncio
import random
import re

import pytest

from tests.unit.binder.safety.world import OPERATIONS, Broken, Operation, World

# 200 histories of 500 steps: 100 000 in all. Each test runs those of one seed and names it.
SEEDS, HISTORIES, STEPS = range(20), 10, 500
_SHRINKS = 400


def history(seed: int) -> list[Operation]:
    chance = random.Random(seed)
    names = chance.choices(list(OPERATIONS), list(OPERATIONS.values()), k=STEPS)
    return [(name, chance.randrange(1 << 16), chance.randrange(1 << 16)) for name in names]


async def fault_of(operations: list[Operation]) -> str | None:
    """What breaks in a history, or None."""
    random.seed(1)  # of backoffs
    world = World()
    await world.begin()
    try:
        for operation in operations:
            await world.do(operation)
    except (Broken, AssertionError) as error:
        return str(error) or repr(error)
    finally:
        await world.end()
    return None


def kind_of(fault: str | None) -> str | None:
    """A fault without its names and figures."""
    return None if fault is None else re.sub(r"\S*\d\S*", "", fault)


def shortened(operations: list[Operation]) -> list[Operation]:
    """The same fault with fewer steps: leave out ever smaller parts for as long as it still fails so."""
    fault = kind_of(asyncio.run(fault_of(operations)))
    size, tries = max(1, len(operations) // 2), 0
    while size >= 1 and tries < _SHRINKS:
        start = 0
        while start < len(operations) and tries < _SHRINKS:
            tries += 1
            fewer = operations[:start] + operations[start + size :]
            if kind_of(asyncio.run(fault_of(fewer))) == fault:
                operations = fewer
            else:
                start += size
        size //= 2
    return operations


@pytest.mark.parametrize("seed", SEEDS)
def test_no_history_breaks_the_binder(seed: int) -> None:
    for number in range(HISTORIES):
        operations = history(1000 * seed + number)
        if asyncio.run(fault_of(operations)) is not None:
            least = shortened(operations)
            pytest.fail(f"history {1000 * seed + number}: {asyncio.run(fault_of(least))}\n{least}")


def test_a_binder_that_forgets_what_it_has_assumed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test can fail: the simplest of all faults is found, and its history is made short."""
    from binder.cache.state import ClusterState

    monkeypatch.setattr(ClusterState, "assume", lambda *_: None)
    broken = next(h for h in map(history, range(20)) if asyncio.run(fault_of(h)) is not None)
    assert len(shortened(broken)) < 20


def test_a_binder_that_misses_a_wake_up_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """(review of the binder, `op_quiet`) While pods were tried of themselves after 130 s, this was hidden."""
    from binder.loop.requeue import QueueingHints

    monkeypatch.setattr(QueueingHints, "_rows", lambda *_: [])
    assert any((fault := asyncio.run(fault_of(h))) and "not tried" in fault for h in map(history, range(20)))
