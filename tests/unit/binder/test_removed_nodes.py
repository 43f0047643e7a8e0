"""What is left of a node that is deleted: nothing."""

from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement, Refusal
from binder.pod.demand import parse_demand
from tests.cluster.differential.generator import generate
from tests.cluster.differential.vanished import answers, vanished
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

Json = dict[str, Any]


@pytest.mark.parametrize("seed", range(1, 31))
def test_nodes_that_are_gone_decide_nothing(seed: int) -> None:
    """Random worlds and pods under every kind of constraint, as a binder sees them that has been there
    before, and as one that has not."""
    generated = generate(seed, cases=120)
    world = generated.world
    pods = {name: {**case.manifest} for name, case in generated.cases.items()}
    for kind in (world.pods, pods.values()):
        for number, one in enumerate(kind):
            one["metadata"].setdefault("uid", f"{one['metadata']['name']}-{number}")
    fresh = answers(world, pods, KEYS)
    assert answers(world, pods, KEYS, gone=vanished(world.nodes)) == fresh
    assert len(set(fresh.values())) > 10


def zoned(name: str, zone: str) -> Json:
    return node(name, says=report(gpu(f"GPU-{name}")), labels={"zone": zone})


def spread(uid: str, **more: Any) -> Json:
    constraint = {
        "maxSkew": 1,
        "topologyKey": "zone",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "x"}},
    }
    one = pod(uid, topologySpreadConstraints=[constraint], **more)
    one["metadata"]["labels"] = {"app": "x"}
    return one


def test_the_zone_of_a_deleted_node_is_no_domain_any_more_and_its_end_is_news() -> None:
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    for name, zone in (("a1", "a"), ("b1", "b"), ("c1", "c")):
        cluster.on_node(Change(ChangeKind.SET, zoned(name, zone)))
        cluster.decider.table.beat(NodeName(name), 1.0)
    for uid, name in (("p1", "a1"), ("p2", "b1")):
        choice = GpuChoice(GpuUuid(f"GPU-{name}"), 0, GIB)
        cluster.state.set_pod(spread(uid, on=name, choice=choice))
    wanted = parse_demand(spread("p3"), KEYS)
    placed = cluster.decider.decide(wanted)
    assert isinstance(placed, Placement)
    assert placed.node == "c1"
    cluster.state.set_pod(spread("p4", on="a1", choice=GpuChoice(GpuUuid("GPU-a1"), 0, GIB)))
    cluster.on_node(Change(ChangeKind.SET, {**zoned("c1", "c"), "spec": {"unschedulable": True}}))
    assert isinstance(cluster.decider.decide(wanted), Refusal)  # zone c counts, and takes nobody
    assert cluster.on_node(Change(ChangeKind.GONE, zoned("c1", "c")))
    placed = cluster.decider.decide(wanted)
    assert isinstance(placed, Placement)
    assert placed.node == "b1"
    assert not cluster.on_node(Change(ChangeKind.GONE, zoned("c1", "c")))  # told twice


def test_a_node_that_is_registered_anew_is_judged_by_what_it_is_now() -> None:
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    taint = {"key": "k", "value": "", "effect": "NoSchedule"}
    old = node(
        "n1", says=report(gpu(total=80 * GIB)), taints=[taint], unschedulable=True, labels={"zone": "a"}
    )
    cluster.on_node(Change(ChangeKind.SET, old))
    cluster.decider.table.beat(NodeName("n1"), 1.0)
    wanted = parse_demand(pod(mem="10Gi", nodeSelector={"zone": "b"}), KEYS)
    assert isinstance(cluster.decider.decide(wanted), Refusal)
    cluster.on_node(Change(ChangeKind.GONE, old))
    assert isinstance(cluster.decider.decide(wanted), Refusal)
    cluster.on_node(Change(ChangeKind.SET, node("n1", labels={"zone": "b"})))  # no report yet
    assert isinstance(cluster.decider.decide(wanted), Refusal)
    cluster.on_node(Change(ChangeKind.SET, node("n1", says=report(gpu()), labels={"zone": "b"})))
    assert isinstance(cluster.decider.decide(wanted), Placement)
