"""What an operator reads: each reason with its detail, and its line in the guide."""

import re
from pathlib import Path
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import TritonReport
from berth.kube.informer import Change, ChangeKind
from binder.cache.load_failures import LoadFailures
from binder.cli.progress import Stage
from binder.engine.cluster import Cluster
from binder.engine.decision import Refusal
from binder.engine.explain import sentence, summary, verdicts
from binder.engine.remedy import remedy
from binder.pod.demand import Demand, parse_demand
from binder.rules.registry import RULES
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

Json = dict[str, Any]
GUIDE = (Path(__file__).parents[3] / "docs/operating.md").read_text()


@pytest.mark.parametrize("word", [*RULES.codes, *(stage.value for stage in Stage)])
def test_every_word_has_its_line_in_the_guide(word: str) -> None:
    assert re.search(rf"^\|[^|]*`{word}`[^|]*\|", GUIDE, re.MULTILINE)


class Excluding(LoadFailures):
    def excluded(self, demand: Demand) -> list[NodeName]:
        return [NodeName("excluded")]


def cluster_of(*nodes: Json, pods: tuple[Json, ...] = ()) -> Cluster:
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    cluster.facts.load_failures = Excluding()
    for one in nodes:
        cluster.on_node(Change(ChangeKind.SET, one))
        name = one["metadata"]["name"]
        cluster.decider.table.beat(name, -1.0 if name == "stale" else 1.0)
    for one in pods:
        cluster.on_pod(Change(ChangeKind.SET, one))
    return cluster


PORT: Json = {"containers": [{"name": "c", "ports": [{"hostPort": 80}, {"hostPort": 81, "protocol": "UDP"}]}]}
TAKEN: Json = {"containers": [{"name": "c", "ports": [{"hostPort": 81, "protocol": "UDP"}]}]}
TWO = report(gpu("GPU-a"), gpu("GPU-b", index=1))
SICK = report(*(gpu(f"GPU-{i}", index=i, healthy=i == 9, reason=f"XID {i % 2}") for i in range(3)))
HELD = GpuChoice(GpuUuid("GPU-a"), 0, GIB)
# What is asked, what the node is, who is there; the sentence.
DETAILS: dict[str, tuple[Json, Json, tuple[Json, ...], str]] = {
    "cordon": ({}, {"unschedulable": True}, (), "NodeUnschedulable"),
    "taint": (
        {"tolerations": [{"key": "a", "operator": "Exists"}]},
        {"taints": [{"key": k, "value": "v", "effect": "NoExecute"} for k in "ab"]},
        (),
        "TaintNotTolerated: b=v:NoExecute",
    ),
    "taint without a value": (
        {},
        {"taints": [{"key": "s", "effect": "PreferNoSchedule"}, {"key": "k", "effect": "NoSchedule"}]},
        (),
        "TaintNotTolerated: k:NoSchedule",
    ),
    "selector": ({"nodeSelector": {"z": "1", "a": "2"}}, {}, (), "NodeSelectorMismatch: a=2,z=1"),
    "no report": ({}, {"says": None}, (), "NoNodeReport"),
    "unreadable": (
        {},
        {"says": "[]"},
        (),
        "UnreadableNodeReport: node report: Expected `object`, got `array`",
    ),
    "triton": ({}, {"says": report(triton=TritonReport(False, ""))}, (), "TritonNotReady"),
    "server": (
        {"annotations": {KEYS.server: "pool"}},
        {},
        (),
        "WrongServer: pool wanted, triton is here",
    ),
    "capabilities": (
        {"annotations": {KEYS.requirements: "x,python,a"}},
        {},
        (),
        "MissingCapabilities: a,x",
    ),
    "stale": (
        {},
        {"name": "stale", "says": report(observed_at="noon")},
        (),
        "StaleNodeFacts: no heartbeat; last report of noon",
    ),
    "excluded": ({}, {"name": "excluded"}, (), "ExcludedAfterLoadFailure"),
    "id": (
        {"annotations": {KEYS.model_id: "m"}},
        {},
        (pod("x", on="n1", choice=HELD, annotations={KEYS.model_id: "m"}),),
        "ModelAlreadyOnNode: id m",
    ),
    "port": (PORT, {}, (pod("x", mem=None, on="n1", **TAKEN),), "HostPortTaken: UDP 81"),
    "ports": (
        PORT,
        {},
        (pod("x", mem=None, on="n1", **PORT),),
        "HostPortTaken: TCP 80, UDP 81",
    ),
    "resource": (
        {"requests": {"cpu": "3", "memory": "1Gi"}},
        {},
        (pod("x", mem=None, on="n1", requests={"cpu": "1500m"}),),
        "ResourceInsufficient: cpu: 3000 asked, 2500 left",
    ),
    "resource given out twice": (
        {"requests": {"cpu": "1"}},
        {},
        (pod("x", mem=None, on="n1", requests={"cpu": "9"}),),
        "ResourceInsufficient: cpu: 1000 asked, 0 left",
    ),
    "pods": (
        {},
        {"allocatable": {"cpu": "4", "pods": "2"}},
        tuple(pod(f"x{i}", mem=None, on="n1") for i in range(2)),
        "TooManyPods: 2 pods are on the node",
    ),
    "product": ({"annotations": {KEYS.gpu_product: "H100"}}, {"says": TWO}, (), "GPUProductMismatch: T4"),
    "count": (
        {"mem": "3Gi", "annotations": {KEYS.gpu_count: "3"}},
        {"says": TWO},
        (),
        "GPUCountInsufficient: 3 wanted, 2 here",
    ),
    "sick": ({}, {"says": SICK}, (), "GPUUnhealthy: XID 0; XID 1"),
    "unknown": ({}, {"says": report(gpu(other_use_bytes=None))}, (), "GPUFactsUnknown"),
    "memory": ({"mem": "17Gi"}, {"says": TWO}, (), "GPUMemoryInsufficient: 1 GiB short on the best GPU"),
    "memory of several": (
        {"mem": "10Gi", "annotations": {KEYS.gpu_count: "2"}},
        {
            "says": report(
                gpu("GPU-a"), gpu("GPU-b", index=1, total=2 * GIB), gpu("GPU-c", index=2, total=3 * GIB)
            )
        },
        (),
        "GPUMemoryInsufficient: 2 GiB short on one of the best 2 GPUs",
    ),
    "unsupported": (
        {"resourceClaims": [{"name": "r"}]},
        {},
        (),
        "UnsupportedConstraint: spec.resourceClaims",
    ),
    "claim": (
        {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
        {},
        (),
        "VolumeClaimNotFound: persistentvolumeclaim 'c' does not exist or is being deleted",
    ),
    "a long detail": (
        {"nodeSelector": {"k": "v" * 300}},
        {},
        (),
        f"NodeSelectorMismatch: k={'v' * 198}",
    ),
    "fits": ({}, {}, (), "fits"),
}


def refused(asks: Json, has: Json, pods: tuple[Json, ...]) -> tuple[str, str]:
    """The node's own reason, and the whole refusal."""
    cluster = cluster_of(node(**{"says": report(), **has}), pods=pods)
    demand = parse_demand(pod(**asks), KEYS)
    (found,) = verdicts(cluster.decider, demand)
    outcome = cluster.decider.decide(demand)
    whole = summary(cluster.decider, demand, outcome) if isinstance(outcome, Refusal) else ""
    return "fits" if found.reason is None else sentence(found.reason), whole


@pytest.mark.parametrize("case", DETAILS)
def test_each_reason_says_what_would_be_right(case: str) -> None:
    *world, expected = DETAILS[case]
    assert refused(*world)[0] == expected  # type: ignore[arg-type]


# What of a refusal stands in the summary of all nodes: figures that differ from node to node do not.
IN_BRIEF = {
    "cordon": "1 NodeUnschedulable",
    "taint": "1 TaintNotTolerated (b=v:NoExecute)",
    "selector": "1 NodeSelectorMismatch",
    "unreadable": "1 UnreadableNodeReport (node report: Expected `object`, got `array`)",
    "server": "1 WrongServer",
    "capabilities": "1 MissingCapabilities (a,x)",
    "stale": "1 StaleNodeFacts",
    "id": "1 ModelAlreadyOnNode",
    "resource": "1 ResourceInsufficient (cpu: 3000 asked, 2500 left)",
    "product": "1 GPUProductMismatch (T4)",
    "count": "1 GPUCountInsufficient (3 wanted, 2 here)",
    "sick": "1 GPUUnhealthy",
    "memory": "1 GPUMemoryInsufficient (1 GiB short on the best GPU)",
    "unsupported": "UnsupportedConstraint: spec.resourceClaims",
}


@pytest.mark.parametrize("case", IN_BRIEF)
def test_a_summary_keeps_what_is_alike_on_all_nodes(case: str) -> None:
    asks, has, pods, _ = DETAILS[case]
    assert refused(asks, has, pods)[1] == f"0/1 nodes: {IN_BRIEF[case]}"


def test_a_summary_tells_of_the_nearest_node_and_the_most_common_reason_first() -> None:
    sizes = {"n1": "1", "n2": "3", "n3": "2"}
    cluster = cluster_of(
        *(node(n, says=report(), allocatable={"cpu": cpu, "pods": "9"}) for n, cpu in sizes.items()),
        *(node(f"g{i}", says=report(gpu(total=i * GIB))) for i in (1, 3, 2, 0)),
        node("gone", says=report(gpu(total=5 * GIB))),
    )
    cluster.on_node(Change(ChangeKind.GONE, node("gone")))
    demand = parse_demand(pod(mem="6Gi", requests={"cpu": "4"}), KEYS)
    outcome = cluster.decider.decide(demand)
    assert isinstance(outcome, Refusal)
    assert summary(cluster.decider, demand, outcome) == (
        "0/7 nodes: 4 GPUMemoryInsufficient (3 GiB short on the best GPU), "
        "3 ResourceInsufficient (cpu: 4000 asked, 3000 left)"
    )


GPUS: dict[str, tuple[Json, Any, str | None]] = {
    "fits": ({"mem": "16Gi"}, gpu(), None),
    "asks for nothing": ({"mem": None}, gpu(total=GIB, other_use_bytes=GIB), None),
    "over its memory": (
        {"mem": None},
        gpu(total=GIB, other_use_bytes=2 * GIB),
        "GPUMemoryInsufficient: 1 GiB short",
    ),
    "short": ({"mem": "17Gi"}, gpu(), "GPUMemoryInsufficient: 1 GiB short"),
    "sick": ({}, gpu(healthy=False, reason="XID 79"), "GPUUnhealthy: XID 79"),
    "unknown": ({}, gpu(total=None, reason="NVML"), "GPUFactsUnknown: NVML"),
    "another product": (
        {"annotations": {KEYS.gpu_product: "H100,A100"}},
        gpu(healthy=False),
        "GPUProductMismatch: T4 is not one of A100, H100",
    ),
    "the product": ({"annotations": {KEYS.gpu_product: "t4"}}, gpu(), None),
}


@pytest.mark.parametrize("case", GPUS)
def test_each_gpu_has_its_own_reason(case: str) -> None:
    asks, has, expected = GPUS[case]
    cluster = cluster_of(node(says=report(has)))
    (found,) = verdicts(cluster.decider, parse_demand(pod(**asks), KEYS))
    reason = found.gpus[0].reason
    assert (None if reason is None else sentence(reason)) == expected


def helps(cluster: Cluster, asks: Json) -> str:
    demand = parse_demand(asks, KEYS)
    outcome = cluster.decider.decide(demand)
    assert isinstance(outcome, Refusal)
    return remedy(cluster.decider, demand, outcome, most_nodes=1)


def resident(uid: str, on: str, gib: int, slot: int = 0, **more: Any) -> Json:
    return pod(uid, mem=f"{gib}Gi", on=on, choice=GpuChoice(GpuUuid(f"{on}-{slot}"), slot, gib * GIB), **more)


def test_what_would_help_is_said_of_the_node_with_most_room() -> None:
    cluster = cluster_of(
        *(node(n, says=report(gpu(f"{n}-0"), gpu(f"{n}-1", index=1))) for n in ("n1", "n2", "n3")),
        pods=(
            *(
                resident(f"{n}{slot}", n, 10 - (n == "n2"), slot)
                for n in ("n1", "n2", "n3")
                for slot in (0, 1)
            ),
        ),
    )
    assert helps(cluster, pod(mem="8Gi")) in (
        "would fit on n2, GPU 0, without team/n20",
        "would fit on n2, GPU 1, without team/n21",
    )
    both = pod(mem="16Gi", annotations={KEYS.gpu_count: "2"})
    assert helps(cluster, both) == "would fit on n2, GPU 0, 1, without team/n20, team/n21"
    assert (
        helps(cluster, pod(mem="17Gi"))
        == "no GPU is large enough: 17 GiB asked, 16 GiB on the largest when empty"
    )
    assert helps(cluster, pod(mem="17Gi", nodeSelector={"a": "b"})) == ""
    assert helps(cluster, pod(mem="8Gi", resourceClaims=[{"name": "r"}])) == ""


def test_the_largest_gpu_is_one_that_the_pod_may_have() -> None:
    cluster = cluster_of(
        node("n1", says=report(gpu(total=16 * GIB, headroom_bytes=GIB))),
        node("n2", says=report(gpu("b", total=80 * GIB, product="H100", headroom_bytes=0))),
    )
    asks = pod(mem="20Gi", annotations={KEYS.gpu_product: "T4"})
    assert helps(cluster, asks) == "no GPU is large enough: 20 GiB asked, 15 GiB on the largest when empty"


# --- a scrape
