"""Every reason for which a node refuses a pod, and Kubernetes' matching rules."""

from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName
from binder.cache.cluster_facts import ClusterFacts
from binder.cache.live_nodes import LiveNodes
from binder.cache.state import ClusterState
from binder.cache.table import NodeTable
from binder.engine.decision import Decider, Placement, Refusal
from binder.engine.explain import NodeVerdict, summary, verdicts
from binder.engine.score import make_strategy
from binder.pod.demand import parse_demand
from binder.pod.resources import pod_amounts
from binder.rules.node_selection import matches_affinity
from binder.rules.taints import untolerated_taint
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.values import replace

TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def state_of(*nodes: dict[str, Any], pods: tuple[dict[str, Any], ...] = ()) -> ClusterState:
    state = ClusterState(KEYS, clock=lambda: 0.0)
    for one in nodes:
        state.set_node(one)
    for one in pods:
        state.set_pod(one)
    return state


def decider_of(state: ClusterState, *, strategy: str = "binpack", fresh: bool = True) -> Decider:
    decider = Decider(
        LiveNodes(state),
        ClusterFacts(state=state, clock=lambda: 0.0),
        make_strategy(strategy, np.random.default_rng(1)),
    )
    for view in state.views():
        decider.table.beat(view.facts.name, 1.0 if fresh else -1.0)
    return decider


def verdict(asks: dict[str, Any], state: ClusterState, *, fresh: bool = True) -> NodeVerdict:
    (found,) = verdicts(decider_of(state, fresh=fresh), parse_demand(asks, KEYS))
    return found


def kind_of(found: NodeVerdict) -> str | None:
    return None if found.reason is None else found.reason.rule


def affinity(*terms: Any) -> dict[str, Any]:
    return {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    }


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, GIB)
# What a rule refuses besides its case in `test_registry`.
REFUSALS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "claims": ("UnsupportedConstraint", {"resourceClaims": [{"name": "gpu"}]}, {}, ()),
    "memory": ("ResourceInsufficient", {"requests": {"memory": "9Gi"}}, {}, ()),
    "other resource": ("ResourceInsufficient", {"requests": {"example.com/fpga": "1"}}, {}, ()),
    "model not yet gone": (
        "ModelAlreadyOnNode",
        {"annotations": {KEYS.model_id: "model-old"}},
        {"says": report(models=(listed("old"),))},
        (),
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSALS))
def test_a_node_refuses_for_its_reason(case: str) -> None:
    kind, asks, has, pods = REFUSALS[case]
    state = state_of(node(**{"says": report(), **has}), pods=pods)
    assert kind_of(verdict(pod(**asks), state)) == kind


def test_a_name_is_nobodys_and_an_id_its_namespaces() -> None:
    same_name = pod("x", on="n1", choice=CHOICE, annotations={KEYS.model_id: "other", KEYS.model_name: "m"})
    theirs = pod("y", on="n1", choice=CHOICE, annotations={KEYS.model_id: "m"})
    theirs["metadata"]["namespace"] = "elsewhere"
    foreign = replace(listed("z"), namespace="elsewhere", model_id=ModelId("m"), model_name=ModelName("m"))
    state = state_of(node(says=report(models=(foreign,))), pods=(same_name, theirs))
    assert kind_of(verdict(pod(annotations={KEYS.model_id: "m"}), state)) is None
    mine = pod("w", on="n1", choice=CHOICE, annotations={KEYS.model_id: "m"})
    state = state_of(node(says=report()), pods=(same_name, theirs, mine))
    assert kind_of(verdict(pod(annotations={KEYS.model_id: "m"}), state)) == "ModelAlreadyOnNode"


def test_stale_facts_refuse_and_what_is_left_fits() -> None:
    state = state_of(node(says=report()))
    assert kind_of(verdict(pod(), state, fresh=False)) == "StaleNodeFacts"
    assert verdict(pod(), state).reason is None


def test_an_exact_fit_fits_and_a_byte_more_does_not() -> None:
    state = state_of(node(says=report(gpu(total=16 * GIB, other_use_bytes=GIB, headroom_bytes=GIB))))
    assert verdict(pod(mem=str(14 * GIB)), state).reason is None
    reason = verdict(pod(mem=str(14 * GIB + 1)), state).reason
    assert reason is not None
    assert (reason.rule, reason.short_bytes) == ("GPUMemoryInsufficient", 1)


def test_memory_is_judged_per_gpu_and_not_per_node() -> None:
    state = state_of(node(says=report(gpu("GPU-a", total=12 * GIB), gpu("GPU-b", total=12 * GIB, index=1))))
    reason = verdict(pod(mem="20Gi"), state).reason
    assert reason is not None
    assert reason.short_bytes == 8 * GIB


def test_one_sick_gpu_does_not_hide_the_other() -> None:
    state = state_of(node(says=report(gpu("GPU-a", healthy=False), gpu("GPU-b", index=1))))
    assert [g.gpu.uuid for g in verdict(pod(), state).gpus if g.reason is None] == ["GPU-b"]


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "nvidia.com/gpu", "value": "present"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Equal", "value": "absent"}, False),
        ({"operator": "Exists"}, True),
        ({"operator": "Equal", "value": "present"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "nvidia.com/gpu", "operator": "Odd", "value": "present"}, False),
    ],
)
def test_tolerations(toleration: dict[str, str], tolerated: bool) -> None:
    assert (
        untolerated_taint([("nvidia.com/gpu", "present", "NoSchedule")], [toleration]) is None
    ) is tolerated


def test_a_preference_taint_never_refuses() -> None:
    assert untolerated_taint([("k", "", "PreferNoSchedule")], []) is None


@pytest.mark.parametrize(
    ("terms", "matches"),
    [
        ([expression("zone", "In", "a", "b")], True),
        ([expression("zone", "In", "b")], False),
        ([expression("zone", "NotIn", "b")], True),
        ([expression("none", "NotIn", "b")], True),
        ([expression("zone", "Exists")], True),
        ([expression("none", "DoesNotExist")], True),
        ([expression("size", "Gt", "9")], True),
        ([expression("size", "Gt", "10")], False),
        ([expression("size", "Lt", "11")], True),
        ([expression("zone", "Gt", "1")], False),
        ([expression("size", "Gt", "x")], False),
        ([expression("zone", "Like", "a")], False),
        ([{}], False),
        ([], False),
        ([expression("zone", "In", "b"), expression("zone", "In", "a")], True),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}], True),
        ([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}], False),
    ],
)
def test_required_affinity(terms: list[Any], matches: bool) -> None:
    labels = {"zone": "a", "size": "10"}
    table, (view,) = NodeTable(), state_of(node(labels=labels)).views()
    table.put(view)
    found = matches_affinity(table, affinity(*terms)["nodeAffinity"], table.all_rows)
    assert found is not None
    assert found.tolist() == [matches]


def test_what_a_pod_takes_of_a_node() -> None:
    asks = pod(requests={"cpu": "250m", "memory": "1Gi"}, overhead={"cpu": "10m"})
    asks["spec"]["initContainers"] = [
        {"name": "side", "restartPolicy": "Always", "resources": {"requests": {"cpu": "100m"}}},
        {"name": "init", "resources": {"requests": {"cpu": "1"}}},
    ]
    assert pod_amounts(asks, KEYS) == {"cpu": 1110, "memory": GIB, "pods": 1}


def host_port(port: int, ip: str = "") -> dict[str, Any]:
    return {"containers": [{"name": "c", "ports": [{"hostPort": port, "hostIP": ip}]}]}


def test_host_ports_conflict_on_the_same_address_or_any() -> None:
    taken = pod("x", on="n1", mem=None, **host_port(80, "10.0.0.1"))
    state = state_of(node(says=report()), pods=(taken,))
    for ip, refused in (("", True), ("10.0.0.1", True), ("10.0.0.2", False)):
        reason = verdict(pod(**host_port(80, ip)), state).reason
        assert (reason is not None and reason.rule == "HostPortTaken") is refused, ip


def choose(strategy: str, asks: dict[str, Any], state: ClusterState) -> Any:
    return decider_of(state, strategy=strategy).decide(parse_demand(asks, KEYS))


def test_binpack_takes_the_fullest_and_spread_the_emptiest() -> None:
    state = state_of(
        node("n1", says=report(gpu("GPU-1", total=16 * GIB))),
        node("n2", says=report(gpu("GPU-2", total=24 * GIB), gpu("GPU-3", total=2 * GIB, index=1))),
    )
    assert choose("binpack", pod(), state) == Placement("n2", GpuChoice(GpuUuid("GPU-3"), 1, GIB))  # type: ignore[arg-type]
    assert choose("spread", pod(), state).gpu.uuid == "GPU-2"


def test_equal_cases_are_always_decided_alike() -> None:
    both = report(gpu("GPU-y", index=0), gpu("GPU-x", index=1))
    state = state_of(node("n2", says=both), node("n1", says=report(gpu("GPU-z"))))
    assert choose("binpack", pod(), state) == choose("binpack", pod(), state)


def test_what_the_owner_prefers_comes_before_the_strategy() -> None:
    state = state_of(
        node(
            "n1",
            says=report(gpu("GPU-1", total=2 * GIB)),
            taints=[{"key": "k", "effect": "PreferNoSchedule"}],
        ),
        node("n2", says=report(gpu("GPU-2"))),
        node("n3", says=report(gpu("GPU-3")), labels={"zone": "a"}),
    )
    assert choose("binpack", pod(), state).node == "n2"
    weighted = {"weight": 5, "preference": expression("zone", "In", "a")}
    preferred = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}
    assert choose("binpack", pod(affinity=preferred), state).node == "n3"


def test_a_refusal_counts_the_reasons_and_says_how_much_is_missing() -> None:
    state = state_of(
        node("n1", says=report(gpu("GPU-1", total=16 * GIB))),
        node("n2", says=report(gpu("GPU-2", total=18 * GIB))),
        node("n3", says=report(), taints=[TAINT]),
    )
    decider, demand = decider_of(state), parse_demand(pod(mem="20Gi"), KEYS)
    refusal = decider.decide(demand)
    assert isinstance(refusal, Refusal)
    assert summary(decider, demand, refusal) == (
        "0/3 nodes: 2 GPUMemoryInsufficient (2 GiB short on the best GPU), "
        "1 TaintNotTolerated (nvidia.com/gpu=present:NoSchedule)"
    )


def test_without_any_node_the_summary_says_so() -> None:
    decider, demand = decider_of(state_of()), parse_demand(pod(), KEYS)
    refusal = decider.decide(demand)
    assert isinstance(refusal, Refusal)
    assert summary(decider, demand, refusal) == "0/0 nodes: there is no node"


def test_several_gpus_are_distinct_and_each_has_the_bytes() -> None:
    state = state_of(
        node("n1", says=report(*(gpu(f"GPU-{i}", index=i, total=(i + 1) * GIB) for i in range(4))))
    )
    two = pod(mem="6Gi", annotations={KEYS.gpu_count: "2"})
    chosen = choose("binpack", two, state).gpu
    assert [(one.uuid, one.index) for one in chosen.gpus] == [("GPU-2", 2), ("GPU-3", 3)]
    assert GpuChoice.decode(chosen.encode()) == chosen
    reason = verdict(pod(mem="9Gi", annotations={KEYS.gpu_count: "3"}), state).reason
    assert reason is not None
    assert (reason.rule, reason.short_bytes) == ("GPUMemoryInsufficient", GIB)
