"""DeficitRoundRobin at the sockets: what is kept back is served in order, whole, and its connection is not read meanwhile."""

import asyncio
from typing import Any

import pytest

from proxy.gateway import fair_reader as module
from proxy.gateway.fair_reader import FairReader, FairReadScheduler, ReplicaShare
from proxy.request.fairness import CALL_COST, QUANTUM
from tests.fakes.data_plane import Wire

IN_A_TURN = QUANTUM // CALL_COST


class Load:
    def __init__(self) -> None:
        self.calls = self.sent_bytes = 0


class Inner(asyncio.Protocol):
    """A downstream's connection: each piece is a call."""

    def __init__(self, log: list[tuple[str, bytes]], name: str, load: Load, calls: int) -> None:
        self._log, self._name, self._load, self._calls = log, name, load, calls
        self.transport: Any = None
        self.lost = self.stays = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def eof_received(self) -> bool:
        self._log.append((self._name, b""))
        return self.stays

    def data_received(self, data: bytes) -> None:
        self._log.append((self._name, data))
        self._load.calls += self._calls


class Process:
    def __init__(self) -> None:
        self.now_ns = 0
        self.turns = FairReadScheduler(lambda: self.now_ns)
        self.log: list[tuple[str, bytes]] = []
        self.gone = 0
        self._shares: dict[str, tuple[ReplicaShare, Load]] = {}

    def connect(self, name: str, *, calls: int = 1) -> tuple[FairReader, Inner, Wire]:
        if name not in self._shares:
            load = Load()
            self._shares[name] = ReplicaShare(load), load
        share, load = self._shares[name]
        inner, wire = Inner(self.log, name, load, calls), Wire()
        connection = FairReader(inner, share, self.turns, self._gone)
        connection.connection_made(wire)  # type: ignore[arg-type]
        return connection, inner, wire

    def _gone(self) -> None:
        self.gone += 1

    async def turn(self) -> list[tuple[str, bytes]]:
        self.log.clear()
        await asyncio.sleep(0)
        return list(self.log)


async def test_a_hundred_connections_of_one_replica_get_one_replicas_part() -> None:
    process = Process()
    flood = [process.connect("flood") for _ in range(100)]
    quiet = process.connect("quiet")
    for number, (connection, _, _) in enumerate(flood):
        connection.data_received(b"%d" % number)
    quiet[0].data_received(b"here")
    assert [name for name, _ in process.log] == ["flood"] * IN_A_TURN + ["quiet"]
    assert all(
        not wire.paused for _, _, wire in flood
    )  # a client that waits for its response sends nothing more
    served = [data for name, data in process.log if name == "flood"]
    for _ in range(100 // IN_A_TURN + 1):
        turn = await process.turn()
        assert len(turn) <= IN_A_TURN
        served += [data for _, data in turn]
    assert served == [b"%d" % number for number in range(100)]
    assert all(not wire.paused for _, _, wire in flood)


async def test_one_connection_with_many_calls_at_once_pays_for_all_of_them() -> None:
    process = Process()
    dense = process.connect("dense", calls=10 * IN_A_TURN)
    for piece in (b"1", b"2"):
        dense[0].data_received(piece)
    for _ in range(4 * IN_A_TURN):
        process.connect("other")[0].data_received(b"x")
    for _ in range(3):
        assert [name for name, _ in await process.turn()] == ["other"] * IN_A_TURN
    assert await process.turn() == [("dense", b"2")]


async def test_the_inner_protocol_stops_reading_for_its_own_reasons() -> None:
    process = Process()
    connections = [process.connect("a") for _ in range(IN_A_TURN + 1)]
    for connection, _, _ in connections:
        connection.data_received(b"1")
    kept, inner, wire = connections[-1]
    assert not wire.paused
    kept.data_received(b"2")  # it does not wait to be answered
    assert wire.paused
    inner.transport.resume_reading()  # as a downstream does when its upstream is writable
    assert wire.paused
    inner.transport.pause_reading()
    assert await process.turn() == [("a", b"12")]
    assert wire.paused  # the downstream's own wish
    inner.transport.resume_reading()
    assert not wire.paused
    inner.transport.write(b"answer")
    assert wire.sent == b"answer"
    wire.close()
    inner.transport.pause_reading()
    assert not wire.paused  # a transport that closes is not asked
    kept.data_received(b"2")


async def test_what_is_kept_of_a_connection_that_is_lost_goes_nowhere() -> None:
    process = Process()
    connections = [process.connect("a") for _ in range(IN_A_TURN + 3)]
    for connection, _, _ in connections:
        connection.data_received(b"1")
    lost, inner, _ = connections[-2]
    lost.data_received(b"more")  # had been read already
    lost.connection_lost(None)
    assert inner.lost
    assert process.gone == 1
    assert len(await process.turn()) == 2
    assert process.turns._kept_bytes == 0
    assert await process.turn() == []


async def test_only_so_much_is_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 15)
    process = Process()
    connections = [process.connect("a") for _ in range(IN_A_TURN + 3)]
    for connection, _, _ in connections:
        connection.data_received(b"12345")
    # Two are kept; the third finds no room and is served, out of its turn. It is not read before the next.
    assert len(process.log) == IN_A_TURN + 1
    late, _, wire = connections[-1]
    assert wire.paused
    late.data_received(b"67890")  # had been read already
    assert len(process.log) == IN_A_TURN + 2
    other = [process.connect("other")[0] for _ in range(IN_A_TURN + 1)]
    for connection in other:
        connection.data_received(b"12345")
    assert len(process.log) == 2 * IN_A_TURN + 2  # what one replica has kept back takes no room from another
    while process.turns._turns.has_waiting:
        await process.turn()
    assert all(not wire.paused for _, _, wire in connections)
    assert process.turns._kept_bytes == process._shares["a"][0].kept_bytes == 0


async def test_one_that_was_served_out_of_its_turn_and_goes_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    process = Process()
    connections = [process.connect("a") for _ in range(IN_A_TURN + 1)]
    for connection, _, _ in connections:
        connection.data_received(b"12345")
    connections[-1][0].connection_lost(None)
    assert not process._shares["a"][0].waiting
    assert await process.turn() == []


async def test_no_piece_overtakes_one_that_is_kept_be_there_room_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 5)
    process = Process()
    connections = [process.connect("a") for _ in range(IN_A_TURN + 1)]
    for connection, _, _ in connections:
        connection.data_received(b"12345")
    connections[-1][0].data_received(b"6789")  # had been read already
    assert b"6789" not in [data for _, data in process.log]
    assert await process.turn() == [("a", b"123456789")]
    assert process.turns._kept_bytes == 0


async def test_requests_that_had_come_already_wait_for_their_turn_too() -> None:
    process = Process()
    process.connect("a")
    share, load = process._shares["a"]
    done: list[int] = []
    for number in range(3 * IN_A_TURN):
        process.turns.later(share, lambda number=number: done.append(number))  # type: ignore[misc]
    quiet = process.connect("quiet")
    for turn in range(1, 4):
        await process.turn()
        assert done == list(range(turn * IN_A_TURN))
        quiet[0].data_received(b"here")
        assert process.log == [("quiet", b"here")]
    assert load.calls == 0


async def test_what_comes_does_not_overtake_requests_that_had_come_already() -> None:
    process = Process()
    connection, _, _ = process.connect("a")
    process.turns.later(process._shares["a"][0], lambda: process.log.append(("a", b"first")))
    connection.data_received(b"second")
    assert process.log == []
    assert await process.turn() == [("a", b"first"), ("a", b"second")]


def test_a_piece_costs_its_bytes_and_calls_or_the_time_that_it_took() -> None:
    load = Load()
    share = ReplicaShare(load)
    load.calls = 5
    assert share.cost(1, 0) == 5 * CALL_COST + 1
    assert share.cost(1, 0) == CALL_COST + 1
    assert share.cost(1, 10 * CALL_COST) == 10 * CALL_COST


async def test_what_takes_long_counts_for_as_long() -> None:
    """A check of a long body, say, that is one call as any other."""
    process = Process()
    slow, other = process.connect("slow"), process.connect("other")
    take = slow[1].data_received

    def take_long(data: bytes) -> None:
        process.now_ns += 3 * QUANTUM
        take(data)

    slow[1].data_received = take_long  # type: ignore[method-assign]
    slow[0].data_received(b"1")
    slow[0].data_received(b"2")
    process.turns.later(process._shares["slow"][0], lambda: None)
    for _ in range(2 * IN_A_TURN):
        process.connect("other")[0].data_received(b"x")
    other[0].data_received(b"x")
    assert [name for name, _ in await process.turn()] == ["other"] * IN_A_TURN
    assert ("slow", b"2") not in await process.turn()
    assert await process.turn() == [("slow", b"2")]


async def test_answers_count_too() -> None:
    process = Process()
    connection, _, _ = process.connect("a")
    connection.data_received(b"1")
    process._shares["a"][1].sent_bytes += 10 * QUANTUM
    connection.data_received(b"2")
    connection.data_received(b"3")
    assert [data for _, data in process.log] == [b"1", b"2"]
    assert await process.turn() == [("a", b"3")]  # nobody else wants anything


@pytest.mark.parametrize("stays", [False, True])
async def test_a_clients_end_is_reported_behind_what_is_kept(stays: bool) -> None:
    process = Process()
    connections = [process.connect("a") for _ in range(IN_A_TURN + 1)]
    for connection, _, _ in connections:
        connection.data_received(b"1")
    kept, inner, wire = connections[-1]
    inner.stays = stays
    assert kept.eof_received()
    assert ("a", b"") not in process.log
    assert await process.turn() == [("a", b"1"), ("a", b"")]
    assert wire.ended is not stays
    assert connections[0][0].eof_received() is False  # nothing is kept of this one
