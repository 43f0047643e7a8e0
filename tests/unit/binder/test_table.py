"""The table of nodes: what of a node's news may let a waiting pod in, and that its rows say what the nodes say."""

import random
from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import GpuReport, TritonReport
from berth.kube.informer import Change, ChangeKind
from binder.cache.state import ClusterState
from binder.cache.view import eases, parse_node
from binder.engine.cluster import Cluster
from binder.pod.demand import parse_demand
from binder.rules.registry import FITS, RULES
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]
N1 = NodeName("n1")


def resident(uid: str, **more: Any) -> Json:
    return pod(uid, mem="4Gi", on="n1", choice=GpuChoice(GpuUuid("GPU-a"), 0, 4 * GIB), **more)


def world(*, pods: tuple[Json, ...] = (), **facts: Any) -> Any:
    state = ClusterState(KEYS, clock=lambda: 0.0)
    state.set_node(node(**{"says": report(), **facts}))
    for one in pods:
        state.set_pod(one)
    return state.view(N1)


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
    "a model": ({}, {"pods": (resident("x", annotations=NAMED),)}),
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
        {"pods": (resident("x", annotations={KEYS.model_id: None}),)},
        {"pods": (resident("x", annotations={KEYS.model_id: "m"}),)},
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


def heard(cluster: Cluster, **facts: Any) -> bool:
    return cluster.on_node(Change(ChangeKind.SET, node(**{"says": report(), **facts})))


def test_a_report_that_says_the_same_later_is_no_news() -> None:
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    assert heard(cluster)
    assert not heard(cluster, says=report(generation=7, observed_at="later"))
    assert heard(cluster, says=report(gpu(other_use_bytes=1)))
    assert heard(cluster, labels={"zone": "a"})
    assert not heard(cluster, labels={"zone": "a"})


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


def some_gpus(chance: random.Random, name: str) -> list[GpuReport]:
    return [
        replace(
            gpu(
                f"{name}-{i}",
                index=i,
                total=chance.choice((8, 16, 24)) * GIB,
                other_use_bytes=chance.choice((0, 0, GIB, None)),
                healthy=chance.random() < 0.85,
            ),
            product=chance.choice(("T4", "NVIDIA A100")),
        )
        for i in range(chance.randrange(1, 9))
    ]


def first_failing(cluster: Cluster, name: NodeName, one: Json) -> str | None:
    """The rules once more, in their order, for one node and in plain words."""
    view, demand = cluster.state.view(name), parse_demand(one, KEYS)
    facts, shape = view.facts, demand.shape
    if facts.unschedulable:
        return "NodeUnschedulable"
    if any(taint["effect"] == "NoSchedule" for taint in facts.taints):
        return "TaintNotTolerated"
    if any(facts.labels.get(key) != value for key, value in shape.node_selector.items()):
        return "NodeSelectorMismatch"
    if facts.report is None:
        return "NoNodeReport"
    if not facts.report.triton.ready:
        return "TritonNotReady"
    if (demand.model.ref.namespace, demand.model.model_id) in view.model_ids:
        return "ModelAlreadyOnNode"
    if dict(shape.amounts).get("cpu", 0) > view.left_of("cpu"):
        return "ResourceInsufficient"
    if view.left_of("pods") < 1:
        return "TooManyPods"
    wanted = [
        g for g in view.gpus if not shape.products or g.product.replace(" ", "-").casefold() in shape.products
    ]
    if len(wanted) < min(shape.gpu_count, len(view.gpus)):
        return "GPUProductMismatch"
    if len(view.gpus) < shape.gpu_count:
        return "GPUCountInsufficient"
    usable = [g for g in wanted if g.healthy and view.free_on(g) is not None]
    if len(usable) < shape.gpu_count:
        return "GPUUnhealthy" if not all(g.healthy for g in wanted) else "GPUFactsUnknown"
    enough = [g for g in usable if (view.free_on(g) or 0) >= shape.request_bytes]
    return None if len(enough) >= shape.gpu_count else "GPUMemoryInsufficient"


@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_nodes_are_judged_as_each_alone(seed: int) -> None:
    """Through changes, departures and returns: more nodes than the first table has rows, more GPUs than it has
    columns."""
    chance = random.Random(seed)
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    for step in range(301):
        name = f"n{chance.randrange(40 + step)}"
        if chance.random() < 0.1 and cluster.state.find(NodeName(name)) is not None:
            cluster.on_node(Change(ChangeKind.GONE, node(name)))
            continue
        says = report(*some_gpus(chance, name), triton=TritonReport(chance.random() < 0.9, ""))
        facts = {
            "labels": {"zone": chance.choice("ab")},
            "taints": [{"key": "k", "effect": chance.choice(("NoSchedule", "PreferNoSchedule"))}]
            if chance.random() < 0.2
            else [],
            "unschedulable": chance.random() < 0.1,
            "allocatable": {"cpu": chance.choice("248"), "pods": chance.choice("23")},
            "says": says if chance.random() < 0.9 else None,
        }
        cluster.on_node(Change(ChangeKind.SET, node(name, **facts)))
        cluster.decider.table.beat(NodeName(name), 1.0)
        for uid in range(chance.randrange(2)):
            there = f"r{step}-{uid}"
            choice = GpuChoice(GpuUuid(f"{name}-0"), 0, GIB)
            marks = {KEYS.model_id: f"m{chance.randrange(3)}"}
            one = pod(there, mem="3Gi", on=name, choice=choice, annotations=marks, requests={"cpu": "1"})
            cluster.on_pod(Change(ChangeKind.SET, one))
        if step % 100:
            continue
        for _ in range(4):
            count = chance.randrange(1, 4)
            marks = {KEYS.model_id: f"m{chance.randrange(6)}", KEYS.gpu_count: str(count)}
            if chance.random() < 0.3:
                marks[KEYS.gpu_product] = "nvidia a100"
            asks = pod(
                mem=f"{chance.randrange(20) * count}Gi",
                annotations=marks,
                requests={"cpu": chance.choice("123")},
                nodeSelector=chance.choice(({}, {"zone": "a"})),
            )
            codes, table = cluster.decider.codes(parse_demand(asks, KEYS)), cluster.decider.table
            for known, row in table.row_of.items():
                found = None if codes[row] == FITS else RULES.rule(int(codes[row])).name
                assert found == first_failing(cluster, known, asks), (known, asks)
            some = np.array(chance.sample(range(len(table)), min(5, len(table))))
            assert (cluster.decider.codes_on(parse_demand(asks, KEYS), some) == codes[some]).all()
