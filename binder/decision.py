"""One decision: a pod and the nodes in, a node and a GPU or the reasons out. Pure and synchronous.

Scores are compared as tuples: what the pod's owner prefers first, then the strategy, then a fixed
order (node name, GPU index), so that equal cases are always decided alike.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import NodeName
from binder.demand import Demand
from binder.filters import GpuVerdict, NodeVerdict, judge
from binder.matching import preference, untolerated_preferences
from binder.view import NodeView

# From what is free on the GPU afterwards to a figure of which the smallest wins.
Strategy = Callable[[int], float]


def strategy(name: str, random_unit: Callable[[], float]) -> Strategy:
    """binpack: the least left free; spread: the most; random: any."""
    table: dict[str, Strategy] = {
        "binpack": lambda free_after: free_after,
        "spread": lambda free_after: -free_after,
        "random": lambda _: random_unit(),
    }
    return table[name]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pod goes."""

    node: NodeName
    gpu: GpuChoice


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nowhere: every node's verdict."""

    verdicts: tuple[NodeVerdict, ...]


def decide(
    demand: Demand, views: Iterable[NodeView], *, fresh: Callable[[NodeName], bool], by: Strategy
) -> Placement | Refusal:
    """Choose among all nodes and their GPUs."""
    verdicts = [judge(demand, view, fresh=fresh(view.facts.name)) for view in views]
    candidates = [
        (_score(demand, verdict.view, gpu, by), verdict.view.facts.name, gpu)
        for verdict in verdicts
        if verdict.reason is None
        for gpu in verdict.fitting
    ]
    if not candidates:
        return Refusal(tuple(verdicts))
    _, node, best = min(candidates, key=lambda c: (c[0], c[1], c[2].gpu.index))
    return Placement(node, GpuChoice(best.gpu.uuid, best.gpu.index, demand.model.request_bytes))


def _score(demand: Demand, view: NodeView, gpu: GpuVerdict, by: Strategy) -> tuple[int, int, float]:
    facts = view.facts
    assert gpu.free_after_bytes is not None
    return (
        untolerated_preferences(facts.taints, demand.tolerations),
        -preference(facts.name, facts.labels, demand.affinity),
        by(gpu.free_after_bytes),
    )
