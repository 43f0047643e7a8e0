"""How much room could be made on a node if all of lower priority went: never less than can really be made."""

import random
from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.kube.informer import Change, ChangeKind
from binder.cache.view import NOT_KNOWN
from binder.engine.cluster import Cluster
from binder.engine.victims import Victims
from binder.pod.demand import parse_demand
from tests.fakes.objects import GIB, KEYS, budget, gpu, listed, node, pod, report

Json = dict[str, Any]
N1 = NodeName("n1")


def heard(*pods: Json, budgets: tuple[Json, ...] = (), **facts: Any) -> tuple[Cluster, Victims]:
    """Node n1 with GPU-0 and GPU-1 of 16 GiB, 4 CPUs."""
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    cluster.on_node(
        Change(ChangeKind.SET, node(**{"says": report(gpu("GPU-0"), gpu("GPU-1", index=1)), **facts}))
    )
    for one in budgets:
        cluster.on_budget(Change(ChangeKind.SET, one))
    for one in pods:
        cluster.on_pod(Change(ChangeKind.SET, one))
    cluster.decider.refresh()
    victims = Victims(cluster.state, cluster.decider.table, cluster.budgets)
    victims.renew()
    return cluster, victims


def held(
    uid: str, gib: int, priority: int = 0, *, slot: int | None = 0, app: str = "web", **more: Any
) -> Json:
    """Without a slot nobody knows on which GPU it is."""
    choice = "{" if slot is None else GpuChoice(GpuUuid(f"GPU-{slot}"), slot, gib * GIB)
    one = pod(uid, mem=f"{gib}Gi", on="n1", choice=choice, priority=priority, **more)
    one["metadata"]["labels"] = {"app": app}
    return one


def going(one: Json) -> Json:
    one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return one


ROW = np.array([0])
# Who is there, budgets; what could be free on the two GPUs for a pod of priority 10, the most first, in GiB.
REACH: dict[str, tuple[list[Json], tuple[Json, ...], list[int]]] = {
    "nobody": ([], (), [16, 16]),
    "lower": ([held("a", 4), held("b", 4, 5)], (), [16, 16]),
    "equal": ([held("a", 4, 10)], (), [16, 12]),
    "higher": ([held("a", 4, 11), held("b", 8)], (), [16, 12]),
    "going already": ([going(held("a", 4))], (), [16, 12]),
    "no model": (
        [held("a", 4, 20), pod("web", mem=None, on="n1", annotations={KEYS.model_id: None})],
        (),
        [16, 12],
    ),
    "a budget for none": ([held("a", 4), held("b", 8, slot=1, app="y")], (budget(0),), [16, 12]),
    "a budget for one, the larger": ([held("a", 4), held("b", 8)], (budget(1),), [16, 12]),
    "a budget for one, on whichever GPU": ([held("a", 4), held("b", 8, slot=1)], (budget(1),), [16, 12]),
    "a budget for one beside another": (
        [held("a", 4), held("b", 8, slot=1), held("c", 1, slot=1, app="y")],
        (budget(1),),
        [16, 12],
    ),
    "a budget for both": ([held("a", 4), held("b", 8)], (budget(2),), [16, 16]),
    "two budgets": ([held("a", 4)], (budget(9), budget(9, uid="c")), [16, 12]),
    "on nobody knows which": ([held("a", 4, 20), held("b", 4, slot=None)], (), [16, 12]),
    "on nobody knows which, and stays": ([held("b", 4, 20, slot=None)], (), [12, 12]),
}


@pytest.mark.parametrize("case", REACH)
def test_what_could_be_free(case: str) -> None:
    pods, budgets, gib = REACH[case]
    _, victims = heard(*pods, budgets=budgets)
    assert (victims.reach(ROW, victims.below(10)) // GIB).tolist() == [gib]


def test_what_could_be_free_follows_who_comes_and_goes() -> None:
    cluster, victims = heard(held("a", 4, 5), held("b", 8, 7, slot=1))
    assert victims.below(5) == ()
    assert (victims.below(6), victims.below(8)) == ((5,), (5, 7))
    assert victims.some(ROW, ()).tolist() == [False]
    assert victims.some(ROW, (5,)).tolist() == [True]
    assert (victims.reach(ROW, (5,)) // GIB).tolist() == [[16, 8]]
    cluster.on_pod(Change(ChangeKind.SET, held("a", 4, 9)))
    cluster.decider.refresh()
    victims.renew()
    assert victims.some(ROW, (5,)).tolist() == [False]
    assert (victims.reach(ROW, (5, 7)) // GIB).tolist() == [[16, 12]]
    cluster.on_node(Change(ChangeKind.GONE, node()))
    cluster.decider.refresh()
    victims.renew()
    assert (victims.reach(ROW, victims.below(100))).tolist() == [[NOT_KNOWN, NOT_KNOWN]]


@pytest.mark.parametrize("trouble", [{"healthy": False}, {"other_use_bytes": None}])
def test_a_gpu_that_takes_nothing_takes_nothing_whoever_goes(trouble: Json) -> None:
    _, victims = heard(held("a", 4), says=report(gpu("GPU-0", **trouble), gpu("GPU-1", index=1)))
    assert victims.reach(ROW, victims.below(10)).tolist() == [[16 * GIB, NOT_KNOWN]]


def test_what_is_measured_comes_free_too() -> None:
    says = report(gpu("GPU-0"), gpu("GPU-1", index=1), models=(listed("a", on="GPU-0", measured=9 * GIB),))
    _, victims = heard(held("a", 4), says=says)
    assert (victims.reach(ROW, ()) // GIB).tolist() == [[16, 7]]
    assert (victims.reach(ROW, (0,)) // GIB).tolist() == [[16, 16]]


def test_cpu_comes_free_with_those_who_go() -> None:
    _, victims = heard(
        held("a", 1, 1, requests={"cpu": "1"}),
        held("b", 1, 2, requests={"cpu": "1"}),
        held("c", 1, 2, requests={"cpu": "500m"}),
        held("d", 1, 50, requests={"cpu": "1"}),
    )
    lefts = [victims.left("cpu", ROW, levels).tolist() for levels in ((), (1,), (1, 2))]
    assert lefts == [[500], [1500], [3000]]
    assert victims.left("x.io/y", ROW, (1, 2)).tolist() == [0]


PORT: Json = {
    "containers": [{"name": "c", "ports": [{"hostPort": 80}], "resources": {"limits": {KEYS.gpu_mem: "1Gi"}}}]
}
ANONYMOUS = {KEYS.model_id: None}
# Who is there, what is asked with priority 10, whether somebody is in its way who cannot go.
IN_THE_WAY: dict[str, tuple[list[Json], Json, bool]] = {
    "the model, lower": ([held("a", 1, annotations={KEYS.model_id: "m"})], {}, False),
    "the model, equal": ([held("a", 1, 10, annotations={KEYS.model_id: "m"})], {}, True),
    "the model, higher": ([held("a", 1, 11, annotations={KEYS.model_id: "m"})], {}, True),
    "the model, going": ([going(held("a", 1, annotations={KEYS.model_id: "m"}))], {}, True),
    "one of two stays": (
        [
            held("a", 1, annotations={KEYS.model_id: "m"}),
            held("b", 1, 20, annotations={KEYS.model_id: "m"}),
        ],
        {},
        True,
    ),
    "the port, lower": ([held("a", 1, **PORT)], PORT, False),
    "the port, higher": ([held("a", 1, 20, **PORT)], PORT, True),
    "another port": (
        [held("a", 1, 20, **PORT), held("b", 1, annotations={KEYS.model_id: "m"})],
        {},
        False,
    ),
    "nobody with a pod: it is the report that lists it": ([held("a", 1)], {}, True),
}


@pytest.mark.parametrize("case", IN_THE_WAY)
def test_who_is_in_the_way_for_good(case: str) -> None:
    pods, asks, for_good = IN_THE_WAY[case]
    _, victims = heard(*pods)
    demand = parse_demand(pod("vip", priority=10, annotations={KEYS.model_id: "m"}, **asks), KEYS)
    assert victims.in_the_way_for_good(demand, 0) is for_good


def test_an_anonymous_model_is_in_nobody_s_way() -> None:
    _, victims = heard(held("a", 1, 20, annotations=ANONYMOUS), held("b", 1, 20))
    demand = parse_demand(pod("vip", priority=10, annotations=ANONYMOUS, **PORT), KEYS)
    assert victims.in_the_way_for_good(demand, 0)  # nobody has it who could go
    _, victims = heard(held("a", 1, 20, annotations=ANONYMOUS), held("b", 1, **PORT))
    assert not victims.in_the_way_for_good(demand, 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_is_one(seed: int) -> None:
    """Whoever is hidden, as many as may go: what is free then is within what was said could be."""
    chance = random.Random(seed)
    pods = [
        held(
            f"p{i}",
            chance.randrange(1, 5),
            chance.choice((0, 5, 20)),
            slot=chance.choice((0, 1, None)),
            app=chance.choice(("web", "y", "z")),
        )
        for i in range(6)
    ]
    cluster, victims = heard(*pods, budgets=(budget(chance.randrange(3)), budget(1, "y", "c")))
    reach = victims.reach(ROW, victims.below(10))[0]
    lower = [h for h in cluster.state.living_on(N1) if h.priority < 10]
    for _ in range(30):
        some = chance.sample(lower, chance.randint(0, len(lower)))
        if not cluster.budgets.allow(map(cluster.state.labelled, some)):
            continue
        with cluster.decider.without([h.ref.uid for h in some]):
            cluster.decider.refresh()
            free = np.sort(cluster.decider.table.free[0])[::-1]
        assert (np.maximum(free, 0) <= np.maximum(reach, 0)).all()
