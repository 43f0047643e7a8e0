"""A gRPC client's connection: HTTP/2 from the client, call by call to the own model.

A call's headers go to Triton together with its first message, once that has been checked and has a
slot; nobody upstream ever hears of a call that is refused.
"""

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from berth.contract.endpoint import Endpoint
from proxy.codecs import protobuf
from proxy.codecs.grpc_status import (
    OK_TRAILERS_BLOCK,
    RESPONSE_BLOCK,
    Refused,
    Status,
    trailers,
    trailers_only,
    try_again,
)
from proxy.codecs.h2 import frames, hpack
from proxy.codecs.h2.connection import H2Connection, Stream
from proxy.codecs.h2.frames import ConnectionFailed, ErrorCode, Setting, StreamFailed, read_u32
from proxy.exchange.breaker import QueueFull
from proxy.exchange.messages import (
    PREFIX_BYTES,
    MessageReader,
    Piece,
    ResponseReader,
    framed,
    read_prefix,
    stream_error,
)
from proxy.exchange.policy import Verdict
from proxy.exchange.refusal import NotServed
from proxy.fronts.grpc.head import MODEL_READY, CallHead, Malformed, require_trailers
from proxy.fronts.grpc.upstream import MessageCounter, UpstreamConnection, UpstreamStream
from proxy.fronts.tcp import keep_alive, unsent_bytes

if TYPE_CHECKING:
    from proxy.fronts.grpc.front import GrpcFront


MAX_STREAMS = 1000
# Of all clients' requests, before they are with Triton: those that come when there is so much are refused.
HELD_BYTES = 256 * 1024 * 1024
# Calls that Triton still has to run though nobody waits for them: where there is no limit, those who give up
# and ask again must not pile up work for ever.
MOST_GIVEN_UP = 256
# A connection that has not said a word of HTTP/2, or stopped in the middle of a header block.
_HANDSHAKE_SECONDS = 10.0
_IDLE_SECONDS = 3600.0
_GRPC_ONLY = b"this port takes gRPC calls: POST with content-type application/grpc\n"
_STATUS_NAMES = {b"%d" % status: status.name for status in Status}


class Call(Stream):
    """One call, as the stream of its client's connection that it came in on."""

    connection: "ClientConnection"
    # Most calls never need more than these.
    up: UpstreamStream | None = None
    reader: MessageReader | None = None
    counter: MessageCounter | None = None
    responses: ResponseReader | None = None
    outbox: deque[Piece] | None = None
    timer: asyncio.TimerHandle | None = None
    messages = inflight = held = 0
    ended = end_passed = waiting = granted_slot = responded = watches = False

    def __init__(self, connection: "ClientConnection", id: int, head: CallHead, began: float) -> None:
        # As Stream's own, without the cost of asking it.
        self.connection, self.id = connection, id
        self.send_window = connection.peer_window
        self.head, self.began = head, began
        self.deadline = began + connection.front.timeout_seconds

    def granted(self) -> None:
        """The breaker's word: the message that waits may go on."""
        self.connection.granted(self)


class ClientConnection(H2Connection):
    """One client."""

    def __init__(self, front: "GrpcFront") -> None:
        super().__init__()
        self.front = front
        self._made = self._quiet_since = time.monotonic()
        self.expect_preface()
        self._going_away = False
        # The stream of a header block that had not ended at the last tick, and the first tick that saw it.
        self._half_block, self._half_since = 0, 0.0
        self._upstreams: list[UpstreamConnection] = []
        # Ids that were left out; to come back to them is an error.
        self._skipped: deque[range] = deque(maxlen=16)

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        keep_alive(transport)
        if not self.front.clients.connected(self):
            transport.abort()  # type: ignore[attr-defined]
            self.closed = True
            return
        self.send_settings({Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS})
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """The client does not read: nothing more is taken, from Triton for it, nor from itself."""
        super().pause_writing()
        for upstream in self._upstreams:
            if upstream.transport is not None:
                upstream.transport.pause_reading()
        self.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        for upstream in self._upstreams:
            if upstream.transport is not None and not upstream.closed:
                upstream.transport.resume_reading()
        self.resume_reading()

    def pause_reading(self) -> None:
        if self.transport is not None and not self.closed:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, once nobody who takes what comes is behind."""
        if self.transport is None or self.closed or not self.writable:
            return
        if all(upstream.writable for upstream in self._upstreams):
            self.transport.resume_reading()

    def flush_peers(self) -> None:
        for upstream in self._upstreams:
            upstream.flush()

    def on_end(self, reason: str) -> None:
        # First those that wait: what the others give back is not for them.
        for call in sorted(self.streams.values(), key=lambda call: not call.waiting):
            self._finish(call, Status.CANCELLED.name)
        upstreams, self._upstreams = self._upstreams, []
        for upstream in upstreams:
            upstream.retire("the client has gone")
        self.front.clients.disconnected(self)

    def tick(self, now: float) -> None:
        """Called every second: what has waited too long ends."""
        self.calm_down()
        for call in list(self.streams.values()):
            if now <= call.deadline or self._may_rest(call):
                continue
            if call.ended:  # answered, and the client does not take the answer
                self.reset(call, ErrorCode.CANCEL)
            else:
                self.refuse(call, Refused(Status.DEADLINE_EXCEEDED, "request timeout"))
        if not self._settings_seen and now - self._made > _HANDSHAKE_SECONDS:
            self.fail(ErrorCode.SETTINGS_TIMEOUT, "no SETTINGS")
        elif self._is_stuck_in_a_block(now):
            self.fail(ErrorCode.PROTOCOL_ERROR, "a header block without its end")
        elif self.streams:
            self._quiet_since = now
        elif now - self._quiet_since > _IDLE_SECONDS or (self._going_away and not self._is_delivering):
            self.fail(ErrorCode.NO_ERROR, "idle")
        self.flush()
        self.flush_peers()

    def _is_stuck_in_a_block(self, now: float) -> bool:
        stream = self.half_block()
        if not stream or stream != self._half_block:
            self._half_block, self._half_since = stream, now
        return stream != 0 and now - self._half_since > _HANDSHAKE_SECONDS

    def go_away(self) -> None:
        """Take no more calls; the connection ends with its last."""
        if not self.closed and not self._going_away:
            self._going_away = True
            self.write(frames.goaway(self.last_stream, ErrorCode.NO_ERROR, "draining"))
            for call in [call for call in self.streams.values() if call.watches]:
                self.refuse(call, Refused(Status.UNAVAILABLE, "draining"))
            self.flush()

    @property
    def is_busy(self) -> bool:
        """A call is under way, or its answer not yet with the client."""
        if self.transport is None or self.closed:
            return False
        return any(not call.watches for call in self.streams.values()) or self._is_delivering

    @property
    def _is_delivering(self) -> bool:
        """Something that was sent is still here; at the end, when the pod goes, also with the system."""
        if self.transport is None:
            return False
        if self._going_away:
            return unsent_bytes(self.transport) > 0
        return self.transport.get_write_buffer_size() > 0

    @staticmethod
    def _may_rest(call: Call) -> bool:
        """A stream may live for as long as it likes while nothing is asked of Triton in it, nor half asked."""
        if call.ended:
            return False
        return call.watches or (
            call.head.is_stream and not call.inflight and not call.waiting and not call.held
        )

    # What a client sends.

    def on_block(self, id: int, block: bytes, end: bool, data: bytes, at: int, stop: int) -> None:
        if id <= self.last_stream:
            self._later_block(id, block, end=end)
            return
        if not id & 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"a client's stream cannot be {id}")
        if id != self.last_stream + 2 and self.last_stream:
            self._skipped.append(range(self.last_stream + 2, id))
        self.last_stream = id
        front = self.front
        head = front.heads.get(block) if self.decoder.is_stateless else None
        if head is None or front.upstream.access is not front.heads_for:
            head = self._read_head(id, block)
        if self._going_away or len(self.streams) >= MAX_STREAMS:
            raise StreamFailed(id, ErrorCode.REFUSED_STREAM, "no more streams")
        call = self.streams[id] = Call(self, id, head, time.monotonic())
        if head.refusal is not None:
            self.refuse(call, head.refusal)
        elif head.verdict is Verdict.BLOCK:
            self.refuse(
                call,
                Refused(
                    Status.PERMISSION_DENIED,
                    "this call reaches beyond the model; the proxy does not offer it",
                ),
            )
        elif head.verdict is Verdict.DENY and head.http_status is None:
            self.refuse(call, Refused(Status.UNIMPLEMENTED, f"unknown method {head.method}"))
        if end:
            call.remote_done = True
            self._input_ended(call)

    # The usual call: a ModelInfer whose headers have been seen before, and one DATA frame with its one
    # message. What these two do is what `on_block` and `on_stream_data` would, with nothing else in between.

    def take_headers(self, data: bytes, at: int, stop: int, end: int, id: int) -> int:
        front = self.front
        if id != self.last_stream + 2 or not self.decoder.is_stateless:
            return 0
        head = front.heads.get(data[at + frames.HEAD_BYTES : stop])
        if head is None or not head.is_usual or front.upstream.access is not front.heads_for:
            return 0
        if self._going_away or len(self.streams) >= MAX_STREAMS:
            return 0
        self.last_stream = id
        self.streams[id] = Call(self, id, head, time.monotonic())
        return stop

    def take_data(self, data: bytes, at: int, stop: int, id: int) -> bool:
        call: Call | None = self.streams.get(id)
        if call is None or call.received or not call.head.is_usual or not self._upstreams:
            return False
        length = stop - at - frames.HEAD_BYTES
        if length < PREFIX_BYTES or call.head.content_length not in (None, length):
            return False
        packed, size = read_prefix(data, at + frames.HEAD_BYTES)
        upstream, front = self._upstreams[-1], self.front
        if packed or size != length - PREFIX_BYTES or not upstream.takes_whole(id, length):
            return False
        if front.given_up:  # they may be too many
            return False
        message = data[at + frames.HEAD_BYTES + PREFIX_BYTES : stop]
        if protobuf.needs_closer_look(message) or not protobuf.names_model(message, front.own.field):
            return False
        if call.ended or call.remote_done or not front.breaker.enter_at_once(time.monotonic()):
            return False
        call.remote_done = call.end_passed = True
        call.messages = call.inflight = 1
        call.received = length
        call.up = upstream.open_whole(call, call.head.block, data, at, stop)
        self.patience += 2
        self.credit_connection(length)
        front.traffic.received_bytes += length
        return True

    def _read_head(self, id: int, block: bytes) -> CallHead:
        stateless = self.decoder.is_stateless
        headers = self._decode(id, block)
        try:
            head = self.front.reader.read(headers)
        except Malformed as error:
            raise StreamFailed(id, ErrorCode.PROTOCOL_ERROR, str(error)) from error
        if stateless and block[0] & 0xE0 != 0x20:
            self.front.heads.remember(block, head)
        return head

    def _decode(self, id: int, block: bytes) -> list[hpack.Header]:
        try:
            return self.decoder.decode(block)
        except hpack.HpackError as error:
            raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        except hpack.HeaderListTooLarge as error:
            raise StreamFailed(id, ErrorCode.ENHANCE_YOUR_CALM, str(error)) from error

    def _later_block(self, id: int, block: bytes, *, end: bool) -> None:
        """A client's trailers, or a block for a stream that is over."""
        headers = self._decode(id, block)
        call: Call | None = self.streams.get(id)
        if call is None and any(id in skipped for skipped in self._skipped):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"stream {id} after stream {self.last_stream}")
        if call is None or call.remote_done:
            self._stray(id, call, "HEADERS")
            return
        if not end:
            raise StreamFailed(
                id, ErrorCode.PROTOCOL_ERROR, "a second header block that does not end the stream"
            )
        try:
            require_trailers(headers)
        except Malformed as error:
            raise StreamFailed(id, ErrorCode.PROTOCOL_ERROR, str(error)) from error
        call.remote_done = True
        self._input_ended(call)

    def on_stream_data(
        self, call: Any, data: bytes, at: int, start: int, finish: int, stop: int, end: bool
    ) -> None:
        size, head = finish - start, call.head
        call.received += size
        if head.content_length is not None:
            self._check_length(call, end=end)
        self.front.traffic.received_bytes += size
        if call.ended:
            self.credit(call, size)
        elif call.reader is not None and not call.outbox and not end and call.reader.skim(size):
            self._pass_on(call, data, at, start, finish, stop)
        elif (
            size >= PREFIX_BYTES
            and data[start] == 0
            and read_u32(data, start + 1)[0] == size - PREFIX_BYTES
            and head.verdict is Verdict.ALLOW
            and (call.reader is None or call.reader.is_between_messages)
            and not call.outbox
            and not (head.is_stream and self.front.upstream.facts.is_decoupled)
            and (head.is_stream or not call.messages)
        ):
            self._take_whole(call, data, at, start, finish, stop, end=end)
        elif size:
            self._take_part(call, data[start:finish])
        if end and not call.end_passed:
            self._input_ended(call)

    def _check_length(self, call: Call, *, end: bool) -> None:
        length = call.head.content_length
        if length is not None and (call.received > length or (end and call.received != length)):
            raise StreamFailed(
                call.id, ErrorCode.PROTOCOL_ERROR, f"content-length {length}, {call.received} came"
            )

    def _take_whole(
        self, call: Call, data: bytes, at: int, start: int, finish: int, stop: int, *, end: bool
    ) -> None:
        """The usual case: one frame is one message."""
        size, message = finish - start, data[start + PREFIX_BYTES : finish]
        try:
            checked = call.head.guard.whole(message)
            call.messages += 1
            waits = call.head.is_counted and not self._enter(call)
        except Refused as refusal:
            self.credit(call, size)
            self._refuse_message(call, refusal)
            return
        except QueueFull as full:
            self.credit(call, size)
            self._refuse_message(call, try_again(str(full), request_id=protobuf.request_id(message)))
            return
        if waits or checked is not message:
            self.credit(call, size - PREFIX_BYTES - len(checked))
            self._hold(call, PREFIX_BYTES + len(checked))
            call.outbox = deque([Piece(framed(checked), begins=True)])
            if not waits:
                self._pump_out(call)
            self._hold_no_more_than_may_be(call)
            return
        try:
            up = call.up or self._open(call)
        except Refused as refusal:
            self.refuse(call, refusal)  # the whole call, with its slot
            return
        connection = up.connection
        call.end_passed = end
        plain = finish == stop and start == at + frames.HEAD_BYTES
        if up.id == call.id and plain and connection.can_pass(up, size, stop - at):
            connection.pass_raw(data, at, stop)
            self.credit(call, size)
            if end:
                connection.closed_locally(up)
        else:
            self._hold(call, size)
            connection.send_data(up, data[start:finish], end=end, source=call)

    def _pass_on(self, call: Call, data: bytes, at: int, start: int, finish: int, stop: int) -> None:
        """The middle of a long tensor."""
        up = call.up
        assert up is not None, "its first piece has gone on"
        connection, size = up.connection, finish - start
        plain = finish == stop and start == at + frames.HEAD_BYTES
        if up.id == call.id and plain and connection.can_pass(up, size, stop - at):
            connection.pass_raw(data, at, stop)
            self.credit(call, size)
        else:
            self._hold(call, size)
            connection.send_data(up, data[start:finish], end=False, source=call)

    def _take_part(self, call: Call, payload: bytes) -> None:
        """The other cases: messages cut anyhow, long ones, packed ones, those that are answered here."""
        head = call.head
        if head.verdict is Verdict.DENY:  # no gRPC call at all: answered at its end
            self.credit(call, len(payload))
            return
        reader = call.reader
        if reader is None:
            ask = head.is_stream and self.front.upstream.facts.is_decoupled
            reader = call.reader = MessageReader(
                head.guard, encoding=head.encoding, inflate_limit=self.front.inflate_limit, ask_final=ask
            )
        gathered = reader.gathered
        try:
            items = reader.feed(payload)
        except Refused as refusal:
            self.credit(call, len(payload))
            self.refuse(call, refusal)
            return
        if call.outbox is None:
            call.outbox = deque()
        going_on = 0
        for item in items:
            if call.ended:
                break
            if isinstance(item, Refused):
                self._refuse_message(call, item)
            elif item.begins and call.messages and not head.is_stream:
                self.refuse(call, Refused(Status.INVALID_ARGUMENT, "a unary call takes one message"))
            else:
                call.messages += item.begins
                if head.verdict is Verdict.ALLOW:
                    call.outbox.append(item)
                    going_on += len(item.data)
                else:
                    self.front.answer(call, item.data[PREFIX_BYTES:])
        self.credit(call, len(payload) - going_on)
        self._hold(call, reader.gathered - gathered + going_on)
        self._pump_out(call)
        self._hold_no_more_than_may_be(call)

    def _hold(self, call: Call, size: int) -> None:
        """So many bytes of a call more (or less) are here: gathered, waiting for a slot, or for Triton."""
        if call.ended:
            return
        if not call.held and call.head.is_stream:  # it may no longer rest
            call.deadline = time.monotonic() + self.front.timeout_seconds
        call.held += size
        self.front.held_bytes += size

    def _hold_no_more_than_may_be(self, call: Call) -> None:
        if call.held and self.front.held_bytes > HELD_BYTES:
            self.refuse(call, try_again(f"{HELD_BYTES} bytes of other requests are waiting here already"))

    def gone_on(self, stream: Any, size: int) -> None:
        super().gone_on(stream, size)
        self._hold(stream, -size)

    def _pump_out(self, call: Call) -> None:
        """Pass on what has been checked, as far as there are slots for it."""
        outbox = call.outbox
        while outbox and not call.ended:
            piece = outbox[0]
            try:
                if piece.begins and call.head.is_counted and not call.granted_slot and not self._enter(call):
                    return
                call.granted_slot = False
                up = call.up or self._open(call)
            except Refused as refusal:
                self.refuse(call, refusal)
                return
            except QueueFull as full:
                if not call.head.is_stream:
                    self.refuse(call, try_again(str(full)))
                    return
                self._drop_message(call)
                self._refuse_message(call, try_again(str(full)))
                continue
            outbox.popleft()
            up.connection.send_data(up, piece.data, end=False, source=call)
        if call.remote_done and not call.ended and not outbox:
            self._input_ended(call)

    def _drop_message(self, call: Call) -> None:
        """Take out the first message of the outbox. Of the last one more may be to come."""
        outbox = call.outbox
        assert outbox
        self.gone_on(call, len(outbox.popleft().data))
        while outbox and not outbox[0].begins:
            self.gone_on(call, len(outbox.popleft().data))
        if not outbox and call.reader is not None:
            call.reader.drop()

    def _enter(self, call: Call) -> bool:
        """Ask the breaker for a message's slot. Raises QueueFull, or Refused."""
        if call.waiting:
            return False
        if len(self.front.given_up) >= MOST_GIVEN_UP:
            raise try_again(f"{MOST_GIVEN_UP} calls that were given up still run in Triton")
        now = time.monotonic()
        if self.front.breaker.enter(call, now):
            call.inflight += 1
            if call.head.is_stream:
                call.deadline = now + self.front.timeout_seconds
            return True
        call.waiting = True
        self._watch_deadline(call, now)
        return False

    def _watch_deadline(self, call: Call, now: float) -> None:
        timeout = call.head.timeout_seconds
        if timeout is not None and call.timer is None:
            left = max(0.0, call.began + timeout - now)
            call.timer = asyncio.get_running_loop().call_later(left, self._too_late, call)

    def granted(self, call: Call) -> None:
        call.waiting, call.granted_slot = False, True
        call.inflight += 1
        self._pump_out(call)
        self.flush()
        self.flush_peers()

    def _too_late(self, call: Call) -> None:
        if not call.ended:
            where = "in the queue" if call.waiting else "before the answer was there"
            self.refuse(call, Refused(Status.DEADLINE_EXCEEDED, f"the deadline passed {where}"))
            self.flush()
            self.flush_peers()

    def _input_ended(self, call: Call) -> None:
        """The client will send no more on this stream."""
        if call.ended:
            if call.local_done:
                self.streams.pop(call.id, None)
            return
        head = call.head
        if head.http_status is not None:
            answer = [(b":status", head.http_status), (b"content-type", b"text/plain")]
            self.send_headers(call, hpack.encode(answer), end=False)
            self.send_data(call, _GRPC_ONLY, end=True)
            self._finish(call, f"HTTP_{head.http_status.decode()}")
        elif call.reader is not None and not call.reader.is_between_messages:
            self.refuse(call, Refused(Status.INVALID_ARGUMENT, "the stream ended inside a message"))
        elif call.end_passed:
            return
        elif not head.is_stream and not call.messages:
            self.refuse(call, Refused(Status.INVALID_ARGUMENT, "a unary call needs one message"))
        elif head.verdict is Verdict.ALLOW and not call.outbox:
            try:
                up = call.up or self._open(call)
            except Refused as refusal:
                self.refuse(call, refusal)
                return
            call.end_passed = True
            up.connection.send_data(up, b"", end=True)

    # Towards Triton.

    def _open(self, call: Call) -> UpstreamStream:
        """Begin the call at Triton. Raises Refused."""
        front, head = self.front, call.head
        if head.method == MODEL_READY and front.not_ready() is not None:
            raise Refused(Status.NOT_FOUND, "not ready")  # told as ready: false
        block = head.block
        if not head.is_stream:
            # Triton is not told: it would go on computing, and it dies of calls that end under its hands.
            block = head.untimed_block
            self._watch_deadline(call, time.monotonic())
        elif head.timeout_seconds is not None and call.timer is not None:
            call.timer.cancel()
            block = head.block_with_timeout(call.began + head.timeout_seconds - time.monotonic())
        connection = self._upstream()
        call.up = connection.open(call, block)
        if head.is_stream:
            if front.upstream.facts.is_decoupled:
                call.responses = ResponseReader()
            else:
                call.counter = MessageCounter()
        return call.up

    def _upstream(self) -> UpstreamConnection:
        if self._upstreams and self._upstreams[-1].is_usable:
            return self._upstreams[-1]
        try:
            access = self.front.upstream.require()
        except NotServed as error:
            raise try_again(str(error)) from error
        upstream = UpstreamConnection(self, access.grpc, self.front.response_blocks)
        self._upstreams.append(upstream)
        return upstream

    def triton_is_at(self, endpoint: Endpoint) -> None:
        """Calls that come now go there."""
        for upstream in self._upstreams:
            if upstream.endpoint != endpoint:
                upstream.is_usable = False

    def lost(self, upstream: UpstreamConnection) -> None:
        if upstream in self._upstreams:
            self._upstreams.remove(upstream)
        self.resume_reading()

    # Towards the client.

    def answered(self, call: Call, status: bytes | None) -> None:
        """Triton's trailers are on their way to the client."""
        if not call.ended:
            self._finish(call, _STATUS_NAMES.get(status or b"", Status.UNKNOWN.name))
        self._close_input(call)

    def answered_whole(self, call: Call, status: bytes | None, size: int) -> None:
        """The whole answer to a call that came in one piece is on its way to the client."""
        front, now = self.front, time.monotonic()
        call.ended = call.responded = call.local_done = True
        call.up = None
        call.inflight = 0
        if call.timer is not None:
            call.timer.cancel()
        del self.streams[call.id]
        front.traffic.sent_bytes += size
        front.traffic.answered(_STATUS_NAMES.get(status or b"", Status.UNKNOWN.name), now - call.began)
        front.breaker.leave(now)

    def answered_messages(self, call: Call, count: int) -> None:
        """So many messages of a stream are answered for good."""
        now = time.monotonic()
        for _ in range(min(count, call.inflight)):
            call.inflight -= 1
            self.front.breaker.leave(now)
        if count:
            call.deadline = now + self.front.timeout_seconds

    def broken(self, call: Call, reason: str) -> None:
        """Triton's end of the call is gone without an answer."""
        call.up = None
        self.refuse(call, try_again(reason))

    def respond(self, call: Call, message: bytes) -> None:
        """Answer a unary call here."""
        if call.ended:
            return
        self._respond_part(call, framed(message))
        self.send_headers(call, OK_TRAILERS_BLOCK, end=True)
        self._finish(call, Status.OK.name)
        self._close_input(call)

    def _respond_part(self, call: Call, data: bytes) -> None:
        if not call.responded:
            call.responded = True
            self.send_headers(call, RESPONSE_BLOCK, end=False)
        self.send_data(call, data, end=False)

    def tell_health(self, call: Call, status: bytes) -> None:
        """One more message of a Watch."""
        self._respond_part(call, framed(status))
        self.flush()

    def refuse(self, call: Call, refusal: Refused) -> None:
        """End a call with a status of our own."""
        if call.ended:
            return
        if call.head.method == MODEL_READY and refusal.status is Status.NOT_FOUND:
            self.respond(call, b"")  # ready: false, which is what Triton says of models it does not have
            return
        if call.responded:
            self.send_headers(call, hpack.encode(trailers(refusal)), end=True)
        else:
            self.send_headers(call, trailers_only(refusal), end=True)
        self._finish(call, refusal.status.name)
        self._close_input(call)

    def _refuse_message(self, call: Call, refusal: Refused) -> None:
        """In a stream the refusal of one message is a message, unless the client wants a status.

        Triton 2.51 tells of a model that it does not have in a message either way.
        """
        as_status = call.head.errors_as_status and refusal.status is not Status.NOT_FOUND
        if not call.head.is_stream or as_status:
            self.refuse(call, refusal)
        elif not call.ended:
            self._respond_part(call, stream_error(str(refusal), refusal.request_id))

    def _close_input(self, call: Call) -> None:
        """The answer is complete: what the client may still send is of no use."""
        if call.local_done and not call.remote_done:
            self.reset(call, ErrorCode.NO_ERROR)

    def on_stream_reset(self, call: Any, code: int) -> None:
        self._finish(call, Status.CANCELLED.name)

    def _finish(self, call: Call, code: str) -> None:
        """Once for each call: nothing of it is left in the queue, and it is counted.

        A call that Triton may have begun keeps its slot until Triton is done with it.
        """
        if call.ended:
            return
        call.ended = True
        front, now = self.front, time.monotonic()
        up, call.up = call.up, None
        if up is not None:
            up.connection.give_up(up)
        if call.waiting:
            call.waiting = False
            front.breaker.cancel(call, now)
        if call.timer is not None:
            call.timer.cancel()
        if call.outbox:
            call.outbox.clear()
        front.held_bytes -= call.held
        call.held = 0
        if call.watches:
            front.watchers.discard(call)
        if up is None or not up.is_given_up:
            self.give_back_slots(call)
        front.traffic.answered(code, now - call.began)

    def give_back_slots(self, call: Call) -> None:
        """Nothing of the call is left in Triton."""
        inflight, call.inflight = call.inflight, 0
        for _ in range(inflight):
            self.front.breaker.leave(time.monotonic())
