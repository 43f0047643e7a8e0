"""Every rule of the registry: it refuses one node as it does all, says so, ends as it says, and wakes the pod then.

A rule without a case here, or that the registry lacks, is found out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.report import CodeReport, CodeRule, TritonReport
from berth.kube.informer import Change, ChangeKind
from binder.cache.load_failures import EXCLUDED_SECONDS
from binder.cache.state import STALE_MODEL_GRACE_SECONDS
from binder.engine.cluster import Cluster
from binder.engine.decision import Decider
from binder.engine.explain import sentence, verdicts
from binder.engine.score import make_strategy
from binder.engine.victims import Victims
from binder.loop.requeue import NodeToStatus, QueueingHints
from binder.pod.demand import Demand, parse_demand
from binder.rules.registry import FITS, RULES, Registry
from binder.rules.rule import Cure
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]
N1, N2 = NodeName("n1"), NodeName("n2")
ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
CLAIM = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}


class World:
    """Two nodes that would both take the pod, but for what the case says of n1."""

    def __init__(self, case: "Case") -> None:
        self.now, self.date = 0.0, datetime(2026, 1, 1, tzinfo=UTC)
        self.cluster = Cluster(KEYS, clock=lambda: self.now, now=lambda: self.date)
        self.hints = QueueingHints(
            self.cluster,
            Victims(self.cluster.state, self.cluster.decider.table, self.cluster.budgets),
            aside=lambda _: (),
            may_preempt=lambda *_: False,
            clock=lambda: self.now,
        )
        self.node(**case.has)
        self.node("n2")
        for one in case.pods:
            self.tell(one)
        case.before(self)

    def node(self, name: str = "n1", **has: Any) -> None:
        labels = {ZONE: "a", **has.pop("labels", {})}
        self.cluster.on_node(
            Change(ChangeKind.SET, node(name, **{"says": report(), "labels": labels, **has}))
        )
        self.cluster.decider.table.beat(NodeName(name), math.inf)

    def tell(self, one: Json) -> None:
        self.cluster.on_pod(Change(ChangeKind.SET, one))

    def end(self, one: Json) -> None:
        """The pod is gone, and by and by its model."""
        self.cluster.on_pod(Change(ChangeKind.GONE, one))
        self.now += STALE_MODEL_GRACE_SECONDS
        self.cluster.state.settle(N1, asked_at=self.now)

    def claim(self, *, bound: bool, exclusive: bool = False, zone: str = "") -> None:
        term = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone]}]}
        affinity = {"nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}} if zone else {}
        self.cluster.on_volume(Change(ChangeKind.SET, {"metadata": {"name": "v"}, "spec": affinity}))
        marks = {"pv.kubernetes.io/bind-completed": "yes"} if bound else {}
        modes = ["ReadWriteOncePod"] if exclusive else ["ReadWriteOnce"]
        claim = {
            "metadata": {"namespace": "team", "name": "c", "annotations": marks},
            "spec": {"volumeName": "v", "accessModes": modes} if bound else {},
        }
        self.cluster.on_claim(Change(ChangeKind.SET, claim))

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        self.date += timedelta(seconds=seconds)

    def quarantine(self) -> None:
        said = "took Triton down on node n9; none is placed until 2026-01-01T01:00:00Z"
        self.cluster.facts.quarantines.remember(("team", "", "model-p1"), said)

    def beat(self, deadline: float) -> None:
        self.cluster.decider.table.beat(N1, deadline)
        self.cluster.decider.table.ease(N1)

    def codes(self, demand: Demand, rules: Registry = RULES) -> "np.ndarray[Any, Any]":
        cluster = self.cluster
        strategy = make_strategy("binpack", np.random.default_rng(1))
        return Decider(cluster.nodes, cluster.facts, strategy, rules=rules).codes(demand)


def nothing(_: World) -> None:
    """There is nothing to be done."""


def good_node(world: World) -> None:
    world.node()


@dataclass(frozen=True)
class Case:
    """What is asked, how n1 is, who is there, and what ends the refusal; None: only another pod."""

    asks: Json = field(default_factory=dict)
    has: Json = field(default_factory=dict)
    pods: tuple[Json, ...] = ()
    before: Callable[[World], None] = nothing
    cure: Callable[[World], None] | None = good_node
    labels: Json = field(default_factory=dict)


def there(
    uid: str = "x", *, on: str = "n1", namespace: str = "team", labels: Json | None = None, **asks: Any
) -> Json:
    one = pod(uid, on=on, choice=GpuChoice(GpuUuid("GPU-a"), 0, GIB), **asks)
    one["metadata"] |= {"namespace": namespace, "labels": labels or {}}
    return one


def ends(**asks: Any) -> Json:
    """A pod on n1 refuses, until it ends."""
    one = there(**asks)
    return {"pods": (one,), "cure": lambda world: world.end(one)}


def term(app: str) -> Json:
    return {"topologyKey": HOST, "labelSelector": {"matchLabels": {"app": app}}}


def port(number: int) -> Json:
    container = {"name": "c", "ports": [{"hostPort": number}], "resources": {"limits": {KEYS.gpu_mem: "1Gi"}}}
    return {"containers": [container]}


APART = {"has": {"says": report(code=CodeReport(CodeRule.NAMESPACE))}}
PYTHON = {"annotations": {KEYS.requirements: "python"}}
SELECTED = {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}
SPREAD = {
    "topologyKey": HOST,
    "maxSkew": 1,
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"app": "a"}},
}
CASES: dict[str, Case] = {
    "UnsupportedConstraint": Case({"resourceClaims": [{"name": "gpu"}]}, cure=None),
    "ModelQuarantined": Case(before=World.quarantine, cure=lambda world: world.pass_seconds(2 * 3600)),
    "VolumeClaimNotFound": Case(CLAIM, cure=lambda world: world.claim(bound=True)),
    "VolumeClaimNotBound": Case(
        CLAIM, before=lambda world: world.claim(bound=False), cure=lambda world: world.claim(bound=True)
    ),
    "VolumeInUse": Case(CLAIM, **ends(**CLAIM), before=lambda world: world.claim(bound=True, exclusive=True)),
    "NodeUnschedulable": Case(has={"unschedulable": True}),
    "TaintNotTolerated": Case(has={"taints": [{"key": "k", "effect": "NoSchedule"}]}),
    "NodeSelectorMismatch": Case(
        {"nodeSelector": {"disk": "ssd"}}, cure=lambda world: world.node(labels={"disk": "ssd"})
    ),
    "NodeAffinityMismatch": Case(
        {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [SELECTED]}}}},
        cure=lambda world: world.node(labels={"disk": "ssd"}),
    ),
    "NoNodeReport": Case(has={"says": None}),
    "UnreadableNodeReport": Case(has={"says": "{"}),
    "TritonNotReady": Case(has={"says": report(triton=TritonReport(False, ""))}),
    "WrongServer": Case(
        {"annotations": {KEYS.server: "other"}}, cure=lambda world: world.node(says=report(server="other"))
    ),
    "MissingCapabilities": Case(
        {"annotations": {KEYS.requirements: "tensorrt"}},
        cure=lambda world: world.node(says=report(capabilities=("tensorrt",))),
    ),
    "CodeNotAllowed": Case(PYTHON, {"says": report(code=CodeReport(CodeRule.NONE))}),
    "StaleNodeFacts": Case(
        before=lambda world: world.beat(-math.inf), cure=lambda world: world.beat(math.inf)
    ),
    "ExcludedAfterLoadFailure": Case(
        before=lambda world: world.cluster.facts.load_failures.note(("team", "model-p1"), N1, PodUid("p0")),
        cure=lambda world: world.pass_seconds(EXCLUDED_SECONDS),
    ),
    "VolumeNodeAffinityConflict": Case(
        CLAIM,
        before=lambda world: world.claim(bound=True, zone="b"),
        cure=lambda world: world.node(labels={ZONE: "b"}),
    ),
    "ModelAlreadyOnNode": Case(**ends(annotations={KEYS.model_id: "model-p1"})),
    "CodeOfAnotherNamespace": Case(**APART, **ends(namespace="other", **PYTHON)),
    "ModelsOfOtherNamespaces": Case(PYTHON, **APART, **ends(namespace="other")),
    "HostPortTaken": Case(port(80), **ends(**port(80))),
    "ResourceInsufficient": Case({"requests": {"cpu": "3"}}, **ends(requests={"cpu": "2"})),
    "TooManyPods": Case(has={"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "1"}}, **ends()),
    "NoGPU": Case(has={"says": replace(report(), gpus=())}),
    "GPUProductMismatch": Case(
        {"annotations": {KEYS.gpu_product: "A100"}},
        cure=lambda world: world.node(says=report(gpu(product="A100"))),
    ),
    "GPUCountInsufficient": Case(
        {"annotations": {KEYS.gpu_count: "2"}, "mem": "2Gi"},
        cure=lambda world: world.node(says=report(gpu(), gpu("GPU-b", index=1))),
    ),
    "GPUUnhealthy": Case(has={"says": report(gpu(healthy=False, reason="XID 79"))}),
    "GPUFactsUnknown": Case(has={"says": report(gpu(other_use_bytes=None))}),
    "GPUMemoryInsufficient": Case({"mem": "10Gi"}, **ends(mem="10Gi")),
    "PodAffinityMismatch": Case(
        {"affinity": {"podAffinity": {REQUIRED: [term("db")]}}},
        cure=lambda world: world.tell(there(labels={"app": "db"})),
    ),
    "PodAntiAffinity": Case(
        {"affinity": {"podAntiAffinity": {REQUIRED: [term("db")]}}}, **ends(labels={"app": "db"})
    ),
    "ExistingPodAntiAffinity": Case(
        labels={"app": "a"}, **ends(affinity={"podAntiAffinity": {REQUIRED: [term("a")]}})
    ),
    "TopologySpread": Case(
        {"topologySpreadConstraints": [SPREAD]}, labels={"app": "a"}, **ends(labels={"app": "a"})
    ),
}


def asked(case: Case) -> Demand:
    one = pod("p1", **case.asks)
    one["metadata"]["labels"] = case.labels
    return parse_demand(one, KEYS)


@pytest.fixture(params=sorted(RULES.codes))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_case_is_of_a_rule() -> None:
    assert CASES.keys() == RULES.codes.keys()


def test_it_is_the_reason_over_all_nodes_as_for_one(name: str) -> None:
    world, demand = World(CASES[name]), asked(CASES[name])
    codes = world.codes(demand)
    row = world.cluster.decider.table.row_of[N1]
    assert RULES.rule(int(codes[row])).name == name
    for each in range(len(codes)):
        assert world.cluster.decider.codes_on(demand, np.array([each])).tolist() == [codes[each]]


def test_it_says_so(name: str) -> None:
    world = World(CASES[name])
    found = {one.view.facts.name: one.reason for one in verdicts(world.cluster.decider, asked(CASES[name]))}
    assert (reason := found[N1]) is not None
    assert sentence(reason).startswith(name)


def test_without_it_the_node_is_not_refused_so(name: str) -> None:
    world, demand = World(CASES[name]), asked(CASES[name])
    others = Registry(rule for rule in RULES.rules if rule.name != name)
    code = int(world.codes(demand, others)[world.cluster.decider.table.row_of[N1]])
    assert code == FITS or "GPU" in others.rule(code).name  # without a report no GPU is known


def test_its_cure_lets_the_pod_in_and_wakes_it(name: str) -> None:
    case, rule = CASES[name], RULES.named(name)
    world, demand = World(case), asked(case)
    codes, table = world.cluster.decider.codes(demand), world.cluster.decider.table
    if case.cure is None:
        assert rule.cures == {Cure.OWNER}
        return
    assert rule.cures - {Cure.OWNER}
    world.hints.take_changes()
    refused = world.cluster.decider.because(demand) is not None
    status = NodeToStatus(codes.copy(), RULES.names(codes[table.live]), refused, table.clock)
    case.cure(world)
    row = table.row_of[N1]
    assert world.cluster.decider.codes(demand)[row] == FITS
    hint = world.hints.hint(demand, status, world.hints.take_changes()) or world.hints.spared(demand, status)
    assert hint is not None
    assert hint.rows is None or row in hint.rows


def test_what_the_end_of_a_pod_cures_is_cured_by_leaving_it_out_and_nothing_else(name: str) -> None:
    case, ends = CASES[name], Cure.POD_ENDS in RULES.named(name).cures
    world, demand = World(case), asked(case)
    decider = world.cluster.decider
    with decider.without([PodUid(one["metadata"]["uid"]) for one in case.pods]):
        assert bool(decider.codes(demand)[decider.table.row_of[N1]] == FITS) is ends
