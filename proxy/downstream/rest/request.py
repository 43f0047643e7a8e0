"""One REST request from its head to its end: buffered, checked, admitted, forwarded, answered.

JSON is buffered until it has been checked; the tensors behind it stream through unread, in both directions no
faster than the slower side takes them. A request whose client has gone lives on by itself until Triton is done.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from berth.contract.gateway import ReplicaLimits
from berth.contract.quantity import format_bytes
from berth.runtime.logs import fields
from proxy.downstream.rest.answer import GATHERED_BYTES, PartedAnswer
from proxy.downstream.rest.checking import INLINE_BYTES, Checked, Question, check, inflated
from proxy.downstream.rest.downstream import RestDownstream, RoutedHead
from proxy.policy.json_guard import asks_for_ready_only
from proxy.policy.refusal import NotServed, Refusal, Why
from proxy.policy.routes import COUNTED, Route, Verdict
from proxy.request.admission import LARGE_ANSWER_BYTES
from proxy.request.lifecycle import CLIENT_LEFT, Request, Stage
from proxy.request.minimum_rate import BEGUN_BYTES, TOO_SLOW
from proxy.request.replica import Replica
from proxy.upstream.http1 import UpstreamHttp
from proxy.wire.http1 import (
    CONTINUE,
    HEADER_LENGTH,
    HttpError,
    RequestChunks,
    ResponseHead,
    error_body,
    write_response,
)
from proxy.wire.packing import CODINGS

log = logging.getLogger(__name__)

_RETRY: Final = {"Retry-After": "1"}
# A body with tensors is gathered up to this size before it waits for a slot: a slow sender delays no other request.
# A longer one asks when BEGUN_BYTES are here, and has to keep up with a pace.
_GATHERED_BYTES: Final = 256 * 1024
# An unwanted body is read to its end up to this size, to keep the connection.
_SWALLOW_BYTES: Final = 64 * 1024
# A longer packed body is checked beside the loop.
_INLINE_PACKED_BYTES: Final = 1024

_COMPUTES: Final = COUNTED - {Route.GENERATE_STREAM}
_RECEIVING, _QUEUED, _FORWARDED = Stage.RECEIVING, Stage.QUEUED, Stage.FORWARDED
_ANSWERED, _REFUSED, _ABORTED = Stage.ANSWERED, Stage.REFUSED, Stage.ABORTED


class Client(Protocol):
    """The connection that a request came on."""

    at_eof: bool

    @property
    def is_last(self) -> bool:
        """The client will say nothing more."""
        ...

    @property
    def is_writable(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def regulate(self) -> None:
        """What the request can take may be another now."""
        ...

    def read_on(self) -> None:
        """Look at what has come meanwhile."""
        ...

    def answered(self, now: float, *, closes: bool, swallows: bool) -> None:
        """The answer has been written. `swallows`: the rest of the body is still to come."""
        ...

    def abort(self) -> None: ...


class RestRequest(Request):
    """One request."""

    is_rest = True
    # As most requests are: what is never set costs nothing.
    closes = False
    # Those that its head has passed: others may hold when its body is here.
    _limits: ReplicaLimits
    body_left = _hold_left = 0
    _chunks: RequestChunks | None = None
    # What has come of the body, while it comes; then what goes on in its place, until it has gone on.
    _pieces: list[bytes] | None = None
    _checked: Checked | None = None
    _upstream: UpstreamHttp | None = None
    # Of an answer that does not come in one piece.
    _answer: PartedAnswer | None = None
    # Of a body that is here and waits for its slot.
    _last = b""
    _task: asyncio.Task[None] | None = None

    def __init__(
        self, client: Client, downstream: RestDownstream, routed: RoutedHead, raw: bytes, now: float
    ) -> None:
        super().__init__(downstream.replica, downstream.replica.rest, now)
        self._client: Client | None = client
        self._downstream, self.routed, self._raw = downstream, routed, raw

    # How far it is, as its client's connection sees it.

    @property
    def is_coming(self) -> bool:
        """Whether the part of its body that must be checked is not all here."""
        return self.stage is _RECEIVING and self._pieces is not None

    @property
    def is_streaming(self) -> bool:
        """Whether the rest of its body is passed on as it comes."""
        return self.body_left > 0 and self.stage is _FORWARDED

    @property
    def swallows(self) -> bool:
        """Whether it has been answered, and the rest of its body goes nowhere."""
        return self.stage.is_over and not self.closes and (self.body_left > 0 or self._chunks is not None)

    @property
    def takes_body(self) -> bool:
        """Whether what the client sends next is of this request."""
        return self.is_coming or self.is_streaming or self.swallows

    @property
    def waits(self) -> bool:
        """For a slot, for a connection, or for an answer of our own."""
        return self.stage is _QUEUED or (self._last != b"" and self.stage is _FORWARDED)

    # What a client sends.

    def go_at_once(self, upstream: UpstreamHttp, request: bytes) -> None:
        """The usual request, which has its slot, to a Triton that waits."""
        self._upstream = upstream
        self.enter(_FORWARDED)
        upstream.request_done = True
        upstream.write(request)

    def begin(self) -> None:
        head = self.routed.head
        self.closes = not head.keeps_alive or self._downstream.is_draining
        self.body_left = head.length or 0
        self._chunks = RequestChunks() if head.is_chunked else None
        self._limits = self.replica.limits
        try:
            self._hold_left = self._bytes_to_hold()
        except (HttpError, Refusal) as refusal:
            self.refuse(refusal)
            return
        if head.expects_continue and (self.body_left or self._chunks) and self._client is not None:
            self._client.write(CONTINUE)
        self._pieces = []
        if not self._hold_left and self._chunks is None:
            self._received_all()

    def _bytes_to_hold(self) -> int:
        """How much of the body must be here before any of it goes on. Raises HttpError or Refusal."""
        head, route = self.routed.head, self.routed.decision.route
        self._downstream.require_route(self.routed.decision)
        length = head.length or 0
        self.require_size(length)
        if head.header_length is not None and route is not Route.INFER:
            raise HttpError(400, f"{HEADER_LENGTH} belongs to infer")
        if head.encoding not in ("identity", *CODINGS):
            raise HttpError(415, f"Content-Encoding {head.encoding!r}; gzip and deflate are taken")
        if head.header_length is None or head.is_chunked or head.encoding != "identity":
            self.require_json_size(length)
            return length
        if head.header_length > length:
            raise HttpError(400, f"{HEADER_LENGTH} is above Content-Length")
        self.require_json_size(head.header_length)
        return length if length <= _GATHERED_BYTES else max(head.header_length, BEGUN_BYTES)

    def require_json_size(self, size_bytes: int) -> None:
        """Raises HttpError where no JSON may be so long."""
        if size_bytes > self.replica.limits.max_json_bytes:
            raise _json_too_large(self.replica)

    @property
    def takes_more(self) -> bool:
        """Whether the next of the body can go somewhere."""
        if self.is_streaming:
            return self._upstream is not None and self._upstream.is_writable
        return self.takes_body

    def take(self, data: bytes) -> bytes:
        """The next of the body; returns what is not of it. Raises BadRequest. For a request that takes more."""
        if self.stage.is_over:
            return self._take_unwanted(data)
        if self._chunks is not None:
            return self._take_chunks(self._chunks, data)
        is_streaming = self.stage is _FORWARDED
        left = self.body_left if is_streaming else self._hold_left
        piece, rest = (data, b"") if len(data) <= left else (data[:left], data[left:])
        if is_streaming:
            self._stream(piece)
        elif not self._keep(piece):
            return b""
        else:
            self._hold_left -= len(piece)
            self.body_left -= len(piece)
            if not self._hold_left:
                self._received_all()
        return rest

    def _take_chunks(self, chunks: RequestChunks, data: bytes) -> bytes:
        body, size = chunks.feed(data)
        self._hold_left += len(body)
        if self._hold_left > self.replica.limits.max_json_bytes:
            self.closes = True
            self.refuse(_json_too_large(self.replica))
            return b""
        if not self._keep(body):
            return b""
        if chunks.is_done:
            self._chunks = None
            self._received_all()
        return data[size:]

    def _keep(self, piece: bytes) -> bool:
        """Of a body that is to be checked; False where there is no room for it; the refusal has been sent."""
        try:
            self.hold(len(piece))
        except Refusal as refusal:
            self.closes = True
            self.refuse(refusal)
            return False
        assert self._pieces is not None
        self._pieces.append(piece)
        self.traffic.received_bytes += len(piece)
        return True

    def _stream(self, piece: bytes) -> None:
        upstream = self._upstream
        assert upstream is not None
        self.body_left -= len(piece)
        self.traffic.received_bytes += len(piece)
        if self.body_left:
            upstream.write(piece)
        elif self.admission is None or self.admission.come_back(self._came_back):
            self._send_last(upstream, piece)
        else:
            upstream.write(piece[:-1])
            self._last = piece[-1:]

    def _came_back(self) -> None:
        """Admission's word: there is a slot for what Triton has all but the last byte of."""
        if self._upstream is not None:
            self._send_last(self._upstream, self._last)

    def _send_last(self, upstream: UpstreamHttp, piece: bytes) -> None:
        self._last = b""
        upstream.request_done = True
        upstream.write(piece)

    def _take_unwanted(self, data: bytes) -> bytes:
        if self._chunks is not None:
            _, size = self._chunks.feed(data)
            if self._chunks.is_done:
                self._chunks = None
        else:
            size = min(len(data), self.body_left)
            self.body_left -= size
        return data[size:]

    # From a body that is here to Triton.

    def _received_all(self) -> None:
        """What had to be buffered is there."""
        pieces = self._pieces or []
        body, self._pieces = (pieces[0] if len(pieces) == 1 else b"".join(pieces)), None
        try:
            if self.routed.decision.verdict is not Verdict.ALLOW:
                self._answer_locally(body)
            elif self._downstream.takes_body(self.routed.decision.route):
                self._check(body)
            elif (own := self._downstream.own_answer(self.routed.decision)) is not None:
                self._respond(_ANSWERED, *own)
            else:
                self._admit(Checked(b"\r\n", 0))
        except (HttpError, Refusal) as error:
            self.refuse(error)

    def _check(self, body: bytes) -> None:
        """Raises HttpError or Refusal."""
        head = self.routed.head
        question = Question(
            is_infer=self.routed.decision.route is Route.INFER,
            encoding=head.encoding,
            header_length=head.header_length,
            left=self.body_left,
            facts=self.replica.facts,
            max_json_bytes=self.replica.limits.max_json_bytes,
            json_flag=self.replica.flags.json,
        )
        json_bytes = len(body) if head.header_length is None else head.header_length
        if json_bytes <= INLINE_BYTES if head.encoding == "identity" else len(body) <= _INLINE_PACKED_BYTES:
            self._admit(check(question, body))
            if not self.stage.is_over:
                self._downstream.remember_head(self._raw, self.routed, self._limits)
            return
        self._task = asyncio.create_task(self._check_in_process(question, body))

    async def _check_in_process(self, question: Question, body: bytes) -> None:
        try:
            checked = await self._checked_in_process(question, body)
            self._task = None
            self._admit(checked)
        except (HttpError, Refusal) as refusal:
            self._task = None
            self.refuse(refusal)
        except Exception as failure:
            self._task = None
            self._failed(failure)

    async def _checked_in_process(self, question: Question, body: bytes) -> Checked:
        """Raises HttpError or Refusal."""
        try:
            return await self._downstream.shared.checker.check(question, body, self.replica)
        except Refusal as refusal:
            if refusal.why is Why.NO_ROOM:  # too many wait for that: load as well
                self.replica.rejected()
            raise

    def _admit(self, checked: Checked) -> None:
        """Raises Refusal."""
        if self.routed.head.encoding != "identity":  # what was packed is here at its length now
            self.hold(max(0, len(checked.tail) - self.buffered_bytes))
        self._checked = checked
        self.enter(_QUEUED)
        counted = self.routed.decision.route in COUNTED
        self._downstream.cluster.require()
        if self.admit(time.monotonic(), self._granted, checked.cost_bytes, counted=counted):
            self._connect()

    def _granted(self) -> None:
        """Admission's word: the slot is there."""
        try:
            self._connect()
        except NotServed as error:
            self.refuse(error)

    def _connect(self) -> None:
        """Raises NotServed."""
        upstream = self._downstream.pool.take(self)
        if upstream is not None:
            self.connected(upstream)

    # What Triton's connection tells.

    @property
    def wants_connection(self) -> bool:
        return self.stage is _QUEUED and self._upstream is None

    @property
    def takes_chunks(self) -> bool:
        """Whether a chunked answer can go to this client as it is."""
        return self.routed.head.is_http11 and self.replica.names.are_same

    def connected(self, upstream: UpstreamHttp) -> None:
        endpoint, checked = self._downstream.cluster.endpoint, self._checked
        if not self.wants_connection or endpoint is None or checked is None:
            upstream.abort()
            return
        self._upstream, self._checked = upstream, None
        upstream.request_done = not self.body_left
        self.enter(_FORWARDED)
        if self.body_left and self.admission is not None:
            self.admission.step_aside()
        client = self._client
        if client is not None and not client.is_writable:
            self.pause_answer()
        upstream.write(self._downstream.request_start(self.routed, endpoint) + checked.tail)
        self.upstream_writable()
        if client is not None:
            client.read_on()

    def later(self, do: Callable[[], None]) -> None:
        self._downstream.later(do)

    def upstream_writable(self) -> None:
        if self._upstream is not None and self._upstream.is_writable:
            self.let_all_go()
        if self._client is not None:
            self._client.regulate()

    def pause_answer(self) -> None:
        """The client does not take what is written to it."""
        if self._upstream is not None:
            self._upstream.stop(True)

    def resume_answer(self) -> None:
        if self._upstream is not None:
            self._upstream.stop(False)

    def answer_began(self, head: ResponseHead, body: bytes, raw: bytes | None) -> None:
        client = self._client
        if client is None:
            return
        closes = self.closes
        # Answered early: the rest of the request has no reader.
        if self.is_streaming or self._downstream.is_draining or client.is_last or not head.keeps_alive:
            closes = self.closes = True
        names, routed = self.replica.names, self.routed
        if head.length is not None and head.length > LARGE_ANSWER_BYTES and self.admission is not None:
            self.admission.has_run(head.length)
        answer = self._answer = PartedAnswer(head, names, routed.decision.route, routed.head.is_http11)
        if raw is not None and not closes and not routed.head.is_head and names.are_same:
            self.traffic.sent_bytes += len(body)
            client.write(raw)
            return
        body = answer.feed(body)
        if not answer.is_gathered:
            self._send(body, head.whole(closes=closes, chunked=routed.head.is_http11))

    def answer_whole(self, head: ResponseHead, data: bytes, start: int) -> None:
        """What this does is what `answer_began` and `answer_ended` would."""
        self._upstream = None
        client, names, asked = self._client, self.replica.names, self.routed
        if (
            client is None
            or (self.closes or self._downstream.is_draining or client.at_eof or asked.head.is_head)
            or not (names.are_same or (head.status == 200 and asked.has_tensors))
        ):
            self.answer_began(head, data[start:], data if head.plain_is_raw else None)
            self.answer_ended()
            return
        if not head.plain_is_raw:
            data = b"%b\r\n%b" % (head.lines, data[start:])
        if not names.are_same:
            data = data.replace(names.server_member, names.public_member, 1)
        now = time.monotonic()
        self.traffic.sent_bytes += head.length or 0
        client.write(data)
        self.end(_ANSWERED, head.code, now)
        client.answered(now, closes=False, swallows=False)

    def answer_data(self, data: bytes) -> None:
        answer = self._answer
        if self._client is None or answer is None:
            return
        answer.came_bytes += len(data)
        data = answer.feed(data)
        if not answer.is_gathered:
            self._send(data)
        elif answer.is_too_long:
            self._answer = None
            self.refuse(HttpError(502, f"Triton's answer is longer than {format_bytes(GATHERED_BYTES)}"))

    def _send(self, data: bytes, start: bytes = b"") -> None:
        """The next of the body; `start`: what goes before its first."""
        if self.routed.decision.route is Route.GENERATE_STREAM:
            self.prolong(time.monotonic())
        if self.routed.head.is_head:
            data = b""
        if data and self._answer is not None:
            self.traffic.sent_bytes += len(data)
            data = self._answer.chunked(data)
        if start:
            data = start + data
        if data and self._client is not None:
            self._client.write(data)

    def answer_ended(self) -> None:
        client, answer, now = self._client, self._answer, time.monotonic()
        if client is None or not client.is_writable:
            self.resume_answer()
        self._upstream = None
        if client is None:
            self._leave_given_up(now)
            return
        if answer is not None and answer.is_gathered:
            body = answer.rest()
            start = answer.head.anew(len(body), closes=self.closes)
            self.traffic.sent_bytes += len(body)
            client.write(start if self.routed.head.is_head else start + body)
        elif answer is not None and answer.is_renamed:
            self._send(answer.rest())
            if not self.routed.head.is_head:
                client.write(answer.last_chunk)
        self.end(_ANSWERED, "502" if answer is None else answer.head.code, now)
        self._after_answer(client)

    def answer_broke(self, reason: str) -> None:
        self._upstream = None
        if self._client is None:
            self._leave_given_up(time.monotonic())
        elif not self._has_begun:
            self._answer = None
            self.refuse(NotServed(reason))
        else:
            # A second head would be read as a part of the body: the client learns by the cut.
            log.info("answer broke off", extra=fields(reason=reason))
            self._cut("502")

    @property
    def _has_begun(self) -> bool:
        """Whether the client has something of the answer."""
        return self._answer is not None and not self._answer.is_gathered

    # The end.

    def refuse(self, error: HttpError | Refusal) -> None:
        refusal = _in_http(error)
        if self.body_left > _SWALLOW_BYTES or self._chunks is not None:
            self.closes = True
        self._refuse(refusal.status, str(refusal), refusal.headers)

    def fail(self, status: int, message: str) -> None:
        """What came is no request that every server would read alike."""
        self.closes = True
        self.body_left, self._chunks = 0, None
        self._refuse(status, message)

    def _failed(self, error: Exception) -> None:
        log.error("a request broke", exc_info=error)
        self.refuse(HttpError(500, "the proxy failed"))

    def _refuse(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        """In Triton's form of an error."""
        self._respond(_REFUSED, status, error_body(message), headers)

    def _respond(
        self, stage: Stage, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer here; what Triton works on goes on by itself."""
        client = self._client
        if client is None or self.stage.is_over:
            return
        self.closes = self.closes or client.is_last or self._downstream.is_draining
        is_head = self.routed.head.is_head
        head, body = write_response(status, body, headers=headers or {}, close=self.closes)
        self._leave(stage, str(status))
        client.write(head if is_head else head + body)
        self._after_answer(client)

    def _after_answer(self, client: Client) -> None:
        swallows = bool(self.body_left or self._chunks is not None)
        client.answered(time.monotonic(), closes=self.closes, swallows=swallows)

    def _leave(self, stage: Stage, code: str) -> None:
        """No client waits for Triton's answer any more.

        Triton cannot be stopped, and goes on computing: the slot is kept until it is done. Not so for a request
        that is not complete, which Triton never begins, for a stream of events, which ends with its
        connection, and for an answer that has begun.
        """
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._pieces = self._checked = None
        upstream = self._upstream
        is_computed = (
            upstream is not None
            and self.routed.decision.route in _COMPUTES
            and self._answer is None
            and not (self.body_left or self._last)
        )
        if not self.stage.is_over:
            self.end(stage, code, time.monotonic(), in_triton=is_computed)
        if upstream is not None and is_computed:  # its client may have its next request
            self._client = None
            self._downstream.given_up.add(self)
            upstream.stop(False)
        elif upstream is not None:
            self._upstream = None
            upstream.abort()

    def out_of_time(self) -> None:
        """Triton has had its time for a request without a client."""
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None
        self._leave_given_up(time.monotonic())

    def _leave_given_up(self, now: float) -> None:
        self._downstream.given_up.discard(self)
        self.triton_is_done(now)

    def client_left(self) -> None:
        """The connection has gone."""
        self._leave(_ABORTED, CLIENT_LEFT)
        self.closes, self._client = True, None

    def _cut(self, code: str) -> None:
        client = self._client
        self._leave(_ABORTED, code)
        self.closes, self._client = True, None
        if client is not None:
            client.abort()

    def look_at_time(self, now: float) -> None:
        """Called every second."""
        if self._downstream.overdue and now <= self.deadline and self.is_overdue(now):
            self.refuse(NotServed(self._downstream.overdue))
        elif self.is_late(now) or (self.is_coming and now - self.began > self._downstream.arrival_seconds):
            self._out_of_time(504, "request timeout")
        elif self.is_streaming and self._is_upload_too_slow(now):
            self._out_of_time(408, TOO_SLOW)
        elif self._answer is not None and self._is_answer_taken_too_slowly(now, self._answer.came_bytes):
            log.debug("an answer was taken too slowly", extra=fields(bytes=self._answer.came_bytes))
            self._cut("408")

    def _is_answer_taken_too_slowly(self, now: float, came_bytes: int) -> bool:
        client, admission = self._client, self.admission
        # While the client takes what is written, no other request waits for it.
        is_awaited = client is not None and not client.is_writable
        others_wait = is_awaited and admission is not None and admission.keeps_others_waiting
        return self.is_read_too_slowly(came_bytes, now, others_wait=others_wait)

    def _is_upload_too_slow(self, now: float) -> bool:
        return self.is_sent_too_slowly(
            (self.routed.head.length or 0) - self.body_left, now, is_awaited=self.takes_more
        )

    def _out_of_time(self, status: int, message: str) -> None:
        if self._has_begun:
            self._cut(str(status))
        else:
            self.closes = True
            self._refuse(status, message)

    # Answers of our own.

    def _answer_locally(self, body: bytes) -> None:
        """Raises HttpError or Refusal."""
        downstream, route, head = self._downstream, self.routed.decision.route, self.routed.head
        if route is Route.LIVE:
            self._respond(_ANSWERED, 200, b"")
        elif route is Route.READY:
            self._respond(_ANSWERED, 200 if self.replica.not_ready() is None else 400, b"")
        else:
            if route is Route.INDEX:
                if head.encoding != "identity":
                    body = inflated(
                        body, head.encoding, self.replica.limits.max_json_bytes, self.replica.flags.json
                    )
                work = downstream.index(only_ready=asks_for_ready_only(body))
            elif route is Route.ALL_STATS:
                work = downstream.own_statistics()
            else:
                work = downstream.server_metadata()
            self.enter(_QUEUED)
            self._task = asyncio.create_task(self._answer_later(work))

    async def _answer_later(self, work: Awaitable[tuple[int, bytes]]) -> None:
        try:
            status, body = await work
        except Refusal as error:
            self._task = None
            self.refuse(error)
        except Exception as error:
            self._task = None
            self._failed(error)
        else:
            self._task = None
            self._respond(_ANSWERED, status, body)


def _json_too_large(replica: Replica) -> HttpError:
    return HttpError(
        413,
        f"JSON, and whatever comes packed or in chunks, is taken up to {format_bytes(replica.limits.max_json_bytes)} "
        f"({replica.flags.json}); send large tensors with the binary extension ({HEADER_LENGTH} and Content-Length)",
    )


def _in_http(error: HttpError | Refusal) -> HttpError:
    if isinstance(error, HttpError):
        return error
    return HttpError(error.form.http, str(error), _RETRY if error.form.retries else None)
