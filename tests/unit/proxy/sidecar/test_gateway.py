"""A connection of the sidecar's until the gateway takes it, without a socket."""

from typing import Any

import pytest

from proxy.sidecar.gateway import ClientHandshake, NoGateway
from proxy.wire.preamble import ACCEPTED
from tests.fakes.data_plane import Wire


def knocked() -> tuple[ClientHandshake, Any]:
    knock, wire = ClientHandshake(b"hello", lambda: "the ticket is not taken"), Wire()
    knock.connection_made(wire)  # type: ignore[arg-type]
    assert wire.sent == b"hello"
    return knock, wire


async def test_what_is_taken_is_read_no_further_and_stays() -> None:
    knock, wire = knocked()
    knock.data_received(ACCEPTED + b"first")
    assert wire.paused  # or what comes next would be lost
    knock.data_received(b"had been read already")
    assert knock.taken.result() == b"first"
    assert knock.give() is wire
    knock.leave()
    assert not wire.aborted


async def test_what_was_not_taken_in_time_is_ended() -> None:
    knock, wire = knocked()
    knock.leave()
    assert wire.aborted
    knock.data_received(ACCEPTED)  # too late
    assert knock.taken.cancelled()


@pytest.mark.parametrize("said", [b"no", b""])
async def test_what_the_gateway_does_not_take_is_told_and_ended(said: bytes) -> None:
    knock, wire = knocked()
    if said:
        knock.data_received(said)
    knock.connection_lost(None)
    with pytest.raises(NoGateway, match="ticket"):
        await knock.taken
    knock.leave()
    assert wire.aborted
