"""A Lease as a heartbeat."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from berth.kube.errors import KubeUnreachable
from berth.kube.lease import Freshness, Heartbeat
from berth.kube.times import micro_time
from tests.fakes.kube import RecordingClient

NOW = datetime(2026, 1, 1, tzinfo=UTC)


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


START = datetime(2026, 1, 1, tzinfo=UTC)


async def test_a_heartbeat_renews_and_makes_what_is_missing() -> None:
    api = RecordingClient()
    path = "/apis/coordination.k8s.io/v1/namespaces/nodes/leases/berth-agent-n"
    heart = Heartbeat(
        api,  # type: ignore[arg-type]
        namespace="nodes",
        name="berth-agent-n",
        holder="pod-1",
        duration_seconds=40,
        now=lambda: START,
    )
    spec = {
        "holderIdentity": "pod-1",
        "leaseDurationSeconds": 40,
        "renewTime": "2026-01-01T00:00:00.000000Z",
    }
    await heart.beat()
    api.missing.add(path)
    await heart.beat()
    patched, created = api.written
    assert (patched[:2], patched[2]["spec"]) == (("patch", path), spec)
    assert created == (
        "create",
        path.rpartition("/")[0],
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "berth-agent-n"},
            "spec": spec,
        },
    )
    api.broken = KubeUnreachable("away")
    with pytest.raises(KubeUnreachable):
        await heart.beat()


def seen(renewed: datetime | None, *, duration: int | None = 40) -> dict[str, Any]:
    spec = {"renewTime": renewed and micro_time(renewed), "leaseDurationSeconds": duration}
    return {"metadata": {"name": "a"}, "spec": spec}


def test_a_lease_that_is_seen_again_is_as_old_as_before_and_a_renewed_one_is_young() -> None:
    fresh = Freshness()
    assert fresh.deadline("a") == -math.inf
    fresh.observe(seen(START), monotonic=0.0, wall=START)
    fresh.observe(seen(START), monotonic=30.0, wall=START + timedelta(seconds=30))
    assert fresh.deadline("a") == 40
    fresh.observe(seen(START + timedelta(seconds=1)), monotonic=35.0, wall=START)
    assert fresh.deadline("a") == 75


def test_what_is_forgotten_is_judged_anew_by_its_own_time() -> None:
    fresh = Freshness()
    fresh.observe(seen(START), monotonic=0.0, wall=START)
    fresh.forget("a")
    fresh.forget("never-seen")
    assert not fresh.is_fresh("a", monotonic=0.0)
    fresh.observe(seen(START), monotonic=0.0, wall=START + timedelta(seconds=39))
    assert fresh.deadline("a") == 1


def test_a_renewal_without_a_duration_lasts_no_time() -> None:
    fresh = Freshness()
    fresh.observe(seen(START), monotonic=0.0, wall=START)
    fresh.observe(seen(START + timedelta(seconds=5), duration=None), monotonic=5.0, wall=START)
    assert not fresh.is_fresh("a", monotonic=5.0)
    fresh.observe({"metadata": {"name": "b"}}, monotonic=0.0, wall=START)
    assert not fresh.is_fresh("b", monotonic=0.0)
