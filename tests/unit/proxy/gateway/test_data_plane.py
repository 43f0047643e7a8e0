"""One process' replicas without a socket: which connections they get, what is reported of them, how they end."""

import os
import time
from collections.abc import Iterator

import pytest

from proxy.gateway.data_plane import ENDING_SECONDS
from proxy.request.admission import shared_limit
from proxy.wire.preamble import Kind
from tests.fakes.gateway_plane import Plane, spec_of


async def test_a_replica_that_has_ended_accepts_no_connection_and_goes_once_it_is_idle(plane: Plane) -> None:
    await plane.apply(spec_of("a"))
    plane.connect("a")
    replica, (downstream,) = plane.replica("a"), plane.downstreams
    running = replica.admissions.admit(0.0, list)
    await plane.apply(spec_of())
    assert plane.connect("a") is None
    assert plane.connect("a", Kind.REPORT) is None
    assert (replica.not_ready(), downstream.stops) == ("draining", 1)
    now = time.monotonic()
    plane.data_plane.tick(now)
    assert (downstream.closes, downstream.ticks) == (0, [now])
    assert plane.data_plane.in_triton() == {"a"}  # what is left of it may still kill Triton
    assert plane.data_plane.uids_of([replica]) == {"a"}
    running.release(0.0)
    downstream.busy_connections = 1
    plane.data_plane.tick(now)
    assert not downstream.closes  # an answer is still to be delivered
    downstream.busy_connections = 0
    plane.data_plane.tick(now)
    assert downstream.closes == 1
    assert not list(plane.data_plane)


async def test_a_replica_that_has_ended_and_is_not_idle_in_time_is_broken_off(plane: Plane) -> None:
    await plane.apply(spec_of("a"))
    plane.connect("a")
    plane.replica("a").admissions.admit(0.0, list)
    await plane.apply(spec_of())
    now = time.monotonic()
    plane.data_plane.tick(now + ENDING_SECONDS - 1)
    assert list(plane.data_plane)
    plane.data_plane.tick(now + ENDING_SECONDS + 1)
    assert not list(plane.data_plane)
    assert plane.downstreams[0].closes == 1


async def test_a_replica_with_any_question_to_triton_is_in_triton(plane: Plane) -> None:
    await plane.apply(spec_of("a", "b", "c"))
    assert plane.data_plane.in_triton() == frozenset()
    plane.replica("a").admissions.admit(0.0, list)
    plane.replica("b").questions.admit(0.0, list)
    assert plane.data_plane.in_triton() == {"a", "b"}
    plane.replica("a").admissions.running = 0


async def test_only_a_replica_that_drains_is_reported_as_idle(plane: Plane) -> None:
    await plane.apply(spec_of("a", "b"))
    assert plane.data_plane.status().idle == frozenset()
    await plane.apply(spec_of("a", "b", draining=frozenset("a")))
    assert plane.data_plane.status().idle == {"a"}
    waiting = plane.replica("a").admissions.admit(0.0, list)
    assert plane.data_plane.status().idle == frozenset()
    assert not plane.data_plane.is_idle
    waiting.release(0.0)
    plane.connect("b")
    plane.downstreams[0].busy_connections = 2
    assert plane.data_plane.status().stats["b"].figures.busy_connections == 2
    assert not plane.data_plane.is_idle


@pytest.fixture(autouse=True)
def no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_replica_gives_the_descriptors_of_its_shared_limit_back() -> None:
    plane, descriptors = Plane(), shared_limit(1, 1)
    plane.shared = descriptors
    await plane.apply(spec_of("a"))
    await plane.apply(spec_of())
    plane.data_plane.tick(time.monotonic())
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    await plane.data_plane.close()
