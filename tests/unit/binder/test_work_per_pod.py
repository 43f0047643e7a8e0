"""What is done for one pod, counted: a burst costs its own pods' work, and not that of the pods that are there."""

from collections.abc import Callable
from typing import Any

import pytest

from berth.contract.ids import NodeName, PodUid
from binder.cache import state as state_module
from tests.fakes.binder import Bench

RESIDENTS, BURST = 40, 60
N1 = NodeName("n1")


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """One entry for each call from now on."""
    calls: list[None] = []
    original: Callable[..., Any] = getattr(owner, name)

    def count(*args: Any, **more: Any) -> Any:
        calls.append(None)
        return original(*args, **more)

    monkeypatch.setattr(owner, name, count)
    return calls


async def crowded() -> Bench:
    bench = Bench()
    bench.node("n1", *([80] * 8))
    for number in range(RESIDENTS):
        bench.resident(f"r{number}", "n1", 1, slot=number % 8)
    await bench.step(2)
    return bench


async def test_a_burst_does_not_weigh_who_could_go_while_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The binder's lost speed: the pods of a node were weighed as victims anew for every pod that came there."""
    bench = await crowded()
    async with bench:
        looks = counted(monkeypatch, bench.scheduler.state, "reservations_on")
        for number in range(BURST):
            bench.add(f"p{number}", mem="1Gi")
        await bench.step(BURST + 1)
        assert bench.is_placed(*(f"p{number}" for number in range(BURST)))
        assert len(looks) <= 2


async def test_who_could_go_is_known_when_the_first_pod_asks() -> None:
    bench = await crowded()
    async with bench:
        for number in range(BURST):
            bench.add(f"p{number}", mem="8Gi", requests={"cpu": "1"})
        await bench.step(BURST + 1)
        bench.add("vip", mem="80Gi", priority=10)
        await bench.step(2)
        assert bench.scheduler.nominator.is_nominated(bench.scheduler.queue.find(PodUid("vip")).demand)  # type: ignore


async def test_news_from_before_a_pod_was_parked_does_not_wake_it() -> None:
    """Nobody looks at the news while nobody waits; the first one who does must not be woken by old ones."""
    bench = await crowded()
    async with bench:
        for number in range(BURST):
            bench.gone(f"r{number % RESIDENTS}") if number < RESIDENTS else bench.node(f"n{number}", 80)
            await bench.step()
        bench.add("big", mem="81Gi")
        await bench.step()
        tried = bench.scheduler.queue.find(PodUid("big"))
        assert tried is not None
        assert tried.status is not None
        await bench.step(3)
        assert tried.hint is None


async def test_a_node_that_gets_one_pod_more_is_not_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The binder's lost speed: what forty pods hold was summed up for each that joined them."""
    bench = await crowded()
    async with bench:
        sums = counted(monkeypatch, state_module, "reserved_by_gpu")
        for number in range(BURST):
            bench.add(f"p{number}", mem="1Gi")
        await bench.step(BURST + 1)
        assert bench.is_placed(*(f"p{number}" for number in range(BURST)))
        assert len(sums) == 0
        state = bench.scheduler.state
        assert state.view(N1) == state.view_without(N1, ())  # as if it had been


async def test_a_pod_that_is_seen_bound_as_it_was_assumed_changes_nothing() -> None:
    """The binder's lost speed: every Binding that the watch showed made its node's figures anew."""
    bench = await crowded()
    async with bench:
        bench.add("p", mem="1Gi", requests={"cpu": "1"})
        await bench.step(2)
        state = bench.scheduler.state
        state.take_touched()
        assert state.assumed_count == 1
        bound = bench.api.pods["p"]
        assert bound["spec"]["nodeName"] == "n1"
        bench.tell("pods", bound)
        assert state.assumed_count == 0
        assert not state.is_touched
        assert state.overdue(seconds=-1.0) == []
        bound["metadata"]["labels"] = {"app": "other"}  # another change is one
        bench.tell("pods", bound)
        assert state.is_touched


async def test_pods_that_are_yet_to_be_tried_are_not_gone_through_for_each_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The binder's lost speed: each step went through all pods in the queue to find those that were refused."""
    bench = await crowded()
    async with bench:
        bench.add("huge", mem="81Gi")
        bench.add("gated", mem="81Gi", schedulingGates=[{"name": "x"}])
        for number in range(BURST):
            bench.add(f"p{number}", mem="1Gi")
        await bench.step(BURST // 2)
        assert [one.uid for one in bench.scheduler.queue.parked()] == ["huge"]
        bench.gone("huge")
        assert not bench.scheduler.queue.has_parked
