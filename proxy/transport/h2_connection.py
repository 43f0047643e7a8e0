"""A codec on a transport: what comes in is handled event by event, what goes out is written once a turn."""

import asyncio
from typing import Any, Generic, TypeVar, cast

from proxy.transport.write_batch import WriteBatch
from proxy.wire.h2.codec import H2Codec
from proxy.wire.h2.events import Event
from proxy.wire.h2.frames import ErrorCode
from proxy.wire.h2.stream import Stream

_WRITE_HIGH = 256 * 1024

C = TypeVar("C", bound=H2Codec[Any, Any])


class H2Connection(asyncio.Protocol, Generic[C]):
    """What both ends share. `codec` is the subclass' to make, with `wake`."""

    codec: C
    # Frames: usual calls and answers, of which what came may hold a thousand; others are served between them.
    most_at_once = 64

    def __init__(self, batch: WriteBatch) -> None:
        self.batch = batch
        self.transport: asyncio.Transport | None = None
        self.is_closed = False
        self.is_writable = True
        # More of what came is taken in a later turn, which is scheduled.
        self._rests = False

    def on_events(self, events: list[Event]) -> None:
        raise NotImplementedError

    def on_lost(self, streams: list[Stream], reason: str) -> None:
        """Nothing can be read or written any more. `streams`: all that had not ended. Called once."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.transport.set_write_buffer_limits(high=_WRITE_HIGH)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_writable = False
        self._over(str(exc) if exc else "the connection was closed")

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        self.on_events(self.codec.receive(data, self.most_at_once))
        if self.codec.has_more:
            self.on_more()

    def on_more(self) -> None:
        """The codec has taken a part of what came, and is to be called again when others have had their turn."""
        if self.transport is not None and not self._rests:
            self._rests = True
            self.transport.pause_reading()
            self.batch.then(self._go_on)

    def _go_on(self) -> None:
        self._rests = False
        if self.is_closed or self.transport is None:
            return
        self.data_received(b"")
        if not self._rests and not self.is_closed:
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self.flush()

    def wake(self) -> None:
        """The codec's word: there is something to write."""
        self.batch.then(self.flush)

    def flush(self) -> None:
        """Write what there is room for."""
        transport, codec = self.transport, self.codec
        if transport is None or self.is_closed:
            return
        while self.is_writable and codec.has_output:
            pieces = codec.take_output()
            if len(pieces) == 1:
                transport.write(pieces[0])
            else:
                transport.writelines(pieces)

    def fail(self, code: ErrorCode, message: str) -> None:
        """GOAWAY, and the end."""
        ended = self.codec.fail(code, message)
        if ended is not None:
            self.ended(ended.streams, message)

    def ended(self, streams: list[Stream], reason: str) -> None:
        """The codec has said its last word: write it, and close."""
        if self.is_closed:
            return
        self.is_writable = True
        self.flush()
        self.is_closed = True
        if self.transport is not None:
            self.transport.close()
        self.codec.lost()
        self.on_lost(streams, reason)

    def abort(self, reason: str) -> None:
        if self.transport is not None and not self.is_closed:
            self.transport.abort()
        self._over(reason)

    def _over(self, reason: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.on_lost(self.codec.lost(), reason)
