"""Preemption as it runs: who is evicted, when, and what is written where."""

import pytest

from berth.kube.errors import KubeUnreachable, response_error
from binder.loop.nominate import NOMINATION_SECONDS
from tests.fakes.binder import Bench
from tests.fakes.objects import KEYS

TWO_BUDGETS = response_error(500, "InternalError", "This pod has more than one PodDisruptionBudget")


def full(bench: Bench, *names: str) -> None:
    """Nodes that are each full with one pod of low priority."""
    for name in names:
        bench.node(name, 16)
        bench.resident(f"v-{name}", name, 16)


async def drain(bench: Bench, seconds: int, *, into: int = 10) -> None:
    """Time passes; who is evicted begins to go and stays on its way."""
    for _ in range(seconds // into):
        await bench.step(2, seconds=into / 2)
        for uid in bench.api.evicted:
            if uid in bench.api.pods and "deletionTimestamp" not in bench.api.pods[uid]["metadata"]:
                bench.begin_to_go(uid)


async def test_victims_that_drain_for_long_are_waited_for() -> None:
    async with Bench() as bench:
        full(bench, "n1", "n2", "n3")
        bench.add("vip", mem="16Gi", priority=100)
        await drain(bench, 1200)
        assert bench.api.evicted == ["v-n1"]
        bench.gone("v-n1")
        await bench.step(3, seconds=5.0)
        assert bench.is_placed("vip")


async def test_a_victim_that_does_not_begin_to_go_is_given_up() -> None:
    async with Bench() as bench:
        full(bench, "n1", "n2")
        bench.add("vip", mem="16Gi", priority=100)
        await bench.step(3, seconds=1.0)
        assert bench.api.evicted == ["v-n1"]
        bench.resident("v-n1", "n1", 16, priority=200)  # somebody has made it important meanwhile
        await bench.step(10, seconds=NOMINATION_SECONDS / 8)
        assert bench.api.evicted == ["v-n1", "v-n2"]
        assert bench.api.nominated == [("vip", "n1"), ("vip", "n2")]


async def test_a_place_on_a_node_that_takes_nobody_any_more_is_given_up() -> None:
    async with Bench() as bench:
        full(bench, "n1", "n2")
        bench.add("vip", mem="16Gi", priority=100)
        await drain(bench, 20)
        bench.node("n1", 16, unschedulable=True)
        await drain(bench, 300)
        assert bench.api.evicted == ["v-n1", "v-n2"]


async def test_nobody_slips_into_a_place_that_is_being_made() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("a", "n1", 8)
        bench.resident("b", "n1", 8)
        bench.add("vip", mem="16Gi", priority=100)
        await drain(bench, 20)
        bench.gone("a")
        bench.add("same", mem="4Gi", priority=100, created="2020-01-01T00:00:00Z")
        bench.add("lower", mem="4Gi", priority=50)
        await bench.step(5, seconds=1.0)
        assert not bench.is_placed("same")
        assert not bench.is_placed("lower")
        bench.gone("b")
        await bench.step(3, seconds=5.0)
        assert bench.is_placed("vip")


async def test_a_higher_priority_takes_the_place_and_the_other_looks_for_another() -> None:
    async with Bench() as bench:
        full(bench, "n1", "n2")
        bench.add("vip", mem="16Gi", priority=100)
        await drain(bench, 20)
        bench.gone("v-n1")
        bench.add("king", mem="16Gi", priority=200)
        await bench.step()
        assert bench.is_placed("king")
        await drain(bench, 30)
        assert bench.api.evicted == ["v-n1", "v-n2"]


async def test_a_place_that_a_higher_priority_has_spoilt_is_free_for_others_at_once() -> None:
    async with Bench() as bench:
        full(bench, "n1")
        bench.add("vip", mem="16Gi", priority=100)
        await drain(bench, 20)
        bench.gone("v-n1")
        bench.add("king", mem="4Gi", priority=200)
        await bench.step()
        assert bench.is_placed("king")
        bench.add("small", mem="8Gi")
        await bench.step(3)
        assert bench.is_placed("small")


async def test_all_evictions_are_rehearsed_before_the_first() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("a", "n1", 8)
        bench.resident("b", "n1", 8)
        bench.api.refusals["b"] = TWO_BUDGETS
        bench.add("vip", mem="16Gi", priority=100)
        await bench.step(600, seconds=1.0)
        assert bench.api.evicted == []
        assert bench.api.rehearsed
        assert len(bench.api.rehearsed) < 30
        del bench.api.refusals["b"]
        await bench.step(120, seconds=1.0)
        assert sorted(bench.api.evicted) == ["a", "b"]


@pytest.mark.parametrize(
    "error", [TWO_BUDGETS, response_error(429, "TooManyRequests", "x"), KubeUnreachable("x")]
)
async def test_a_victim_whose_eviction_is_refused_is_passed_over_for_another(error: Exception) -> None:
    async with Bench() as bench:
        full(bench, "n1", "n2")
        bench.api.refusals["v-n1"] = error
        bench.add("vip", mem="16Gi", priority=100)
        await bench.step(5, seconds=1.0)
        assert bench.api.evicted == ["v-n2"]
        assert bench.api.nominated == [("vip", "n2")]


async def test_an_eviction_that_fails_after_all_is_tried_again_and_no_successor_is_evicted() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("a", "n1", 8)
        bench.resident("b", "n1", 8)
        bench.api.late_refusals["b"] = response_error(429, "TooManyRequests", "x")
        bench.add("vip", mem="16Gi", priority=100)
        successors = 0
        for _ in range(600):
            await bench.step(seconds=1.0)
            for uid in set(bench.api.evicted) & bench.api.pods.keys():
                bench.gone(uid)
                successors += 1
                bench.resident(f"a{successors}", "n1", 8)  # its controller's; another scheduler placed it
        assert bench.api.evicted == ["a"]
        bench.api.late_refusals.clear()
        bench.gone("a1")
        await drain(bench, 600)
        assert "b" in bench.api.evicted


async def test_a_leader_that_is_not_certain_evicts_nobody_and_patches_nothing() -> None:
    async with Bench() as bench:
        full(bench, "n1")
        bench.add("vip", mem="16Gi", priority=100)
        bench.scheduler.step()
        bench.may_write = lambda: False
        await bench.step(10, seconds=1.0)
        assert (bench.api.rehearsed, bench.api.evicted, bench.api.nominated) == ([], [], [])


async def test_a_leader_that_is_not_certain_any_more_stops_between_two_evictions() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("a", "n1", 8)
        bench.resident("b", "n1", 8)
        bench.add("vip", mem="16Gi", priority=100)
        bench.may_write = lambda: not bench.api.evicted
        await bench.step(10, seconds=1.0)
        assert bench.api.evicted == ["a"]


async def test_a_leader_that_is_not_certain_decides_nothing() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.add("p")
        bench.add("large", mem="20Gi")
        bench.may_write = lambda: False
        await bench.step(5, seconds=1.0)
        assert not bench.is_placed("p")
        assert bench.events.said == []


async def test_the_next_leader_takes_the_place_over() -> None:
    async with Bench() as bench:
        full(bench, "n1", "n2")
        bench.begin_to_go("v-n1")
        vip = bench.add("vip", mem="16Gi", priority=100, created="2026-01-05T00:00:00Z")
        bench.gone("vip")
        vip["status"]["nominatedNodeName"] = "n1"
        bench.api.pods["vip"] = vip
        bench.tell("pods", vip)
        bench.add("older", mem="16Gi", priority=100)
        await drain(bench, 100)
        assert bench.api.evicted == ["v-n2"]  # for the older one
        bench.gone("v-n1")
        await bench.step(3, seconds=5.0)
        assert bench.is_placed("vip")


async def test_the_next_leader_finishes_what_was_begun() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.node("n0", 16)
        bench.resident("other", "n0", 16)
        bench.resident("a", "n1", 8)
        bench.resident("b", "n1", 8)
        bench.begin_to_go("a")
        vip = bench.add("vip", mem="16Gi", priority=100)
        bench.gone("vip")
        vip["status"]["nominatedNodeName"] = "n1"
        bench.api.pods["vip"] = vip
        bench.tell("pods", vip)
        await drain(bench, 50)
        assert bench.api.evicted == ["b"]


async def test_what_was_nominated_is_taken_back_in_the_status_when_it_is_given_up() -> None:
    async with Bench() as bench:
        full(bench, "n1")
        bench.add("vip", mem="16Gi", priority=100)
        await drain(bench, 20)
        bench.node("n1", 16, unschedulable=True)
        await drain(bench, 60)
        assert bench.api.nominated == [("vip", "n1"), ("vip", None)]


async def test_who_waits_for_room_does_not_take_victims_of_a_model_it_could_not_be_beside() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("same", "n1", 1, priority=200, annotations={KEYS.model_id: "m"})
        bench.resident("low", "n1", 15)
        bench.add("vip", mem="8Gi", priority=100, annotations={KEYS.model_id: "m"})
        await drain(bench, 30)
        assert bench.api.evicted == []


async def test_who_is_on_his_way_out_is_not_evicted_once_more() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("going", "n1", 8)
        bench.resident("staying", "n1", 8, priority=5)
        bench.begin_to_go("going")
        bench.add("vip", mem="8Gi", priority=100)
        await bench.step(3, seconds=1.0)
        assert bench.api.evicted == ["staying"]
