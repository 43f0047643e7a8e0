"""A connection of the sidecar's until the gateway takes it, without a socket."""

from typing import Any

import pytest

from proxy.sidecar.gateway import ClientHandshake, NoGateway
from proxy.wire.preamble import ACCEPTED
from tests.fakes.data_plane import Wire


def started() -> tuple[ClientHandshake, Any]:
    handshake, wire = ClientHandshake(b"hello", lambda: "the ticket is not taken"), Wire()
    handshake.connection_made(wire)  # type: ignore[arg-type]
    assert wire.sent == b"hello"
    return handshake, wire


async def test_what_is_taken_is_read_no_further_and_stays() -> None:
    handshake, wire = started()
    handshake.data_received(ACCEPTED + b"first")
    assert wire.paused  # or what comes next would be lost
    handshake.data_received(b"had been read already")
    assert handshake.taken.result() == b"first"
    assert handshake.give() is wire
    handshake.leave()
    assert not wire.aborted


async def test_what_was_not_taken_in_time_is_ended() -> None:
    handshake, wire = started()
    handshake.leave()
    assert wire.aborted
    handshake.data_received(ACCEPTED)  # too late
    assert handshake.taken.cancelled()


@pytest.mark.parametrize("said", [b"no", b""])
async def test_what_the_gateway_does_not_take_is_reported_and_ended(said: bytes) -> None:
    handshake, wire = started()
    if said:
        handshake.data_received(said)
    handshake.connection_lost(None)
    with pytest.raises(NoGateway, match="ticket"):
        await handshake.taken
    handshake.leave()
    assert wire.aborted
