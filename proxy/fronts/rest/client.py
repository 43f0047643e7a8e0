"""A REST client's connection: HTTP/1.1, request by request to the own model.

JSON is held until it has been checked; the tensors behind it stream through unread, in both
directions no faster than the slower side takes them.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

from berth.contract.quantity import format_bytes
from berth.runtime.logs import fields
from proxy.codecs.http1 import (
    CONTINUE,
    HEAD_BYTES,
    HEAD_END,
    HEADER_LENGTH,
    BadRequest,
    HttpRefused,
    RequestChunks,
    RequestHead,
    ResponseHead,
    read_request,
    require_hopeful,
    write_lengths,
    write_response,
)
from proxy.codecs.json_guard import BadJson, asks_for_ready_only, check_generate, check_infer
from proxy.codecs.packing import CODINGS, BadPacking, UnpacksTooLarge, unpack
from proxy.exchange.breaker import QueueFull
from proxy.exchange.policy import COUNTED, Route, Verdict
from proxy.fronts.rest.upstream import UpstreamHttp
from proxy.fronts.tcp import keep_alive, unsent_bytes
from proxy.upstream import Access, NotServed

if TYPE_CHECKING:
    from proxy.fronts.rest.front import RestFront

log = logging.getLogger(__name__)

_RETRY = {"Retry-After": "1"}
_HEAD_SECONDS, _IDLE_SECONDS, _LINGER_SECONDS = 10.0, 300.0, 2.0
# At the end, a client that has just connected or been answered may have its next request on its way already.
_NEXT_SECONDS = 1.0
# A client that takes nothing of its last answer for so long gets no more of it.
_STALLED_SECONDS = 60.0
# What a client may have sent ahead while its last request is still under way.
_PIPELINE_BYTES = 256 * 1024
# A body with tensors is gathered up to this size before it asks for a slot: who sends it slowly keeps nobody waiting.
_GATHERED_BYTES = 256 * 1024
# A body that nobody wants is read to its end up to this size, to keep the connection.
_SWALLOW_BYTES = 64 * 1024
_WRITE_HIGH = 256 * 1024
# nginx's code for a client that did not wait for its answer.
_CLIENT_LEFT = "499"


class _State(Enum):
    HEAD = auto()  # between requests, or in the middle of a head
    HOLD = auto()  # the part of a body that must be checked is coming
    WAIT = auto()  # for a slot, or for Triton's connection
    STREAM = auto()  # the rest of the body is passed on
    ANSWER = auto()  # the request is complete, its answer is not
    SWALLOW = auto()  # it has been answered; the rest of its body goes nowhere
    LINGER = auto()  # the last answer has been written; only the client's end is waited for
    ENDED = auto()


class RestConnection(asyncio.Protocol):
    """One client."""

    def __init__(self, front: "RestFront") -> None:
        self._front = front
        self._transport: asyncio.Transport | None = None
        self._state = _State.HEAD
        # What has come and cannot be looked at yet.
        self._input = b""
        self._since = time.monotonic()
        # When the head that is coming must be there; 0 while none has begun.
        self._head_deadline = 0.0
        self._head: RequestHead | None = None
        self._raw = b""
        self._held: list[bytes] = []
        self._hold_left = 0
        # Of the front end's `held_bytes`: what was taken in of this request and has not gone on to Triton.
        self._holding = 0
        self._body_left = 0
        self._chunks: RequestChunks | None = None
        self._request = b""
        self._upstream: UpstreamHttp | None = None
        self._has_slot = self._waits = self._closes = self._at_eof = False
        self._begun: ResponseHead | None = None
        self._deadline = 0.0
        self._writable, self._paused = True, False
        self._task: asyncio.Task[None] | None = None
        # What of the last answer has not reached the client, when it was looked at last.
        self._unsent = 0

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH)
        keep_alive(transport)
        if not self._front.clients.connected(self):
            self._transport.abort()
            self._state = _State.ENDED

    def connection_lost(self, exc: Exception | None) -> None:
        was, self._state = self._state, _State.ENDED
        self._input = b""
        self._drop_held()
        if self._task is not None:
            self._task.cancel()
        if was not in (_State.HEAD, _State.SWALLOW, _State.LINGER, _State.ENDED):
            self._client_left()
        self._front.clients.disconnected(self)

    def eof_received(self) -> bool:
        """A client that has said all it wants to may still wait for its answers; whatever is half said ends."""
        self._at_eof = True
        self._end_what_is_half_said()
        return self._state in (_State.HEAD, _State.WAIT, _State.ANSWER, _State.LINGER)

    def _end_what_is_half_said(self) -> None:
        """After the client's end: the rest of what has begun will never come."""
        if self._state is _State.HEAD:
            if (
                not self._input or self._head_deadline
            ):  # else whole requests: they wait for answers to be taken
                self._linger()
        elif self._state in (_State.HOLD, _State.STREAM, _State.SWALLOW) and self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        self._writable = False
        if self._upstream is not None and self._upstream.transport is not None:
            self._upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        self._writable = True
        if self._upstream is not None and self._upstream.transport is not None:
            self._upstream.transport.resume_reading()
        if self._state is _State.HEAD:
            self._read_on()

    def upstream_writable(self) -> None:
        self._regulate()

    def _takes_more(self) -> bool:
        """Whether what the client sends next can go somewhere."""
        if self._state is _State.STREAM:
            return self._upstream is not None and self._upstream.is_writable
        if self._state is _State.HEAD:
            return self._writable  # each request has an answer, which must go somewhere too
        return len(self._input) <= _PIPELINE_BYTES

    def _regulate(self) -> None:
        """Read from the client, or do not."""
        if self._transport is None or self._state is _State.ENDED or self._paused is not self._takes_more():
            return
        self._paused = not self._paused
        if self._paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # What a client sends.

    def data_received(self, data: bytes) -> None:
        if self._input:
            data = self._input + data
            self._input = b""
        elif self._state is _State.HEAD and self._take_usual(data):
            return
        try:
            self._take(data)
        except BadRequest as error:
            self._closes = True
            if self._state is _State.SWALLOW:  # it has had its answer
                self._linger()
            else:
                self._answer_error(error.status, str(error))

    def _take_usual(self, data: bytes) -> bool:
        """A request whose head has been seen before, with its whole JSON, for a Triton that waits.

        What this does is what the steps below would. False, with nothing done, for anything else.
        """
        front = self._front
        end = data.find(HEAD_END) + len(HEAD_END)
        usual = front.usual.get(data[:end])
        if usual is None or len(data) - end != usual.length or front.upstream.access is not front.heads_for:
            return False
        body = data[end:]
        if front.is_draining or not front.pool.has_idle or not self._writable:
            return False
        try:
            body = check_infer(body, front.upstream.facts) if usual.is_infer else check_generate(body)
        except BadJson:
            return False  # to be told of below
        now = time.monotonic()
        if not front.breaker.enter_at_once(now):
            return False
        self._head, self._begun, self._closes = usual.head, None, False
        self._since, self._deadline = now, now + front.timeout_seconds
        self._has_slot, self._state = True, _State.ANSWER
        front.traffic.received_bytes += usual.length
        upstream = self._upstream = front.pool.take_idle(self)
        upstream.request_done = True
        upstream.write(b"%bContent-Length: %d\r\n\r\n%b" % (usual.start, len(body), body))
        return True

    def _take(self, data: bytes) -> None:
        while data:
            state = self._state
            if state is _State.HEAD and self._writable:
                data = self._take_head(data)
            elif state is _State.HOLD:
                data = self._take_held(data)
            elif state is _State.STREAM:
                data = self._take_streamed(data)
            elif state is _State.SWALLOW:
                data = self._take_unwanted(data)
            elif state in (_State.LINGER, _State.ENDED):
                return
            else:
                self._keep(data)
                return

    def _keep(self, data: bytes) -> None:
        """For later: a body that waits for its slot, or the next request."""
        self._input = data
        self._regulate()

    def _take_head(self, data: bytes) -> bytes:
        if data.startswith(b"\r\n"):  # RFC 9112, 2.2
            data = data[2:]
            if not data:
                self._head_deadline = 0.0
                return b""
        end = data.find(HEAD_END) + len(HEAD_END)
        if end < len(HEAD_END):
            if len(data) > HEAD_BYTES:
                raise BadRequest(f"a head of more than {HEAD_BYTES} bytes", 431)
            require_hopeful(data)
            if not self._head_deadline:
                self._head_deadline = time.monotonic() + _HEAD_SECONDS
            self._input = data
            return b""
        self._head_deadline = 0.0
        raw = self._raw = data[:end]
        head = self._front.heads.get(raw)
        if head is None:
            head = read_request(raw)
            self._front.heads.remember(raw, head)
        self._begin(head)
        return data[end:]

    def _begin(self, head: RequestHead) -> None:
        self._head, self._begun = head, None
        self._since = now = time.monotonic()
        self._deadline = now + self._front.timeout_seconds
        self._closes = not head.keeps_alive or self._front.is_draining
        self._body_left = head.length or 0
        self._chunks = RequestChunks() if head.is_chunked else None
        try:
            self._hold_left = self._bytes_to_hold(head)
        except HttpRefused as refusal:
            self._refuse(refusal)
            return
        if head.expects_continue and (self._body_left or self._chunks) and self._transport is not None:
            self._transport.write(CONTINUE)
        self._state = _State.HOLD
        if not self._hold_left and self._chunks is None:
            self._held_all()

    def _bytes_to_hold(self, head: RequestHead) -> int:
        """How much of the body must be here before any of it goes on. Raises HttpRefused."""
        front, decision = self._front, head.decision
        route = decision.route
        self._front.require_route(head)
        length = head.length or 0
        if head.header_length is not None and route is not Route.INFER:
            raise HttpRefused(400, f"{HEADER_LENGTH} belongs to infer")
        if head.encoding not in ("identity", *CODINGS):
            raise HttpRefused(415, f"Content-Encoding {head.encoding!r}; gzip and deflate are taken")
        if head.header_length is None or head.is_chunked or head.encoding != "identity":
            if length > front.max_json_bytes:
                raise self._too_large()
            return length
        if head.header_length > length:
            raise HttpRefused(400, f"{HEADER_LENGTH} is above Content-Length")
        if head.header_length > front.max_json_bytes:
            raise self._too_large()
        return length if length <= _GATHERED_BYTES else head.header_length

    def _take_held(self, data: bytes) -> bytes:
        if self._chunks is not None:
            return self._take_chunks(data)
        piece, rest = (
            (data, b"")
            if len(data) <= self._hold_left
            else (data[: self._hold_left], data[self._hold_left :])
        )
        if not self._hold(piece):
            return b""
        self._hold_left -= len(piece)
        self._body_left -= len(piece)
        self._front.traffic.received_bytes += len(piece)
        if not self._hold_left:
            self._held_all()
        return rest

    def _take_chunks(self, data: bytes) -> bytes:
        assert self._chunks is not None
        body, size = self._chunks.feed(data)
        self._hold_left += len(body)
        self._front.traffic.received_bytes += len(body)
        if self._hold_left > self._front.max_json_bytes:
            self._closes = True
            self._refuse(self._too_large())
            return b""
        if not self._hold(body):
            return b""
        if self._chunks.is_done:
            self._chunks = None
            self._held_all()
        return data[size:]

    def _hold(self, piece: bytes) -> bool:
        """Keep a piece of a body to be checked; False where all clients together hold too much, which is told."""
        front = self._front
        if front.held_bytes + len(piece) > front.max_held_bytes:
            self._closes = True
            self._refuse(HttpRefused(503, "too many bodies are on their way at once", _RETRY))
            return False
        self._held.append(piece)
        self._holding += len(piece)
        front.held_bytes += len(piece)
        return True

    def _drop_held(self) -> None:
        self._held.clear()
        self._request = b""
        self._front.held_bytes -= self._holding
        self._holding = 0

    def _take_streamed(self, data: bytes) -> bytes:
        assert self._upstream is not None
        piece, rest = (
            (data, b"")
            if len(data) <= self._body_left
            else (data[: self._body_left], data[self._body_left :])
        )
        self._body_left -= len(piece)
        self._front.traffic.received_bytes += len(piece)
        if not self._body_left:
            self._state = _State.ANSWER
            self._upstream.request_done = True
        self._upstream.write(piece)
        return rest

    def _take_unwanted(self, data: bytes) -> bytes:
        if self._chunks is not None:
            _, size = self._chunks.feed(data)
            if self._chunks.is_done:
                self._chunks = None
        else:
            size = min(len(data), self._body_left)
            self._body_left -= size
        if self._chunks is None and not self._body_left:
            self._next_request()
        return data[size:]

    # From a checked request to Triton.

    def _held_all(self) -> None:
        """What had to be held is there."""
        head, self._state = self._head, _State.WAIT
        assert head is not None
        held = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        try:
            self._proceed(head, held)
        except (BadJson, HttpRefused, QueueFull, NotServed) as error:
            self._refuse(_refusal(error))

    def _proceed(self, head: RequestHead, held: bytes) -> None:
        front, decision = self._front, head.decision
        if decision.verdict is not Verdict.ALLOW:
            self._answer_locally(head, held)
            return
        access = front.upstream.require()
        start = front.request_start(head, access)
        if front.takes_body(decision.route):
            self._request = start + self._checked(head, held)
            front.remember_usual(self._raw, head, start)
        else:
            self._request = start + b"\r\n"
        if decision.route in COUNTED:
            if not front.breaker.enter(self, time.monotonic()):
                self._waits = True
                return
            self._has_slot = True
        self._connect(access)

    def _checked(self, head: RequestHead, held: bytes) -> bytes:
        """The end of the head and the body, as far as it was held. Raises BadJson or HttpRefused."""
        if head.encoding != "identity":
            held = _inflated(held, head.encoding, self._front.max_json_bytes)
        if head.decision.route is not Route.INFER:
            body = check_generate(held)
            return write_lengths(len(body), None) + body
        text, tensors = held, b""
        if head.header_length is not None:
            if head.header_length > len(held):
                raise HttpRefused(400, f"{HEADER_LENGTH} is above the body's length")
            text, tensors = held[: head.header_length], held[head.header_length :]
        binary = len(tensors) + self._body_left
        body = check_infer(text, self._front.upstream.facts, binary_bytes=binary)
        header_length = None if head.header_length is None else len(body)
        return write_lengths(len(body) + binary, header_length) + body + tensors

    def granted(self) -> None:
        """The breaker's word: the slot is there."""
        self._waits, self._has_slot = False, True
        try:
            self._connect(self._front.upstream.require())
        except NotServed as error:
            self._refuse(_refusal(error))

    def _connect(self, access: Access) -> None:
        upstream = self._front.pool.take(access.http, self)
        if upstream is not None:
            self.connected(upstream)

    def connected(self, upstream: UpstreamHttp) -> None:
        if self._state is not _State.WAIT:  # the client has gone, or was told that it took too long
            upstream.abort()
            return
        self._upstream = upstream
        request = self._request
        self._drop_held()
        upstream.request_done = not self._body_left
        self._state = _State.STREAM if self._body_left else _State.ANSWER
        if not self._writable and upstream.transport is not None:
            upstream.transport.pause_reading()
        upstream.write(request)
        self._read_on()

    def _read_on(self) -> None:
        """Look at what has come meanwhile."""
        data, self._input = self._input, b""
        if data:
            self.data_received(data)
        if self._at_eof:
            self._end_what_is_half_said()
        self._regulate()

    # The answer.

    def response_begun(self, head: ResponseHead, body: bytes, raw: bytes | None) -> None:
        self._begun = head
        transport = self._transport
        if transport is None or self._state is _State.ENDED:
            return
        request = self._head
        assert request is not None
        self._front.traffic.sent_bytes += len(body)
        # Answered early: the rest of the request has no reader.
        if self._state is _State.STREAM or self._front.is_draining or self._is_last:
            self._closes = True
        self._closes = self._closes or not head.keeps_alive
        if raw is not None and not self._closes and not request.is_head:
            transport.write(raw)
            return
        start = head.whole(closes=self._closes, chunked=request.is_http11)
        transport.write(start if request.is_head else start + body)

    def response_data(self, data: bytes) -> None:
        if self._state is _State.ENDED or self._transport is None:
            return
        assert self._head is not None
        if self._head.decision.route is Route.GENERATE_STREAM:
            self._deadline = time.monotonic() + self._front.timeout_seconds
        if not self._head.is_head:
            self._front.traffic.sent_bytes += len(data)
            self._transport.write(data)

    def response_ended(self) -> None:
        upstream, self._upstream = self._upstream, None
        if not self._writable and upstream is not None and upstream.transport is not None:
            upstream.transport.resume_reading()
        begun = self._begun
        if self._state is _State.ENDED:
            self._end_abandoned()
            return
        self._finish("502" if begun is None else begun.code)
        self._after_answer()

    def response_lost(self, reason: str) -> None:
        self._upstream = None
        if self._state is _State.ENDED:
            self._end_abandoned()
        elif self._begun is None:
            self._refuse(HttpRefused(503, reason, _RETRY))
        else:
            # A second head would be read as a part of the body: the client learns by the cut.
            log.info("answer broke off", extra=fields(reason=reason))
            self._cut("502")

    def _end_abandoned(self) -> None:
        """Triton is done with a request whose client has gone."""
        if self in self._front.abandoned:
            self._front.abandoned.discard(self)
            self._finish(_CLIENT_LEFT)

    def _cut(self, code: str) -> None:
        self._detach()
        self._finish(code)
        self._state = _State.LINGER
        self.abort()

    def _after_answer(self) -> None:
        """The answer has been written: go on with this connection, or not."""
        if self._state is _State.ENDED:
            return
        if self._closes or self._is_last:
            self._linger()
        elif self._body_left or self._chunks is not None:
            self._state = _State.SWALLOW
            self._read_on()
        else:
            self._next_request()
            self._read_on_if_any()

    @property
    def _is_last(self) -> bool:
        """The client will say nothing more."""
        return self._at_eof and not self._input

    def _next_request(self) -> None:
        self._state, self._head = _State.HEAD, None
        self._since = time.monotonic()

    def _read_on_if_any(self) -> None:
        if self._input and self._writable:
            # Not from here: a client that pipelines a thousand requests must not nest a thousand calls.
            asyncio.get_running_loop().call_soon(self._read_on)

    def _linger(self) -> None:
        """Close for writing, and read a little longer: a reset would take the answer away."""
        self._state, self._since, self._input = _State.LINGER, time.monotonic(), b""
        if self._transport is None:
            return
        unread = self._body_left or self._chunks is not None or self._head is None
        if self._at_eof or not unread or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._regulate()

    def _refuse(self, refusal: HttpRefused) -> None:
        if self._body_left > _SWALLOW_BYTES or self._chunks is not None:
            self._closes = True
        self._answer_error(refusal.status, str(refusal), refusal.headers)

    def _answer_error(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        """In Triton's form of an error."""
        body = json.dumps({"error": message}, separators=(",", ":")).encode() if message else b""
        self._answer(status, body, headers)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Answer here, and release whatever the request holds."""
        if self._state in (_State.ENDED, _State.LINGER):
            return
        self._detach()
        if self._task is not None:
            self._task.cancel()
        self._drop_held()
        self._closes = self._closes or self._is_last
        self._finish(str(status))
        is_head = self._head is not None and self._head.is_head
        head, body = write_response(status, body, headers=headers or {}, close=self._closes)
        if self._transport is not None:
            self._transport.write(head if is_head else head + body)
        self._after_answer()

    def _finish(self, code: str) -> None:
        """Once for each request: count it and give its slot back."""
        front, now = self._front, time.monotonic()
        if self._waits:
            self._waits = False
            front.breaker.cancel(self, now)
        if self._has_slot:
            self._has_slot = False
            front.breaker.leave(now)
        front.traffic.answered(code, now - self._since)

    def _detach(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()

    def _client_left(self) -> None:
        """Triton cannot be told, and goes on computing: the slot is kept until it is done.

        Not so for a request that is not complete, which Triton never begins, nor for a stream of
        events, which ends with its connection.
        """
        upstream, head = self._upstream, self._head
        streams = head is not None and head.decision.route is Route.GENERATE_STREAM
        if upstream is not None and upstream.request_done and self._has_slot and not streams:
            if upstream.transport is not None:
                upstream.transport.resume_reading()
            self._front.abandoned.add(self)
            return
        self._detach()
        self._finish(_CLIENT_LEFT)

    # Answers of our own.

    def _answer_locally(self, head: RequestHead, held: bytes) -> None:
        front, route = self._front, head.decision.route
        if route is Route.LIVE:
            self._answer(200, b"")
        elif route is Route.READY:
            self._answer(200 if front.not_ready() is None else 400, b"")
        else:
            if route is Route.INDEX:
                if head.encoding != "identity":
                    held = _inflated(held, head.encoding, front.max_json_bytes)
                work = front.index(only_ready=asks_for_ready_only(held))
            elif route is Route.ALL_STATS:
                work = front.own_statistics()
            else:
                work = front.server_metadata()
            self._task = asyncio.create_task(self._answer_later(work))

    async def _answer_later(self, work: Awaitable[tuple[int, bytes]]) -> None:
        refusal, status, body = None, 0, b""
        try:
            status, body = await work
        except NotServed as error:
            refusal = _refusal(error)
        except Exception as error:
            log.error("a request broke", exc_info=error)
            refusal = HttpRefused(500, "the proxy failed")
        self._task = None
        if self._state is not _State.WAIT:
            return  # it took too long, and its client was told so
        if refusal is not None:
            self._refuse(refusal)
        else:
            self._answer(status, body)

    def tick(self, now: float) -> None:
        """Called every second: what has waited too long ends."""
        state = self._state
        if state is _State.HEAD:
            if self._head_deadline:
                if now > self._head_deadline:
                    self._closes = True
                    self._answer_error(408, "the head did not come")
            elif self._is_delivering:
                if not self._still_delivers(now):
                    self.abort()
            elif self._front.is_draining:
                self.end_if_idle()
            elif now - self._since > _IDLE_SECONDS:
                self.abort()
        elif state is _State.LINGER:
            if not self._still_delivers(now) and now - self._since > _LINGER_SECONDS:
                self.abort()
        elif now > self._deadline:
            self._too_late()

    def _still_delivers(self, now: float) -> bool:
        """Whether the client takes what it has not got yet: some of it every _STALLED_SECONDS."""
        unsent = 0 if self._transport is None else unsent_bytes(self._transport)
        if unsent != self._unsent:
            self._unsent, self._since = unsent, now
        return unsent > 0 and now - self._since <= _STALLED_SECONDS

    def end_if_idle(self) -> None:
        """End a connection on which no request is under way, once all has been delivered that was answered."""
        if self._state is not _State.HEAD or self._input or self._transport is None:
            return
        if unsent_bytes(self._transport):
            self._linger()
        elif not self._may_ask_again:
            self.abort()

    def _too_late(self) -> None:
        if self._state is _State.ENDED:  # an abandoned request: Triton has had its time
            self._detach()
            self._front.abandoned.discard(self)
            self._finish(_CLIENT_LEFT)
        elif self._state is _State.SWALLOW:
            self.abort()
        elif self._begun is not None:
            self._cut("504")
        else:
            self._closes = True
            self._answer_error(504, "request timeout")

    @property
    def takes_chunks(self) -> bool:
        """Whether a chunked answer can go to this client as it is."""
        return self._head is None or self._head.is_http11

    @property
    def is_busy(self) -> bool:
        """A request is under way, or its answer not yet with the client."""
        if self._transport is None or self._state is _State.ENDED:
            return False
        if self._state in (_State.HEAD, _State.LINGER):
            return self._is_delivering or self._may_ask_again
        return True

    @property
    def _may_ask_again(self) -> bool:
        """At the end, when the pod goes: to close now could cross with a request."""
        waits = self._front.is_draining and self._state is _State.HEAD
        return waits and time.monotonic() - self._since < _NEXT_SECONDS

    @property
    def _is_delivering(self) -> bool:
        """Something that was answered is still here; at the end, when the pod goes, also with the system."""
        if self._transport is None:
            return False
        if self._front.is_draining:
            return unsent_bytes(self._transport) > 0
        return self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _too_large(self) -> HttpRefused:
        return HttpRefused(
            413,
            f"JSON, and whatever comes packed or in chunks, is taken up to "
            f"{format_bytes(self._front.max_json_bytes)}; send large tensors with the binary extension "
            f"({HEADER_LENGTH} and Content-Length)",
        )


def _inflated(data: bytes, encoding: str, limit: int) -> bytes:
    """Unpack a body within a bound. Raises HttpRefused."""
    try:
        return unpack(data, encoding, limit)
    except BadPacking as error:
        raise HttpRefused(400, f"the body {error}") from error
    except UnpacksTooLarge as error:
        raise HttpRefused(413, f"the body unpacks to more than {format_bytes(limit)}") from error


def _refusal(error: Exception) -> HttpRefused:
    if isinstance(error, HttpRefused):
        return error
    if isinstance(error, BadJson):
        return HttpRefused(400, str(error))
    return HttpRefused(503, str(error), _RETRY)
