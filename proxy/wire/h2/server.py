"""The server's end of a connection: requests come in, answers go out."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from proxy.wire.h2 import frames, hpack
from proxy.wire.h2.codec import H2Codec
from proxy.wire.h2.events import Headers, WholeRequest
from proxy.wire.h2.fields import FieldReader, Fields, Malformed
from proxy.wire.h2.frames import (
    DATA,
    DEFAULT_MAX_FRAME,
    END_HEADERS,
    END_STREAM,
    HEAD_BYTES,
    HEADERS,
    ConnectionFailed,
    ErrorCode,
    Setting,
    StreamFailed,
    pack_head,
    read_head,
)
from proxy.wire.h2.receiving import CREDIT_BYTES
from proxy.wire.h2.sending import OUTPUT_BYTES, VIEW_BYTES, Buffer, sliced
from proxy.wire.h2.stream import FIRST_WINDOW, Stream

H = TypeVar("H")
T = TypeVar("T")

MAX_STREAMS: Final = 1000


class _WholeStream(Stream):
    """Of a request that came in one piece."""

    begun = remote_done = True
    received = 1  # or more


class ServerCodec(H2Codec[H, T]):
    """Towards a client. A stream is over once its answer is, whatever more the client would have sent."""

    def __init__(self, heads: FieldReader[H], trailers: FieldReader[T], *, wake: Callable[[], None]) -> None:
        super().__init__(heads, trailers, wake=wake, settings={Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS})
        self._read, self._unread.need = self._read_preface, 1
        # Ids that were left out; to come back to them is an error.
        self._skipped: deque[range] = deque(maxlen=16)

    def send_answer(
        self, stream: Stream, head: bytes, data: Buffer, trailers: bytes, *, owned: Any = None
    ) -> None:
        """A whole answer at once."""
        size, head_bytes, tail_bytes, id = len(data), len(head), len(trailers), stream.id
        if (
            not 0 < size <= DEFAULT_MAX_FRAME
            or head_bytes > DEFAULT_MAX_FRAME
            or tail_bytes > DEFAULT_MAX_FRAME
            or size > stream.send_window
            or size > self._send_window
            or self._out_bytes + size > OUTPUT_BYTES
            or self._turns
            or self._tells_no_table
            or stream.queue
            or stream.is_closed
            or stream.local_done
        ):
            self.send_headers(stream, head)
            self.send_data(stream, data, owned=owned)
            self.send_headers(stream, trailers, end=True)
            return
        self._charge(stream, size)
        self._write(
            b"".join(
                (
                    pack_head(head_bytes >> 8, head_bytes & 0xFF, HEADERS, END_HEADERS, id),
                    head,
                    pack_head(size >> 8, size & 0xFF, DATA, 0, id),
                    data,
                    pack_head(tail_bytes >> 8, tail_bytes & 0xFF, HEADERS, END_HEADERS | END_STREAM, id),
                    trailers,
                )
            )
        )
        if owned is not None:
            self._written.append(owned)
        self._ended_locally(stream)

    def _ended_locally(self, stream: Stream) -> None:
        stream.local_done = True
        if stream.remote_done:
            self._close(stream)
        else:  # RFC 9113, 8.1
            self.reset(stream, ErrorCode.NO_ERROR)

    def _read_preface(self, data: bytes, at: int) -> int:
        if not frames.PREFACE.startswith(data[: len(frames.PREFACE)]):
            message = "this port speaks HTTP/2 with prior knowledge (gRPC)"
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, message)
        if len(data) < len(frames.PREFACE):
            self._unread.need = len(data) + 1
            return 0
        self._read, self._unread.need = self._read_frames, HEAD_BYTES
        return self._read_frames(data, len(frames.PREFACE))

    def _take_fast_path(self, data: bytes, at: int, stop: int, end: int, id: int) -> int:
        """A head, and the one DATA frame that ends its stream, if that is the next; else its turn comes."""
        if id != self.last_stream + 2 or not self._is_stateless:
            return 0
        if self._block is not None or self._is_going_away or len(self.streams) >= MAX_STREAMS:
            return 0
        block = data[at + HEAD_BYTES : stop]
        fields = self.heads.known(block)
        if fields is None:
            try:
                fields = self.heads.read(block)
            except (hpack.HpackError, hpack.HeaderListTooLarge, Malformed):
                return 0  # the long way says what is wrong
        self.last_stream = id
        data_at = stop + HEAD_BYTES
        if data_at <= end:
            high, low, kind, flags, data_id = read_head(data, stop)
            size = high << 8 | low
            whole: int = data_at + size
            if (
                kind == DATA
                and data_id == id
                and flags == END_STREAM
                and whole <= end
                and size <= FIRST_WINDOW
                and (fields.length is None or fields.length == size)
            ):
                stream = self.streams[id] = _WholeStream(self, id, self._peer_window)
                self._took_whole(stream, fields, data, data_at, whole)
                return whole
        begun = self.streams[id] = Stream(self, id, self._peer_window)
        begun.begun, begun.length = True, fields.length
        self._untold[id] = Headers(begun, fields, False)
        return stop

    def _take_content(self, data: bytes, start: int, stop: int, id: int) -> bool:
        head, size = self._untold.get(id), stop - start
        if head is None or size > FIRST_WINDOW or head.fields.length not in (None, size):
            return False
        del self._untold[id]
        head.stream.remote_done, head.stream.received = True, size
        self._took_whole(head.stream, head.fields, data, start, stop)
        return True

    def _took_whole(self, stream: Stream, fields: Fields[H], data: bytes, start: int, stop: int) -> None:
        size = stop - start
        self.patience.left += 2
        window = self._window
        window.owed += size
        if window.owed >= CREDIT_BYTES:
            self._credit_connection(0)
        content = data[start:stop] if size < VIEW_BYTES else sliced(data, start, stop)
        self._events.append(WholeRequest(stream, fields, content))

    def _take_block(self, id: int, block: bytes, *, end: bool) -> None:
        if id <= self.last_stream:
            self._take_later_block(id, block, end=end)
            return
        if not id & 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"a client's stream cannot be {id}")
        if id != self.last_stream + 2 and self.last_stream:
            self._skipped.append(range(self.last_stream + 2, id))
        self.last_stream = id
        fields = self._head(id, self._plain(id, block))
        if self._is_going_away or len(self.streams) >= MAX_STREAMS:
            raise StreamFailed(id, ErrorCode.REFUSED_STREAM, "no more streams")
        if end and fields.length:
            message = f"content-length {fields.length}, 0 came"
            raise StreamFailed(id, ErrorCode.PROTOCOL_ERROR, message)
        stream = self.streams[id] = Stream(self, id, self._peer_window)
        stream.begun, stream.length = True, fields.length
        stream.remote_done = end
        self._events.append(Headers(stream, fields, end))

    def _take_later_block(self, id: int, block: bytes, *, end: bool) -> None:
        """A client's trailers, or a block for a stream that is over."""
        plain = self._plain(id, block)
        stream = self.streams.get(id)
        if stream is None and any(id in skipped for skipped in self._skipped):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"stream {id} after stream {self.last_stream}")
        if stream is None or stream.remote_done:
            self._stray(id, stream, "HEADERS")
            return
        if not end:
            message = "a second header block that does not end the stream"
            raise StreamFailed(id, ErrorCode.PROTOCOL_ERROR, message)
        self._take_trailers(stream, plain)
