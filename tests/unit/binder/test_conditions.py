"""What the owner of a pod that waits is told, and how often: each word is an event and a write."""

import random

import pytest

from binder.loop.conditions import FIGURES_SECONDS, LastMessage, statements_of
from tests.fakes.binder import Bench
from tests.fakes.objects import pod

NODES, PODS = 20, 50


def test_figures_that_change_are_told_after_a_while_and_another_reason_at_once() -> None:
    said = LastMessage().then("0/3 nodes: 3 A (1.5 GiB short)", "", now=100.0)
    assert said is not None
    assert said.then("0/3 nodes: 3 A (900 MiB short)", "", now=101.0) is None
    assert said.then("0/4 nodes: 4 A (7 B short)", "", now=99.0 + FIGURES_SECONDS) is None
    assert said.then("0/4 nodes: 4 A (7 B short)", "", now=100.0 + FIGURES_SECONDS) is not None
    assert said.then("0/3 nodes: 3 A (1.5 GiB short)", "", now=1e9) is None
    assert said.then("0/3 nodes: 2 A (1 GiB short), 1 B", "", now=101.0) is not None


def test_reasons_that_come_and_go_are_told_once() -> None:
    both = "0/3 nodes: 2 A (1 GiB short), 1 B (no heartbeat)"
    said = LastMessage().then(both, "", now=0.0)
    assert said is not None
    assert said.then("0/3 nodes: 3 A (1 GiB short)", "", now=1.0) is None
    assert said.then("0/3 nodes: 3 B (no heartbeat)", "", now=2.0) is None
    third = said.then("0/3 nodes: 3 C", "", now=3.0)
    assert third is not None
    assert third.then(both, "", now=4.0) is None


def test_for_whose_end_a_pod_waits_is_told_at_once_and_that_it_does_no_more() -> None:
    said = LastMessage().then("3 A", "; waits for preempted pods on node n1 to end: team/a-1", now=0.0)
    assert said is not None
    assert said.then("3 A", "; waits for preempted pods on node n2 to end: team/a-1", now=1.0) is not None
    assert said.then("3 A", "", now=1.0) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3 PodAffinityMismatch (node gpu-1)", "3 PodAffinityMismatch (node gpu-2)"),
        ("claim 'c1' is in use", "claim 'c2' is in use"),
        ("zone=a1", "zone=a2"),
        ("version v1.2", "version v1.3"),
    ],
)
def test_names_are_no_figures(one: str, other: str) -> None:
    assert statements_of(one) != statements_of(other)


async def test_pods_that_wait_while_all_figures_change_are_told_of_once() -> None:
    chance = random.Random(1)
    async with Bench() as bench:
        for i in range(NODES):
            bench.node(f"n{i}", 80, foreign=75 * 2**30)
        for i in range(PODS):
            bench.add(f"p{i}", mem=f"{10 * 1024 + i}Mi")
        for _ in range(300):
            name = f"n{chance.randrange(NODES)}"
            bench.node(name, 80, foreign=chance.randrange(72 * 2**30, 79 * 2**30, 2**26))
            await bench.step(20, seconds=0.05)
        assert len([1 for _, reason, _ in bench.events.said if reason == "FailedScheduling"]) == PODS


async def test_a_new_leader_repeats_nothing_but_what_its_predecessor_did_not_say() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        for uid, message in (
            ("p1", "0/1 nodes: 1 GPUMemoryInsufficient (3 GiB short on the best GPU)"),
            ("p2", "0/1 nodes: 1 TaintNotTolerated (k:NoSchedule)"),
        ):
            condition = {"type": "PodScheduled", "reason": "Unschedulable", "message": message}
            waits = pod(uid, mem="20Gi")
            waits["status"]["conditions"] = [condition]
            bench.tell("pods", waits)
        await bench.until_quiet()
        assert [name for name, _, _ in bench.events.said] == ["p2"]


async def test_a_pod_that_asks_for_something_else_is_told_of_that() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.add("p1", mem="20Gi")
        await bench.until_quiet()
        bench.add("p1", mem="90Gi")
        await bench.until_quiet()
        short = [message.partition(" short")[0] for _, _, message in bench.events.said]
        assert [one.rpartition("(")[2] for one in short] == ["4 GiB", "74 GiB"]
