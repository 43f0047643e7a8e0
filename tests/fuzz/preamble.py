"""What must hold for whatever a connection to the gateway begins with."""

import asyncio
from collections.abc import Callable

from proxy.gateway.connection_limits import PendingConnections
from proxy.gateway.handshake import Handshakes
from proxy.wire.preamble import Preamble


def preamble(data: bytes) -> None:
    """What a connection to the gateway begins with, cut in two: nothing but a known ticket gets a status."""
    asyncio.run(_preamble(data[1:], data[0] * len(data) // 256 if data else 0))


async def _preamble(data: bytes, cut: int) -> None:
    got: list[bytes] = []
    host = _Host(got)
    step = Handshakes(host, PendingConnections())
    handshake, wire = step.handshake(), _Door()
    handshake.connection_made(wire)  # type: ignore[arg-type]
    for piece in (data[:cut], data[cut:]):
        if piece:
            (wire.protocol or handshake).data_received(piece)
    known = data[:6] == b"BERTH\x01" and data[6:7] in (b"\x01", b"\x02", b"\x03") and data[7:8] == b"\0"
    if known and data[8:40] == _TICKET:
        assert wire.sent == b"\x01", wire.sent
        assert b"".join(got) == data[40:]
    else:
        assert not wire.sent, wire.sent
        assert not got
        assert wire.aborted or len(data) < 40
    step.close()


_TICKET = b"T" * 32


class _Host:
    def __init__(self, got: list[bytes]) -> None:
        self._got = got

    def route(self, preamble: Preamble) -> Callable[[], asyncio.Protocol] | None:
        return (lambda: _Keeps(self._got)) if preamble.ticket == _TICKET else None


class _Keeps(asyncio.Protocol):
    def __init__(self, got: list[bytes]) -> None:
        self._got = got

    def data_received(self, data: bytes) -> None:
        self._got.append(data)


class _Door:
    """A connection to the gateway."""

    def __init__(self) -> None:
        self.sent, self.aborted = b"", False
        self.protocol: asyncio.Protocol | None = None

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return ("10.0.0.1", 1) if name == "peername" else None

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol

    def write(self, data: bytes) -> None:
        assert not self.aborted
        self.sent += data

    def abort(self) -> None:
        self.aborted = True
