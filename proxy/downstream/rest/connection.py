"""A REST client's connection: HTTP/1.1, request by request. What becomes of a request is its request's matter."""

import asyncio
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, cast

from proxy.downstream.rest.checking import INLINE_BYTES
from proxy.downstream.rest.downstream import RestDownstream
from proxy.downstream.rest.request import RestRequest
from proxy.policy import cost
from proxy.policy.json_guard import check_generate, check_infer
from proxy.policy.refusal import Refusal
from proxy.transport.tcp import keep_alive, unsent_bytes
from proxy.wire.http1 import HEAD_BYTES, HEAD_END, BadRequest, require_hopeful, write_error

_HEAD_SECONDS, _IDLE_SECONDS, _LINGER_SECONDS = 10.0, 300.0, 2.0
# At the end, a client that has just connected or been answered may have its next request on its way already.
_NEXT_SECONDS = 1.0
# A client that takes nothing of its last answer for so long gets no more of it.
_STALLED_SECONDS = 60.0
# What a client may have sent ahead while its last request is still under way.
_PIPELINE_BYTES = 256 * 1024
# Of that so much is not counted: a request or two.
_FREE_BYTES: Final = 16 * 1024
_WRITE_HIGH: Final = 256 * 1024


class _At(Enum):
    HEAD = auto()  # between requests, or in the middle of a head
    REQUEST = auto()  # its request tells more
    LINGER = auto()  # the last answer has been written; only the client's end is waited for
    ENDED = auto()


class RestConnection(asyncio.Protocol):
    """One client. `data_received` may be called before a read of its own, with what came with a preamble."""

    # The transport's own.
    write: Callable[[bytes], None]

    __slots__ = (
        "_at",
        "_charged_bytes",
        "_downstream",
        "_head_deadline",
        "_input",
        "_paused",
        "_request",
        "_since",
        "_transport",
        "_unsent",
        "at_eof",
        "is_writable",
        "write",
    )

    def __init__(self, downstream: RestDownstream) -> None:
        self._downstream = downstream
        self._transport: asyncio.Transport | None = None
        self._at = _At.HEAD
        self._request: RestRequest | None = None
        # What has come and cannot be looked at yet.
        self._input = b""
        # Of the replica's budget, for that.
        self._charged_bytes = 0
        self._since = time.monotonic()
        # When the head that is coming must be there; 0 while none has begun.
        self._head_deadline = 0.0
        self.is_writable, self._paused, self.at_eof = True, False, False
        # What of the last answer has not reached the client, when it was looked at last.
        self._unsent = 0

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH)
        self.write = self._transport.write
        keep_alive(transport)
        if not self._downstream.clients.connected(self):
            self._transport.abort()
            self._at = _At.ENDED

    def connection_lost(self, exc: Exception | None) -> None:
        was, self._at = self._at, _At.ENDED
        request, self._request = self._request, None
        self._keep(b"")
        if was is _At.REQUEST and request is not None:
            request.client_left()
        self._downstream.clients.disconnected(self)

    def eof_received(self) -> bool:
        """A client that has said all it wants to may still wait for its answers; whatever is half said ends."""
        self.at_eof = True
        self._end_partial()
        if self._at is _At.REQUEST:
            return not self._is_partial and (self._downstream.waits_for_half_closed or not self._waits)
        return self._at is not _At.ENDED

    @property
    def _is_partial(self) -> bool:
        return self._request is not None and self._request.takes_body

    @property
    def _waits(self) -> bool:
        """For a slot, or a connection."""
        return self._request is not None and self._request.waits

    def _end_partial(self) -> None:
        """After the client's end: the rest of what has begun will never come."""
        if self._at is _At.HEAD:
            # Else whole requests: they wait for answers to be taken.
            if not self._input or self._head_deadline:
                self._linger()
        elif self._transport is not None and (self._at is _At.LINGER or self._is_partial):
            self._transport.close()

    def pause_writing(self) -> None:
        self.is_writable = False
        if self._request is not None:
            self._request.pause_answer()

    def resume_writing(self) -> None:
        self.is_writable = True
        if self._request is not None:
            self._request.resume_answer()
        if self._at is _At.HEAD:
            self.read_on()

    def _takes_more(self) -> bool:
        """Whether what the client sends next can go somewhere."""
        if self._at is _At.HEAD:  # each request has an answer, which must go somewhere too
            return self.is_writable and len(self._input) <= HEAD_BYTES
        request = self._request
        if self._at is _At.REQUEST and request is not None and request.is_streaming:
            return request.takes_more
        return len(self._input) <= _PIPELINE_BYTES

    def regulate(self) -> None:
        """Read from the client, or do not."""
        if self._transport is None or self._at is _At.ENDED or self._paused is not self._takes_more():
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
            self._keep(b"")
        elif self._at is _At.HEAD and self._take_fast_path(data):
            return
        try:
            self._take(data)
        except BadRequest as error:
            self._not_http(error)

    def _take_fast_path(self, data: bytes) -> bool:
        """A request whose head has been seen before, with its whole JSON, for a Triton that waits.

        What this does is what the steps below would; what a head decides under the limits of now is not asked again.
        False, with nothing done, for anything else.
        """
        downstream = self._downstream
        end = data.find(HEAD_END) + len(HEAD_END)
        known = downstream.known_heads.get(data[:end])
        if known is None or len(data) - end != known.length or known.length > INLINE_BYTES:
            return False
        replica, pool = downstream.replica, downstream.pool
        if (
            downstream.cluster.endpoint is not downstream.known_for
            or replica.limits is not downstream.known_limits
        ):
            return False
        if not pool.has_idle:
            return False
        if downstream.is_draining or not self.is_writable or self.at_eof:
            return False
        body = data[end:]
        try:
            body = check_infer(body, replica.facts) if known.is_infer else check_generate(body)
        except Refusal:
            return False  # to be answered below
        now = time.monotonic()
        request = RestRequest(self, downstream, known.routed, b"", now)
        if not request.admit_at_once(now, cost.of_json(body), known.length):
            return False
        self._at, self._request, self._since = _At.REQUEST, request, now
        replica.rest.received_bytes += known.length
        request.go_at_once(
            pool.take_idle(request),
            b"%bContent-Length: %d\r\n\r\n%b" % (known.start, len(body), body),
        )
        return True

    def _take(self, data: bytes) -> None:
        has_begun = False
        while data:
            request = self._request
            if self._at is _At.HEAD and has_begun and self.is_writable:
                # Requests that are answered here may have come by the thousand: others are served between them.
                if self._put_off(data):
                    self._downstream.later(self.read_on)
                return
            if self._at is _At.HEAD and self.is_writable:
                data = self._take_head(data)
                has_begun = True
            elif self._at is _At.REQUEST and request is not None and request.takes_body:
                data = request.take(data)
                if request.stage.is_over and not request.swallows and self._request is request:
                    self._next_request(time.monotonic())
            elif self._at in (_At.LINGER, _At.ENDED):
                return
            else:
                # For later: a body that waits for its slot, or the next request.
                self._put_off(data)
                return

    def _put_off(self, data: bytes) -> bool:
        """Look at it later. False: there is no room for it; the refusal has been sent."""
        if not self._keep(data):
            self._no_room()
            return False
        self.regulate()
        return True

    def _keep(self, data: bytes) -> bool:
        """Until it can be looked at. False: there is no room for it."""
        charged = max(0, len(data) - _FREE_BYTES)
        if charged != self._charged_bytes:
            if not self._downstream.replica.budget.change(self._charged_bytes, charged):
                return False
            self._charged_bytes = charged
        self._input = data
        return True

    def _no_room(self) -> None:
        """For what was sent ahead."""
        request = self._request
        if self._at is _At.REQUEST and request is not None and not request.stage.is_over:
            request.closes = True
            request.refuse(request.no_room(1))
        else:
            self.abort()

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
            if not self._keep(data):
                self._no_room()
            return b""
        self._head_deadline = 0.0
        raw = data[:end]
        routed = self._downstream.shared.read_head(raw)
        self._since = now = time.monotonic()
        self._at = _At.REQUEST
        self._request = request = RestRequest(self, self._downstream, routed, raw, now)
        request.begin()
        return data[end:]

    def _not_http(self, error: BadRequest) -> None:
        request = self._request
        if self._at is _At.REQUEST and request is not None:
            if request.swallows:  # it has had its answer
                self._linger()
            else:
                request.fail(error.status, str(error))
        elif self._at is _At.HEAD:
            self._tell(error.status, str(error))

    def _tell(self, status: int, message: str) -> None:
        """Of something that was no request; the connection ends with it."""
        self._downstream.replica.rest.answered(str(status), time.monotonic() - self._since)
        head, body = write_error(status, message, headers={}, close=True)
        self.write(head + body)
        self._linger()

    def read_on(self) -> None:
        """Look at what has come meanwhile."""
        data = self._input
        if data:
            self._keep(b"")
            # The client's end lies behind what it has sent: until that is taken, an answer is not the last.
            at_eof, self.at_eof = self.at_eof, False
            self.data_received(data)
            self.at_eof = at_eof
        if self.at_eof:
            self._end_partial()
        self.regulate()

    def answered(self, now: float, *, closes: bool, swallows: bool) -> None:
        """The answer has been written: go on with this connection, or not."""
        if self._at is _At.ENDED:
            return
        if closes or (self.at_eof and self.is_last):
            self._linger(unread=swallows)
        elif swallows:
            self.read_on()
        else:
            self._next_request(now)
            if self._input and self.is_writable:
                # Not from here: a client that pipelines a thousand requests must not nest a thousand calls.
                self._downstream.later(self.read_on)

    @property
    def is_last(self) -> bool:
        """The client will say nothing more."""
        return self.at_eof and not self._input

    def _next_request(self, now: float) -> None:
        self._at, self._request, self._since = _At.HEAD, None, now

    def _linger(self, *, unread: bool = True) -> None:
        """Close for writing, and read a little longer if there is more: a reset would take the answer away."""
        if self._at is _At.ENDED:
            return
        self._at, self._request, self._since = _At.LINGER, None, time.monotonic()
        self._keep(b"")
        if self._transport is None:
            return
        if self.at_eof or not unread or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self.regulate()

    def tick(self, now: float) -> None:
        """Called every second: what has waited too long ends."""
        request = self._request
        if self._at is _At.HEAD:
            if self._head_deadline:
                if now > self._head_deadline:
                    self._tell(408, "the head did not come")
            elif self._is_delivering:
                if not self._still_delivers(now):
                    self.abort()
            elif self._downstream.is_draining and self._downstream.ends_idle:
                self.end_if_idle()
            elif now - self._since > _IDLE_SECONDS:
                self.abort()
        elif self._at is _At.LINGER:
            if not self._still_delivers(now) and now - self._since > _LINGER_SECONDS:
                self.abort()
        elif request is not None and not request.swallows:
            request.look_at_time(now)
        elif request is not None and request.is_late(now):
            self.abort()

    def _still_delivers(self, now: float) -> bool:
        """Whether the client takes what it has not got yet: some of it every _STALLED_SECONDS."""
        unsent = 0 if self._transport is None else unsent_bytes(self._transport)
        if unsent != self._unsent:
            self._unsent, self._since = unsent, now
        return unsent > 0 and now - self._since <= _STALLED_SECONDS

    def end_if_idle(self) -> None:
        """End a connection on which no request is under way, once all has been delivered that was answered."""
        if self._at is not _At.HEAD or self._input or self._transport is None:
            return
        if unsent_bytes(self._transport):
            self._linger()
        elif not self._may_ask_again:
            self.abort()

    @property
    def is_busy(self) -> bool:
        """A request is under way, or its answer not yet with the client."""
        if self._transport is None or self._at is _At.ENDED:
            return False
        if self._at in (_At.HEAD, _At.LINGER):
            return self._is_delivering or self._may_ask_again
        return True

    @property
    def _may_ask_again(self) -> bool:
        """At the end, when the pod goes: to close now could cross with a request."""
        waits = self._downstream.is_draining and self._at is _At.HEAD
        return waits and time.monotonic() - self._since < _NEXT_SECONDS

    @property
    def _is_delivering(self) -> bool:
        """Something that was answered is still here; at the end, when the pod goes, also with the system."""
        if self._transport is None:
            return False
        if self._downstream.is_draining:
            return unsent_bytes(self._transport) > 0
        return self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
