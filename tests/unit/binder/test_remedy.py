"""What would make a refused pod fit: pods that would have to go, or a larger GPU."""

import pytest

from binder.engine.cluster import Cluster
from binder.engine.decision import Refusal
from binder.engine.remedy import remedy
from binder.pod.demand import parse_demand
from tests.fakes.cluster import Json, cluster_of, resident, sized
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report


def helps(cluster: Cluster, asks: Json, *, most_nodes: int = 1) -> str:
    demand = parse_demand(asks, KEYS)
    outcome = cluster.decider.decide(demand)
    assert isinstance(outcome, Refusal)
    return remedy(cluster.decider, demand, outcome, most_nodes=most_nodes)


NODES = ("n1", "n2", "n3")
# n2 has a GiB more left than the others, on either of its GPUs.
PODS = tuple(resident(f"{n}{slot}", n, 10 - (n == "n2"), slot) for n in NODES for slot in (0, 1))
TOO_LARGE = "no GPU is large enough: 17 GiB asked, 16 GiB on the largest when empty"
HELPS: dict[str, tuple[Json, set[str]]] = {
    "one pod": (
        {"mem": "8Gi"},
        {f"would fit on n2, GPU {slot}, without team/n2{slot}" for slot in (0, 1)},
    ),
    "two GPUs": (
        {"mem": "16Gi", "annotations": {KEYS.gpu_count: "2"}},
        {"would fit on n2, GPU 0, 1, without team/n20, team/n21"},
    ),
    "a larger GPU": ({"mem": "17Gi"}, {TOO_LARGE}),
    "nodes refuse by other things as well": ({"mem": "17Gi", "nodeSelector": {"a": "b"}}, {""}),
    "the pod itself is refused": ({"mem": "8Gi", "resourceClaims": [{"name": "r"}]}, {""}),
}


@pytest.mark.parametrize("case", HELPS)
def test_what_would_help_is_said_of_the_node_with_most_room(case: str) -> None:
    asks, expected = HELPS[case]
    assert helps(cluster_of(*(sized(n, 16, 16) for n in NODES), pods=PODS), pod(**asks)) in expected


def test_whoever_has_the_memory_may_be_named_whatever_its_priority() -> None:
    there = (resident("a", "n1", 10, priority=50), resident("b", "n2", 8, priority=90))
    cluster = cluster_of(sized("n1", 16), sized("n2", 8), pods=there)
    assert helps(cluster, pod(mem="7Gi"), most_nodes=4) == "would fit on n1, GPU 0, without team/a"


def test_the_largest_gpu_is_one_that_the_pod_may_have() -> None:
    cluster = cluster_of(
        node("n1", says=report(gpu(total=16 * GIB, headroom_bytes=GIB))),
        node("n2", says=report(gpu("b", total=80 * GIB, product="H100", headroom_bytes=0))),
    )
    asks = pod(mem="20Gi", annotations={KEYS.gpu_product: "T4"})
    assert helps(cluster, asks) == "no GPU is large enough: 20 GiB asked, 15 GiB on the largest when empty"
