"""Two connections joined: what comes from one goes to the other, at the pace at which that takes it.

Nothing here looks at a byte, and an end is passed on as what it was: one that has said all, or one that was broken off. A side's `data_received` *is* the other transport's `write`: uvloop then hands on
what it has read without a step of ours in between.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from proxy.transport.tcp import reset, unsent_bytes

# After the gateway has said all it has to say a client has this long to end its own half.
LINGER_SECONDS: Final = 30.0
# A side reads up to 250 KB at once. Above so many bytes that slow ends have not taken yet, all read in small
# pieces; below the lower number, as much as there is again.
HIGH_BYTES: Final = 16 * 1024**2
LOW_BYTES: Final = 4 * 1024**2
_PIECE_BYTES: Final = 4096
# How often a client whose answer was broken off is looked at, until it has what there is of it.
_LOOK_SECONDS: Final = 0.1
# Of what one end has not taken; the kernel has buffers of its own.
_KEPT_BYTES: Final = 64 * 1024


class Watermark:
    """What all joined connections hold together for ends that take it slowly."""

    def __init__(self, *, high_bytes: int = HIGH_BYTES, low_bytes: int = LOW_BYTES) -> None:
        self._high_bytes, self._low_bytes = high_bytes, low_bytes
        self.held_bytes = 0
        self.is_high = False
        self._joined: set[Tunnel] = set()
        # One for all: what was read is copied before the next read.
        self.piece = memoryview(bytearray(_PIECE_BYTES))

    def __len__(self) -> int:
        return len(self._joined)

    def __iter__(self) -> "Iterator[Tunnel]":
        """Those that are joined now; they may go while they are looked at."""
        return iter(list(self._joined))

    def add(self, joined: "Tunnel") -> None:
        self._joined.add(joined)
        if self.is_high:
            joined.read_pieces()

    def discard(self, joined: "Tunnel") -> None:
        self._joined.discard(joined)

    def holds(self, more_bytes: int) -> None:
        """So many more (or fewer) than before."""
        self.held_bytes += more_bytes
        if not self.is_high and self.held_bytes > self._high_bytes:
            self.is_high = True
            for joined in self._joined:
                joined.read_pieces()
        elif self.is_high and self.held_bytes < self._low_bytes:
            self.is_high = False
            for joined in self._joined:
                joined.read_all()


class Tunnel:
    """A client's connection and that of the gateway which serves it. The ends belong to it from now on."""

    def __init__(
        self,
        client: asyncio.Transport,
        gateway: asyncio.Transport,
        watermark: Watermark,
        *,
        early: bytes = b"",
        unanswered: Callable[[], None] | None,
        ended: Callable[[], None],
    ) -> None:
        """`early`: what the gateway has said already. `unanswered`: called, once, instead of ending the
        client's connection where the gateway's ends before its first byte; the client's transport is then the
        caller's again. `ended`: called once when the client's connection is gone, unless that happened."""
        self._watermark, self._unanswered, self._ended = watermark, unanswered, ended
        self._client = _Side(self, client, gateway)
        self._gateway = _Side(self, gateway, client)
        self._linger: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        if unanswered is not None:
            self._gateway.data_received = self._answered
        self._client.other_side, self._gateway.other_side = self._gateway, self._client
        for side in (self._client, self._gateway):
            side.transport.set_protocol(side)
        watermark.add(self)
        if early:
            self._gateway.data_received(early)
        for side in (self._client, self._gateway):
            side.transport.set_write_buffer_limits(high=_KEPT_BYTES)
            if not side.other_side.holds_much:
                side.resume_reading()

    def holds(self, more_bytes: int) -> None:
        self._watermark.holds(more_bytes)

    def read_pieces(self) -> None:
        for side in (self._client, self._gateway):
            if not side.transport.is_closing():
                side.transport.set_protocol(_InPieces(side, self._watermark.piece))

    def read_all(self) -> None:
        for side in (self._client, self._gateway):
            if not side.transport.is_closing():
                side.transport.set_protocol(side)

    def _answered(self, data: bytes) -> None:
        """The gateway's first bytes."""
        self._unanswered = None
        side = self._gateway
        side.data_received = self._client.transport.write
        if not self._watermark.is_high:
            side.transport.set_protocol(side)
        side.data_received(data)

    def finished(self, side: "_Side") -> None:
        """Nothing more comes from this side; the other is told, and may go on."""
        if side is self._gateway:
            if self._unanswered is not None:
                self._hand_back()
                return
            loop = asyncio.get_running_loop()
            self._linger = self._linger or loop.call_later(LINGER_SECONDS, self.abort)
        other = side.other_side
        if other.has_finished or not other.transport.can_write_eof():
            self.close()
        elif not other.transport.is_closing():
            other.transport.write_eof()

    def lost(self, side: "_Side", exc: Exception | None) -> None:
        if side is self._client:
            self._leave_gateway()
            self._end()
            self._ended()
        elif self._unanswered is not None:
            self._hand_back()
        elif exc is None or side.has_finished:
            self._client.transport.close()  # with what it has not taken yet
        else:
            self._client.pause_reading()
            self._linger = self._linger or asyncio.get_running_loop().call_later(LINGER_SECONDS, self.abort)
            self._break_off()

    def _leave_gateway(self) -> None:
        """Nobody is there to be answered. Told as an end like any other, what waits there would keep its place."""
        reset(self._gateway.transport)

    def _break_off(self) -> None:
        """The answer does not go on. Its client is reset as soon as it has what there is, which a reset would drop."""
        if self.is_settled:
            reset(self._client.transport)
        else:
            self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._break_off)

    @property
    def is_settled(self) -> bool:
        """Whether the client has got, as far as its system is concerned, all that has come from the gateway."""
        return unsent_bytes(self._client.transport) == 0

    def close(self) -> None:
        """Both ends, once they have what was written to them."""
        self._gateway.transport.close()
        self._client.transport.close()

    def abort(self) -> None:
        self._leave_gateway()
        self._client.transport.abort()

    def _hand_back(self) -> None:
        unanswered, self._unanswered = self._unanswered, None
        self._leave_gateway()
        self._end()
        if unanswered is not None and not self._client.transport.is_closing():
            self._client.resume_reading()
            unanswered()

    def _end(self) -> None:
        for timer in (self._linger, self._look):
            if timer is not None:
                timer.cancel()
        self._client.forget()
        self._gateway.forget()
        self._watermark.discard(self)


class _Side(asyncio.Protocol):
    """One end. `data_received` is where its bytes go."""

    other_side: "_Side"

    def __init__(self, joined: Tunnel, transport: asyncio.Transport, other: asyncio.Transport) -> None:
        self._joined, self.transport = joined, transport
        self.data_received: Callable[[bytes], None] = other.write  # type: ignore[assignment]
        self.has_finished = False
        self._held_bytes = 0

    @property
    def holds_much(self) -> bool:
        return self._held_bytes > 0

    def pause_writing(self) -> None:
        self._held_bytes = self.transport.get_write_buffer_size()
        self.other_side.pause_reading()
        self._joined.holds(self._held_bytes)

    def resume_writing(self) -> None:
        self.forget()
        self.other_side.resume_reading()

    def pause_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.has_finished and not self.transport.is_closing():
            self.transport.resume_reading()

    def forget(self) -> None:
        held, self._held_bytes = self._held_bytes, 0
        if held:
            self._joined.holds(-held)

    def eof_received(self) -> bool:
        self.has_finished = True
        self._joined.finished(self)
        return self.transport.can_write_eof()  # TLS has no half

    def connection_lost(self, exc: Exception | None) -> None:
        self._joined.lost(self, exc)


class _InPieces(asyncio.BufferedProtocol):
    """A side that reads little at a time."""

    def __init__(self, side: _Side, piece: memoryview) -> None:
        self._side, self._piece = side, piece
        self.pause_writing, self.resume_writing = side.pause_writing, side.resume_writing  # type: ignore[method-assign]
        self.eof_received, self.connection_lost = side.eof_received, side.connection_lost  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        self._side.data_received(bytes(self._piece[:nbytes]))
