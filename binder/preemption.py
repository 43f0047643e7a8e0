"""Which pods of lower priority would have to go so that a pod fits. Pure.

As kube-scheduler's DefaultPreemption does (framework/preemption/preemption.go): on each node take all
lower ones away, look whether the pod fits, then give back as many as possible, the most important
first; between nodes choose the one whose victims matter least. Two things are Berth's own: only model
pods are victims, and a PodDisruptionBudget is never violated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from berth.contract.ids import NodeName, PodUid
from berth.contract.pod import PodRef
from binder.decision import Decider, Placement, Refusal
from binder.demand import Demand
from binder.filters import CODE
from binder.holders import Holder
from binder.labels import Labels, Selector, parse_selector
from binder.reasons import Kind

JsonObject = Mapping[str, Any]

# What a pod's end can cure.
CURABLE = frozenset(
    {
        Kind.RESOURCE,
        Kind.TOO_MANY_PODS,
        Kind.HOST_PORT,
        Kind.MODEL_ON_NODE,
        Kind.GPU_MEMORY,
        Kind.POD_ANTI_AFFINITY,
        Kind.KEPT_AWAY,
        Kind.SPREAD,
    }
)
# Nodes that are looked at closely, those with the most free memory first.
_MOST_NODES = 32


@dataclass(frozen=True, slots=True)
class Sacrifice:
    """These pods go, and then the pod has this place."""

    placement: Placement
    victims: tuple[Holder, ...]

    @property
    def cost(self) -> tuple[int, int, int, str]:
        """Smaller is better: the most important victim, their sum, how many, and a fixed order."""
        priorities = [victim.priority for victim in self.victims]
        return (max(priorities), sum(priorities), len(priorities), self.placement.node)


class Budgets:
    """PodDisruptionBudgets: how many more pods of each may go."""

    def __init__(self) -> None:
        self._budgets: dict[PodUid, tuple[str, Selector | None, int]] = {}

    def put(self, budget: JsonObject) -> None:
        meta, status = budget["metadata"], budget.get("status") or {}
        selector = parse_selector((budget.get("spec") or {}).get("selector"))
        self._budgets[meta["uid"]] = (meta["namespace"], selector, status.get("disruptionsAllowed") or 0)

    def drop(self, budget: JsonObject) -> None:
        self._budgets.pop(budget["metadata"]["uid"], None)

    def allow(self, pods: Iterable[tuple[PodRef, Labels]]) -> bool:
        """Whether all of these may go together."""
        left = {uid: allowed for uid, (_, _, allowed) in self._budgets.items()}
        for ref, labels in pods:
            for uid, (namespace, selector, _) in self._budgets.items():
                if ref.namespace == namespace and selector is not None and selector.matches(labels):
                    left[uid] -= 1
                    if left[uid] < 0:
                        return False
        return True


def find_sacrifice(
    decider: Decider,
    demand: Demand,
    refusal: Refusal,
    *,
    may_go: Callable[[Holder], bool],
    budgets: Budgets,
    most_nodes: int = _MOST_NODES,
) -> Sacrifice | None:
    """The cheapest way to make room for the pod; None where there is none. Only those who `may_go` go,
    and never more than the budgets allow."""
    found = (
        _on_node(decider, demand, node, may_go, budgets) for node in _promising(decider, refusal, most_nodes)
    )
    return min((one for one in found if one is not None), key=lambda one: one.cost, default=None)


def _promising(decider: Decider, refusal: Refusal, most: int) -> Iterator[NodeName]:
    table = decider.table
    curable = np.isin(refusal.codes, [CODE[kind] for kind in CURABLE]) & table.live
    rows = np.flatnonzero(curable)
    order = np.argsort(-table.free[rows].max(axis=1), kind="stable") if len(rows) else rows
    for row in rows[order][:most]:
        yield table.view(int(row)).facts.name


def _on_node(
    decider: Decider, demand: Demand, node: NodeName, may_go: Callable[[Holder], bool], budgets: Budgets
) -> Sacrifice | None:
    victims = sorted(
        (h for h in decider.state.living_on(node) if h.has_model and may_go(h)),
        key=lambda h: (-h.priority, h.created, h.ref.uid),
    )
    if not victims or _placed(decider, demand, node, victims) is None:
        return None
    going = list(victims)
    for victim in victims:
        rest = [one for one in going if one is not victim]
        if rest and _placed(decider, demand, node, rest) is not None:
            going = rest
    placement = _placed(decider, demand, node, going)
    if placement is None or not budgets.allow(_labelled(decider, going)):
        return None
    return Sacrifice(placement, tuple(going))


def _placed(decider: Decider, demand: Demand, node: NodeName, gone: Iterable[Holder]) -> Placement | None:
    with decider.state.without(victim.ref.uid for victim in gone):
        outcome = decider.place_on(demand, node)
    return outcome if isinstance(outcome, Placement) else None


def _labelled(decider: Decider, pods: Iterable[Holder]) -> Iterator[tuple[PodRef, Labels]]:
    for pod in pods:
        neighbour = decider.state.pods.get(pod.ref.uid)
        yield pod.ref, {} if neighbour is None else neighbour.labels
