"""The client's end of a connection: requests go out, answers come in."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from proxy.wire.h2 import frames, hpack
from proxy.wire.h2.codec import H2Codec
from proxy.wire.h2.events import Headers, Reset, WholeAnswer
from proxy.wire.h2.fields import FieldReader, Malformed
from proxy.wire.h2.frames import (
    DATA,
    DEFAULT_MAX_FRAME,
    END_HEADERS,
    END_STREAM,
    HEAD_BYTES,
    HEADERS,
    MAX_STREAM_ID,
    ErrorCode,
    Setting,
    StreamFailed,
    pack_head,
    read_head,
)
from proxy.wire.h2.receiving import CREDIT_BYTES
from proxy.wire.h2.sending import OUTPUT_BYTES, VIEW_BYTES, Buffer, sliced
from proxy.wire.h2.stream import Stream

H = TypeVar("H")
T = TypeVar("T")

# With the last of its ids a connection is used up; long before, a new one takes over.
_LAST_ID: Final = MAX_STREAM_ID - 10_000


class CannotOpen(Exception):
    """No stream can be opened on this connection now; the message says why."""


class ClientCodec(H2Codec[H, T]):
    """Towards a server, which is one of us: it has no budget, and what it says of streams that
    are over is ignored (Triton tells the end of a call up to seven times if its deadline passes).

    A stream is over once its answer is, whatever more there was to be sent.
    """

    _is_trusted = True

    def __init__(self, heads: FieldReader[H], trailers: FieldReader[T], *, wake: Callable[[], None]) -> None:
        # False when no stream will ever be opened again: a new connection is needed.
        self.is_usable = True
        super().__init__(heads, trailers, wake=wake, settings={Setting.ENABLE_PUSH: 0})

    def _introduce(self, settings: dict[Setting, int]) -> None:
        self._write(frames.PREFACE)
        super()._introduce(settings)

    @property
    def can_open(self) -> bool:
        """Whether another stream may be opened now (the peer's limit, GOAWAY, the end, the ids)."""
        return self.is_usable and len(self.streams) < self.peer_max_streams

    def open(self, block: bytes, *, end: bool = False) -> Stream:
        """Send a request's head. Raises CannotOpen."""
        stream = self._new_stream()
        self._write_headers(stream, block, end=end)
        return stream

    def send_call(self, block: bytes, data: Buffer, *, owned: Any = None) -> Stream:
        """A whole request at once, head and content. Raises CannotOpen, and then `owned` is the caller's."""
        stream = self._new_stream()
        size, block_bytes, id = len(data), len(block), stream.id
        if (
            size > DEFAULT_MAX_FRAME
            or block_bytes > DEFAULT_MAX_FRAME
            or size > self._peer_window
            or size > self._send_window
            or self._out_bytes + size > OUTPUT_BYTES
            or self._turns
            or self._tells_no_table
        ):
            self._write_headers(stream, block, end=False)
            self.send_data(stream, data, end=True, owned=owned)
            return stream
        stream.local_done = True
        self._send_window -= size
        self._out_bytes += size
        self._write(
            b"".join(
                (
                    pack_head(block_bytes >> 8, block_bytes & 0xFF, HEADERS, END_HEADERS, id),
                    block,
                    pack_head(size >> 8, size & 0xFF, DATA, END_STREAM, id),
                    data,
                )
            )
        )
        if owned is not None:
            self._written.append(owned)
        return stream

    def _new_stream(self) -> Stream:
        streams = self.streams
        if not self.is_usable or len(streams) >= self.peer_max_streams:
            raise CannotOpen("the server takes no more streams on this connection")
        id = self.last_stream = self.last_stream + 2 if self.last_stream else 1
        if id >= _LAST_ID:
            self.is_usable = False
        stream = streams[id] = Stream(self, id, self._peer_window)
        return stream

    def go_away(self, message: str = "") -> None:
        self.is_usable = False
        super().go_away(message)

    def _close_all(self) -> list[Stream]:
        self.is_usable = False
        return super()._close_all()

    @property
    def _last_of_peer(self) -> int:
        return 0

    def _ended_remotely(self, stream: Stream) -> None:
        stream.remote_done = True
        if stream.local_done:
            self._close(stream)
        else:
            self.reset(stream, ErrorCode.NO_ERROR)

    def _take_fast_path(self, data: bytes, at: int, stop: int, end: int, id: int) -> int:
        """A head, one DATA frame and trailers."""
        stream = self.streams.get(id)
        if stream is None or stream.begun or not stream.local_done or end - stop < 2 * HEAD_BYTES:
            return 0
        high, low, kind, flags, data_id = read_head(data, stop)
        size = high << 8 | low
        data_at = stop + HEAD_BYTES
        tail = data_at + size
        if kind != DATA or flags or data_id != id or end - tail < HEAD_BYTES or size > stream.receive_left:
            return 0
        high, low, kind, flags, tail_id = read_head(data, tail)
        tail_at = tail + HEAD_BYTES
        whole: int = tail_at + (high << 8 | low)
        if kind != HEADERS or flags != END_HEADERS | END_STREAM or tail_id != id or whole > end:
            return 0
        if not size or self._block is not None or not self._is_stateless:
            return 0
        block, tail_block = data[at + HEAD_BYTES : stop], data[tail_at:whole]
        fields, trailers = self.heads.known(block), self.trailers.known(tail_block)
        if fields is None or trailers is None:
            try:
                fields = self.heads.read(block)
                trailers = self.trailers.read(tail_block)
            except (hpack.HpackError, hpack.HeaderListTooLarge, Malformed):
                return 0  # the long way says what is wrong
        if fields.length is not None and fields.length != size:
            return 0
        stream.is_closed = True
        del self.streams[id]  # nothing waits on it
        window = self._window
        window.owed += size
        if window.owed >= CREDIT_BYTES:
            self._credit_connection(0)
        content = data[data_at:tail] if size < VIEW_BYTES else sliced(data, data_at, tail)
        self._events.append(WholeAnswer(stream, fields, content, trailers))
        return whole

    def _take_block(self, id: int, block: bytes, *, end: bool) -> None:
        plain = self._plain(id, block)
        stream = self.streams.get(id)
        if stream is None or stream.remote_done:
            self._stray(id, stream, "HEADERS")
            return
        if stream.begun:
            if not end:
                message = "a second header block that does not end the stream"
                raise StreamFailed(id, ErrorCode.PROTOCOL_ERROR, message)
            self._take_trailers(stream, plain)
            return
        fields = self._head(id, plain)
        stream.begun, stream.length = True, None if end else fields.length
        self._events.append(Headers(stream, fields, end))
        if end:
            self._ended_remotely(stream)

    def _goaway_received(self, last_stream: int) -> None:
        self.is_usable = False
        for stream in [stream for id, stream in self.streams.items() if id > last_stream]:
            self._close(stream)
            self._events.append(Reset(stream, ErrorCode.REFUSED_STREAM, was_refused=True))
