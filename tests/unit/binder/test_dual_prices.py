"""What a GPU's remainder is worth, and what that makes the binder choose."""

import random
from typing import Any

import numpy as np
import pytest

from berth.contract.ids import GpuUuid, NodeName
from binder.cache.table import NodeTable
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement
from binder.engine.dual_prices import DemandHistory, Prices, PricingProblem, Request, extended, price
from binder.engine.rank import Ranking
from binder.engine.score import LeastFragmentation
from binder.pod.demand import Shape, parse_demand
from binder.rules.registry import RULES
from tests.fakes.cluster import cluster_of
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.fakes.values import replace


def priced(strategy: LeastFragmentation, *nodes: dict[str, object]) -> Cluster:
    return cluster_of(*nodes, strategy=strategy)


def test_a_remainder_that_nobody_could_use_is_not_left_behind() -> None:
    """Pods of 6 GiB are what comes: 2 of them fill 12 GiB, and 4 GiB on a GPU of 10 GiB are lost anyway."""
    strategy = LeastFragmentation()
    cluster = priced(
        strategy,
        node("n1", says=report(gpu("GPU-1", total=12 * GIB))),
        node("n2", says=report(gpu("GPU-2", total=12 * GIB, other_use_bytes=2 * GIB))),
    )
    for _ in range(25):
        strategy.demand_history.note(parse_demand(pod(mem="6Gi"), KEYS).shape)
    cluster.decider.refresh()
    strategy.learn(price(strategy.demand_history.pricing_problem(cluster.decider.table)))
    small = cluster.decider.decide(parse_demand(pod(mem="4Gi"), KEYS))
    assert isinstance(small, Placement)
    assert small.gpu.uuid == GpuUuid("GPU-2")


@pytest.mark.parametrize("gpu_count", [1, 2])
def test_among_equals_the_fullest_gpu_is_taken(gpu_count: int) -> None:
    """Below 6 GiB no remainder is worth anything, so only what is left over tells the two nodes apart."""
    strategy = LeastFragmentation()
    cluster = priced(
        strategy,
        *(
            node(
                name,
                says=report(*(gpu(f"{name}-{i}", total=12 * GIB, other_use_bytes=used) for i, used in gpus)),
            )
            for name, gpus in (
                ("n1", enumerate((7 * GIB, 7 * GIB))),
                ("n2", enumerate((7 * GIB, 9 * GIB))),
                ("n3", enumerate((8 * GIB, 8 * GIB))),
            )
        ),
    )
    for _ in range(25):
        strategy.demand_history.note(parse_demand(pod(mem="6Gi", requests={"cpu": "100m"}), KEYS).shape)
    cluster.decider.refresh()
    strategy.learn(price(strategy.demand_history.pricing_problem(cluster.decider.table)))
    asked = pod(mem=f"{2 * gpu_count}Gi", annotations={KEYS.gpu_count: str(gpu_count)})
    chosen = cluster.decider.decide(parse_demand(asked, KEYS))
    assert isinstance(chosen, Placement)
    assert chosen.node == "n2"


def test_a_rare_product_is_kept_for_those_who_need_it() -> None:
    strategy = LeastFragmentation()
    rare = replace(gpu("GPU-1"), product="A100")
    cluster = priced(
        strategy,
        node("n1", says=report(rare), labels={"product": "rare"}),
        *(node(f"n{i}", says=report(gpu(f"GPU-{i}"))) for i in range(2, 6)),
    )
    anywhere = parse_demand(pod(mem="8Gi"), KEYS)
    first = cluster.decider.decide(anywhere)
    assert isinstance(first, Placement)
    assert first.node == "n1"  # nothing tells them apart, but their order
    picky = parse_demand(pod(mem="8Gi", nodeSelector={"product": "rare"}), KEYS)
    for _ in range(25):
        strategy.demand_history.note(picky.shape)
    strategy.learn(price(strategy.demand_history.pricing_problem(cluster.decider.table)))
    second = cluster.decider.decide(anywhere)
    assert isinstance(second, Placement)
    assert second.node == "n2"


def test_prices_are_renewed_ever_more_rarely() -> None:
    demand_history, shape = DemandHistory(), parse_demand(pod(), KEYS).shape
    due = [number for number in range(1, 5001) if demand_history.note(shape)]
    assert due == [25, 50, 100, 200, 400, 800, 2400, 4000]


def sized(request_bytes: int) -> Shape:
    return replace(_SHAPE, request_bytes=request_bytes)


_SHAPE = parse_demand(pod(), KEYS).shape


def asked_sizes(demand_history: DemandHistory) -> dict[int, int]:
    return {
        request.request_bytes: request.count
        for request in demand_history.pricing_problem(NodeTable()).requests
    }


def test_shapes_that_are_all_different_are_not_forgotten_all_at_once() -> None:
    """Each model has a size of its own: none comes twice, and the last ones are what is asked for."""
    demand_history = DemandHistory()
    for size in range(1, 10_001):
        demand_history.note(sized(size))
        if size % 1000 == 97:
            assert min(size, 500) <= len(asked_sizes(demand_history)) <= 1024
    assert max(asked_sizes(demand_history)) == 10_000


def test_what_was_requested_long_ago_fades() -> None:
    demand_history = DemandHistory()
    for _ in range(100):
        demand_history.note(sized(1))
    for size in range(2, 10_001):
        demand_history.note(sized(size))
        demand_history.note(sized(2))
    sizes = asked_sizes(demand_history)
    assert 1 not in sizes
    assert sizes[2] == pytest.approx(sum(sizes.values()) / 2, rel=0.1)


def test_a_new_gpu_model_is_no_reason_to_learn_within_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is priced like others of its size, or by the share that is left, until prices are renewed."""
    strategy = LeastFragmentation()
    cluster = priced(strategy, node("n1", says=report(gpu("GPU-1", total=12 * GIB))))
    six = parse_demand(pod(mem="6Gi"), KEYS)
    for _ in range(30):
        strategy.demand_history.note(six.shape)
    cluster.decider.refresh()
    strategy.learn(price(strategy.demand_history.pricing_problem(cluster.decider.table)))
    assert not strategy.demand_history.note(six.shape)
    for name, product, total in (("n2", "A100", 12), ("n3", "H100", 80)):
        cluster.state.set_node(
            node(name, says=report(replace(gpu(name, total=total * GIB), product=product)))
        )
        cluster.decider.table.beat(NodeName(name), 1.0)

    def refuse(_: PricingProblem) -> Prices:
        raise AssertionError("learned within a decision")

    monkeypatch.setattr("binder.engine.score.price", refuse)
    chosen = cluster.decider.decide(parse_demand(pod(mem="70Gi"), KEYS))
    assert isinstance(chosen, Placement)
    assert chosen.node == "n3"
    assert isinstance(cluster.decider.decide(six), Placement)
    assert strategy.demand_history.note(six.shape)  # due at the next arrival
    assert not strategy.demand_history.note(six.shape)


def test_a_new_gpu_model_is_worth_what_others_of_its_size_are() -> None:
    strategy = LeastFragmentation()
    cluster = priced(strategy, node("n1", says=report(gpu("GPU-1", total=12 * GIB))))
    for _ in range(30):
        strategy.demand_history.note(parse_demand(pod(mem="6Gi"), KEYS).shape)
    cluster.decider.refresh()
    table = cluster.decider.table
    prices = price(strategy.demand_history.pricing_problem(table))
    for name, product, total in (("n2", "A100", 12), ("n3", "H100", 24)):
        cluster.state.set_node(
            node(name, says=report(replace(gpu(name, total=total * GIB), product=product)))
        )
    cluster.decider.refresh()
    found = extended(prices, table)
    models, half = np.arange(1, 4, dtype=np.int32), 5 * GIB  # 0: there is no GPU
    assert found.value(models, np.full(3, half)) == pytest.approx([0, 0, 5 / 12], abs=2e-3)
    assert found.value(models, np.array([12, 12, 24]) * GIB) == pytest.approx([1, 1, 2])
    assert found.share(models, np.full(3, 6.0 * GIB)) == pytest.approx([0.5, 0.5, 0.25])


NOTHING, T4, A100 = 0, 1, 2
BOTH, RARE = np.array([True, True, True]), np.array([False, False, True])


def ask(count: int, gib: int, allowed: Any = BOTH, *, gpus: int = 1, **amounts: int) -> Request:
    return Request(count, gib * GIB, gpus, amounts, allowed)


def market(*requests: Request, sizes: tuple[int, int] = (16, 16), supply: tuple[int, int] = (3, 1)) -> Prices:
    """Of T4 and A100, with 4 CPUs and 8 GiB of memory for each GPU."""
    has = {"cpu": 4000, "memory": 8 * GIB}
    return price(PricingProblem(np.array([0, *sizes]) * GIB, np.array([0, *supply]), has, requests))


# What is asked for, and the price of a T4 and an A100 beside their worth.
SCARCITIES: dict[str, tuple[list[Request], tuple[float, float]]] = {
    "nothing": ([], (0, 0)),
    "anything will do": ([ask(2, 8)], (0, 0)),
    "half of it only on a quarter": ([ask(2, 8), ask(2, 8, RARE)], (0, 2)),
    "all of it only on a quarter": ([ask(2, 8, RARE)], (0, 4)),
    "two GPUs each": ([ask(2, 8), ask(1, 8, RARE, gpus=2)], (0, 2)),
    "larger ones": ([ask(4, 4), ask(1, 16, RARE)], (0, 2)),
    "what no GPU can serve": ([ask(2, 8), ask(2, 8, np.array([True, False, False]))], (0, 0)),
}


@pytest.mark.parametrize("case", SCARCITIES)
def test_a_kind_of_gpu_is_scarce_by_what_only_it_can_serve(case: str) -> None:
    requests, scarce = SCARCITIES[case]
    assert market(*requests).scarcity[[T4, A100]] == pytest.approx(scarce)


@pytest.mark.parametrize(("first", "levels"), [(1, (1.5, 1.5, 0)), (3, (1.5, 1.5, 0)), (6, (2, 1, 0))])
def test_what_two_kinds_can_serve_goes_to_the_one_that_has_least_of_it(first: int, levels: Any) -> None:
    """Three kinds, a third of the cluster each. Some pods need the first, three the first or the second."""
    sizes, supply = np.array([0, 1, 1, 1]) * GIB, np.array([0, 1, 1, 1])
    only, either = np.array([False, True, False, False]), np.array([False, True, True, False])
    requests = [Request(first, GIB, 1, {}, only), Request(3, GIB, 1, {}, either)]
    found = price(PricingProblem(sizes, supply, {"cpu": 1.0, "memory": 1.0}, requests)).scarcity
    assert found[1:] == pytest.approx(levels)


# What is asked for; CPU (milli-cores) and memory for a GPU of mean size.
PER_GPU: dict[str, tuple[list[Request], tuple[float, float]]] = {
    "nothing: what there is": ([], (4000, 8 * GIB)),
    "pods without GPU memory: what there is": ([ask(9, 0, cpu=1)], (4000, 8 * GIB)),
    "as asked": ([ask(2, 8, cpu=1000), ask(2, 8, memory=GIB)], (1000, GIB)),
    "two GPUs each": ([ask(2, 8, gpus=2, cpu=1000)], (1000, 0)),
    "more than there is": ([ask(1, 8, cpu=99_000, memory=99 * GIB)], (4000, 8 * GIB)),
}


@pytest.mark.parametrize("case", PER_GPU)
def test_what_else_a_gpu_needs_is_what_pods_ask_for(case: str) -> None:
    requests, (cpu, memory) = PER_GPU[case]
    assert market(*requests).per_gpu == pytest.approx({"cpu": cpu, "memory": memory})


def test_a_gpu_is_worth_its_size() -> None:
    prices = market(sizes=(8, 24), supply=(1, 1))
    models = np.array([NOTHING, T4, A100], np.int32)
    assert prices.mean_bytes == 16 * GIB
    assert prices.value(models, np.array([0, 8, 24]) * GIB) == pytest.approx([0, 0.5, 1.5])
    assert prices.value(models, np.array([0, 4, 6]) * GIB) == pytest.approx([0, 0.25, 0.375])
    # 8 GiB is all that is asked for: of 24 three fit, of 8 one; what is larger than a GPU is not asked of it.
    learned = market(ask(5, 8), ask(5, 20), sizes=(8, 24), supply=(1, 1))
    assert learned.value(models, np.array([0, 7, 7]) * GIB) == pytest.approx([0, 0, 0])
    assert learned.value(models, np.array([0, 8, 24]) * GIB) == pytest.approx([0, 0.5, 1.5])


def test_what_the_median_gpu_has_is_weighed_by_bytes_and_only_healthy_gpus_count() -> None:
    def some(name: str, *gib: int, cpu: str, sick: int = 0) -> dict[str, object]:
        gpus = [
            gpu(f"{name}-{i}", index=i, total=size * GIB, healthy=i >= sick) for i, size in enumerate(gib)
        ]
        return node(name, says=report(*gpus), allocatable={"cpu": cpu, "memory": "8Gi"})

    cluster = priced(
        LeastFragmentation(),
        some("few", 16, cpu="4"),
        some("many", 16, 16, 16, 16, cpu="24", sick=1),
        node("none", allocatable={"cpu": "999", "memory": "999Gi"}),
    )
    cluster.decider.refresh()
    found = DemandHistory().pricing_problem(cluster.decider.table)
    assert found.most_per_gpu["cpu"] == pytest.approx(8000)
    assert found.supply.tolist() == [0, 4]
    assert DemandHistory().pricing_problem(NodeTable()).most_per_gpu == {"cpu": 0.0, "memory": 0.0}


def test_which_gpus_pods_may_be_on() -> None:
    cluster = priced(
        LeastFragmentation(),
        node("n1", says=report(gpu("a", total=8 * GIB)), labels={"zone": "a"}),
        node(
            "n2",
            says=report(replace(gpu("b", total=24 * GIB), product="H100")),
            labels={"zone": "b"},
        ),
    )
    cluster.decider.refresh()
    asked = {
        "small": pod(mem="8Gi"),
        "large": pod(mem="9Gi"),
        "product": pod(mem="1Gi", annotations={KEYS.gpu_product: "T4"}),
        "selector": pod(mem="1Gi", nodeSelector={"zone": "b"}),
        "large, elsewhere": pod(mem="9Gi", nodeSelector={"zone": "a"}),
    }
    demand_history = DemandHistory()
    for one in asked.values():
        demand_history.note(parse_demand(one, KEYS).shape)
    allowed = [
        one.allowed[1:].tolist() for one in demand_history.pricing_problem(cluster.decider.table).requests
    ]
    assert dict(zip(asked, allowed, strict=True)) == {
        "small": [True, True],
        "large": [False, True],
        "product": [True, False],
        "selector": [False, True],
        "large, elsewhere": [False, False],
    }


@pytest.mark.parametrize(("cpu", "chosen"), [("2", "n2"), ("64", "n1")])
def test_a_gpu_whose_cpu_would_be_used_up_is_worth_nothing_more(cpu: str, chosen: str) -> None:
    """n1 is the fuller one. With little CPU beside it, what stays of its GPU would be stranded."""
    strategy = LeastFragmentation()
    cluster = priced(
        strategy,
        node(
            "n1",
            says=report(gpu("a", other_use_bytes=2 * GIB)),
            allocatable={"cpu": cpu, "memory": "64Gi", "pods": "9"},
        ),
        node("n2", says=report(gpu("b")), allocatable={"cpu": "64", "memory": "64Gi", "pods": "9"}),
    )
    one = parse_demand(pod(mem="2Gi", requests={"cpu": "2"}), KEYS)
    for _ in range(25):
        strategy.demand_history.note(parse_demand(pod(mem="4Gi", requests={"cpu": "1"}), KEYS).shape)
    cluster.decider.refresh()
    strategy.learn(price(strategy.demand_history.pricing_problem(cluster.decider.table)))
    outcome = cluster.decider.decide(one)
    assert isinstance(outcome, Placement)
    assert outcome.node == chosen


def test_what_is_kept_of_the_nodes_worth_is_what_it_would_be_found_to_be() -> None:
    """As pods come and go, as nodes come with more GPUs, and as prices change."""
    strategy, chance = LeastFragmentation(), random.Random(3)
    cluster = priced(strategy, *(node(f"n{n}", says=report(gpu(f"GPU-{n}"))) for n in range(3)))
    placed = []
    for step in range(60):
        if step in (20, 40):
            name = f"new{step}"
            gpus = [gpu(f"GPU-{name}-{slot}", total=(8 + step) * GIB) for slot in range(step // 10)]
            cluster.state.set_node(node(name, says=report(*gpus)))
            cluster.decider.table.beat(NodeName(name), 1.0)
        if step == 30:
            strategy.learn(price(strategy.demand_history.pricing_problem(cluster.decider.table)))
        demand = parse_demand(pod(f"p{step}", mem=f"{chance.choice((1, 2, 3, 5))}Gi"), KEYS)
        strategy.demand_history.note(demand.shape)
        found = cluster.decider.scores(demand)
        fresh = LeastFragmentation()
        assert strategy._prices is not None
        fresh.learn(strategy._prices)
        anew = Ranking(demand.shape, RULES, awaited=True)
        anew.renew(cluster.decider.table, fresh)
        assert (found == anew.score).all()
        outcome = cluster.decider.decide(demand)
        if isinstance(outcome, Placement):
            cluster.state.assume(demand, outcome.node, outcome.gpu)
            placed.append(demand.model.ref.uid)
        if placed and chance.random() < 0.4:
            cluster.state.forget(placed.pop(chance.randrange(len(placed))))
