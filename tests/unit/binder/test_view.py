"""A node as it is seen: what its object says, and which of its news may let a waiting pod in."""

import random
from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import CodeReport, CodeRule, TritonReport
from binder.cache.state import ClusterState, with_replica
from binder.cache.view import eases, parse_node
from binder.engine import schedulable as schedulable
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement
from binder.pod.demand import parse_demand
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]


def held(uid: str, **more: Any) -> Json:
    return pod(uid, mem="4Gi", on="n1", choice=GpuChoice(GpuUuid("GPU-a"), 0, 4 * GIB), **more)


def world(*, pods: tuple[Json, ...] = (), **facts: Any) -> Any:
    state = ClusterState(KEYS, clock=lambda: 0.0)
    state.set_node(node(**{"says": report(), **facts}))
    for one in pods:
        state.set_pod(one)
    return state.view(N1)


N1 = NodeName("n1")
PORT: Json = {"containers": [{"name": "c", "ports": [{"hostPort": 80}]}]}
NAMED = {KEYS.model_id: "m", KEYS.model_name: "n"}
LOST = pod("lost", mem="4Gi", on="n1")  # nobody knows on which GPU
# A node, and the same node with more on it or worse: the way back eases, the way there does not.
WORSE: dict[str, tuple[Json, Json]] = {
    "foreign memory": ({}, {"says": report(gpu(other_use_bytes=1))}),
    "headroom": ({}, {"says": report(gpu(headroom_bytes=1))}),
    "a GPU whose figures are not known": ({}, {"says": report(gpu(other_use_bytes=None))}),
    "a GPU that is sick": ({}, {"says": report(gpu(healthy=False))}),
    "CPU": (
        {"pods": (pod("x", mem=None, on="n1", requests={"cpu": "1"}),)},
        {"pods": (pod("x", mem=None, on="n1", requests={"cpu": "2"}),)},
    ),
    "one more pod": ({}, {"pods": (pod("x", mem=None, on="n1"),)}),
    "a model": ({}, {"pods": (held("x", annotations=NAMED),)}),
    "a model's bytes": (
        {"says": report(models=(listed("x", requested=GIB),))},
        {"says": report(models=(listed("x", requested=2 * GIB),))},
    ),
    "bytes on nobody knows which GPU": ({}, {"pods": (LOST,)}),
    "a host port": (
        {"pods": (pod("x", mem=None, on="n1", containers=[{"name": "c"}]),)},
        {"pods": (pod("x", mem=None, on="n1", **PORT),)},
    ),
    "less allocatable": (
        {"allocatable": {"cpu": "4", "x.io/fpga": "2"}},
        {"allocatable": {"cpu": "4", "x.io/fpga": "1"}},
    ),
    "a model's id": (
        {"pods": (held("x", annotations={KEYS.model_id: None}),)},
        {"pods": (held("x", annotations={KEYS.model_id: "m"}),)},
    ),
}


@pytest.mark.parametrize("case", WORSE)
def test_what_comes_free_may_let_a_pod_in_and_what_is_taken_does_not(case: str) -> None:
    better, worse = (world(**facts) for facts in WORSE[case])
    assert eases(worse, better)
    assert not eases(better, worse)
    assert not eases(better, better)
    assert not eases(worse, worse)


# What decides otherwise, better or not: either way is news.
MOVES: dict[str, tuple[Json, Json]] = {
    "label": ({}, {"labels": {"zone": "a"}}),
    "taint": ({}, {"taints": [{"key": "k", "effect": "NoSchedule"}]}),
    "cordon": ({}, {"unschedulable": True}),
    "report": ({}, {"says": None}),
    "readable": ({"says": None}, {"says": "{"}),
    "Triton": ({}, {"says": report(triton=TritonReport(False, ""))}),
    "server": ({}, {"says": report(server="pool")}),
    "capabilities": ({}, {"says": report(capabilities=())}),
    "a GPU more": ({}, {"says": report(gpu(), gpu("GPU-b", index=1))}),
    "another GPU": ({}, {"says": report(gpu("GPU-b"))}),
    "another product": ({}, {"says": report(replace(gpu(), product="H100"))}),
}


@pytest.mark.parametrize("case", MOVES)
def test_what_people_change_is_news_either_way(case: str) -> None:
    one, other = (world(**facts) for facts in MOVES[case])
    assert eases(one, other)
    assert eases(other, one)
    assert eases(None, one)
    assert not eases(one, one)


@pytest.mark.parametrize(
    ("quantity", "amount"), [("4", 4000), ("100m", 100), ("nonsense", 0), ("-1", 0), ("1e300", 2**62)]
)
def test_what_a_node_has(quantity: str, amount: int) -> None:
    assert parse_node(node(allocatable={"cpu": quantity}), KEYS).allocatable == {"cpu": amount}


@pytest.mark.parametrize("version", [None, "", "x", "12"])
def test_the_version_of_a_node_need_not_be_a_number(version: str | None) -> None:
    one = node()
    one["metadata"]["resourceVersion"] = version
    assert parse_node(one, KEYS).version == (12 if version == "12" else 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_node_with_a_copy_more_is_what_the_state_makes_of_it(seed: int) -> None:
    chance = random.Random(seed)
    rule = chance.choice(
        (CodeReport(CodeRule.ANY), CodeReport(CodeRule.NAMESPACE), CodeReport(CodeRule.NAMESPACE, "team"))
    )
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    cluster.state.set_node(node(says=report(gpu("n1-0"), gpu("n1-1", index=1), code=rule)))
    cluster.decider.table.beat(NodeName("n1"), np.inf)
    for number in range(4):
        count = chance.choice((1, 2))
        asks = pod(
            f"p{number}",
            mem=f"{chance.randint(0, 4) * count}Gi",
            requests={"cpu": f"{chance.randint(0, 900)}m"},
            annotations={
                KEYS.model_id: chance.choice((None, f"m{number}")),
                KEYS.requirements: chance.choice((None, "python")),
                KEYS.gpu_count: str(count),
            },
        )
        asks["metadata"]["namespace"] = chance.choice(("team", "team", "other"))
        asks["spec"]["containers"][0]["ports"] = [
            {"hostPort": 8000 + number, "protocol": "TCP"}
        ] * chance.randint(0, 1)
        demand = parse_demand(asks, KEYS)
        outcome = cluster.decider.decide(demand)
        if isinstance(outcome, Placement):
            expected = with_replica(cluster.state.view(outcome.node), demand, outcome.gpu)
            cluster.state.assume(demand, outcome.node, outcome.gpu)
            assert cluster.state.view(outcome.node) == expected
            assert cluster.state.view_without(outcome.node, ()) == expected  # made anew
