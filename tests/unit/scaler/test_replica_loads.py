"""The load that replicas report: of a model and second, and of those that may be removed."""

from typing import Any

import pytest

from berth.contract.scaling import ModelKey, ReplicaLoad
from scaler.core.cache import Cache
from scaler.core.replica_loads import ReplicaLoads
from scaler.decision.defaults import BERTH, read_defaults
from scaler.decision.load import Stat
from scaler.go import SECOND_NS
from tests.fakes.scaled_cluster import FakePod

NOW = 1_700_000_000 * SECOND_NS
MODEL = ModelKey("a", "m")
MILLION = 1_000_000


def load(uid: str, second: int = 1, **fields: Any) -> ReplicaLoad:
    return ReplicaLoad(namespace="a", pod_name=uid, pod_uid=uid, second=second, **fields)


class World:
    """One model with these ready replicas."""

    def __init__(self, *ready: str) -> None:
        self.cache = Cache(read_defaults(BERTH))
        for uid in ready:
            self.cache.observe_pod(FakePod(uid, uid, MODEL, node="n", ready=True).json(), NOW)
        self.loads = ReplicaLoads(self.cache)

    def record(self, *loads: ReplicaLoad, of: str = "xyz", seconds: int = 0) -> bool:
        return self.loads.record(loads, [*of], NOW + seconds * SECOND_NS)

    def close(self) -> Stat | None:
        return self.loads.close([MODEL]).get(MODEL)


# One second of a model.


def test_the_load_of_a_model_is_that_of_its_ready_replicas() -> None:
    world = World("x", "y")
    assert world.record(
        load("x", average_concurrent_requests=1.5, request_count=3),
        load("y", average_concurrent_requests=0.5, request_count=1),
        load("z", average_concurrent_requests=7.0, request_count=9),  # there, and not ready
    )
    assert world.close() == Stat(concurrency=2.0, requests=4.0)


def test_a_second_counts_once_however_often_it_is_reported() -> None:
    world = World("x")
    for second, seen, stat in (5, True, Stat(requests=2.0)), (5, False, None), (8, True, Stat(requests=2.0)):
        assert world.record(load("x", second, request_count=2)) == seen
        assert world.close() == stat


def test_the_clock_of_a_node_that_starts_anew_may_have_gone_back() -> None:
    world = World("x")
    assert world.record(load("x", 2**62))
    assert world.record(load("x", 3))


@pytest.mark.parametrize(
    ("replicas", "reported", "known"),
    [(1, 0, False), (1, 1, True), (3, 2, False), (3, 3, True), (20, 8, False), (20, 9, True)],
)
def test_too_few_replicas_are_no_stat_and_enough_stand_for_all(
    replicas: int, reported: int, known: bool
) -> None:
    """Knative's sample of 20 replicas is 8.94…, which is 9."""
    uids = [f"{number}" for number in range(replicas)]
    world = World(*uids)
    some = [load(uid, average_concurrent_requests=2.0, request_count=4.0) for uid in uids[:reported]]
    world.loads.record(some, uids, NOW)
    assert world.close() == (Stat(concurrency=2.0 * replicas, requests=4.0 * replicas) if known else None)


def test_a_model_without_a_ready_replica_has_no_stat() -> None:
    world = World()
    world.record(load("x", request_count=5))
    assert world.close() is None


def test_a_gateway_is_believed_about_its_own_node_alone() -> None:
    world = World("x")
    assert not world.record(load("x", average_concurrent_requests=1e6), of="y")
    assert (world.close(), world.loads.queued(MODEL, NOW)) == (None, None)


# Each replica.

# Fields of a replica's load; whether it is busy, whether for long, what its deletion costs.
LOADS: dict[str, tuple[dict[str, Any], bool, bool, int]] = {
    "nothing": ({}, False, False, 0),
    "one that runs": ({"in_triton": 1, "request_count": 1.0, "average_concurrent_requests": 0.5}, True, False, 1),
    "one that waits": ({"waiting": 1, "request_count": 1.0, "average_concurrent_requests": 0.5}, True, False, 1),
    "those that wait and those that run": ({"waiting": 3, "in_triton": 4, "request_count": 9.0}, True, False, 7),
    "one a moment ago": ({"average_concurrent_requests": 0.1, "request_count": 1.0}, True, False, 0),
    "a silent stream": ({"in_triton": 1, "average_concurrent_requests": 1.0}, True, True, MILLION + 1),
    "five seconds each": ({"in_triton": 1, "average_concurrent_requests": 5.0, "request_count": 1.0}, True, False, 1),
    "longer": ({"in_triton": 1, "average_concurrent_requests": 5.1, "request_count": 1.0}, True, True, MILLION + 1),
    "more short ones than are counted": ({"waiting": 10**9, "request_count": 1e9}, True, False, MILLION - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADS)
def test_which_replica_is_busy_and_what_its_deletion_costs(name: str) -> None:
    fields, busy, long, cost = LOADS[name]
    world = World("x")
    world.record(load("x", **fields))
    loads = world.loads.of(MODEL, NOW, lambda uid: False)
    assert loads.costs(evicting=False) == ({"x": cost} if cost else {})
    assert [pod.uid for pod, _ in world.loads.idle(MODEL, NOW)] == ([] if busy else ["x"])
    assert (loads.spared(0), loads.spared(1)) == (busy, long)


def test_a_replica_whose_load_is_unknown_may_be_busy_and_is_the_last_to_go() -> None:
    world = World("x", "y", "z")
    world.record(load("x"), load("y"))
    loads = world.loads.of(MODEL, NOW, lambda uid: uid == "z")
    assert loads.costs(evicting=False) == {"z": MILLION}
    assert [pod.uid for pod, _ in world.loads.idle(MODEL, NOW)] == ["x", "y"]
    assert loads.spared(0) == 1
    # What may take long is not ended by what is unknown.
    assert loads.spared(1) == 0
    assert loads.costs(evicting=True) == {"x": 1000 * MILLION, "y": 1000 * MILLION}, "the evicted one first"


@pytest.mark.parametrize(("seconds", "is_known"), [(0, True), (3, True), (3.1, False)])
def test_a_load_is_known_for_three_seconds(seconds: float, is_known: bool) -> None:
    world = World("x")
    world.record(load("x", waiting=2, last_arrival=7, timestamp=9))
    now_ns = NOW + int(seconds * SECOND_NS)
    assert world.loads.queued(MODEL, now_ns) == (2.0 if is_known else None)
    assert world.loads.last_arrival_ns(MODEL, now_ns) == (NOW - 2 * SECOND_NS if is_known else None)


def test_a_gateway_that_repeats_its_last_answer_makes_no_load_recent() -> None:
    world = World("x")
    world.record(load("x"))
    assert not world.record(load("x"), seconds=3)
    assert world.loads.queued(MODEL, NOW + 4 * SECOND_NS) is None
    assert world.record(load("x", second=2), seconds=4)
    assert world.loads.queued(MODEL, NOW + 4 * SECOND_NS) == 0.0


def test_of_all_replicas_or_of_none() -> None:
    reported = [
        load(uid, waiting=waiting, last_arrival=last, timestamp=10)
        for uid, waiting, last in (("x", 1, 5), ("y", 2, 9), ("z", 0, 0))
    ]
    for some, queued, last_ns in (reported, 3.0, NOW - SECOND_NS), (reported[:2], None, None):
        world = World("x", "y", "z")
        world.record(*some)
        found = world.loads.queued(MODEL, NOW), world.loads.last_arrival_ns(MODEL, NOW)
        assert found == (queued, last_ns)


@pytest.mark.parametrize("off", [0, 60, -60, 10**6, -(10**6)])
def test_idle_time_is_right_on_a_node_whose_clock_is_off(off: int) -> None:
    world, at = World("x"), NOW // SECOND_NS + off
    world.record(load("x", last_arrival=at - 4, timestamp=at))
    assert world.loads.last_arrival_ns(MODEL, NOW + 2 * SECOND_NS) == NOW - 4 * SECOND_NS
    ((_, last_used_ns),) = world.loads.idle(MODEL, NOW + 2 * SECOND_NS)
    assert last_used_ns == NOW - 4 * SECOND_NS


def test_an_arrival_is_never_in_the_future() -> None:
    world = World("x")
    world.record(load("x", last_arrival=100, timestamp=90))
    assert world.loads.last_arrival_ns(MODEL, NOW) == NOW


def test_a_replica_that_is_gone_is_forgotten() -> None:
    world = World("x", "y")
    world.record(load("x"), load("y"))
    world.cache.pod_gone({"metadata": {"uid": "x", "name": "x"}})
    world.loads.forget_gone()
    assert {*world.loads._last} == {"y"} == {*world.loads._fresh}
