"""One replica in one process: what the control plane wants of it, and its readiness."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from berth.contract.gateway import ReplicaLimits
from proxy.gateway.spec import Spec
from proxy.wire.preamble import Kind
from tests.fakes.agent_control import replica_of
from tests.fakes.gateway_plane import Plane, spec_of


async def test_triton_is_polled_at_once_when_the_agent_has_loaded_a_model_or_lost_it(plane: Plane) -> None:
    for loaded, limit in ((False, 0), (False, 3), (True, 3), (True, 5), (False, 5)):
        limits = ReplicaLimits(container_concurrency=limit)
        await plane.apply(Spec(replicas=(replica_of("a", loaded=loaded, limits=limits), replica_of("b"))))
    assert [watch.nudges for watch in plane.pollers] == [2, 0]


async def test_it_is_withheld_and_ejected_as_the_last_spec_says(
    plane: Plane,
) -> None:
    await plane.apply(Spec(replicas=(replica_of("a", withheld="its GPU"),)))
    replica = plane.replica("a")
    assert replica.not_ready() == "its GPU"
    await plane.apply(spec_of("a", ejected={"a": "it killed Triton"}))
    assert replica.not_ready() == replica.admissions.closed == "it killed Triton"
    await plane.apply(spec_of("a"))
    assert (replica.not_ready(), replica.admissions.closed) == (None, None)


async def test_a_drain_is_reported_once_and_taken_back_whole(plane: Plane) -> None:
    await plane.apply(spec_of("a"))
    plane.connect("a")
    (downstream,) = plane.downstreams
    draining = spec_of("a", draining=frozenset("a"), drained=frozenset("a"))
    report = plane.connect("a", Kind.REPORT)
    for _ in range(3):
        await plane.apply(draining)
    assert downstream.stops == 1
    assert report._transport.sent.count(b'{"drained"') == 1
    await plane.apply(spec_of("a"))
    assert (downstream.closes, plane.replica("a").not_ready()) == (1, None)
    assert plane.connect("a") is not None
    assert len(plane.downstreams) == 2
    await plane.apply(draining)
    assert plane.downstreams[1].stops == 1
    assert plane.data_plane._by_uid["a"]._is_drained


async def test_a_drain_of_a_replica_that_was_drained_once_is_another(plane: Plane) -> None:
    await plane.apply(spec_of("a", draining=frozenset("a"), drained=frozenset("a")))
    await plane.apply(spec_of("a"))
    await plane.apply(spec_of("a", draining=frozenset("a")))
    report = plane.connect("a", Kind.REPORT)
    plane.data_plane.publish_stats({})
    assert b'{"drained"' not in report._transport.sent


async def test_clients_learn_of_readiness_and_polling_ends_with_the_replica(plane: Plane) -> None:
    await plane.apply(spec_of("a"))
    plane.connect("a")
    await asyncio.sleep(0)
    (downstream,), replica = plane.downstreams, plane.replica("a")
    told = downstream.readiness_changes
    replica.triton_says("gone")
    await asyncio.sleep(0)
    assert downstream.readiness_changes == told + 1
    assert plane.watched == [replica]
    await plane.apply(spec_of())
    plane.data_plane.tick(time.monotonic())
    for _ in range(3):
        await asyncio.sleep(0)
    assert plane.watched == []


async def test_limits_that_change_hold_for_later_requests(plane: Plane) -> None:
    await plane.apply(spec_of("a"))
    other = replica_of("a").limits.__class__(container_concurrency=3)
    await plane.apply(Spec(replicas=(replica_of("a", limits=other),)))
    assert plane.replica("a").limits == other
    await plane.apply(spec_of())
    assert plane.connect("a") is None


@pytest.fixture(autouse=True)
def no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.records if record.exc_info]
