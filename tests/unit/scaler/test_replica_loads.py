"""What copies tell of themselves, and which of them may go."""

from collections.abc import Iterable
from typing import Any

import pytest

from berth.contract.scaling import ModelKey, ReplicaLoad
from scaler.core.cache import Cache
from scaler.core.replica_loads import ReplicaLoads, is_busy, is_long
from scaler.decision.defaults import BERTH, read_defaults
from tests.fakes.scaled_cluster import FakePod

SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND
MODEL = ModelKey("a", "m")
MILLION = 1_000_000


def told(uid: str, second: int = 1, **fields: Any) -> ReplicaLoad:
    return ReplicaLoad(namespace="a", pod_name=uid, pod_uid=uid, second=second, **fields)


def copies_of(
    loads: Iterable[ReplicaLoad], *, ready: Iterable[str] = "xyz", at_ns: int = NOW
) -> ReplicaLoads:
    """Of one model, whose node has told this."""
    cache = Cache(read_defaults(BERTH))
    for uid in ready:
        cache.observe_pod(FakePod(uid, uid, MODEL, node="n", ready=True).json(), NOW)
    copies = ReplicaLoads(cache)
    copies.heard(loads, set("xyz"), at_ns)
    return copies


def quiet(*uids: str, **fields: Any) -> list[ReplicaLoad]:
    return [told(uid, **fields) for uid in uids]


# Fields of a copy's load; whether it is busy, whether for long, what its end costs.
LOADS: dict[str, tuple[dict[str, Any], bool, bool, int]] = {
    "nothing": ({}, False, False, 0),
    "one that runs": ({"in_triton": 1, "request_count": 1.0, "average_concurrent_requests": 0.5}, True, False, 1),
    "one that waits": ({"waiting": 1, "request_count": 1.0, "average_concurrent_requests": 0.5}, True, False, 1),
    "those that wait and those that run": ({"waiting": 3, "in_triton": 4, "request_count": 9.0}, True, False, 7),
    "one has been there a moment ago": ({"average_concurrent_requests": 0.1, "request_count": 1.0}, True, False, 0),
    "a stream that nobody says anything in": ({"in_triton": 1, "average_concurrent_requests": 1.0}, True, True, MILLION + 1),
    "five seconds each": ({"in_triton": 1, "average_concurrent_requests": 5.0, "request_count": 1.0}, True, False, 1),
    "longer": ({"in_triton": 1, "average_concurrent_requests": 5.1, "request_count": 1.0}, True, True, MILLION + 1),
    "more short ones than anything counts": ({"waiting": 10**9, "request_count": 1e9}, True, False, MILLION - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADS)
def test_who_is_busy_and_what_its_end_costs(name: str) -> None:
    fields, busy, long, cost = LOADS[name]
    load = told("x", **fields)
    assert (is_busy(load), is_long(load)) == (busy, long)
    copies = copies_of([load], ready="x")
    (pod,) = copies._cache.ready(MODEL)
    assert copies.cost(pod, NOW) == cost
    assert [pod.uid for pod, _ in copies.idle(MODEL, NOW)] == ([] if busy else ["x"])
    assert (copies.spared(MODEL, 0, NOW), copies.spared(MODEL, 1, NOW)) == (busy, long)


def test_who_says_nothing_may_be_busy_and_is_the_last_to_go() -> None:
    copies = copies_of(quiet("x", "y"))
    costs = {pod.uid: copies.cost(pod, NOW) for pod in copies._cache.ready(MODEL)}
    assert costs == {"x": 0, "y": 0, "z": MILLION}
    assert [pod.uid for pod, _ in copies.idle(MODEL, NOW)] == ["x", "y"]
    assert copies.spared(MODEL, 0, NOW) == 1
    # What may take long is not ended by what is not known.
    assert copies.spared(MODEL, 1, NOW) == 0


@pytest.mark.parametrize(("seconds", "is_known"), [(0, True), (3, True), (3.1, False)])
def test_what_was_said_a_while_ago_is_not_known(seconds: float, is_known: bool) -> None:
    copies = copies_of(quiet("x", waiting=2, last_arrival=7, timestamp=9), ready="x")
    now_ns = NOW + int(seconds * SECOND)
    assert copies.waiting(MODEL, now_ns) == (2.0 if is_known else None)
    assert copies.last_arrival_ns(MODEL, now_ns) == (NOW - 2 * SECOND if is_known else None)


def test_a_second_that_is_told_again_and_again_is_no_news() -> None:
    """A gateway that hangs answers with its last word."""
    copies = copies_of(quiet("x"), ready="x")
    assert not copies.heard(quiet("x"), {"x"}, NOW + 3 * SECOND)
    assert copies.waiting(MODEL, NOW + 4 * SECOND) is None
    assert copies.heard(quiet("x", second=2), {"x"}, NOW + 4 * SECOND)
    assert copies.waiting(MODEL, NOW + 4 * SECOND) == 0.0


def test_nobody_speaks_of_another_nodes_copies() -> None:
    copies = copies_of([], ready="x")
    assert not copies.heard(quiet("x"), {"y"}, NOW)
    assert copies.waiting(MODEL, NOW) is None


def test_of_all_copies_or_of_none() -> None:
    lately = {"x": (1, 5), "y": (2, 9), "z": (0, 0)}
    all_of_them = [
        told(uid, waiting=waiting, last_arrival=last, timestamp=10) for uid, (waiting, last) in lately.items()
    ]
    copies = copies_of(all_of_them)
    assert (copies.waiting(MODEL, NOW), copies.last_arrival_ns(MODEL, NOW)) == (3.0, NOW - SECOND)
    copies = copies_of(all_of_them[:2])
    assert (copies.waiting(MODEL, NOW), copies.last_arrival_ns(MODEL, NOW)) == (None, None)


@pytest.mark.parametrize("off", [0, 60, -60, 10**6, -(10**6)])
def test_how_long_a_copy_is_idle_is_told_by_nodes_whose_clocks_are_off(off: int) -> None:
    """None is idle for ever, nor for longer than it is."""
    at = NOW // SECOND + off
    copies = copies_of(quiet("x", last_arrival=at - 4, timestamp=at), ready="x")
    assert copies.last_arrival_ns(MODEL, NOW + 2 * SECOND) == NOW - 4 * SECOND
    ((_, last_used_ns),) = copies.idle(MODEL, NOW + 2 * SECOND)
    assert last_used_ns == NOW - 4 * SECOND


def test_an_arrival_is_never_still_to_come() -> None:
    copies = copies_of(quiet("x", last_arrival=100, timestamp=90), ready="x")
    assert copies.last_arrival_ns(MODEL, NOW) == NOW


def test_who_is_gone_is_forgotten() -> None:
    copies = copies_of(quiet("x", "y", "z"))
    copies._cache.pod_gone({"metadata": {"uid": "x", "name": "x"}})
    copies.forget_gone()
    assert set(copies._heard_ns) == {"y", "z"} == set(copies._seconds.latest)
