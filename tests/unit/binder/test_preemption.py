"""Who has to go so that a pod of higher priority fits, and when nobody has to."""

from collections.abc import Callable
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from binder.cluster import Cluster
from binder.decision import Placement, Refusal
from binder.demand import parse_demand
from binder.holders import Holder
from binder.preemption import Budgets, Sacrifice, find_sacrifice
from binder.remedy import remedy
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report


def cluster_of(nodes: dict[str, int], *pods: dict[str, Any]) -> Cluster:
    """Nodes with one GPU of so many GiB each."""
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    for name, gib in nodes.items():
        cluster.state.set_node(node(name, says=report(gpu(f"GPU-{name}", total=gib * GIB))))
        cluster.decider.table.beat(name, 1.0)  # type: ignore[arg-type]
    for one in pods:
        cluster.state.set_pod(one)
    return cluster


def placed(uid: str, on: str, gib: int, priority: int = 0, **more: Any) -> dict[str, Any]:
    choice = GpuChoice(GpuUuid(f"GPU-{on}"), 0, gib * GIB)
    return pod(uid, mem=f"{gib}Gi", on=on, choice=choice, priority=priority, **more)


def sacrifice(
    cluster: Cluster,
    asks: dict[str, Any],
    *,
    budgets: Budgets | None = None,
    may_go: Callable[[Holder], bool] | None = None,
) -> Sacrifice | None:
    demand = parse_demand(asks, KEYS)
    refusal = cluster.decider.decide(demand)
    assert isinstance(refusal, Refusal)
    return find_sacrifice(
        cluster.decider,
        demand,
        refusal,
        may_go=may_go or (lambda holder: holder.priority < demand.priority),
        budgets=budgets or Budgets(),
    )


def names(found: Sacrifice | None) -> list[str] | None:
    return None if found is None else [victim.ref.name for victim in found.victims]


def test_only_as_many_go_as_must_and_the_least_important_first() -> None:
    cluster = cluster_of(
        {"n1": 16}, placed("a", "n1", 4, 5), placed("b", "n1", 4, 1), placed("c", "n1", 6, 3)
    )
    assert names(sacrifice(cluster, pod("vip", mem="5Gi", priority=10))) == ["b"]
    assert names(sacrifice(cluster, pod("vip", mem="9Gi", priority=10))) == ["c", "b"]


def test_nobody_goes_where_it_would_not_help() -> None:
    cluster = cluster_of({"n1": 16}, placed("a", "n1", 16))
    assert sacrifice(cluster, pod("vip", mem="17Gi", priority=10)) is None
    assert sacrifice(cluster, pod("vip", mem="1Gi", priority=10, nodeSelector={"zone": "a"})) is None


def test_the_same_priority_and_a_higher_one_stay() -> None:
    cluster = cluster_of({"n1": 16}, placed("a", "n1", 16, 10))
    assert sacrifice(cluster, pod("vip", mem="1Gi", priority=10)) is None


def test_the_node_whose_victims_matter_least_is_chosen() -> None:
    cluster = cluster_of(
        {"n1": 16, "n2": 16, "n3": 16},
        placed("a", "n1", 16, 5),
        *(placed(f"b{i}", "n2", 8, 1) for i in range(2)),
        placed("c", "n3", 16, 1),
    )
    found = sacrifice(cluster, pod("vip", mem="16Gi", priority=10))
    assert names(found) == ["c"]


def test_a_model_that_is_on_the_node_already_can_be_the_victim() -> None:
    cluster = cluster_of({"n1": 16}, placed("old", "n1", 2, annotations={KEYS.model_id: "m"}))
    asks = pod("vip", mem="2Gi", priority=10, annotations={KEYS.model_id: "m"})
    assert names(sacrifice(cluster, asks)) == ["old"]


@pytest.mark.parametrize(("allowed", "victims"), [(0, None), (1, None), (2, ["a", "b"])])
def test_a_budget_is_never_violated(allowed: int, victims: list[str] | None) -> None:
    labelled: dict[str, Any] = {"app": "web"}
    pods = [placed(uid, "n1", 8) for uid in ("a", "b")]
    for one in pods:
        one["metadata"]["labels"] = labelled
    budgets = Budgets()
    budgets.put(
        {
            "metadata": {"uid": "pdb", "namespace": "team", "name": "pdb"},
            "spec": {"selector": {"matchLabels": labelled}},
            "status": {"disruptionsAllowed": allowed},
        }
    )
    found = sacrifice(cluster_of({"n1": 16}, *pods), pod("vip", mem="16Gi", priority=10), budgets=budgets)
    assert names(found) == victims


def test_the_question_leaves_no_trace() -> None:
    cluster = cluster_of({"n1": 16}, placed("a", "n1", 16))
    before = cluster.state.view("n1")  # type: ignore[arg-type]
    sacrifice(cluster, pod("vip", mem="16Gi", priority=10))
    assert cluster.state.view("n1") == before  # type: ignore[arg-type]
    assert isinstance(cluster.decider.decide(parse_demand(pod("x", mem="1Gi"), KEYS)), Refusal)


def what_helps(cluster: Cluster, asks: dict[str, Any]) -> str:
    demand = parse_demand(asks, KEYS)
    outcome = cluster.decider.decide(demand)
    assert not isinstance(outcome, Placement)
    return remedy(cluster.decider, demand, outcome, most_nodes=4)


def test_what_would_make_it_fit() -> None:
    cluster = cluster_of({"n1": 16, "n2": 8}, placed("a", "n1", 10, 50), placed("b", "n2", 8, 90))
    assert what_helps(cluster, pod(mem="20Gi")) == (
        "no GPU is large enough: 20 GiB asked, 16 GiB on the largest when empty"
    )
    assert what_helps(cluster, pod(mem="7Gi")) == "would fit on n1, GPU 0, without team/a"
    assert what_helps(cluster, pod(mem="1Gi", nodeSelector={"zone": "a"})) == ""
