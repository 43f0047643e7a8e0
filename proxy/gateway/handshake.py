"""How every connection to the gateway begins: with a ticket that names its replica, or it is closed without an answer."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol, cast

from proxy.gateway.connection_limits import PendingConnections
from proxy.transport.tcp import keep_alive
from proxy.wire.preamble import ACCEPTED, PREAMBLE_BYTES, BadPreamble, Preamble, may_begin, read_preamble

PREAMBLE_SECONDS: Final = 2.0


class Router(Protocol):
    """Knows the tickets."""

    def route(self, preamble: Preamble) -> Callable[[], asyncio.Protocol] | None:
        """Makes the protocol that serves such a connection from now on; None: it is rejected."""
        ...


class Handshakes:
    """The connections that have not shown a ticket yet."""

    def __init__(self, router: Router, pending: "PendingConnections[Handshake]") -> None:
        self.router, self.pending = router, pending
        # Connections that were closed without an answer, by reason: for a metric.
        self.rejected = {"late": 0, "crowded": 0, "unreadable": 0, "unknown": 0}
        self._sweep: asyncio.TimerHandle | None = None

    def handshake(self) -> "Handshake":
        return Handshake(self)

    def add(self, handshake: "Handshake", source: str) -> None:
        crowded = self.pending.add(handshake, source, time.monotonic())
        if crowded is not None:
            self.reject(crowded, "crowded")
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(PREAMBLE_SECONDS, self._end_late)

    def reject(self, handshake: "Handshake", why: str) -> None:
        self.rejected[why] += 1
        self.pending.remove(handshake)
        handshake.abort()

    def _end_late(self) -> None:
        self._sweep = None
        for handshake in self.pending.late(time.monotonic() - PREAMBLE_SECONDS):
            self.reject(handshake, "late")
        if len(self.pending):
            self._sweep = asyncio.get_running_loop().call_later(PREAMBLE_SECONDS / 4, self._end_late)

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for handshake in self.pending.late(float("inf")):
            handshake.abort()


class Handshake(asyncio.Protocol):
    """One connection until its preamble is there."""

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes
        self._transport: asyncio.Transport | None = None
        self._input = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        peer = transport.get_extra_info("peername")
        self._handshakes.add(self, str(peer[0]) if isinstance(peer, tuple) else "")

    def data_received(self, data: bytes) -> None:
        if self._transport is None:  # ended, with this on its way
            return
        data = self._input + data if self._input else data
        if len(data) < PREAMBLE_BYTES and may_begin(data):
            self._input = data
            return
        try:
            preamble = read_preamble(data)
        except BadPreamble:
            self._handshakes.reject(self, "unreadable")
            return
        make = self._handshakes.router.route(preamble)
        if make is None:
            self._handshakes.reject(self, "unknown")
        else:
            self._hand_over(make(), data[PREAMBLE_BYTES:])

    def _hand_over(self, protocol: asyncio.Protocol, rest: bytes) -> None:
        transport, self._transport = self._transport, None
        assert transport is not None
        self._handshakes.pending.remove(self)
        keep_alive(transport)
        transport.write(ACCEPTED)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if rest:
            protocol.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._handshakes.pending.remove(self)

    def abort(self) -> None:
        """Without an answer: a peer without a ticket learns nothing."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
