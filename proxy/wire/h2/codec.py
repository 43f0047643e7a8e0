"""One HTTP/2 connection (RFC 9113) without its socket: bytes in, events out; verbs in, bytes out.

    for event in codec.receive(data): ...
    codec.send_answer(event.stream, head, message, trailers)
    while codec.has_output and transport_has_room:
        transport.writelines(codec.take_output())

Nothing here raises for what a peer does. A broken rule of a stream ends that stream (`Reset`), a broken
rule of the connection ends it (`Ended`, with GOAWAY in the output).

Sending: headers and content go out in the order of the calls. Content that has no room (the stream's
window, the connection's, or what one `take_output` hands out) waits in its stream's queue, and those that
wait take turns, a frame each. Headers and trailers of a stream never overtake its content.

Receiving: a stream's window is given back as its `Data` is released, the connection's on receipt. What can
pile up here is what the streams' windows let through.
"""

import struct
import sys
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from proxy.wire.h2 import frames, hpack
from proxy.wire.h2.events import (
    PEER_SETTINGS,
    Data,
    Ended,
    Event,
    GoAway,
    Headers,
    Reset,
    Trailers,
)
from proxy.wire.h2.fields import FieldReader, Fields, Malformed, PeerBlocks
from proxy.wire.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    HEAD_BYTES,
    HEADERS,
    MAX_STREAM_ID,
    MAX_WINDOW,
    PADDED,
    PING,
    WINDOW_UPDATE,
    ConnectionFailed,
    ErrorCode,
    Setting,
    StreamFailed,
    read_head,
    read_u32,
)
from proxy.wire.h2.patience import RESET_COST, STREAMS_PER_COST, Patience
from proxy.wire.h2.receiving import (
    CONNECTION_WINDOW,
    CREDIT_BYTES,
    RESET_BY_PEER,
    LongFrame,
    ReceiveWindow,
    ResetStreams,
    Stall,
    Unread,
)
from proxy.wire.h2.sending import MAX_FRAME, Sender, sliced
from proxy.wire.h2.stream import FIRST_WINDOW, Stream

H = TypeVar("H")
T = TypeVar("T")

HEADER_LIST_BYTES: Final = 64 * 1024
# A block grows little when it is decoded, unless it repeats table entries, which the list limit bounds.
_BLOCK_BYTES = 64 * 1024
# Content that comes in parts is handed on in parts where its frame is longer.
_WHOLE_BELOW = 32 * 1024
# Of headers, which are read field by field: a longer block counts as so many frames (`receive`).
_PLAIN_BLOCK_BYTES: Final = 512

# What clients say between heads and their content.
_CONCERN_NO_HEAD = (WINDOW_UPDATE, PING)

_SETTING = struct.Struct(">HI")
# Pieces of output that wait for the peer to read; as many as Go's x/net/http2 keeps of control frames.
_MOST_UNREAD: Final = 10_000


class H2Codec(Sender, Generic[H, T]):
    """What both ends share. `heads` and `trailers` read the blocks that the peer sends."""

    _is_trusted = False

    def __init__(
        self,
        heads: FieldReader[H],
        trailers: FieldReader[T],
        *,
        wake: Callable[[], None],
        settings: dict[Setting, int],
    ) -> None:
        """`wake` is called when there is output after there was none, from any cause: a verb, `receive`,
        or the release of a `Data`. It must do no more than remember that, and is not called again before
        `take_output`. There is output from the start."""
        super().__init__(Patience(is_endless=self._is_trusted), wake)
        self.heads, self.trailers = PeerBlocks(heads), PeerBlocks(trailers)
        self.last_stream = 0
        self.has_settings = False
        self.decoder = hpack.Decoder(allowed=0, list_limit=HEADER_LIST_BYTES)
        # The peer uses no table: what was said before by the same bytes holds.
        self._is_stateless = False
        self._events: list[Event] = []
        # Heads of this `receive` whose content may be in it as well: who asks many things at once often sends
        # all heads first.
        self._untold: dict[int, Headers] = {}
        self._window = ReceiveWindow()
        self._read: Callable[[bytes, int], int] = self._read_frames
        self._unread = Unread(HEAD_BYTES)
        # More has come than was taken: `receive` is to be called again, with nothing if need be.
        self.has_more, self._most = False, sys.maxsize
        self._block: tuple[int, int, bytearray] | None = None
        self._long: LongFrame | None = None
        self._unacknowledged = 1
        self._is_going_away = False
        self._resets, self._stall = ResetStreams(), Stall()
        self._introduce(settings)

    def _introduce(self, settings: dict[Setting, int]) -> None:
        """Our part of the connection's preface."""
        ours = {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.INITIAL_WINDOW_SIZE: FIRST_WINDOW,
            Setting.MAX_FRAME_SIZE: MAX_FRAME,
            Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES,
            **settings,
        }
        self._write(frames.settings(ours))
        self._write(frames.window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW))

    # In, and what ends it.

    def receive(self, data: bytes, most: int = sys.maxsize) -> list[Event]:
        """Whatever came. After the end: nothing, silently.

        `most`: frames that are taken at once, a usual call or answer counted as one; `has_more` tells whether
        there are more, which may be thousands.
        """
        self.has_more, self._most = False, most
        unread = self._unread
        if unread.parts or len(data) < unread.need:
            data = unread.put_together(data)
        if self.is_closed or not data:
            return []
        try:
            at = self._read(data, 0)
        except ConnectionFailed as error:
            self._tell_heads()
            self._end(error.code, str(error))
        else:
            if at < len(data):
                unread.keep(data[at:])
            if self._untold and not self.has_more:
                self._tell_heads()
        events, self._events = self._events, []
        return events

    def tick(self, now: float) -> list[Event]:
        """Called about every second: a peer's patience budget grows again; a handshake or a header block
        that has stood still for 10 s ends the connection."""
        if self.is_closed:
            return []
        self.patience.calm_down()
        if self._stall.is_too_long(self._half_block() if self.has_settings else -1, now):
            code = ErrorCode.PROTOCOL_ERROR if self.has_settings else ErrorCode.SETTINGS_TIMEOUT
            ended = self.fail(code, "a header block without its end" if self.has_settings else "no SETTINGS")
            return [ended] if ended else []
        return []

    def fail(self, code: ErrorCode, message: str) -> Ended | None:
        """GOAWAY and the end, from our side: the `Ended` event; None if it has ended before."""
        if self.is_closed:
            return None
        self._end(code, message)
        ended = self._events.pop()
        assert isinstance(ended, Ended)
        return ended

    def lost(self) -> list[Stream]:
        """The transport is gone: drops and releases everything; the streams that had not ended."""
        streams = self._close_all()
        self.drop_output()
        return streams

    def announce_leaving(self, message: str = "") -> None:
        """A GOAWAY that leaves none out (RFC 9113, 6.8): the peer is to open no more, and what it has opened is taken."""
        if not self.is_closed and not self._is_going_away:
            self._write(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR, message))

    def go_away(self, message: str = "") -> None:
        """GOAWAY with NO_ERROR: new streams of the peer are refused, those there are go on."""
        if not self.is_closed and not self._is_going_away:
            self._is_going_away = True
            self._write(frames.goaway(self._last_of_peer, ErrorCode.NO_ERROR, message))

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """RST_STREAM; what waits on it is dropped and released. No `Reset` follows."""
        if not stream.is_closed:
            self._resets.remember(stream.id, stream.receive_left)
            self._write(frames.reset(stream.id, code))
            self._close(stream)

    def widening(self, stream: Stream) -> int:
        return self._window.widening(stream)

    @property
    def kept_bytes(self) -> int:
        """Of a frame, or of a header block, that has begun and is not whole; what is only to be taken in a later
        turn is none."""
        return (0 if self.has_more else self._unread.size) + (
            0 if self._block is None else len(self._block[2])
        )

    @property
    def receive_left(self) -> int:
        """What the peer may send on the connection."""
        return self._window.left

    @property
    def _last_of_peer(self) -> int:
        """The last stream that the peer has opened."""
        return self.last_stream

    def _end(self, code: ErrorCode, message: str) -> None:
        self._write(frames.goaway(self._last_of_peer, code, message))
        self._events.append(Ended(code, message, self._close_all()))

    def _close_all(self) -> list[Stream]:
        self.is_closed = True
        streams = list(self.streams.values())
        for stream in streams:
            self._close(stream)
        self._turns.clear()
        self._unread.parts.clear()
        self._untold.clear()
        self.has_more = False
        if self._long is not None:
            self._long.stream = None
        return streams

    def _narrow(self, stream: Stream) -> None:
        self._window.narrow(stream)

    def _half_block(self) -> int:
        """The stream whose header block has begun and not ended, 0 if there is none."""
        if self._block is not None:
            return self._block[0]
        head = self._unread.head if self._long is None else b""
        if len(head) < HEAD_BYTES or head[3] != HEADERS:
            return 0
        id: int = read_head(head)[4] & MAX_STREAM_ID
        return id

    # Frame by frame.

    def _take_fast_path(self, data: bytes, at: int, stop: int, end: int, id: int) -> int:
        """A plain HEADERS frame at `data[at:stop]` and what usually follows it, in the quickest way.

        Returns where what was taken ends, or 0, with nothing done, where it is not the usual thing.
        """
        raise NotImplementedError

    def _take_content(self, data: bytes, start: int, stop: int, id: int) -> bool:
        """What ends a stream whose head is still untold. False, with nothing done, where it is not the usual
        thing."""
        raise NotImplementedError

    def _tell_heads(self) -> None:
        """Their content comes later, or in another way."""
        self._events += self._untold.values()
        self._untold.clear()

    def _read_frames(self, data: bytes, at: int) -> int:
        """Handle every whole frame; returns where the first incomplete one begins."""
        end, left = len(data), self._most
        if self._long is not None:
            at = self._take_long(self._long, data, at)
        while True:
            if end - at < HEAD_BYTES:
                self._unread.need = HEAD_BYTES
                return at
            if left <= 0:
                self._unread.need, self.has_more = 1, True
                return at
            left -= 1
            high, low, kind, flags, id = read_head(data, at)
            length = high << 8 | low
            stop = at + HEAD_BYTES + length
            if length > _PLAIN_BLOCK_BYTES and kind == HEADERS:
                left -= length // _PLAIN_BLOCK_BYTES
            if kind == HEADERS and flags == END_HEADERS and stop <= end:
                taken = self._take_fast_path(data, at, stop, end, id)
                if taken:
                    at = taken
                    continue
            if self._untold:
                is_usual = kind == DATA and flags == END_STREAM and stop <= end
                if is_usual and self._take_content(data, at + HEAD_BYTES, stop, id):
                    at = stop
                    continue
                if kind not in _CONCERN_NO_HEAD:
                    self._tell_heads()
            if length > MAX_FRAME:
                raise ConnectionFailed(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes; {MAX_FRAME} are taken"
                )
            if self._block is not None or not self.has_settings:
                self._require_order(kind, flags)
            if stop > end:
                if kind == DATA and length >= _WHOLE_BELOW and not flags & PADDED:
                    self._begin_long(data, at + HEAD_BYTES, length, flags, id & MAX_STREAM_ID)
                    return end
                self._unread.need = HEAD_BYTES + length
                return at
            if kind < 10:  # others are to be ignored (RFC 9113, 5.5)
                try:
                    _HANDLERS[kind](self, data, at, stop, flags, id & MAX_STREAM_ID)
                except StreamFailed as error:
                    self._stream_failed(error)
            at = stop

    def _require_order(self, kind: int, flags: int) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if not self.has_settings and (kind != frames.SETTINGS or flags & ACK):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")

    # Content.

    def _on_data(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        length = stop - at - HEAD_BYTES
        self._credit_connection(length)
        start, finish = at + HEAD_BYTES, stop
        if flags & PADDED:
            start, finish = _unpadded(data, start, finish)
        stream = self._begin_data(id, length)
        if stream is None:
            return
        padding = length - (finish - start)
        if padding:
            stream.arrived(padding)
            stream.released(padding)
        self._take_data(stream, data, start, finish, end=flags & END_STREAM != 0)

    def _begin_data(self, id: int, length: int) -> Stream | None:
        """A DATA frame has begun. None: its content is dropped."""
        stream = self.streams.get(id)
        if stream is None or stream.remote_done:
            self._stray(id, stream, "DATA", length)
            return None
        if not stream.begun:
            raise StreamFailed(id, ErrorCode.PROTOCOL_ERROR, "DATA before HEADERS")
        if length > stream.receive_left:
            raise StreamFailed(id, ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window")
        return stream

    def _take_data(self, stream: Stream, data: bytes, start: int, finish: int, *, end: bool) -> None:
        size = finish - start
        stream.received += size
        if stream.length is not None and (
            stream.received > stream.length or (end and stream.received != stream.length)
        ):
            message = f"content-length {stream.length}, {stream.received} came"
            raise StreamFailed(stream.id, ErrorCode.PROTOCOL_ERROR, message)
        if size:
            self.patience.left += 2
            stream.arrived(size)
        elif not end:
            self.patience.spend()
            return
        self._events.append(Data(stream, sliced(data, start, finish), end))
        if end:
            self._ended_remotely(stream)

    def _begin_long(self, data: bytes, start: int, length: int, flags: int, id: int) -> None:
        """A DATA frame whose end has not come yet: hand on what has, so that nothing is put together."""
        try:
            stream = self._begin_data(id, length)
        except StreamFailed as error:
            stream = None
            self._stream_failed(error)
        self._long = LongFrame(length, flags, stream)
        self._take_long(self._long, data, start)

    def _take_long(self, frame: LongFrame, data: bytes, at: int) -> int:
        """More of a long DATA frame; returns where it ends, or what came does."""
        stop = min(at + frame.left, len(data))
        frame.left -= stop - at
        is_last = not frame.left
        self._unread.need = HEAD_BYTES if is_last else 1
        if is_last:
            self._long = None
        self._credit_connection(stop - at)
        stream = frame.stream
        if stream is not None and not stream.is_closed and stop > at:
            try:
                self._take_data(stream, data, at, stop, end=is_last and frame.flags & END_STREAM != 0)
            except StreamFailed as error:
                self._stream_failed(error)
        return stop

    def _credit_connection(self, size: int) -> None:
        """So many bytes of DATA have come in, on whatever stream."""
        window = self._window
        window.owed += size
        if window.owed >= CREDIT_BYTES:
            self.open_window(0, window.owed)
            window.owed = 0

    def _ended_remotely(self, stream: Stream) -> None:
        """The peer has sent END_STREAM."""
        stream.remote_done = True
        if stream.local_done:
            self._close(stream)

    # Header blocks.

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
            self._take_block(id, block, end=flags & END_STREAM != 0)
        else:
            self._block = (id, flags, bytearray(block))

    def _on_continuation(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if self._block is None or self._block[0] != id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without its HEADERS")
        self.patience.spend()
        _, first_flags, block = self._block
        block += data[at + HEAD_BYTES : stop]
        if len(block) > _BLOCK_BYTES:
            raise ConnectionFailed(
                ErrorCode.ENHANCE_YOUR_CALM, f"a header block of more than {_BLOCK_BYTES} bytes"
            )
        if flags & END_HEADERS:
            self._block = None
            self._take_block(id, bytes(block), end=first_flags & END_STREAM != 0)

    def _take_block(self, id: int, block: bytes, *, end: bool) -> None:
        """A complete header block."""
        raise NotImplementedError

    def _plain(self, id: int, block: bytes) -> bytes:
        """The block without the table. Always to be asked, to keep the table in step."""
        try:
            plain = self.decoder.plain(block)
            self._is_stateless = self.decoder.is_stateless
            return plain
        except hpack.HpackError as error:
            raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        except hpack.HeaderListTooLarge as error:
            raise StreamFailed(id, ErrorCode.ENHANCE_YOUR_CALM, str(error)) from error

    def _head(self, id: int, block: bytes) -> Fields[H]:
        """What a plain block says as the first of its stream."""
        try:
            return self.heads.read(block)
        except (hpack.HpackError, hpack.HeaderListTooLarge, Malformed) as error:
            raise _block_failed(id, error) from error

    def _take_trailers(self, stream: Stream, block: bytes) -> None:
        if stream.length is not None and stream.received != stream.length:
            message = f"content-length {stream.length}, {stream.received} came"
            raise StreamFailed(stream.id, ErrorCode.PROTOCOL_ERROR, message)
        try:
            fields = self.trailers.read(block)
        except (hpack.HpackError, hpack.HeaderListTooLarge, Malformed) as error:
            raise _block_failed(stream.id, error) from error
        self._events.append(Trailers(stream, fields))
        self._ended_remotely(stream)

    # The rest.

    def _on_priority(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        self.patience.spend()
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
        stream = self.streams.get(id)
        self._resets.remember(id, RESET_BY_PEER)
        if stream is None:
            self.patience.spend()
            return
        self._close(stream)
        code = read_u32(data, at + HEAD_BYTES)[0]
        self._events.append(Reset(stream, code, was_refused=code == ErrorCode.REFUSED_STREAM))
        if not stream.received:  # else it was a call, which may be given up
            self.patience.spend(RESET_COST)

    def _on_settings(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        length = stop - at - HEAD_BYTES
        if id != 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if length % 6 or (flags & ACK and length):
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of the wrong size")
        self.patience.spend(1 + length // 6)
        if flags & ACK:
            if self._unacknowledged:
                self._unacknowledged -= 1
                self.decoder.acknowledged()
            return
        self.has_settings = True
        before = self._peer_window
        for place in range(at + HEAD_BYTES, stop, 6):
            self.set_peer(*_SETTING.unpack_from(data, place))
        self._acknowledge(frames.SETTINGS_ACK)
        if self._peer_window != before:
            self._move_windows(self._peer_window - before)
        self._events.append(PEER_SETTINGS)

    def _move_windows(self, change: int) -> None:
        """RFC 9113, 6.9.2: a new initial window counts for the streams that are there."""
        self.patience.spend(len(self.streams) // STREAMS_PER_COST)
        for stream in list(self.streams.values()):
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1")
            if stream.queue:
                self._wants_turn(stream)

    def _on_push(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE is not accepted")

    def _on_ping(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if id != 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if stop - at - HEAD_BYTES != 8:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "PING of the wrong size")
        self.patience.spend_answer()
        if not flags & ACK:
            self._acknowledge(frames.ping_ack(data[at + HEAD_BYTES : stop]))

    def _acknowledge(self, frame: bytes) -> None:
        """For a peer that requests it and reads nothing it would be kept here, however long the list of them grows."""
        if len(self._out) >= _MOST_UNREAD:
            raise ConnectionFailed(
                ErrorCode.ENHANCE_YOUR_CALM, "too many frames request answers that are not read"
            )
        self._write(frame)

    def _on_goaway(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if id != 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        start = at + HEAD_BYTES
        if stop - start < 8:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of the wrong size")
        self.patience.spend()
        last = read_u32(data, start)[0] & MAX_STREAM_ID
        code = read_u32(data, start + 4)[0]
        self._events.append(GoAway(last, code, data[start + 8 : min(stop, start + 8 + 256)]))
        self._goaway_received(last)

    def _goaway_received(self, last_stream: int) -> None:
        """The peer takes no streams above this one."""

    def _on_window_update(self, data: bytes, at: int, stop: int, flags: int, id: int) -> None:
        if stop - at - HEAD_BYTES != 4:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of the wrong size")
        self.patience.spend_answer()
        size = read_u32(data, at + HEAD_BYTES)[0] & MAX_STREAM_ID
        if id == 0:
            if size == 0:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self.widen_connection(size)
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
            self._wants_turn(stream)

    # Streams that are in error, or over.

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
        if self._is_trusted:
            return
        if not self._resets.may_hold(id):
            raise ConnectionFailed(ErrorCode.STREAM_CLOSED, f"{what} on stream {id}, which is closed")
        if self._resets.was_by_peer(
            id
        ):  # nothing of it can have been on its way (RFC 9113, 5.1): reported once
            raise StreamFailed(id, ErrorCode.STREAM_CLOSED, f"{what} on stream {id}, after its RST_STREAM")
        if not self._resets.takes(id, size):
            self.patience.spend()

    def _stream_failed(self, error: StreamFailed) -> None:
        self._tell_heads()
        self.patience.spend(RESET_COST)
        stream = self.streams.get(error.stream)
        self._resets.remember(error.stream, 0 if stream is None else stream.receive_left)
        self._write(frames.reset(error.stream, error.code))
        if stream is not None:
            self._close(stream)
            self._events.append(Reset(stream, error.code, str(error)))


_HANDLERS: Final = (
    H2Codec._on_data,
    H2Codec._on_headers,
    H2Codec._on_priority,
    H2Codec._on_reset,
    H2Codec._on_settings,
    H2Codec._on_push,
    H2Codec._on_ping,
    H2Codec._on_goaway,
    H2Codec._on_window_update,
    H2Codec._on_continuation,
)


def _block_failed(id: int, error: Exception) -> ConnectionFailed | StreamFailed:
    if isinstance(error, hpack.HpackError):
        return ConnectionFailed(ErrorCode.COMPRESSION_ERROR, str(error))
    too_large = isinstance(error, hpack.HeaderListTooLarge)
    code = ErrorCode.ENHANCE_YOUR_CALM if too_large else ErrorCode.PROTOCOL_ERROR
    return StreamFailed(id, code, str(error))


def _unpadded(data: bytes, start: int, finish: int) -> tuple[int, int]:
    if finish == start:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without its length")
    padding = data[start]
    if padding >= finish - start:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return start + 1, finish - padding
