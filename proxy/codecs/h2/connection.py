"""One HTTP/2 connection (RFC 9113), either end: frames in and out, windows, settings, limits on abuse.

Each hop has its own windows. A byte that came in is given back to its connection at once, so that no
stream can use up what its neighbours need, and to its stream when it has gone out on the other side, so
what is buffered for a stream is bounded by that stream's window. What needs no change can be handed on
as a slice of what was read (`pass_raw`).
"""

import asyncio
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, cast

from proxy.codecs.h2 import frames, hpack
from proxy.codecs.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_MAX_FRAME,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    HEAD_BYTES,
    HEADERS,
    MAX_STREAM_ID,
    MAX_WINDOW,
    PADDED,
    ConnectionFailed,
    ErrorCode,
    Setting,
    StreamFailed,
    read_head,
    read_u32,
)

MAX_FRAME: Final = 128 * 1024
# What a peer may have on its way to us: for a stream that nobody has read from, for one that is being
# read, and for all of them until we hear of it. A first frame always fits, which the quick ways rely on.
# What can pile up on a connection is what its streams' windows let through: at most 1000 streams, each
# with a first window, and of those no more than _WIDE_STREAMS with a wide one, 125 + 12 MiB. A call that
# waits for its slot keeps its first window.
FIRST_WINDOW: Final = MAX_FRAME
STREAM_WINDOW: Final = 512 * 1024
CONNECTION_WINDOW: Final = 2 * 1024 * 1024
_WIDE_STREAMS = 32
HEADER_LIST_BYTES: Final = 64 * 1024
# What a peer takes until it tells: as Triton's gRPC has it, which tells of it after the first call.
DEFAULT_HEADER_LIST: Final = 16 * 1024
# A block grows little when it is decoded, unless it repeats table entries, which the list limit bounds.
_BLOCK_BYTES = 64 * 1024
_WRITE_HIGH = 256 * 1024
_JOIN_BELOW = 64 * 1024
# Frames that move no request forward: how many a peer may send at once, and how many more each second.
_PATIENCE = 4_000
_PATIENCE_PER_SECOND = 2_000
# All streams of a connection may be given up at once, though nothing was ever sent on them.
_RESET_COST = 3
# A window that changes moves those of all streams: so many of them cost as much as a frame.
_STREAMS_PER_COST = 50
# Data that we send is answered with windows, and measured with pings: so many a frame (as Envoy has it),
# and one more for so many bytes (Go's x/net/http2 tells of 4 KiB, once for the stream and once for all).
_ANSWERS_PER_FRAME = 10
_BYTES_PER_ANSWER_LOG2 = 9
# Streams that were reset: what one end still says of them was on its way, or is said twice (Triton does).
_REMEMBERED_RESETS = 1_000

_SETTING = struct.Struct(">HI")


class Stream:
    """One stream on one connection."""

    # Most streams never need more than these. `receive_left` + `owed` + what has not gone on = `window`.
    window = receive_left = FIRST_WINDOW
    owed = received = 0
    remote_done = local_done = False
    # What waits to be sent: bytes, whether they are a header block, whether they end the stream, and the
    # stream that they came in on, if they did, to be given back there.
    queue: "deque[tuple[Any, bool, bool, Stream | None]] | None" = None

    def __init__(self, connection: "H2Connection", id: int) -> None:
        self.connection, self.id = connection, id
        self.send_window = connection.peer_window


class H2Connection(asyncio.Protocol):
    """The rules that both ends share. Subclasses say what happens to headers, data and resets."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.streams: dict[int, Any] = {}
        self.last_stream = 0
        self.closed = False
        self.writable = True
        self.peer_window, self.peer_max_frame = DEFAULT_WINDOW, DEFAULT_MAX_FRAME
        self.peer_max_streams, self.peer_header_list = MAX_STREAM_ID, DEFAULT_HEADER_LIST
        self.send_window = DEFAULT_WINDOW
        self.decoder = hpack.Decoder(allowed=0, list_limit=HEADER_LIST_BYTES)
        self._owed = 0
        self._read: Callable[[bytes], int] = self._read_frames
        self._parts: list[bytes] = []
        self._have, self._need = 0, HEAD_BYTES
        self._settings_seen = False
        self._unacknowledged = 0
        self._block: tuple[int, int, bytearray] | None = None
        # The peer's decoder may not know yet that no table is used: the next block must say it first.
        self.tells_no_table = True
        self._blocked: dict[int, Stream] = {}
        # Streams that were reset, and how much data for each may have been on its way.
        self._resets: OrderedDict[int, int] = OrderedDict()
        self._forgotten_resets = 0
        self.patience, self.answers = _PATIENCE, 0
        self._out: list[Any] = []
        self._run: bytes | None = None
        self._run_start = self._run_stop = 0
        self._handlers: tuple[Callable[[bytes, int, int, int, int], None], ...] = (
            self._on_data,
            self._on_headers,
            self._on_priority,
            self._on_reset,
            self._on_settings,
            self._on_push,
            self._on_ping,
            self._on_goaway,
            self._on_window_update,
            self._on_continuation,
        )

    # What the two ends do differently.

    def on_block(self, id: int, block: bytes, end: bool, data: bytes, at: int, stop: int) -> None:
        """A complete header block, not yet decoded. `data[at:stop]` is its frame, if it is one plain
        frame; otherwise `stop` is 0."""
        raise NotImplementedError

    def on_stream_data(
        self, stream: Any, data: bytes, at: int, start: int, finish: int, stop: int, end: bool
    ) -> None:
        """`data[start:finish]` is the content of the DATA frame `data[at:stop]`."""
        raise NotImplementedError

    def on_stream_reset(self, stream: Any, code: int) -> None:
        """The peer has reset a stream, or it is in error; it is no longer in `streams`."""
        raise NotImplementedError

    def on_goaway(self, last_stream: int) -> None:
        """The peer takes no streams above `last_stream`."""

    def on_end(self, reason: str) -> None:
        """The connection has ended; nothing can be written any more."""
        raise NotImplementedError

    def take_headers(self, data: bytes, at: int, stop: int, end: int, id: int) -> int:
        """A plain HEADERS frame at `data[at:stop]`, in the quickest way, with what follows it perhaps.

        Returns where what was taken ends, or 0, with nothing done, where it is not the usual thing.
        """
        return 0

    def take_data(self, data: bytes, at: int, stop: int, id: int) -> bool:
        """A DATA frame that ends its stream, likewise; False with nothing done."""
        return False

    def flush_peers(self) -> None:
        """Flush whatever else was written to while this connection's input was handled."""

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.transport.set_write_buffer_limits(high=_WRITE_HIGH)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(str(exc) if exc else "the connection was closed")

    def eof_received(self) -> bool:
        return False

    def resume_writing(self) -> None:
        self.writable = True

    def pause_writing(self) -> None:
        self.writable = False

    def data_received(self, data: bytes) -> None:
        self._have += len(data)
        if self._parts or self._have < self._need:
            self._parts.append(data)
            if self._have < self._need:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        try:
            at = self._read(data)
        except ConnectionFailed as error:
            self.fail(error.code, str(error))
        else:
            self._have = len(data) - at
            if self._have:
                self._parts.append(data[at:])
        self.flush()
        self.flush_peers()

    def expect_preface(self) -> None:
        """The peer begins with the client's preface (RFC 9113, 3.4)."""
        self._read, self._need = self._read_preface, 1

    def _read_preface(self, data: bytes) -> int:
        if not frames.PREFACE.startswith(data[: len(frames.PREFACE)]):
            message = "this port speaks HTTP/2 with prior knowledge (gRPC)"
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, message)
        if len(data) < len(frames.PREFACE):
            self._need = len(data) + 1
            return 0
        self._read, self._need = self._read_frames, HEAD_BYTES
        return self._read_frames(data, len(frames.PREFACE))

    def _read_frames(self, data: bytes, at: int = 0) -> int:
        """Handle every whole frame; returns where the first incomplete one begins."""
        end, handlers = len(data), self._handlers
        while not self.closed:
            if end - at < HEAD_BYTES:
                self._need = HEAD_BYTES
                return at
            high, low, kind, flags, id = read_head(data, at)
            length = high << 8 | low
            stop = at + HEAD_BYTES + length
            if length > MAX_FRAME:
                raise ConnectionFailed(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes; {MAX_FRAME} are taken"
                )
            if stop > end:
                self._need = HEAD_BYTES + length
                return at
            if self._block is not None and kind != CONTINUATION:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
            if not self._settings_seen and (kind != frames.SETTINGS or flags & ACK):
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            if kind == HEADERS and flags == END_HEADERS:
                if taken := self.take_headers(data, at, stop, end, id):
                    at = taken
                    continue
            elif kind == DATA and flags == END_STREAM and self.take_data(data, at, stop, id):
                at = stop
                continue
            if kind < 10:  # others are to be ignored (RFC 9113, 5.5)
                try:
                    handlers[kind](data, at, stop, flags, id & MAX_STREAM_ID)
                except StreamFailed as error:
                    self._stream_failed(error)
            at = stop
        return end

    # Writing.

    def write(self, piece: Any) -> None:
        """Put bytes on their way; `flush` sends them."""
        if self._run is not None:
            self._end_run()
        self._out.append(piece)

    def pass_raw(self, data: bytes, at: int, stop: int) -> None:
        """Put a slice of read bytes on its way; neighbours are joined without being copied."""
        if self._run is data and self._run_stop == at:
            self._run_stop = stop
            return
        if self._run is not None:
            self._end_run()
        self._run, self._run_start, self._run_stop = data, at, stop

    def flush(self) -> None:
        if self._run is not None:
            self._end_run()
        out = self._out
        if not out or self.transport is None or self.closed:
            return
        if len(out) == 1:
            self.transport.write(out[0])
            out.clear()
            return
        if sum(map(len, out)) < _JOIN_BELOW:
            self.transport.write(b"".join(out))
        else:
            self.transport.writelines(out)
        self._out = []

    def _end_run(self) -> None:
        run = self._run
        assert run is not None
        start, stop = self._run_start, self._run_stop
        # Small slices are copied for less than a view of them costs.
        self._out.append(run[start:stop] if stop - start < _JOIN_BELOW else memoryview(run)[start:stop])
        self._run = None

    def send_headers(self, stream: Stream, block: bytes, *, end: bool) -> None:
        """After whatever data of the stream still waits for its window."""
        if stream.queue:
            stream.queue.append((block, True, end, None))
            return
        self._write_headers(stream, block, end=end)

    def send_data(self, stream: Stream, payload: Any, *, end: bool, source: Stream | None = None) -> None:
        """Send as far as the windows let it, and the rest when they open. `source`: whose bytes they are."""
        size = len(payload)
        if not stream.queue and size <= stream.send_window and size <= self.send_window:
            self._write_data(stream, payload, end=end, source=source)
            return
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.append((payload, False, end, source))
        self._pump(stream)

    def can_pass(self, stream: Stream, size: int, frame_bytes: int) -> bool:
        """Whether a frame of data may go out as it is: charges the windows if so."""
        if stream.queue or size > stream.send_window or size > self.send_window:
            return False
        if frame_bytes - HEAD_BYTES > self.peer_max_frame:
            return False
        stream.send_window -= size
        self.sent(size)
        return True

    def sent(self, size: int) -> None:
        """A frame of data is on its way: it is charged to the connection's window, and may be answered."""
        self.send_window -= size
        self.answers += _ANSWERS_PER_FRAME + (size >> _BYTES_PER_ANSWER_LOG2)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream from our side, without further ado."""
        if self.streams.pop(stream.id, None) is None:
            return
        self._blocked.pop(stream.id, None)
        self._remember_reset(stream.id, stream.receive_left)
        self.write(frames.reset(stream.id, code))

    def closed_locally(self, stream: Stream) -> None:
        """We have sent END_STREAM."""
        stream.local_done = True
        if stream.remote_done:
            self.streams.pop(stream.id, None)

    def gone_on(self, stream: Stream, size: int) -> None:
        """So many bytes that came in on a stream of ours have gone out on another connection."""
        self.credit(stream, size)

    def credit(self, stream: Stream, size: int) -> None:
        """Bytes of a stream have gone on, or nobody wants them: let its sender send as many more."""
        stream.owed += size
        if stream.owed >= stream.window // 2 and not stream.remote_done and stream.id in self.streams:
            if stream.window < STREAM_WINDOW and len(self.streams) <= _WIDE_STREAMS:
                stream.owed += STREAM_WINDOW - stream.window
                stream.window = STREAM_WINDOW
            self.write(frames.window_update(stream.id, stream.owed))
            stream.receive_left += stream.owed
            stream.owed = 0

    @property
    def receive_left(self) -> int:
        """What the peer may send on the connection. More than any frame, as what comes is given back."""
        return CONNECTION_WINDOW - self._owed

    def credit_connection(self, size: int) -> None:
        """So many bytes of DATA have come in, on whatever stream."""
        self._owed += size
        if self._owed >= CONNECTION_WINDOW // 2:
            self.write(frames.window_update(0, self._owed))
            self._owed = 0

    def send_settings(self, values: dict[Setting, int]) -> None:
        """Our part of the connection's preface, with what is special to this end."""
        self.write(
            frames.settings(
                {
                    Setting.HEADER_TABLE_SIZE: 0,
                    Setting.INITIAL_WINDOW_SIZE: FIRST_WINDOW,
                    Setting.MAX_FRAME_SIZE: MAX_FRAME,
                    Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES,
                    **values,
                }
            )
        )
        self._unacknowledged += 1
        self.write(frames.window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW))

    def fail(self, code: ErrorCode, message: str) -> None:
        """GOAWAY, and the end."""
        if self.closed:
            return
        self.write(frames.goaway(self.last_stream, code, message))
        self.close(message)

    def close(self, reason: str) -> None:
        """Send what is written, then end."""
        self.flush()
        if self.transport is not None and not self.closed:
            self.transport.close()
        self._ended(reason)

    def abort(self, reason: str) -> None:
        if self.transport is not None and not self.closed:
            self.transport.abort()
        self._ended(reason)

    def _ended(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._parts.clear()
        self.on_end(reason)
        self.streams.clear()
        self._blocked.clear()
        self._out.clear()

    def calm_down(self) -> None:
        """A second has passed: a peer may try our patience a little more again."""
        self.patience = min(_PATIENCE, self.patience + _PATIENCE_PER_SECOND)

    def half_block(self) -> int:
        """The stream whose header block has begun and not ended, 0 if there is none."""
        if self._block is not None:
            return self._block[0]
        head = b"".join(self._parts)[:HEAD_BYTES] if self._settings_seen and self._parts else b""
        if len(head) < HEAD_BYTES or head[3] != HEADERS:
            return 0
        id: int = read_head(head)[4] & MAX_STREAM_ID
        return id

    def _spend(self, cost: int = 1) -> None:
        self.patience -= cost
        if self.patience < 0:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")

    def _spend_answer(self) -> None:
        """A frame that may be an answer to data of ours."""
        if self.answers > 0:
            self.answers -= 1
        else:
            self._spend()

    def _write_headers(self, stream: Stream, block: bytes, *, end: bool) -> None:
        if self.tells_no_table:
            self.tells_no_table = False
            block = hpack.NO_TABLE + block
        self.write(frames.headers(stream.id, block, end_stream=end, max_frame=self.peer_max_frame))
        if end:
            self.closed_locally(stream)

    def _write_data(self, stream: Stream, payload: Any, *, end: bool, source: Stream | None) -> None:
        """The windows have been looked at."""
        size, at = len(payload), 0
        stream.send_window -= size
        self.sent(size)
        view = payload if size <= self.peer_max_frame else memoryview(payload)
        while size - at > self.peer_max_frame:
            self.write(frames.head(self.peer_max_frame, DATA, 0, stream.id))
            self.write(view[at : at + self.peer_max_frame])
            at += self.peer_max_frame
        self.write(frames.head(size - at, DATA, END_STREAM if end else 0, stream.id))
        if size - at:
            self.write(view[at:] if at else view)
        if size and source is not None:
            source.connection.gone_on(source, size)
        if end:
            self.closed_locally(stream)

    def _pump(self, stream: Stream) -> None:
        """Send of a stream's queue what the windows let through."""
        queue = stream.queue
        while queue:
            payload, is_block, end, source = queue[0]
            if is_block:
                queue.popleft()
                self._write_headers(stream, payload, end=end)
                continue
            room = max(0, min(stream.send_window, self.send_window))
            if len(payload) <= room:
                queue.popleft()
                self._write_data(stream, payload, end=end, source=source)
                continue
            if room:
                view = memoryview(payload)
                queue[0] = (view[room:], False, end, source)
                self._write_data(stream, view[:room], end=False, source=source)
            break
        # Whoever waits for its own window is woken by that alone.
        if queue and stream.send_window > 0:
            self._blocked[stream.id] = stream
        else:
            self._blocked.pop(stream.id, None)

    # Reading, frame by frame.

    def _on_data(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        length = stop - at - HEAD_BYTES
        self.credit_connection(length)
        start, finish = at + HEAD_BYTES, stop
        if flags & PADDED:
            start, finish = _unpadded(data, start, finish)
        stream = self.streams.get(id)
        if stream is None or stream.remote_done:
            self._stray(id, stream, "DATA", length)
            return
        stream.receive_left -= length
        if stream.receive_left < 0:
            raise StreamFailed(id, ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window")
        if length > finish - start:
            self.credit(stream, length - (finish - start))
        end = flags & END_STREAM != 0
        if end:
            stream.remote_done = True
        if finish > start:
            self.patience += 2
        elif not end:
            self._spend()
        self.on_stream_data(stream, data, at, start, finish, stop, end)

    def _on_headers(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if id == 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "HEADERS on stream 0")
        start, finish = at + HEAD_BYTES, stop
        if flags & PADDED:
            start, finish = _unpadded(data, start, finish)
        if flags & HAS_PRIORITY:
            if finish - start < 5:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            if read_u32(data, start)[0] & MAX_STREAM_ID == id:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"stream {id} depends on itself")
            start += 5
        if finish - start > _BLOCK_BYTES:
            message = f"a header block of {finish - start} bytes; {_BLOCK_BYTES} are taken"
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, message)
        block = data[start:finish]
        if flags & END_HEADERS:
            plain = finish - start == stop - at - HEAD_BYTES
            self.on_block(id, block, flags & END_STREAM != 0, data, at, stop if plain else 0)
        else:
            self._block = (id, flags, bytearray(block))

    def _on_continuation(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if self._block is None or self._block[0] != id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without its HEADERS")
        self._spend()
        _, first_flags, block = self._block
        block += data[at + HEAD_BYTES : stop]
        if len(block) > _BLOCK_BYTES:
            raise ConnectionFailed(
                ErrorCode.ENHANCE_YOUR_CALM, f"a header block of more than {_BLOCK_BYTES} bytes"
            )
        if flags & END_HEADERS:
            self._block = None
            self.on_block(id, bytes(block), first_flags & END_STREAM != 0, data, at, 0)

    def _on_priority(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        self._spend()
        if id == 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if stop - at - HEAD_BYTES != 5:
            raise StreamFailed(id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of the wrong size")
        if read_u32(data, at + HEAD_BYTES)[0] & MAX_STREAM_ID == id:
            raise StreamFailed(id, ErrorCode.PROTOCOL_ERROR, f"stream {id} depends on itself")

    def _on_reset(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if stop - at - HEAD_BYTES != 4:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of the wrong size")
        if id == 0 or self._is_idle(id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM of stream {id}, which is idle")
        stream = self.streams.pop(id, None)
        self._remember_reset(id, 0)
        if stream is not None:
            self._blocked.pop(id, None)
            self.on_stream_reset(stream, read_u32(data, at + HEAD_BYTES)[0])
        if stream is None:
            self._spend()
        elif not stream.received:  # else it was a call, which may be given up
            self._spend(_RESET_COST)

    def _on_settings(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        length = stop - at - HEAD_BYTES
        if id != 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if length % 6 or (flags & ACK and length):
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of the wrong size")
        self._spend(1 + length // 6)
        if flags & ACK:
            if self._unacknowledged:
                self._unacknowledged -= 1
                self.decoder.acknowledged()
            return
        self._settings_seen = True
        before = self.peer_window
        for place in range(at + HEAD_BYTES, stop, 6):
            self._set(*_SETTING.unpack_from(data, place))
        self.write(frames.SETTINGS_ACK)
        if self.peer_window != before:
            self._move_windows(self.peer_window - before)

    def _move_windows(self, change: int) -> None:
        """RFC 9113, 6.9.2: a new initial window counts for the streams that are there."""
        self._spend(len(self.streams) // _STREAMS_PER_COST)
        for stream in list(self.streams.values()):
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1")
            if stream.queue:
                self._pump(stream)

    def _set(self, name: int, value: int) -> None:
        match name:
            case Setting.HEADER_TABLE_SIZE:
                self.tells_no_table = True
            case Setting.ENABLE_PUSH if value > 1:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
            case Setting.MAX_CONCURRENT_STREAMS:
                self.peer_max_streams = value
            case Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {value}")
                self.peer_window = value
            case Setting.MAX_FRAME_SIZE:
                if not DEFAULT_MAX_FRAME <= value <= frames.MAX_FRAME:
                    raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value}")
                self.peer_max_frame = value
            case Setting.MAX_HEADER_LIST_SIZE:
                self.peer_header_list = value

    def _on_push(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE is not accepted")

    def _on_ping(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if id != 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if stop - at - HEAD_BYTES != 8:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "PING of the wrong size")
        self._spend_answer()
        if not flags & ACK:
            self.write(frames.ping_ack(data[at + HEAD_BYTES : stop]))

    def _on_goaway(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if id != 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if stop - at - HEAD_BYTES < 8:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of the wrong size")
        self._spend()
        self.on_goaway(read_u32(data, at + HEAD_BYTES)[0] & MAX_STREAM_ID)

    def _on_window_update(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if stop - at - HEAD_BYTES != 4:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of the wrong size")
        self._spend_answer()
        size = read_u32(data, at + HEAD_BYTES)[0] & MAX_STREAM_ID
        if id == 0:
            self._open_connection_window(size)
            return
        stream = self.streams.get(id)
        if stream is None:
            if self._is_idle(id):
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE of idle stream {id}")
            return
        if size == 0:
            raise StreamFailed(id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        stream.send_window += size
        if stream.send_window > MAX_WINDOW:
            raise StreamFailed(id, ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        if stream.queue:
            self._pump(stream)

    def _open_connection_window(self, size: int) -> None:
        if size == 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        self.send_window += size
        if self.send_window > MAX_WINDOW:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        while self._blocked and self.send_window > 0:
            # Who is not done goes to the end of the line, so that none starves.
            self._pump(self._blocked.pop(next(iter(self._blocked))))

    def _is_idle(self, id: int) -> bool:
        return id > self.last_stream

    def _stray(self, id: int, stream: Stream | None, what: str, size: int = 0) -> None:
        """A frame for a stream that the peer has no right to send on. Returns if it may be ignored.

        `size`: of a DATA frame; what the stream's window let through before it was reset costs nothing.
        """
        if stream is not None:
            raise StreamFailed(id, ErrorCode.STREAM_CLOSED, f"{what} after the stream's end")
        if id == 0 or self._is_idle(id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"{what} on stream {id}, which is idle")
        if id not in self._resets and id > self._forgotten_resets:
            raise ConnectionFailed(ErrorCode.STREAM_CLOSED, f"{what} on stream {id}, which is closed")
        on_its_way = self._resets.get(id, 0)
        if 0 < size <= on_its_way:
            self._resets[id] = on_its_way - size
        else:
            self._spend()

    def _stream_failed(self, error: StreamFailed) -> None:
        self._spend(_RESET_COST)
        stream = self.streams.pop(error.stream, None)
        self._blocked.pop(error.stream, None)
        self._remember_reset(error.stream, 0 if stream is None else max(0, stream.receive_left))
        self.write(frames.reset(error.stream, error.code))
        if stream is not None:
            self.on_stream_reset(stream, error.code)

    def _remember_reset(self, id: int, on_its_way: int) -> None:
        self._resets[id] = on_its_way
        if len(self._resets) > _REMEMBERED_RESETS:
            forgotten, _ = self._resets.popitem(last=False)
            self._forgotten_resets = max(self._forgotten_resets, forgotten)


def _unpadded(data: bytes, start: int, finish: int) -> tuple[int, int]:
    if finish == start:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without its length")
    padding = data[start]
    if padding >= finish - start:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return start + 1, finish - padding
