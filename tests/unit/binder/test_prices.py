"""What GPUs are worth is learned from the pods that come, in the background."""

import numpy as np
import pytest

from binder.cache.residents import residents
from binder.engine.cluster import Cluster
from binder.engine.score import LeastFragmentation, make_strategy
from binder.loop.prices import PriceLearner
from binder.pod.demand import parse_demand
from tests.fakes.eventually import until
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report


def learner_of(strategy: LeastFragmentation) -> tuple[Cluster, PriceLearner]:
    cluster = Cluster(KEYS, strategy)
    cluster.state.set_node(node(says=report(gpu())))
    return cluster, PriceLearner(cluster, strategy)


async def test_a_fresh_binder_learns_from_what_is_bound() -> None:
    """Its predecessor has seen these pods come; also the last namespace of the list counts."""
    strategy = LeastFragmentation()
    cluster, prices = learner_of(strategy)
    model = [pod(f"{n * 7919 % 3000:04}", mem="6Gi" if n < 1500 else "4Gi", on="n1") for n in range(3000)]
    strangers = [pod(f"{n}-stranger", mem=None, on="n1") for n in range(20)]
    waiting = [pod(f"{n}-waiting", mem="5Gi") for n in range(20)]
    damaged = [pod("0-damaged", on="n1", choice="{")]
    before = strategy.version
    for demand in residents([*model, *strangers, *waiting, *damaged], KEYS):
        prices.note(demand)
    requests = strategy.demand_history.pricing_problem(cluster.decider.table).requests
    asked = {ask.request_bytes: ask.count for ask in requests}
    assert asked.keys() == {6 * GIB, 4 * GIB}
    assert asked[6 * GIB] == pytest.approx(500, abs=50)
    await until(lambda: strategy.version != before, what="prices that were learned")
    await prices.abandon()


async def test_what_is_being_learned_ends_with_the_leadership() -> None:
    strategy = LeastFragmentation()
    _, prices = learner_of(strategy)
    before = strategy.version
    for number in range(3000):
        prices.note(parse_demand(pod(f"p{number}", mem="6Gi"), KEYS))
    await prices.abandon()
    await prices.abandon()
    assert strategy.version == before


async def test_a_strategy_without_prices_learns_nothing() -> None:
    strategy = make_strategy("binpack", np.random.default_rng(1))
    prices = PriceLearner(Cluster(KEYS, strategy), strategy)
    prices.note(parse_demand(pod("p1"), KEYS))
    await prices.abandon()
