"""The table of nodes: what of a node's news may let a waiting pod in, and that its rows say what the nodes say."""

import random
from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import GpuReport, TritonReport
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import Cluster
from binder.pod.demand import parse_demand
from binder.rules.registry import FITS, RULES
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]
N1 = NodeName("n1")


def heard(cluster: Cluster, **facts: Any) -> bool:
    return cluster.on_node(Change(ChangeKind.SET, node(**{"says": report(), **facts})))


def test_a_report_that_says_the_same_later_is_no_news() -> None:
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    assert heard(cluster)
    assert not heard(cluster, says=report(generation=7, observed_at="later"))
    assert heard(cluster, says=report(gpu(other_use_bytes=1)))
    assert heard(cluster, labels={"zone": "a"})
    assert not heard(cluster, labels={"zone": "a"})


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
