"""Nothing is heard while a step runs: what concerns many nodes at once is taken over a few nodes at a time."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from berth.contract.ids import NodeName
from binder.cache.column import Column
from tests.fakes.binder import Bench

NODES, FEW = 200, 64


def full(bench: Bench, **labels: str) -> None:
    for i in range(NODES):
        bench.node(f"n{i:03d}", 80)
        bench.resident(f"r{i}", f"n{i:03d}", 70, labels=labels)


async def test_a_budget_that_counts_nobody_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench() as bench:
        full(bench, app="web")
        await bench.step()
        looks = _looks(bench, monkeypatch)
        for allowed in (1, 0, 2):
            bench.budget(allowed, app="others")
            await bench.step()
        assert len(looks) == 0


async def test_a_budget_that_counts_pods_everywhere_is_taken_over_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Bench() as bench:
        full(bench, app="web")
        bench.budget(0)
        bench.add("vip", mem="80Gi", priority=10)
        await bench.step(NODES, seconds=1.0)
        assert not bench.scheduler.nominator.is_nominated(bench.scheduler.queue.find("vip").demand)  # type: ignore
        looks = _looks(bench, monkeypatch)
        bench.budget(1)
        await bench.step()
        assert len(looks) <= FEW
        await bench.step(20, seconds=1.0)
        assert len(bench.api.evicted) == 1


async def test_a_new_leader_takes_over_the_nodes_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    full(bench)
    bench.add("p1", mem="1Gi")
    leads = asyncio.create_task(bench.scheduler.run())
    known, table = [0], bench.scheduler.cluster.decider.table
    while not bench.is_placed("p1"):
        await asyncio.sleep(0)
        known.append(len(table))
    leads.cancel()
    await asyncio.gather(leads, return_exceptions=True)
    assert known[-1] == NODES
    assert max(after - before for before, after in pairwise(known)) <= FEW


def _looks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[NodeName]:
    """Whose pods are looked at from now on."""
    looks: list[NodeName] = []
    state = bench.scheduler.state
    reservations_on = state.reservations_on

    def looked(node: NodeName) -> object:
        looks.append(node)
        return reservations_on(node)

    monkeypatch.setattr(state, "reservations_on", looked)
    return looks


async def test_what_pods_name_does_not_pile_up() -> None:
    """Labels and resources that nobody has: each of them costs memory and time at every report."""
    async with Bench() as bench:
        bench.node("n1", 80, labels={"pool": "a"})
        sizes = []
        for batch in range(4):
            for i in range(300):
                uid = f"p{batch}-{i}"
                bench.add(uid, nodeSelector={f"k{uid}": "x"}, requests={f"example.com/{uid}": "1"})
            bench.add(f"ok{batch}", mem="1Gi", nodeSelector={"pool": "a"}, requests={"cpu": "1"})
            await bench.step(400, seconds=0.01)
            assert bench.is_placed(f"ok{batch}")
            for i in range(300):
                bench.gone(f"p{batch}-{i}")
            sizes.append(_arrays_in(bench.scheduler.cluster.decider.table))
        assert sizes[-1] <= sizes[0] <= 600


def _arrays_in(one: object) -> int:
    """How many there are in an object and in what it keeps."""
    kept = vars(one).values()
    many = (value for value in kept if isinstance(value, dict))
    return sum(isinstance(value, np.ndarray | Column) for values in many for value in values.values())
