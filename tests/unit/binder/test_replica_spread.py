"""Replicas of one controller are spread over zones and nodes unless they say otherwise (binder M5)."""

from collections import Counter

import pytest

from berth.contract.ids import PodUid
from berth.kube.informer import ChangeKind
from tests.fakes.binder import Bench
from tests.fakes.objects import KEYS, Json, pod

ZONE = "topology.kubernetes.io/zone"
STRATEGIES = ("least-fragmentation", "binpack", "random")


class Zones(Bench):
    """Nodes of one GPU of 80 GiB; a node's zone is its first letter."""

    def __init__(
        self, names: str = "a0 a1 a2 a3 b0 b1 b2 b3 c0 c1 c2 c3", *, strategy: str = "binpack"
    ) -> None:
        super().__init__(strategy=strategy)
        for name in names.split():
            self.node(name, 80, labels={ZONE: name[0]} if name[0] != "x" else {})

    def replica(
        self,
        uid: str,
        *,
        owner: str | None = "rs",
        model: str | None = None,
        ns: str = "team",
        **asks: object,
    ) -> None:
        one = pod(uid, annotations={KEYS.model_id: model}, **asks)  # type: ignore[arg-type]
        one["metadata"] |= {"namespace": ns, "labels": {"app": "web"}}
        if owner is not None:
            one["metadata"]["ownerReferences"] = [{"uid": owner, "controller": True}]
        self.api.pods[uid] = one
        self.tell("pods", one)

    async def places(self, count: int, **asks: object) -> list[str]:
        """Where so many replicas go, which are made one after another."""
        first = len(self.api.pods)
        for number in range(first, first + count):
            self.replica(f"r{number}", **asks)  # type: ignore[arg-type]
            await self.step(3)
        return [self.on(f"r{number}") for number in range(first, first + count)]

    def on(self, uid: str) -> str:
        reservation = self.scheduler.state.reservation_of(PodUid(uid))
        return "" if reservation is None else str(reservation.node)


def zones(nodes: list[str]) -> Counter[str]:
    return Counter(name[:1] for name in nodes)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["m", None])
async def test_replicas_are_spread_over_zones_and_nodes(strategy: str, model: str | None) -> None:
    """With an id they were on a0 to a3, without one all on a0."""
    async with Zones(strategy=strategy) as bench:
        nodes = await bench.places(6, model=model)
        assert zones(nodes) == {"a": 2, "b": 2, "c": 2}
        assert len(set(nodes)) == 6


async def test_a_single_replica_is_packed_as_ever() -> None:
    async with Zones() as bench:
        nodes = [(await bench.places(1, owner=f"rs{number}"))[0] for number in range(5)]
        nodes += await bench.places(3, owner=None)
        assert len(set(nodes)) == 1


async def test_replicas_of_others_do_not_count() -> None:
    async with Zones() as bench:
        (first,) = await bench.places(1, owner="other")
        assert await bench.places(1, ns="elsewhere", owner="rs") == [first]
        assert await bench.places(1, owner="rs") == [first]


async def test_who_is_on_the_way_out_does_not_count() -> None:
    async with Zones("a0 b0") as bench:
        (first,) = await bench.places(1)
        bench.begin_to_go("r0")
        assert await bench.places(1) == [first]


async def test_what_a_pod_says_itself_of_its_spread_takes_the_place_of_the_default() -> None:
    """As at kube-scheduler: also where it says nothing of zones."""
    async with Zones() as bench:
        own = {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}
        own["labelSelector"] = {"matchLabels": {"app": "web"}}
        assert len(set(await bench.places(4, topologySpreadConstraints=[own]))) == 1


async def test_what_the_owner_prefers_comes_first() -> None:
    async with Zones() as bench:
        expression = {"key": ZONE, "operator": "In", "values": ["b"]}
        term = {"weight": 1, "preference": {"matchExpressions": [expression]}}
        affinity: Json = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
        nodes = await bench.places(4, affinity=affinity)
        assert sorted(nodes) == ["b0", "b1", "b2", "b3"]


async def test_it_is_a_wish_and_refuses_nobody() -> None:
    async with Zones("a0") as bench:
        assert await bench.places(3) == ["a0"] * 3


async def test_a_zone_with_few_nodes_is_not_crowded_for_the_sake_of_zones() -> None:
    async with Zones("a0 a1 a2 a3 a4 a5 b0") as bench:
        nodes = await bench.places(7)
        assert Counter(nodes)["b0"] <= 2


async def test_nodes_without_a_zone_are_spread_over_too() -> None:
    async with Zones("x0 x1 x2") as bench:
        assert sorted(await bench.places(3)) == ["x0", "x1", "x2"]


async def test_a_replica_on_a_node_that_is_gone_costs_nothing() -> None:
    async with Zones("a0 b0") as bench:
        (first,) = await bench.places(1)
        bench.tell("nodes", bench.api.nodes[first], ChangeKind.GONE)
        (second,) = await bench.places(1)
        assert {first, second} == {"a0", "b0"}
