"""What an operator reads: each reason with its detail, and its line in the guide."""

import re
from pathlib import Path
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.report import TritonReport
from berth.kube.informer import Change, ChangeKind
from binder.cli.progress import Stage
from binder.engine.cluster import Cluster
from binder.engine.decision import Refusal
from binder.engine.explain import sentence, summary
from binder.pod.demand import parse_demand
from binder.rules.registry import RULES
from tests.fakes.cluster import cluster_of, sized, verdict
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

Json = dict[str, Any]
GUIDE = (Path(__file__).parents[3] / "docs/operating.md").read_text()


@pytest.mark.parametrize("word", [*RULES.codes, *(stage.value for stage in Stage)])
def test_every_word_has_its_line_in_the_guide(word: str) -> None:
    assert re.search(rf"^\|[^|]*`{word}`[^|]*\|", GUIDE, re.MULTILINE)


def summary_of(cluster: Cluster, asks: Json) -> str:
    """Of a refusal; "" where the pod fits."""
    demand = parse_demand(asks, KEYS)
    outcome = cluster.decider.decide(demand)
    return summary(cluster.decider, demand, outcome) if isinstance(outcome, Refusal) else ""


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


def refusing(has: Json, pods: tuple[Json, ...]) -> Cluster:
    """One node, which refuses by what it is called where no object can say it."""
    cluster = cluster_of(node(**{"says": report(), **has}), pods=pods)
    if has.get("name") == "stale":
        cluster.decider.table.beat(NodeName("stale"), -1.0)
    cluster.facts.load_failures.note(("team", "model-p1"), NodeName("excluded"), PodUid("p0"))
    return cluster


@pytest.mark.parametrize("case", DETAILS)
def test_each_reason_says_what_would_be_right(case: str) -> None:
    asks, has, pods, expected = DETAILS[case]
    reason = verdict(refusing(has, pods), pod(**asks)).reason
    assert ("fits" if reason is None else sentence(reason)) == expected


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
    assert summary_of(refusing(has, pods), pod(**asks)) == f"0/1 nodes: {IN_BRIEF[case]}"


def test_a_summary_tells_of_the_nearest_node_and_the_most_common_reason_first() -> None:
    sizes = {"n1": "1", "n2": "3", "n3": "2"}
    cluster = cluster_of(
        *(node(n, says=report(), allocatable={"cpu": cpu, "pods": "9"}) for n, cpu in sizes.items()),
        *(node(f"g{i}", says=report(gpu(total=i * GIB))) for i in (1, 3, 2, 0)),
        node("gone", says=report(gpu(total=5 * GIB))),
    )
    cluster.on_node(Change(ChangeKind.GONE, node("gone")))
    assert summary_of(cluster, pod(mem="6Gi", requests={"cpu": "4"})) == (
        "0/7 nodes: 4 GPUMemoryInsufficient (3 GiB short on the best GPU), "
        "3 ResourceInsufficient (cpu: 4000 asked, 3000 left)"
    )


def test_a_refusal_counts_the_reasons_and_says_how_much_is_missing() -> None:
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    cluster = cluster_of(sized("n1", 16), sized("n2", 18), sized("n3", 16, taints=[taint]))
    assert summary_of(cluster, pod(mem="20Gi")) == (
        "0/3 nodes: 2 GPUMemoryInsufficient (2 GiB short on the best GPU), "
        "1 TaintNotTolerated (nvidia.com/gpu=present:NoSchedule)"
    )


def test_without_any_node_the_summary_says_so() -> None:
    assert summary_of(cluster_of(), pod()) == "0/0 nodes: there is no node"
