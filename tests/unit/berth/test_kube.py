from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from berth.kube.errors import Conflict, NotFound, response_error
from berth.kube.informer import ChangeKind, Mirror
from berth.kube.lease import Freshness
from berth.kube.times import micro_time

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def item(uid: str, version: str, name: str = "p") -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": name, "resourceVersion": version}}


def told(changes: list[Any]) -> list[tuple[str, str]]:
    return [(change.kind.value, change.object["metadata"]["uid"]) for change in changes]


def test_a_relist_tells_the_difference_deletions_first() -> None:
    mirror = Mirror()
    assert told(mirror.replace([item("a", "1"), item("b", "1")])) == [("set", "a"), ("set", "b")]
    # b was deleted and made anew under the same name while nobody watched
    assert told(mirror.replace([item("a", "1"), item("c", "2")])) == [("gone", "b"), ("set", "c")]
    assert set(mirror.objects) == {"a", "c"}


def test_a_watch_event_that_repeats_what_is_known_is_no_change() -> None:
    mirror = Mirror()
    mirror.replace([item("a", "1")])
    assert mirror.apply("ADDED", item("a", "1")) == []
    assert [change.kind for change in mirror.apply("MODIFIED", item("a", "2"))] == [ChangeKind.SET]
    assert told(mirror.apply("DELETED", item("a", "3"))) == [("gone", "a")]
    assert mirror.objects == {}


def lease(renewed: datetime, *, duration: int = 40, name: str = "berth-agent-n") -> dict[str, Any]:
    spec = {"renewTime": micro_time(renewed), "leaseDurationSeconds": duration}
    return {"metadata": {"name": name}, "spec": spec}


def test_a_lease_seen_for_the_first_time_is_judged_by_its_own_time() -> None:
    fresh = Freshness()
    fresh.observe(lease(NOW - timedelta(seconds=30)), monotonic=100.0, wall=NOW)
    assert fresh.is_fresh("berth-agent-n", monotonic=109.9)
    assert not fresh.is_fresh("berth-agent-n", monotonic=110.0)


def test_a_renewal_counts_whatever_the_clock_of_its_writer_says() -> None:
    fresh = Freshness()
    skewed = NOW - timedelta(days=1)
    fresh.observe(lease(skewed), monotonic=0.0, wall=NOW)
    assert not fresh.is_fresh("berth-agent-n", monotonic=0.0)
    fresh.observe(lease(skewed + timedelta(seconds=10)), monotonic=10.0, wall=NOW)
    assert fresh.is_fresh("berth-agent-n", monotonic=49.9)
    fresh.observe(lease(skewed + timedelta(seconds=10)), monotonic=45.0, wall=NOW)  # no renewal
    assert not fresh.is_fresh("berth-agent-n", monotonic=50.0)


def test_a_writer_ahead_in_time_gains_nothing() -> None:
    fresh = Freshness()
    fresh.observe(lease(NOW + timedelta(days=1)), monotonic=0.0, wall=NOW)
    assert fresh.deadline("berth-agent-n") == 40


@pytest.mark.parametrize("spec", [{}, {"renewTime": None}, {"renewTime": "soon", "leaseDurationSeconds": 40}])
def test_a_lease_that_says_nothing_is_not_fresh(spec: dict[str, Any]) -> None:
    fresh = Freshness()
    fresh.observe({"metadata": {"name": "x"}, "spec": spec}, monotonic=0.0, wall=NOW)
    assert not fresh.is_fresh("x", monotonic=0.0)
    assert not fresh.is_fresh("never-seen", monotonic=0.0)


def test_statuses_become_the_errors_that_somebody_handles() -> None:
    assert isinstance(response_error(404, "NotFound", "x"), NotFound)
    assert isinstance(response_error(409, "Conflict", "x"), Conflict)
    assert str(response_error(500, "", "boom")) == "500: boom"
