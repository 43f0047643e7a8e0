"""Who comes to the gateway, byte by byte: no clock but the one that is given, no socket."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.gateway import handshake as module
from proxy.gateway.connection_limits import PendingConnections
from proxy.gateway.handshake import Handshake, Handshakes
from proxy.wire.preamble import ACCEPTED, PREAMBLE_BYTES, Kind, Preamble
from tests.fakes.data_plane import Wire

TICKET = bytes(range(32))


class ServedReplica(asyncio.Protocol):
    def __init__(self) -> None:
        self.got, self.made = b"", 0

    def connection_made(self, transport: Any) -> None:
        self.made += 1

    def data_received(self, data: bytes) -> None:
        assert self.made == 1
        self.got += data


class Router:
    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self.served = ServedReplica()

    def route(self, preamble: Preamble) -> Callable[[], asyncio.Protocol] | None:
        if preamble.ticket != TICKET:
            return None
        self.kinds.append(preamble.kind)
        return lambda: self.served


def step(*, most: int = 4) -> Handshakes:
    return Handshakes(Router(), PendingConnections(most=most))


def arrive(here: Handshakes, source: str = "10.0.0.1") -> tuple[Handshake, Wire]:
    handshake, wire = here.handshake(), Wire(source)
    handshake.connection_made(wire)  # type: ignore[arg-type]
    return handshake, wire


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("cut", [1, 6, 7, 39, 40, 41])
async def test_a_preamble_in_two_pieces_and_what_comes_with_it(kind: Kind, cut: int) -> None:
    here = step()
    handshake, wire = arrive(here)
    data = Preamble(kind, TICKET).to_bytes() + b"the rest"
    for piece in (data[:cut], data[cut:]):
        (wire.protocol or handshake).data_received(piece)
    assert here.router.kinds == [kind]  # type: ignore[attr-defined]
    assert wire.protocol.got == b"the rest"
    assert wire.sent == ACCEPTED
    assert not len(here.pending)
    here.close()
    assert not wire.aborted  # it is none of the handshakes's any more


async def test_an_unknown_ticket_and_whatever_is_no_preamble_end_at_the_first_byte_that_says_so() -> None:
    here = step()
    for data, why in (
        (Preamble(Kind.REST, bytes(32)).to_bytes(), "unknown"),
        (b"G", "unreadable"),
        (b"BERTH\x02", "unreadable"),
        (b"BERTH\x01\x04\x00" + TICKET, "unreadable"),
        (b"BERTH\x01\x01\x01" + TICKET, "unreadable"),
    ):
        before = here.rejected[why]
        handshake, wire = arrive(here)
        handshake.data_received(data)
        assert wire.aborted, data
        assert wire.sent == b""
        handshake.data_received(b"more")  # on its way when it ended
        assert here.rejected[why] == before + 1
        handshake.connection_lost(None)
    assert not len(here.pending)


async def test_who_says_nothing_has_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREAMBLE_SECONDS", 0.05)
    here = step()
    (handshake, silent), (_, half) = arrive(here), arrive(here, "10.0.0.2")
    handshake.data_received(b"BERTH")
    async with asyncio.timeout(5):
        while not (silent.aborted and half.aborted):
            await asyncio.sleep(0.005)
    assert here.rejected["late"] == 2


async def test_who_comes_last_is_ended_too_though_nobody_comes_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PREAMBLE_SECONDS", 0.05)
    here = step()
    _, first = arrive(here)
    await asyncio.sleep(0.03)
    _, last = arrive(here, "10.0.0.2")
    async with asyncio.timeout(5):
        while not (first.aborted and last.aborted):
            await asyncio.sleep(0.005)


def test_two_seconds() -> None:
    assert module.PREAMBLE_SECONDS == 2.0


async def test_a_crowd_from_one_address_pushes_out_its_own() -> None:
    here = step(most=4)
    crowd = [arrive(here, "10.0.0.1")[1] for _ in range(50)]
    (quiet, wire) = arrive(here, "10.0.0.2")
    crowd += [arrive(here, "10.0.0.1")[1] for _ in range(50)]
    assert [one.aborted for one in crowd] == [True] * 97 + [False] * 3
    assert not wire.aborted
    quiet.data_received(Preamble(Kind.GRPC, TICKET).to_bytes())
    assert wire.sent == ACCEPTED
    here.close()
    assert all(one.aborted for one in crowd)


async def test_many_that_come_at_once_from_one_address_have_all_the_room_there_is() -> None:
    """The clients of one pod, say: what they say is on its way when the last of them has been let in."""
    here = step(most=500)
    crowd = [arrive(here) for _ in range(500)]
    for handshake, wire in crowd:
        handshake.data_received(Preamble(Kind.REST, TICKET).to_bytes())
        assert wire.sent == ACCEPTED


async def test_a_crowd_from_many_addresses_pushes_out_the_most_crowded() -> None:
    here = step(most=5)
    _, alone = arrive(here, "10.0.0.9")
    pair = [arrive(here, "10.0.0.1")[1] for _ in range(3)]
    others = [arrive(here, f"10.0.1.{number}")[1] for number in range(2)]
    assert [one.aborted for one in pair] == [True, False, False]
    assert not alone.aborted
    assert not any(one.aborted for one in others)
    here.close()


def test_the_size_is_the_contracts() -> None:
    assert len(Preamble(Kind.REST, TICKET).to_bytes()) == PREAMBLE_BYTES == 40
