"""A cluster as it is on the day of its installation: nodes and GPUs come after the pods that want them."""

from typing import Any

import numpy as np
import pytest

from berth.contract.ids import NodeName
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement, Refusal
from binder.engine.explain import summary, verdicts
from binder.engine.remedy import remedy
from binder.engine.score import STRATEGIES, LeastFragmentation, make_strategy
from binder.pod.demand import Demand, parse_demand
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.fakes.values import replace

NO_GPU = replace(report(), gpus=())
LOST = report(gpu("GPU-lost", total=None))
SICK = report(gpu("GPU-sick", healthy=False, reason="Xid 79"))
HUGE = '{"v":1,"server":"s","gpus":"many"}'
# What the nodes say, and the word that the refusal must hold.
FRESH: dict[str, tuple[list[Any], str]] = {
    "no node": ([], "there is no node"),
    "no report": ([None, None], "2 NoNodeReport"),
    "no GPU": ([NO_GPU, NO_GPU], "2 NoGPU"),
    "unreadable": (["{", HUGE], "2 UnreadableNodeReport"),
    "unknown size": ([LOST], "1 GPUFactsUnknown"),
    "unhealthy": ([SICK], "1 GPUUnhealthy"),
    "a mixture": ([None, NO_GPU, "[]", LOST, SICK], "1 NoNodeReport"),
}
ASKS: dict[str, dict[str, Any]] = {
    "one": {"mem": "4Gi"},
    "none": {"mem": None},
    "several": {"mem": "16Gi", "annotations": {KEYS.gpu_count: "4"}},
    "a product": {"mem": "4Gi", "annotations": {KEYS.gpu_product: "T4"}},
    "a selector": {"mem": "4Gi", "nodeSelector": {"kubernetes.io/hostname": "n0"}},
}


def fresh(strategy: str, says: list[Any]) -> Cluster:
    cluster = Cluster(KEYS, make_strategy(strategy, np.random.default_rng(1)), clock=lambda: 0.0)
    for number, one in enumerate(says):
        tell(cluster, f"n{number}", one)
    return cluster


def tell(cluster: Cluster, name: str, says: Any) -> None:
    cluster.state.set_node(node(name, says=says))
    cluster.decider.table.beat(NodeName(name), 1.0)


def demand(ask: str) -> Demand:
    return parse_demand(pod(**ASKS[ask]), KEYS)


@pytest.mark.parametrize("ask", sorted(ASKS))
@pytest.mark.parametrize("case", sorted(FRESH))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pod_that_comes_before_the_gpus_waits_and_is_placed_once_they_are_there(
    strategy: str, case: str, ask: str
) -> None:
    says, why = FRESH[case]
    cluster, wanted = fresh(strategy, says), demand(ask)
    refusal = cluster.decider.decide(wanted)
    assert isinstance(refusal, Refusal)
    if ask == "one":
        assert why in summary(cluster.decider, wanted, refusal)
    remedy(cluster.decider, wanted, refusal, most_nodes=2)
    assert len(verdicts(cluster.decider, wanted)) == len(says)
    tell(cluster, "n0", report(*(gpu(f"GPU-{i}", index=i) for i in range(4))))
    placed = cluster.decider.decide(wanted)
    assert isinstance(placed, Placement)
    assert placed.node == "n0"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prices_that_were_learned_before_there_was_a_gpu_do_for_those_that_come(strategy: str) -> None:
    """A model of GPU that nobody has seen before appears among others, again and again."""
    cluster = fresh(strategy, [None])
    for number in range(1, 5):
        wanted = parse_demand(pod(f"p{number}", mem="1Gi"), KEYS)
        if isinstance(learns := cluster.decider._strategy, LeastFragmentation):
            learns.demand_history.note(wanted.shape)
        if number > 1:
            tell(cluster, f"n{number}", report(gpu(f"GPU-{number}", total=number * GIB)))
        outcome = cluster.decider.decide(wanted)
        assert isinstance(outcome, Placement if number > 1 else Refusal)
