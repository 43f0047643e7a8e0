"""One process' copies without a socket: who gets in, what is said of them, how they end."""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from berth.contract.gateway import ReplicaLimits, ReplicaSpec
from proxy.gateway.connection_limits import PendingConnections
from proxy.gateway.data_plane import ENDING_SECONDS, DataPlane
from proxy.gateway.spec import ReplicaStats, Spec
from proxy.policy.names import Names
from proxy.request.admission import shared_limit
from proxy.request.load import LoadReport
from proxy.request.replica import Replica
from proxy.request.traffic import Figures
from proxy.wire.preamble import Kind, Preamble
from tests.fakes.agent_control import copy_of


class Front:
    """Records what it is told."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.readiness_told = self.stops = self.closes = self.busy_connections = 0

    def connection(self) -> asyncio.Protocol:
        return asyncio.Protocol()

    def tick(self, now: float) -> None:
        self.ticks.append(now)

    def readiness_changed(self) -> None:
        self.readiness_told += 1

    def stop_accepting(self) -> None:
        self.stops += 1

    def close(self) -> None:
        self.closes += 1


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        self.sent, self.aborted = b"", False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.aborted


class Watch:
    """What is asked of Triton for a copy, which says nothing."""

    def __init__(self, copy: Replica, watched: list[Replica]) -> None:
        self._copy, self._watched = copy, watched
        self.nudges = 0

    async def poll(self) -> None:
        self._watched.append(self._copy)
        try:
            await asyncio.Event().wait()
        finally:
            self._watched.remove(self._copy)

    def nudge(self) -> None:
        self.nudges += 1


class Here:
    def __init__(self, most_connections: int = 100) -> None:
        self.fronts: list[Front] = []
        self.watched: list[Replica] = []
        self.watches: list[Watch] = []
        self.shared: tuple[int, int] | None = None
        self.node = DataPlane(
            self._copy,
            self._front,
            self._watch,
            pending=PendingConnections(),
            most_connections=most_connections,
        )

    def _copy(self, told: ReplicaSpec) -> Replica:
        copy = Replica(Names(told.model.encode(), told.server_name.encode()), told.limits, shared=self.shared)
        copy.triton_says(None)
        return copy

    def _front(self, *_: Any) -> Front:
        self.fronts.append(Front())
        return self.fronts[-1]

    def _watch(self, copy: Replica) -> Watch:
        self.watches.append(Watch(copy, self.watched))
        return self.watches[-1]

    def copy(self, uid: str) -> Replica:
        return self.node._by_uid[uid].copy

    async def apply(self, orders: Spec) -> None:
        self.node.apply(orders)
        await asyncio.sleep(0)

    def come(self, uid: str, kind: Kind = Kind.REST) -> Any:
        """A connection, or None where it is turned away."""
        make = self.node.route(Preamble(kind, copy_of(uid).ticket))
        if make is None:
            return None
        protocol = make()
        protocol.connection_made(Wire())
        return protocol


@pytest.fixture
async def here() -> Any:
    one = Here()
    yield one
    await one.node.close()


def there(*uids: str, **more: Any) -> Spec:
    return Spec(copies=tuple(copy_of(uid) for uid in uids), **more)


async def test_a_copy_that_takes_all_places_it_can_get_leaves_some_for_others() -> None:
    here = Here(most_connections=10)
    await here.apply(there("a", "b"))
    first = [here.come("a") for _ in range(10)]
    assert sum(one is not None for one in first) == 5
    assert here.come("b") is not None
    assert here.node.status().connections == 6
    for one in first[:5]:
        one.connection_lost(None)
    assert here.node.status().connections == 1
    assert sum(here.come("a") is not None for _ in range(10)) == 5  # as many as before
    await here.node.close()


async def test_triton_is_asked_at_once_when_the_agent_has_loaded_a_model_or_lost_it(here: Here) -> None:
    for loaded, limit in ((False, 0), (False, 3), (True, 3), (True, 5), (False, 5)):
        limits = ReplicaLimits(container_concurrency=limit)
        await here.apply(Spec(copies=(copy_of("a", loaded=loaded, limits=limits), copy_of("b"))))
    assert [watch.nudges for watch in here.watches] == [2, 0]


async def test_a_copy_that_has_ended_lets_nobody_in_and_goes_once_it_is_idle(here: Here) -> None:
    await here.apply(there("a"))
    here.come("a")
    copy, (front,) = here.copy("a"), here.fronts
    running = copy.admissions.admit(0.0, list)
    await here.apply(there())
    assert here.come("a") is None
    assert here.come("a", Kind.REPORT) is None
    assert (copy.not_ready(), front.stops) == ("draining", 1)
    now = time.monotonic()
    here.node.tick(now)
    assert (front.closes, front.ticks) == (0, [now])
    assert here.node.inside() == {"a"}  # what is left of it may still kill Triton
    assert here.node.uids_of([copy]) == {"a"}
    running.release(0.0)
    front.busy_connections = 1
    here.node.tick(now)
    assert not front.closes  # an answer is still to be delivered
    front.busy_connections = 0
    here.node.tick(now)
    assert front.closes == 1
    assert not list(here.node)


async def test_a_copy_that_has_ended_and_does_not_come_to_its_end_is_broken_off(here: Here) -> None:
    await here.apply(there("a"))
    here.come("a")
    here.copy("a").admissions.admit(0.0, list)
    await here.apply(there())
    now = time.monotonic()
    here.node.tick(now + ENDING_SECONDS - 1)
    assert list(here.node)
    here.node.tick(now + ENDING_SECONDS + 1)
    assert not list(here.node)
    assert here.fronts[0].closes == 1


async def test_whoever_asks_triton_anything_is_inside(here: Here) -> None:
    await here.apply(there("a", "b", "c"))
    assert here.node.inside() == frozenset()
    here.copy("a").admissions.admit(0.0, list)
    here.copy("b").questions.admit(0.0, list)
    assert here.node.inside() == {"a", "b"}
    here.copy("a").admissions.running = 0


async def test_what_the_agent_and_the_hub_say_of_a_copy_holds_until_they_say_another_thing(
    here: Here,
) -> None:
    await here.apply(Spec(copies=(copy_of("a", withheld="its GPU"),)))
    copy = here.copy("a")
    assert copy.not_ready() == "its GPU"
    await here.apply(there("a", held={"a": "it killed Triton"}))
    assert copy.not_ready() == copy.admissions.closed == "it killed Triton"
    await here.apply(there("a"))
    assert (copy.not_ready(), copy.admissions.closed) == (None, None)


async def test_at_the_end_nobody_comes_in_and_new_copies_drain_from_the_start(here: Here) -> None:
    await here.apply(there("a"))
    here.node.drain_all()
    assert here.copy("a").not_ready() == "draining"
    assert here.come("a") is None
    assert here.come("a", Kind.REPORT) is None
    await here.apply(there("a", "b"))
    assert here.copy("b").not_ready() == "draining"
    assert here.come("b") is None


async def test_only_what_drains_is_said_to_be_idle(here: Here) -> None:
    await here.apply(there("a", "b"))
    assert here.node.status().idle == frozenset()
    await here.apply(there("a", "b", draining=frozenset("a")))
    assert here.node.status().idle == {"a"}
    waiting = here.copy("a").admissions.admit(0.0, list)
    assert here.node.status().idle == frozenset()
    assert not here.node.is_idle
    waiting.release(0.0)
    here.come("b")
    here.fronts[0].busy_connections = 2
    assert here.node.status().stats["b"].figures.busy_connections == 2
    assert not here.node.is_idle


async def test_a_drain_is_told_once_and_taken_back_whole(here: Here) -> None:
    await here.apply(there("a"))
    here.come("a")
    (front,) = here.fronts
    draining = there("a", draining=frozenset("a"), drained=frozenset("a"))
    report = here.come("a", Kind.REPORT)
    for _ in range(3):
        await here.apply(draining)
    assert front.stops == 1
    assert report._transport.sent.count(b'{"drained"') == 1
    await here.apply(there("a"))
    assert (front.closes, here.copy("a").not_ready()) == (1, None)
    assert here.come("a") is not None
    assert len(here.fronts) == 2
    await here.apply(draining)
    assert here.fronts[1].stops == 1
    assert here.node._by_uid["a"].is_drained


async def test_a_door_that_goes_is_forgotten_and_one_that_comes_too_often_has_its_oldest_ended(
    here: Here,
) -> None:
    await here.apply(there("a"))
    doors = [here.come("a", Kind.REPORT) for _ in range(9)]
    wires = [door._transport for door in doors]
    assert [wire.aborted for wire in wires] == [True] + [False] * 8
    for door in doors:
        door.connection_lost(None)
    before = [wire.sent for wire in wires]
    here.node.publish_stats({})
    assert [wire.sent for wire in wires] == before


async def test_fronts_hear_of_readiness_and_what_looks_after_a_copy_ends_with_it(here: Here) -> None:
    await here.apply(there("a"))
    here.come("a")
    await asyncio.sleep(0)
    (front,), copy = here.fronts, here.copy("a")
    told = front.readiness_told
    copy.triton_says("gone")
    await asyncio.sleep(0)
    assert front.readiness_told == told + 1
    assert here.watched == [copy]
    await here.apply(there())
    here.node.tick(time.monotonic())
    for _ in range(3):
        await asyncio.sleep(0)
    assert here.watched == []


async def test_limits_that_change_hold_for_what_comes_from_then_on(here: Here) -> None:
    await here.apply(there("a"))
    other = copy_of("a").limits.__class__(container_concurrency=3)
    await here.apply(Spec(copies=(copy_of("a", limits=other),)))
    assert here.copy("a").limits == other
    await here.apply(there())
    assert here.come("a") is None


@pytest.fixture(autouse=True)
def no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.records if record.exc_info]


def lines(report: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report._transport.sent.splitlines()]


async def test_a_door_is_told_the_sums_of_all_processes_at_each_change_too(here: Here) -> None:
    await here.apply(there("a"))
    report = here.come("a", Kind.REPORT)
    figures = Figures(running=7)
    here.node.publish_stats({"a": ReplicaStats(figures, LoadReport(0.0, 0.0, 0.0, 0.0))})
    here.copy("a").triton_says("gone")
    for _ in range(3):
        await asyncio.sleep(0)
    last = lines(report)[-1]
    assert last["notReady"] == "gone"
    assert last["figures"] == figures.to_json()


async def test_a_door_that_reads_nothing_has_no_more_waiting_and_hears_of_the_drain_later(here: Here) -> None:
    await here.apply(there("a"))
    report = here.come("a", Kind.REPORT)
    report.pause_writing()
    before = report._transport.sent
    await here.apply(there("a", draining=frozenset("a"), drained=frozenset("a")))
    here.node.publish_stats({})
    assert report._transport.sent == before
    report.resume_writing()
    here.node.publish_stats({})
    assert b'{"drained"' in report._transport.sent


async def test_a_drain_of_a_copy_that_was_drained_once_is_another(here: Here) -> None:
    await here.apply(there("a", draining=frozenset("a"), drained=frozenset("a")))
    await here.apply(there("a"))
    await here.apply(there("a", draining=frozenset("a")))
    report = here.come("a", Kind.REPORT)
    here.node.publish_stats({})
    assert b'{"drained"' not in report._transport.sent


async def test_the_end_of_a_process_ends_those_who_have_not_said_for_whom_they_come(here: Here) -> None:
    wire, handshake = Wire(), here.node.handshakes.handshake()
    handshake.connection_made(wire)
    await here.node.close()
    assert wire.aborted


async def test_a_copy_gives_the_descriptors_of_its_shared_limit_back() -> None:
    here, descriptors = Here(), shared_limit(1, 1)
    here.shared = descriptors
    await here.apply(there("a"))
    await here.apply(there())
    here.node.tick(time.monotonic())
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    await here.node.close()
