"""The sending half of a connection: the peer's windows, and whose turn it is.

What there is room for goes straight to the output, in the order of the calls. The content of streams that
there is no room for waits with its stream, and the streams take turns, a frame each.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from proxy.wire.h2 import frames, hpack
from proxy.wire.h2.frames import (
    DATA,
    DEFAULT_MAX_FRAME,
    DEFAULT_WINDOW,
    END_STREAM,
    MAX_STREAM_ID,
    MAX_WINDOW,
    ConnectionFailed,
    ErrorCode,
    Setting,
)
from proxy.wire.h2.patience import ANSWERS_PER_FRAME, BYTES_PER_ANSWER_LOG2, Patience
from proxy.wire.h2.stream import FIRST_WINDOW, Stream

# What came, without being copied where it is large: a view keeps what it was read with in memory.
Buffer = bytes | memoryview

# Of content, at once: more waits in its streams, so that what is still to come can have its turn before it.
OUTPUT_BYTES: Final = 256 * 1024
MAX_FRAME: Final = 128 * 1024
# One stream's part of a turn, where others wait.
_TURN_BYTES = 16 * 1024
# Pieces are put together below this: to copy is cheaper than to hand over one by one.
_JOIN_BELOW = 16 * 1024
# A slice is copied below this, as a view keeps all that it was read with.
VIEW_BYTES: Final = 64 * 1024
# What a peer takes until it tells: as Triton's gRPC has it, which tells of it after the first call.
_DEFAULT_HEADER_LIST = 16 * 1024


class Sender:
    """The streams of a connection, and what goes out on them."""

    def __init__(self, patience: Patience, wake: Callable[[], None]) -> None:
        self.streams: dict[int, Stream] = {}
        self.is_closed = False
        self.patience = patience
        self.peer_max_streams, self.peer_header_list = MAX_STREAM_ID, _DEFAULT_HEADER_LIST
        self._peer_window, self._peer_max_frame = DEFAULT_WINDOW, DEFAULT_MAX_FRAME
        self._send_window = DEFAULT_WINDOW
        # The peer's decoder may not know yet that no table is used: the next block must say it first.
        self._tells_no_table = True
        self._out: list[Any] = []
        # Content in the output, and whom it belongs to.
        self._out_bytes = 0
        self._written: list[Any] = []
        # Streams whose own windows are open.
        self._turns: deque[Stream] = deque()
        self._wake = wake
        # Whether `take_output` has something. There is something from the start.
        self.has_output = True

    def take_output(self) -> list[Buffer]:
        """What is to be written next, at most some 256 KiB of content; often one piece.

        Call it only when the transport has room, and again while it has and `has_output` holds. What is
        owned is released by this call once its last byte is handed out."""
        if self._turns:
            self._take_turns()
        out, self._out = self._out, []
        self._out_bytes = 0
        if self._written:
            written, self._written = self._written, []
            for owned in written:
                owned.release()
        self.has_output = bool(self._turns) and self._send_window > 0
        return _joined(out) if len(out) > 1 else out

    # Verbs. On a stream that is over they do nothing, but release what they were given.

    def send_headers(self, stream: Stream, block: bytes, *, end: bool = False) -> None:
        """A block that touches no table (`hpack.encode`, `Fields.forwarded`): an answer's head, trailers."""
        if stream.is_closed or stream.local_done:
            return
        if stream.queue:
            stream.queue.append((block, True, end, None))
        else:
            self._write_headers(stream, block, end=end)

    def send_data(self, stream: Stream, data: Buffer, *, end: bool = False, owned: Any = None) -> None:
        """`owned.release()` is called exactly once: when the last byte is handed to the transport, or when
        it is dropped because the stream or the connection ends."""
        size = len(data)
        if stream.is_closed or stream.local_done or not (size or end):
            if owned is not None:
                owned.release()
            return
        if not stream.queue and (not size or (not self._turns and self._has_room(stream, size))):
            self._write_data(stream, data, end=end, owned=owned)
            return
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.append((data, False, end, owned))
        self._wants_turn(stream)

    def ping(self, payload: bytes = bytes(8)) -> None:
        if not self.is_closed:
            self._write(frames.head(8, frames.PING, 0, 0) + payload)

    def open_window(self, id: int, size: int) -> None:
        """Let the peer send so many bytes more (`id` 0: on the connection)."""
        if not self.is_closed:
            self._write(frames.window_update(id, size))

    def drop_output(self) -> None:
        """Nothing can be written any more: all of it is dropped and released."""
        self._out, self.has_output = [], False
        written, self._written = self._written, []
        for owned in written:
            owned.release()

    # What the peer says of its windows.

    def set_peer(self, name: int, value: int) -> None:
        """One of its settings. Raises ConnectionFailed."""
        match name:
            case Setting.HEADER_TABLE_SIZE:
                self._tells_no_table = True
            case Setting.ENABLE_PUSH if value > 1:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
            case Setting.MAX_CONCURRENT_STREAMS:
                self.peer_max_streams = value
            case Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {value}")
                self._peer_window = value
            case Setting.MAX_FRAME_SIZE:
                if not DEFAULT_MAX_FRAME <= value <= frames.MAX_FRAME:
                    raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value}")
                self._peer_max_frame = min(value, MAX_FRAME)
            case Setting.MAX_HEADER_LIST_SIZE:
                self.peer_header_list = value

    def widen_connection(self, size: int) -> None:
        """The peer takes so many bytes more, on all streams together. Raises ConnectionFailed."""
        self._send_window += size
        if self._send_window > MAX_WINDOW:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        if self._turns:
            self._rouse()

    def takes_now(self, stream: Stream, size: int) -> bool:
        """Whether so much content would go straight to the output."""
        return not stream.queue and not self._turns and self._has_room(stream, size)

    # How it is done.

    def _write(self, piece: Any) -> None:
        self._out.append(piece)
        if not self.has_output:
            self.has_output = True
            self._wake()

    def _rouse(self) -> None:
        """Something that waited may have room now."""
        if not self.has_output and self._turns and self._send_window > 0:
            self.has_output = True
            self._wake()

    def _has_room(self, stream: Stream, size: int) -> bool:
        return (
            size <= stream.send_window
            and size <= self._send_window
            and self._out_bytes + size <= OUTPUT_BYTES
        )

    def _write_headers(self, stream: Stream, block: bytes, *, end: bool) -> None:
        if self._tells_no_table:
            self._tells_no_table = False
            block = hpack.NO_TABLE + block
        self._write(frames.headers(stream.id, block, end_stream=end, max_frame=self._peer_max_frame))
        if end:
            self._ended_locally(stream)

    def _write_data(self, stream: Stream, data: Buffer, *, end: bool, owned: Any) -> None:
        """The windows have been looked at."""
        size, most = len(data), self._peer_max_frame
        self._charge(stream, size)
        if size > most:
            view, full = memoryview(data), frames.head(most, DATA, 0, stream.id)
            last = (size - 1) // most * most
            for at in range(0, last, most):
                self._out += full, view[at : at + most]
            data = view[last:]
        self._write(frames.head(len(data), DATA, END_STREAM if end else 0, stream.id))
        if size:
            self._write(data)
        if owned is not None:
            self._written.append(owned)
        if end:
            self._ended_locally(stream)

    def _charge(self, stream: Stream, size: int) -> None:
        stream.send_window -= size
        self._send_window -= size
        self._out_bytes += size
        self.patience.answers += ANSWERS_PER_FRAME + (size >> BYTES_PER_ANSWER_LOG2)

    def _ended_locally(self, stream: Stream) -> None:
        """We have sent END_STREAM."""
        stream.local_done = True
        if stream.remote_done:
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        """Nothing more is sent or taken on it. What waits is dropped."""
        stream.is_closed = True
        self.streams.pop(stream.id, None)
        if stream.window != FIRST_WINDOW:
            self._narrow(stream)
        queue, stream.queue = stream.queue, None
        if queue:
            for _, _, _, owned in queue:
                if owned is not None:
                    owned.release()

    def _narrow(self, stream: Stream) -> None:
        """A stream is over whose window had grown."""
        raise NotImplementedError

    def _wants_turn(self, stream: Stream) -> None:
        if stream.send_window > 0 and not stream.takes_turns:
            stream.takes_turns = True
            self._turns.append(stream)
        self._rouse()

    def _take_turns(self) -> None:
        turns = self._turns
        while turns and self._send_window > 0 and self._out_bytes < OUTPUT_BYTES:
            stream = turns.popleft()
            self._send_some(stream, self._peer_max_frame if not turns else _TURN_BYTES)
            if stream.queue and stream.send_window > 0:
                turns.append(stream)
            else:
                stream.takes_turns = False

    def _send_some(self, stream: Stream, most: int) -> None:
        """A frame of a stream's queue, as far as the windows go; and what needs no window behind it."""
        queue = stream.queue
        room = min(most, self._peer_max_frame, stream.send_window, self._send_window)
        while queue:
            data, is_block, end, owned = queue[0]
            if is_block:
                queue.popleft()
                self._write_headers(stream, data, end=end)
            elif len(data) <= room:
                queue.popleft()
                room -= len(data)
                self._write_data(stream, data, end=end, owned=owned)
            else:
                if room > 0:
                    view = memoryview(data)
                    queue[0] = (view[room:], False, end, owned)
                    self._write_data(stream, view[:room], end=False, owned=None)
                return


def _joined(pieces: list[Any]) -> list[Buffer]:
    """The same bytes in fewer pieces: large ones stay as they are."""
    if sum(map(len, pieces)) <= _JOIN_BELOW:
        return [b"".join(pieces)]
    out: list[Buffer] = []
    small: list[Any] = []
    for piece in pieces:
        if len(piece) < _JOIN_BELOW:
            small.append(piece)
            continue
        if small:
            out.append(b"".join(small))
            small = []
        out.append(piece)
    if small:
        out.append(b"".join(small))
    return out


def sliced(data: bytes, start: int, stop: int) -> Buffer:
    """A part of what was read, without a copy where it is large."""
    size = stop - start
    if size < VIEW_BYTES:
        return data[start:stop]
    return data if size == len(data) else memoryview(data)[start:stop]
