"""Who has to go so that a pod of higher priority fits, and when nobody has to."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from binder.cache.disruption_budgets import Budgets
from binder.cache.reservations import Reservation
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement, Refusal
from binder.engine.preemption import PreemptionCandidate, find_candidate, promising
from binder.engine.victims import Victims
from binder.pod.demand import parse_demand
from tests.fakes.cluster import cluster_of, resident, sized
from tests.fakes.objects import GIB, KEYS, budget, gpu, node, pod, report


def cluster_with(nodes: dict[str, int], *pods: dict[str, Any]) -> Cluster:
    """Nodes with one GPU of so many GiB each."""
    return cluster_of(*(sized(name, gib) for name, gib in nodes.items()), pods=pods)


def placed(uid: str, on: str, gib: int, priority: int = 0, **more: Any) -> dict[str, Any]:
    return resident(uid, on, gib, priority=priority, **more)


def candidate(
    cluster: Cluster,
    asks: dict[str, Any],
    *,
    budgets: Budgets | None = None,
    may_go: Callable[[Reservation], bool] | None = None,
) -> PreemptionCandidate | None:
    demand = parse_demand(asks, KEYS)
    refusal = cluster.decider.decide(demand)
    assert isinstance(refusal, Refusal)
    budgets = budgets or Budgets()
    victims = Victims(cluster.state, cluster.decider.table, budgets)
    rows = np.arange(len(cluster.decider.table))
    return find_candidate(
        cluster.decider,
        demand,
        promising(cluster.decider, victims, demand, refusal.codes, rows),
        may_go=may_go or (lambda h: h.priority < demand.priority and not h.deleting),
        budgets=budgets,
    )


def names(found: PreemptionCandidate | None) -> list[str] | None:
    return None if found is None else [victim.ref.name for victim in found.victims]


def test_only_as_many_go_as_must_and_the_least_important_first() -> None:
    cluster = cluster_with(
        {"n1": 16}, placed("a", "n1", 4, 5), placed("b", "n1", 4, 1), placed("c", "n1", 6, 3)
    )
    assert names(candidate(cluster, pod("vip", mem="5Gi", priority=10))) == ["b"]
    assert names(candidate(cluster, pod("vip", mem="9Gi", priority=10))) == ["c", "b"]


def test_nobody_goes_where_it_would_not_help() -> None:
    cluster = cluster_with({"n1": 16}, placed("a", "n1", 16))
    assert candidate(cluster, pod("vip", mem="17Gi", priority=10)) is None
    assert candidate(cluster, pod("vip", mem="1Gi", priority=10, nodeSelector={"zone": "a"})) is None


def test_the_same_priority_and_a_higher_one_stay() -> None:
    cluster = cluster_with({"n1": 16}, placed("a", "n1", 16, 10))
    assert candidate(cluster, pod("vip", mem="1Gi", priority=10)) is None


def test_the_node_whose_victims_matter_least_is_chosen() -> None:
    cluster = cluster_with(
        {"n1": 16, "n2": 16, "n3": 16},
        placed("a", "n1", 16, 5),
        *(placed(f"b{i}", "n2", 8, 1) for i in range(2)),
        placed("c", "n3", 16, 1),
    )
    found = candidate(cluster, pod("vip", mem="16Gi", priority=10))
    assert names(found) == ["c"]


def test_a_model_that_is_on_the_node_already_can_be_the_victim() -> None:
    cluster = cluster_with({"n1": 16}, placed("old", "n1", 2, annotations={KEYS.model_id: "m"}))
    asks = pod("vip", mem="2Gi", priority=10, annotations={KEYS.model_id: "m"})
    assert names(candidate(cluster, asks)) == ["old"]


@pytest.mark.parametrize(("allowed", "victims"), [(0, None), (1, None), (2, ["a", "b"])])
def test_a_budget_is_never_violated(allowed: int, victims: list[str] | None) -> None:
    labelled: dict[str, Any] = {"app": "web"}
    pods = [placed(uid, "n1", 8) for uid in ("a", "b")]
    for one in pods:
        one["metadata"]["labels"] = labelled
    budgets = Budgets()
    budgets.put(budget(allowed))
    found = candidate(cluster_with({"n1": 16}, *pods), pod("vip", mem="16Gi", priority=10), budgets=budgets)
    assert names(found) == victims


def test_the_question_leaves_no_trace() -> None:
    cluster = cluster_with({"n1": 16}, placed("a", "n1", 16))
    before = cluster.state.view("n1")  # type: ignore[arg-type]
    candidate(cluster, pod("vip", mem="16Gi", priority=10))
    assert cluster.state.view("n1") == before  # type: ignore[arg-type]
    assert isinstance(cluster.decider.decide(parse_demand(pod("x", mem="1Gi"), KEYS)), Refusal)


def test_a_node_is_found_however_many_have_more_free_memory() -> None:
    higher = [placed(f"h{i}", f"n{i:02}", 9, 50) for i in range(200)]
    cluster = cluster_with(
        {f"n{i:02}": 16 for i in range(200)} | {"low": 16}, *higher, placed("victim", "low", 14, 0)
    )
    assert names(candidate(cluster, pod("vip", mem="10Gi", priority=10))) == ["victim"]


def test_the_search_is_cheap_on_many_nodes_that_do_not_help() -> None:
    """Residents of lower priority everywhere, and not enough of them anywhere but on one node."""
    nodes = {f"n{i}": 16 for i in range(2000)} | {"one": 16}
    pods = [placed(f"high{i}", f"n{i}", 8, 50) for i in range(2000)]
    pods += [placed(f"low{i}", f"n{i}", 4, 0) for i in range(2000)]
    cluster = cluster_with(nodes, *pods, placed("victim", "one", 14, 0))
    asks = pod("vip", mem="12Gi", priority=10)
    looked: list[NodeName] = []
    place_on = cluster.decider.place_on
    cluster.decider.place_on = lambda demand, name: looked.append(name) or place_on(demand, name)  # type: ignore[method-assign, func-returns-value]
    assert names(candidate(cluster, asks)) == ["victim"]
    assert set(looked) == {"one"}


def labelled(one: dict[str, Any], **labels: str) -> dict[str, Any]:
    one["metadata"]["labels"] = labels
    return one


@pytest.mark.parametrize("legal_priority", [0, 5])
def test_a_protected_victim_is_passed_over_for_a_legal_one_on_the_same_node(legal_priority: int) -> None:
    budgets = Budgets()
    budgets.put(budget(0))
    cluster = cluster_with(
        {"n1": 16},
        labelled(placed("kept", "n1", 8, 1), app="web"),
        labelled(placed("legal", "n1", 8, legal_priority), app="x"),
    )
    assert names(candidate(cluster, pod("vip", mem="8Gi", priority=10), budgets=budgets)) == ["legal"]


def test_of_a_budget_s_pods_only_as_many_go_as_it_allows() -> None:
    budgets = Budgets()
    budgets.put(budget(1))
    cluster = cluster_with(
        {"n1": 16},
        labelled(placed("web1", "n1", 4, 1), app="web"),
        labelled(placed("web2", "n1", 4, 1), app="web"),
        labelled(placed("other", "n1", 8, 5), app="x"),
    )
    assert names(candidate(cluster, pod("vip", mem="12Gi", priority=10), budgets=budgets)) == [
        "other",
        "web2",
    ]
    assert candidate(cluster, pod("vip", mem="16Gi", priority=10), budgets=budgets) is None


def test_a_pod_that_two_budgets_count_is_never_a_victim() -> None:
    budgets = Budgets()
    budgets.put(budget(5, "web", "one"))
    budgets.put(budget(5, "web", "two"))
    cluster = cluster_with({"n1": 16}, labelled(placed("a", "n1", 16), app="web"))
    assert candidate(cluster, pod("vip", mem="16Gi", priority=10), budgets=budgets) is None


def test_a_larger_pod_of_the_same_budget_on_another_gpu_hides_nobody() -> None:
    """One of the two may go, and only the smaller one would help."""
    budgets, cluster = Budgets(), cluster_with({})
    budgets.put(budget(1))
    cluster.state.set_node(node("n1", says=report(gpu("GPU-0"), gpu("GPU-1", index=1))))
    cluster.decider.table.beat(NodeName("n1"), 1.0)
    for uid, gib, slot, priority in (("small", 4, 0, 0), ("large", 8, 1, 0), ("high", 8, 1, 50)):
        choice = GpuChoice(GpuUuid(f"GPU-{slot}"), slot, gib * GIB)
        one = pod(uid, mem=f"{gib}Gi", on="n1", choice=choice, priority=priority)
        cluster.state.set_pod(labelled(one, app="high" if uid == "high" else "web"))
    assert names(candidate(cluster, pod("vip", mem="14Gi", priority=10), budgets=budgets)) == ["small"]


def test_one_node_s_budget_does_not_hide_another_node() -> None:
    budgets = Budgets()
    budgets.put(budget(0))
    kept = [labelled(placed(f"kept{i}", f"n{i}", 16, 0), app="web") for i in range(100)]
    cluster = cluster_with({f"n{i}": 16 for i in range(100)} | {"z": 16}, *kept, placed("legal", "z", 16, 5))
    assert names(candidate(cluster, pod("vip", mem="16Gi", priority=10), budgets=budgets)) == ["legal"]


def test_fewer_victims_are_better_also_of_negative_priority() -> None:
    cluster = cluster_with(
        {"many": 16, "one": 16},
        *(placed(f"m{i}", "many", 2, -10) for i in range(8)),
        placed("alone", "one", 16, -10),
    )
    assert names(candidate(cluster, pod("vip", mem="16Gi", priority=10))) == ["alone"]


def test_the_sum_of_priorities_decides_among_nodes_of_equal_most_important_victims() -> None:
    cluster = cluster_with(
        {"a": 16, "b": 16},
        placed("a1", "a", 8, 5),
        placed("a2", "a", 8, 4),
        placed("b1", "b", 8, 5),
        placed("b2", "b", 8, 1),
    )
    assert names(candidate(cluster, pod("vip", mem="16Gi", priority=10))) == ["b1", "b2"]


def test_a_pod_on_its_way_out_is_no_victim() -> None:
    going = placed("going", "n1", 16, 0)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster = cluster_with({"n1": 16}, going)
    assert candidate(cluster, pod("vip", mem="16Gi", priority=10)) is None


def test_memory_of_a_lower_pod_on_an_unknown_gpu_is_found() -> None:
    cluster = cluster_with({"n1": 16}, pod("lost", mem="16Gi", on="n1", choice="{", priority=0))
    assert names(candidate(cluster, pod("vip", mem="16Gi", priority=10))) == ["lost"]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_can_be_had_on_some_node_is_found(seed: int) -> None:
    """Against the same question asked of every node, one by one."""
    chance = random.Random(seed)
    nodes = {f"n{i}": chance.choice((8, 16)) for i in range(12)}
    pods, budgets = [], Budgets()
    for uid in ("p", "q"):
        budgets.put(budget(chance.randrange(3), uid, uid))
    for name, size in nodes.items():
        while size > 0 and chance.random() < 0.9:
            gib = chance.randint(1, size)
            size -= gib
            one = placed(f"v{len(pods)}", name, gib, chance.choice((-5, 0, 5, 20)))
            pods.append(labelled(one, app=chance.choice("pqrs")))
    cluster = cluster_with(nodes, *pods)
    asks = pod("vip", mem=f"{chance.randint(1, 16)}Gi", priority=chance.choice((0, 10)))
    if isinstance(cluster.decider.decide(parse_demand(asks, KEYS)), Placement):
        return
    found = candidate(cluster, asks, budgets=budgets)
    demand = parse_demand(asks, KEYS)
    everywhere = find_candidate(
        cluster.decider,
        demand,
        [NodeName(name) for name in nodes],
        may_go=lambda reservation: reservation.priority < demand.priority and not reservation.deleting,
        budgets=budgets,
    )
    assert (found and found.cost[0]) == (everywhere and everywhere.cost[0])


def test_a_node_with_many_pods_is_judged_by_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is a decision over the node, and nothing else is heard meanwhile."""
    pods = [placed(f"v{i:03d}", "n1", 1, i % 7) for i in range(100)]
    cluster = cluster_with({"n1": 100}, *pods)
    roomy = {"cpu": "8", "memory": "64Gi", "pods": "200"}
    says = report(gpu("GPU-n1", total=100 * GIB))
    cluster.state.set_node(node("n1", says=says, allocatable=roomy))
    asked: list[int] = []
    place_on = cluster.decider.place_on
    monkeypatch.setattr(cluster.decider, "place_on", lambda *a: (asked.append(1), place_on(*a))[1])
    found = names(candidate(cluster, pod("vip", mem="3Gi", priority=10)))
    assert found == ["v084", "v091", "v098"]
    assert len(asked) <= 40
