"""The Triton end of a gRPC client's connection: one HTTP/2 connection for one client's calls."""

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from berth.contract.endpoint import Endpoint
from berth.runtime.logs import fields
from proxy.codecs.grpc_status import Refused, Status
from proxy.codecs.h2 import frames, hpack
from proxy.codecs.h2.connection import HEADER_LIST_BYTES, MAX_FRAME, H2Connection, Stream
from proxy.codecs.h2.frames import (
    END_HEADERS,
    END_STREAM,
    HEAD_BYTES,
    MAX_STREAM_ID,
    ConnectionFailed,
    ErrorCode,
    Setting,
    pack_head,
    read_head,
)
from proxy.codecs.lookup import Lookup
from proxy.exchange.messages import PREFIX_BYTES, read_prefix
from proxy.fronts.grpc.head import USUAL_LIST_BYTES
from proxy.fronts.tcp import keep_alive

if TYPE_CHECKING:
    from proxy.fronts.grpc.client import Call, ClientConnection

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
# With the last of its ids a connection is used up; long before, a new one takes over.
_LAST_ID = MAX_STREAM_ID - 10_000


class UpstreamStream(Stream):
    """A call as Triton sees it."""

    connection: "UpstreamConnection"
    begun = False
    # Nobody wants the answer any more; the call keeps its slot until it is there.
    is_given_up = False

    def __init__(self, connection: "UpstreamConnection", id: int, call: "Call") -> None:
        # As Stream's own, without the cost of asking it.
        self.connection, self.id = connection, id
        self.send_window = connection.peer_window
        self.call = call


# What is known of header blocks that mean the same on every connection: their grpc-status.
ResponseBlocks = Lookup[bytes | None]


class MessageCounter:
    """Counts the messages that are complete in a stream of bytes."""

    __slots__ = ("_left", "_prefix")

    def __init__(self) -> None:
        self._left = 0
        self._prefix = b""

    def count(self, data: bytes, at: int, end: int) -> int:
        """How many messages are complete with `data[at:end]`."""
        size = end - at - PREFIX_BYTES
        if not self._left and not self._prefix and size >= 0 and read_prefix(data, at)[1] == size:
            return 1  # the usual case: one frame is one message
        count = 0
        while at < end:
            if not self._left:
                taken = min(PREFIX_BYTES - len(self._prefix), end - at)
                self._prefix += data[at : at + taken]
                at += taken
                if len(self._prefix) < PREFIX_BYTES:
                    break
                self._left = read_prefix(self._prefix)[1]
                self._prefix = b""
                if not self._left:
                    count += 1
                    continue
            taken = min(self._left, end - at)
            self._left -= taken
            at += taken
            count += not self._left and taken > 0
        return count


class UpstreamConnection(H2Connection):
    """Opened with its first call; gone with its client, once no call of it is left in Triton, or with Triton."""

    def __init__(self, client: "ClientConnection", endpoint: Endpoint, blocks: ResponseBlocks) -> None:
        super().__init__()
        self._client, self.endpoint, self._blocks = client, endpoint, blocks
        self.is_usable = True
        self._is_retired = False
        self.write(frames.PREFACE)
        # Frames that the client takes as they are.
        largest = min(client.peer_max_frame, MAX_FRAME)
        self.send_settings({Setting.ENABLE_PUSH: 0, Setting.MAX_FRAME_SIZE: largest})
        self._connecting = asyncio.create_task(self._connect())

    def open(self, call: "Call", block: bytes) -> UpstreamStream:
        """Send a call's headers. Raises Refused where Triton takes no more streams, or not such headers."""
        if call.head.list_bytes > self.peer_header_list:
            raise Refused(
                Status.RESOURCE_EXHAUSTED,
                f"metadata of {call.head.list_bytes} bytes; Triton takes {self.peer_header_list}",
            )
        if len(self.streams) >= self.peer_max_streams:
            raise Refused(
                Status.UNAVAILABLE, "Triton takes no more calls on this connection", retry_after="1"
            )
        # The client's own id where it can be had: then frames need no change.
        id = call.id if call.id > self.last_stream else self.last_stream + 2
        self.last_stream = id
        if id > _LAST_ID:
            self.is_usable = False
        stream = self.streams[id] = UpstreamStream(self, id, call)
        self.send_headers(stream, block, end=False)
        return stream

    def takes_whole(self, id: int, length: int) -> bool:
        """Whether a call of one DATA frame can go out as it is, under its client's id."""
        return (
            self.is_usable
            and id > self.last_stream
            and length <= self.send_window
            and length <= self.peer_window
            and length <= self.peer_max_frame
            and len(self.streams) < self.peer_max_streams
            and self.peer_header_list >= USUAL_LIST_BYTES
            and not self.tells_no_table
        )

    def open_whole(self, call: "Call", block: bytes, data: bytes, at: int, stop: int) -> UpstreamStream:
        """Send a call's headers and its one DATA frame, `data[at:stop]`; `takes_whole` has said yes."""
        id = self.last_stream = call.id
        stream = self.streams[id] = UpstreamStream(self, id, call)
        stream.local_done = True
        if id > _LAST_ID:
            self.is_usable = False
        self.send_window -= stop - at - HEAD_BYTES
        size = len(block)
        self.write(pack_head(size >> 8, size & 0xFF, frames.HEADERS, END_HEADERS, id) + block + data[at:stop])
        return stream

    def take_headers(self, data: bytes, at: int, stop: int, end: int, id: int) -> int:
        """The whole answer to a call that came in one piece: headers, one DATA frame, trailers."""
        stream: UpstreamStream | None = self.streams.get(id)
        if stream is None or stream.begun or not stream.local_done or end - stop < 2 * HEAD_BYTES:
            return 0
        call, client, blocks = stream.call, self._client, self._blocks
        high, low, kind, flags, data_id = read_head(data, stop)
        length = high << 8 | low
        tail = stop + HEAD_BYTES + length
        if kind or flags or data_id != id or call.id != id or end - tail < HEAD_BYTES:
            return 0
        high, low, kind, flags, trailers_id = read_head(data, tail)
        whole: int = tail + HEAD_BYTES + (high << 8 | low)
        if kind != frames.HEADERS or flags != END_HEADERS | END_STREAM or trailers_id != id or whole > end:
            return 0
        trailers = data[tail + HEAD_BYTES : whole]
        if data[at + HEAD_BYTES : stop] not in blocks or trailers not in blocks:
            return 0
        if call.ended or call.responded or not call.remote_done or call.inflight != 1:
            return 0
        if not self.decoder.is_stateless or client.tells_no_table:
            return 0
        if call.queue or length > client.peer_max_frame:
            return 0
        if length > call.send_window or length > client.send_window:
            return 0
        client.sent(length)
        del self.streams[id]
        self.credit_connection(length)
        client.pass_raw(data, at, whole)
        client.answered_whole(call, blocks[trailers], length)
        return whole

    def give_up(self, stream: UpstreamStream) -> None:
        """Nobody wants the answer.

        A unary call that is complete runs to its end: Triton does not stop what it has begun, so another in
        its place would be one too many, and Triton 2.51 dies (SIGSEGV in its gRPC handler, within seconds)
        of many such calls that are reset or reach their deadline. A stream has to be told, and stops.
        """
        if stream.call.head.is_stream or not stream.local_done or stream.queue:
            self.reset(stream, ErrorCode.CANCEL)
            return
        stream.is_given_up = True
        self._client.front.given_up.add(stream)
        # What waits for the client goes there or nowhere; Triton need not wait for that.
        if stream.call.queue:
            stream.call.queue = deque((*item[:3], None) for item in stream.call.queue)
        self.credit(stream, stream.window - stream.receive_left - stream.owed)

    def retire(self, reason: str) -> None:
        """The client has gone: end as soon as Triton is done with its calls."""
        self._is_retired, self.is_usable = True, False
        if self.transport is None or not self.streams:
            self.abort(reason)
        else:
            self.transport.resume_reading()
            self.flush()

    def out_of_time(self, stream: UpstreamStream) -> None:
        """Triton has had its time for a call that was given up."""
        self.reset(stream, ErrorCode.CANCEL)
        self._let_go(stream)
        self.flush()

    def _let_go(self, stream: UpstreamStream) -> None:
        """Triton is done with a call that was given up."""
        self.streams.pop(stream.id, None)
        self._client.front.given_up.discard(stream)
        self._client.give_back_slots(stream.call)
        if self._is_retired and not self.streams:
            self.abort("the client has gone")

    def _spend(self, cost: int = 1) -> None:
        """Triton is one of us, and may say what it likes as often as it likes."""

    def _stray(self, id: int, stream: Stream | None, what: str, size: int = 0) -> None:
        """Triton tells the end of a call more than once if its deadline passes: RST_STREAM and trailers,
        up to seven times. Other calls have no part in that."""
        if id == 0 or self._is_idle(id):
            super()._stray(id, stream, what, size)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                transport, _ = await loop.create_connection(
                    lambda: self, self.endpoint.host, self.endpoint.port
                )
        except (OSError, TimeoutError) as error:
            self._ended(f"Triton cannot be reached: {str(error) or 'no answer'}")
            self._client.flush()
            return
        keep_alive(transport)
        if self.closed:
            transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._client.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._client.resume_reading()

    def flush_peers(self) -> None:
        self._client.flush()

    def on_block(self, id: int, block: bytes, end: bool, data: bytes, at: int, stop: int) -> None:
        stateless = self.decoder.is_stateless
        if stateless and block in self._blocks:
            status = self._blocks[block]
        else:
            headers = self._decode(block)
            status = next((value for name, value in headers if name == b"grpc-status"), None)
            if stateless:
                self._blocks.remember(block, status)
            else:
                # It may mean something else to the client's decoder.
                block, stop = hpack.encode(headers), 0
        stream: UpstreamStream | None = self.streams.get(id)
        if stream is None or stream.remote_done:
            self._stray(id, stream, "HEADERS")
            return
        if end:
            stream.remote_done = True
        if stream.is_given_up:
            if end:
                self._let_go(stream)
            return
        call, client = stream.call, self._client
        if call.responded and not stream.begun:  # with headers of ours
            if not end:
                stream.begun = True
                return
            block, stop = _as_trailers(block), 0
        stream.begun = True
        if stop and id == call.id and not call.queue and not client.tells_no_table:
            client.pass_raw(data, at, stop)
            if end:
                client.closed_locally(call)
        else:
            client.send_headers(call, block, end=end)
        call.responded = True
        if end:
            self._answered(stream, status)

    def on_stream_data(
        self, stream: Any, data: bytes, at: int, start: int, finish: int, stop: int, end: bool
    ) -> None:
        call: Call = stream.call
        size, client = finish - start, self._client
        if stream.is_given_up:
            self.credit(stream, size)
            if end:
                self._let_go(stream)
            return
        client.front.traffic.sent_bytes += size
        finals = 0
        if call.responses is not None:
            self._decoupled_data(stream, data[start:finish])
            size = 0
        elif call.counter is not None:
            finals = call.counter.count(data, start, finish)
        plain = stop - at == size + HEAD_BYTES
        if size and stream.id == call.id and plain and not end and client.can_pass(call, size, stop - at):
            client.pass_raw(data, at, stop)
            self.credit(stream, size)
        elif size:
            client.send_data(call, data[start:finish], end=False, source=stream)
        if finals:
            client.answered_messages(call, finals)
        if end:  # a gRPC server ends with trailers
            self.on_stream_reset(stream, ErrorCode.PROTOCOL_ERROR)
            self.streams.pop(stream.id, None)

    def _decoupled_data(self, stream: UpstreamStream, payload: bytes) -> None:
        """Only the content of its answers tells which of its messages are done."""
        call = stream.call
        assert call.responses is not None
        asked = call.reader is not None and call.reader.wants_final
        shown, finals = call.responses.feed(payload, show_marks=asked)
        self.credit(stream, len(payload) - len(shown))
        if shown:
            self._client.send_data(call, shown, end=False, source=stream)
        self._client.answered_messages(call, finals)

    def on_stream_reset(self, stream: Any, code: int) -> None:
        self._broken(stream, f"Triton broke off ({_name(code)})")

    def _broken(self, stream: UpstreamStream, reason: str) -> None:
        if stream.is_given_up:
            self._let_go(stream)
        else:
            self._client.broken(stream.call, reason)

    def on_goaway(self, last_stream: int) -> None:
        self.is_usable = False
        for id in [id for id in self.streams if id > last_stream]:
            stream = self.streams.pop(id)
            self._broken(stream, "Triton is going away")

    def on_end(self, reason: str) -> None:
        self.is_usable = False
        self._connecting.cancel()
        for stream in list(self.streams.values()):
            self._broken(stream, reason)
        self._client.lost(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._client.flush()

    def fail(self, code: ErrorCode, message: str) -> None:
        log.warning("triton broke the protocol", extra=fields(code=code.name, reason=message))
        super().fail(code, message)

    def _answered(self, stream: UpstreamStream, status: bytes | None) -> None:
        call = stream.call
        if stream.local_done:
            self.streams.pop(stream.id, None)
        else:
            self.reset(stream, ErrorCode.NO_ERROR)
        call.up = None
        self._client.answered(call, status)

    def _decode(self, block: bytes) -> list[hpack.Header]:
        try:
            return self.decoder.decode(block)
        except hpack.HpackError as error:
            raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        except hpack.HeaderListTooLarge as error:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from error


def _as_trailers(block: bytes) -> bytes:
    """A block of headers and trailers in one, without what only the first block of an answer has."""
    headers = hpack.Decoder(allowed=0, list_limit=HEADER_LIST_BYTES).decode(block)
    return hpack.encode((n, v) for n, v in headers if not n.startswith(b":") and n != b"content-type")


def _name(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return str(code)
