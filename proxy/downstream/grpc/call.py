"""One gRPC call: received, checked, admitted, forwarded, answered or refused (`request.lifecycle`).

`Stage` says how far it is. Towards Triton it is an `upstream.HttpRequest`: what Triton says of it ends here. A call
whose client has gone while Triton works on it stays until Triton is done, and keeps its slot so long.
"""

import time
from collections import deque
from enum import Enum, auto
from typing import Final, Protocol

from proxy.downstream.grpc.downstream import GrpcDownstream
from proxy.policy import cost
from proxy.policy.refusal import Refusal, in_grpc
from proxy.policy.routes import Verdict
from proxy.request.admission import LARGE_ANSWER_BYTES, Admission
from proxy.request.budget import Budget
from proxy.request.grpc_head import (
    AnswerKind,
    CallKind,
    head_block,
    list_bytes,
    timeout_of,
    trailers_block,
)
from proxy.request.lifecycle import Request, Stage
from proxy.request.messages import (
    MODEL_READY,
    PREFIX_BYTES,
    AnswerReader,
    MessageReader,
    Piece,
    Unfinished,
    framed,
    read_prefix,
    stream_error,
)
from proxy.upstream.grpc import UpstreamConnection
from proxy.wire.grpc_status import (
    OK_TRAILERS_BLOCK,
    RESPONSE_BLOCK,
    GrpcError,
    Status,
    trailers,
    trailers_only,
)
from proxy.wire.h2 import hpack
from proxy.wire.h2.events import Data, WholeAnswer
from proxy.wire.h2.fields import Fields
from proxy.wire.h2.frames import ErrorCode
from proxy.wire.h2.sending import Buffer
from proxy.wire.h2.server import ServerCodec
from proxy.wire.h2.stream import Stream

# What a call takes here while it is open, beside the headers that it came with.
OPEN_BYTES: Final = 1024
_GRPC_ONLY: Final = b"this port takes gRPC calls: POST with content-type application/grpc\n"
BEYOND_THE_MODEL: Final = "this call reaches beyond the model; the proxy does not offer it"


_RECEIVING, _QUEUED, _FORWARDED = Stage.RECEIVING, Stage.QUEUED, Stage.FORWARDED
_ANSWERED, _REFUSED, _ABORTED = Stage.ANSWERED, Stage.REFUSED, Stage.ABORTED


class Input(Enum):
    """What the client sends of its call."""

    OPEN = auto()
    ENDED = auto()  # the client has said all
    PASSED = auto()  # and the end has been sent to Triton


class Output(Enum):
    """What the client has of its answer."""

    NOTHING = auto()
    HEADERS = auto()
    CONTENT = auto()


_OPEN, _ENDED, _PASSED = Input
_NOTHING, _HEADERS, _CONTENT = Output


class Client(Protocol):
    """The connection that it came on."""

    @property
    def downstream(self) -> GrpcDownstream: ...

    @property
    def codec(self) -> ServerCodec[CallKind, None]: ...

    is_writable: bool

    @property
    def timeslice_exhausted(self) -> bool: ...


class UnsentPiece:
    """Bytes of a request on their way to Triton, and the client's credit for what they were made of."""

    __slots__ = ("_data", "_request", "_size")

    def __init__(self, request: Request, size_bytes: int) -> None:
        self._request: Request | None = request
        self._size = size_bytes
        self._data: Data | None = None

    def carry(self, data: Data) -> None:
        """`data` is released with these bytes."""
        if self._request is None:
            data.release()
        else:
            self._data = data

    def release(self) -> None:
        request, self._request = self._request, None
        if request is None:
            return
        if not request.stage.is_over:  # else all is given back already
            request.let_go(self._size)
        if self._data is not None:
            self._data.release()


class UnreadResponse:
    """Bytes of an answer that wait for the client."""

    __slots__ = ("_budget", "_data", "_size")

    def __init__(self, budget: Budget, size_bytes: int, data: Data | None) -> None:
        budget.charge(size_bytes)
        self._budget, self._size, self._data = budget, size_bytes, data

    def release(self) -> None:
        size, self._size = self._size, 0
        if size:
            self._budget.give(size)
            if self._data is not None:
                self._data.release()


class Call(Request):
    """What is not said in `__init__` most calls never need."""

    up: Stream | None = None
    upstream: UpstreamConnection | None = None
    input = _OPEN
    output = _NOTHING
    reader: MessageReader | None = None
    answers: AnswerReader | None = None
    # Pieces of messages that wait: for a slot, or behind one that does.
    outbox: deque[tuple[Piece, UnsentPiece]] | None = None
    # Of a stream: the claim of the message that is next, and those of the messages that Triton works on.
    queued: Admission | None = None
    running: deque[Admission] | None = None
    # What is being read, and the last piece that was made of it.
    _data: Data | None = None
    _last_piece: UnsentPiece | None = None
    messages = 0
    _deadline_step = 0
    # Of the message that goes on piece by piece: what Triton has not got yet.
    _unsent_bytes = 0

    def __init__(self, client: Client, stream: Stream, fields: Fields[CallKind], now: float) -> None:
        downstream = self.downstream = client.downstream
        super().__init__(downstream.replica, downstream.replica.grpc, now)
        self.client, self.stream, self.fields, self.kind = client, stream, fields, fields.kind

    @property
    def watches(self) -> bool:
        """Whether it wants to hear of each change of readiness: it lasts until its client ends it."""
        return self.kind.verdict is Verdict.LOCAL and self in self.downstream.watchers

    @property
    def is_decoupled(self) -> bool:
        """One message of a stream may have many answers, of which their content tells the last."""
        return self.reader is not None and self.reader.asks_final

    @property
    def may_rest(self) -> bool:
        """A stream may live for as long as it likes while nothing is asked of Triton in it, nor half asked."""
        if self.stage.is_over:
            return False
        return self.watches or (
            self.kind.is_stream and not self.running and self.queued is None and not self.buffered_bytes
        )

    # Received.

    def begin(self) -> None:
        """Its headers are here: what they alone refuse."""
        kind, fields = self.kind, self.fields
        try:
            timeout = timeout_of(fields) if fields.values else None
            # A client may open thousands and say nothing more.
            self.open(OPEN_BYTES + len(fields.forwarded))
        except GrpcError as refused:
            self.refuse(refused)
            return
        except Refusal as refusal:
            self.refuse(in_grpc(refusal))
            return
        if kind.verdict is Verdict.BLOCK:
            self.refuse(GrpcError(Status.PERMISSION_DENIED, BEYOND_THE_MODEL))
        elif kind.verdict is Verdict.DENY and kind.http_status is None:
            self.refuse(GrpcError(Status.UNIMPLEMENTED, f"unknown method {kind.method}"))
        elif kind.verdict is Verdict.ALLOW and list_bytes(fields) > self.downstream.most_list_bytes:
            self.refuse(_too_much_metadata(list_bytes(fields), self.downstream.most_list_bytes))
        elif timeout is not None:
            self.watch_deadline(timeout)

    def watch_deadline(self, timeout_seconds: float) -> None:
        """The client's own deadline. It is not sent to Triton: it would go on computing, and it dies of calls
        that end under its hands."""
        self._deadline_step = self.downstream.deadlines.set(self.began + timeout_seconds, self)

    def too_late(self) -> None:
        self._deadline_step = 0
        waits = self.stage.is_pending and self.outbox
        where = "in the queue" if waits else "before the answer was there"
        self.refuse(GrpcError(Status.DEADLINE_EXCEEDED, f"the deadline passed {where}"))

    def take(self, data: Data) -> bool:
        """More of its content. False: the loop is to have its turn, then `advance` goes on."""
        if self.stage.is_over:
            data.release()
            return True
        if self.up is not None and self._takes_fast_path(data):
            return True
        if data.end:
            self.input = _ENDED
        size, reader = len(data.data), self.reader
        if self.kind.verdict is Verdict.DENY:
            data.release()
            self.look_at_end()
            return True
        if reader is not None and not self.outbox and not data.end and reader.skim(size):
            self._pass_through(data)
            return True
        if reader is None:
            reader = self.reader = self._new_reader()
        if size:
            if not self._hold(size):
                data.release()
                return True
            reader.push(data.data)
        self._data, self._last_piece = data, None
        return self.advance()

    def _takes_fast_path(self, data: Data) -> bool:
        """The fast path of a message of a stream that Triton has: whole, in one frame, and nothing keeps it waiting.
        It leaves out reading, and nothing else; False, with nothing done, where it is for the long way to decide."""
        reader, up, upstream, payload = self.reader, self.up, self.upstream, data.data
        if reader is None or not self.kind.is_stream or data.end or self.outbox or self._data is not None:
            return False
        if reader.asks_final or not reader.is_between_messages:
            return False
        guard, replica, size = self.downstream.infer_guard, self.replica, len(payload)
        message = guard.plain(payload)
        if message is None or replica.is_too_large(len(message)) or not replica.budget.has_room(size):
            return False
        assert up is not None, "asked of no other"
        assert upstream is not None
        if not upstream.codec.takes_now(up, size + len(guard.appended)):
            return False
        now = time.monotonic()
        deadline = now + self.downstream.timeout_seconds
        admission = replica.admissions.admit_at_once(
            now, cost_bytes=cost.of_short_message(len(message)), deadline=deadline
        )
        if admission is None:
            return False
        if self.running is None:
            self.running = deque()
        self.running.append(admission)
        self.prolong(now)
        self.messages += 1
        upstream.send(up, guard.framed(message, payload), end=False, owned=data)
        return True

    def take_whole(self, payload: Buffer) -> bool:
        """All of its content; as `take`."""
        reader = self.reader = self._new_reader()
        self.input = _ENDED
        if self.kind.verdict is not Verdict.DENY and payload:
            if not self._hold(len(payload)):
                return True
            reader.push(payload)
        return self.advance()

    def advance(self) -> bool:
        """Take what is there, message by message. False as in `take`."""
        reader = self.reader
        while not self.stage.is_over and reader is not None:
            before = reader.gathered
            try:
                item = reader.pull()
            except GrpcError as refusal:
                self.refuse(refusal)
                break
            more = len(item.data) if isinstance(item, Piece) else 0
            if not self._hold(more - (before - reader.gathered)) or item is None:
                break
            if not isinstance(item, Unfinished):
                self._take_item(item)
            if self.client.timeslice_exhausted:
                return False
        self._settle_data()
        self.look_at_end()
        return True

    def _settle_data(self) -> None:
        """Its sender's credit goes with the last piece that was made of it; what is gathered is none's."""
        data, self._data = self._data, None
        unsent, self._last_piece = self._last_piece, None
        if data is not None:
            if unsent is None:
                data.release()
            else:
                unsent.carry(data)

    def _new_reader(self) -> MessageReader:
        downstream, kind = self.downstream, self.kind
        limits = downstream.replica.limits
        return MessageReader(
            downstream.guard(kind),
            encoding=kind.encoding,
            inflate_limit=limits.max_json_bytes,
            message_limit=limits.max_request_bytes,
            ask_final=kind.is_stream and downstream.replica.facts.is_decoupled,
            flags=downstream.replica.flags,
        )

    def _hold(self, size: int) -> bool:
        """So many bytes more (or less) are here. False: there is no room for them, and the call is refused."""
        if self.stage.is_over:
            return False
        if size <= 0:
            self.let_go(-size)
            return True
        if not self.buffered_bytes and self.kind.is_stream:  # it may no longer rest
            self.prolong(time.monotonic())
        try:
            self.hold(size)
        except Refusal as refusal:
            self.refuse(in_grpc(refusal))
            return False
        return True

    def _take_item(self, item: Piece | GrpcError) -> None:
        if isinstance(item, GrpcError):
            self._refuse_message(item)
            return
        if item.begins_bytes:
            if self.messages and not self.kind.is_stream:
                self.refuse(GrpcError(Status.INVALID_ARGUMENT, "a unary call takes one message"))
                return
            self.messages += 1
        if self.kind.verdict is not Verdict.ALLOW or self.downstream.local.takes(self.kind):
            self.let_go(len(item.data))
            self.downstream.local.answer(self, item.data[PREFIX_BYTES:])
            return
        unsent = self._last_piece = UnsentPiece(self, len(item.data))
        if self.outbox is None:
            self.outbox = deque()
        self.outbox.append((item, unsent))
        self._pump()

    def _pass_through(self, data: Data) -> None:
        """The middle of a long tensor."""
        if self._hold(len(data.data)):
            unsent = UnsentPiece(self, len(data.data))
            unsent.carry(data)
            assert self.up is not None, "its first piece has gone on"
            assert self.upstream is not None
            self._unsent_bytes -= len(data.data)
            self.upstream.send(self.up, data.data, end=False, owned=unsent)
        else:
            data.release()

    def input_ends(self) -> None:
        """Without content."""
        self.input = _ENDED
        self.look_at_end()

    def look_at_end(self) -> None:
        """Whether the client's end can go on, or what is wrong with it."""
        if self.input is not _ENDED or self.stage.is_over or self._data is not None:
            return
        kind = self.kind
        if kind.http_status is not None:
            answer = [(b":status", kind.http_status), (b"content-type", b"text/plain")]
            self.client.codec.send_headers(self.stream, hpack.encode(answer))
            self.client.codec.send_data(self.stream, _GRPC_ONLY, end=True)
            self._leave(_REFUSED, f"HTTP_{kind.http_status.decode()}")
        elif self.reader is not None and not self.reader.is_between_messages:
            self.refuse(GrpcError(Status.INVALID_ARGUMENT, "the stream ended inside a message"))
        elif not kind.is_stream and not self.messages:
            self.refuse(GrpcError(Status.INVALID_ARGUMENT, "a unary call needs one message"))
        elif kind.verdict is Verdict.ALLOW and not self.outbox:
            up = self._opened()
            if up is not None and self.upstream is not None:
                self.input = _PASSED
                self.upstream.send(up, b"", end=True)

    # Admitted, forwarded.

    def _pump(self) -> None:
        """Pass on what has been checked, as far as there are slots for it."""
        outbox = self.outbox
        while outbox and not self.stage.is_over:
            piece, unsent = outbox[0]
            if piece.begins_bytes:
                try:
                    if not self._is_admitted(piece.cost_bytes):
                        self._waits()
                        return
                except Refusal as refusal:
                    self._drop_message(in_grpc(refusal))
                    continue
            elif len(piece.data) == self._unsent_bytes and not self._comes_back():
                return
            if piece.cost_bytes and not piece.begins_bytes:
                try:
                    self._cost_more(piece.cost_bytes)
                except Refusal as refusal:  # a part of it is with Triton, which must never have the rest
                    self.refuse(in_grpc(refusal))
                    return
            up = self._opened()
            if up is None:
                return
            outbox.popleft()
            if self.queued is not None and piece.begins_bytes:
                if self.running is None:
                    self.running = deque()
                self.running.append(self.queued)
                self.queued = None
            assert self.upstream is not None
            assert self.reader is not None
            end = self.input is _ENDED and not outbox and self.reader.is_between_messages
            if end:
                self.input = _PASSED
            self._unsent_bytes += piece.begins_bytes - len(piece.data)
            if self._unsent_bytes and piece.begins_bytes:
                self._steps_aside()
            self.upstream.send(up, piece.data, end=end, owned=unsent)

    def _waits(self) -> None:
        if self.stage is _RECEIVING:
            self.enter(_QUEUED)

    def _is_admitted(self, cost_bytes: int) -> bool:
        """Whether a message may go on; if not, `_granted` tells. Raises Refusal."""
        now = time.monotonic()
        if not self.kind.is_stream:
            if self.admission is None:
                self.admit(now, self._granted, cost_bytes, counted=self.kind.is_counted)
            return self.admission is not None and self.admission.is_running
        if self.queued is None:
            self.queued = self.replica.admissions.admit(
                now, self._granted, cost_bytes=cost_bytes, deadline=self.deadline
            )
        if self.queued.is_waiting:
            return False
        self.prolong(now)
        return True

    def _cost_more(self, more_bytes: int) -> None:
        """The message that streams by costs more than its beginning said. Raises Refusal."""
        admission = self._last_admission
        if admission is not None:
            admission.grow(more_bytes)

    def _steps_aside(self) -> None:
        """Triton has the beginning of a message: it needs no slot before its end."""
        admission = self._last_admission
        if admission is not None:
            admission.step_aside()

    def _comes_back(self) -> bool:
        """Whether the end of a message may go on; if not, `_granted` tells."""
        admission = self._last_admission
        return admission is None or admission.come_back(self._granted)

    @property
    def _last_admission(self) -> Admission | None:
        """Of the message that goes on piece by piece."""
        return self.running[-1] if self.running else self.admission

    def _granted(self) -> None:
        """A slot is there. Not in this step: the request that released it has not returned yet."""
        self.downstream.batch.then(self._go_on)

    def _go_on(self) -> None:
        self._pump()
        self.look_at_end()

    def _drop_message(self, refusal: GrpcError) -> None:
        """The first message of the outbox goes no further. Of the last one more may be to come."""
        if not self.kind.is_stream:
            self.refuse(refusal)
            return
        outbox = self.outbox
        assert outbox is not None
        outbox.popleft()[1].release()
        while outbox and not outbox[0][0].begins_bytes:
            outbox.popleft()[1].release()
        if not outbox and self.reader is not None:
            self.reader.drop()
        self._refuse_message(refusal)

    def _opened(self) -> Stream | None:
        """The call at Triton, which begins now if it has not. None: it cannot, and is refused or waits."""
        if self.up is not None:
            return self.up
        downstream, kind, fields = self.downstream, self.kind, self.fields
        try:
            if kind.method == MODEL_READY and downstream.replica.not_ready() is not None:
                raise GrpcError(Status.NOT_FOUND, "not ready")  # answered with ready: false
            upstream = downstream.triton.connection(self)
            if upstream is None:
                self._waits()
                return None
            size = list_bytes(fields) + upstream.keys.list_bytes
            if size > upstream.most_list_bytes:
                raise _too_much_metadata(size, upstream.most_list_bytes)
            block = kind.block + fields.forwarded + upstream.keys.block
            self.up = upstream.open(self, block)
        except Refusal as refusal:
            self.refuse(in_grpc(refusal))
            return None
        except GrpcError as refused:
            self.refuse(refused)
            return None
        self.upstream = upstream
        self.enter(_FORWARDED)
        return self.up

    @property
    def wants_connection(self) -> bool:
        return self.stage.is_pending

    def connected(self) -> None:
        """There is a connection to begin on."""
        self.downstream.batch.then(self._go_on)

    def forwarded(self, upstream: UpstreamConnection, up: Stream) -> None:
        """It has gone on in one piece."""
        self.upstream, self.up = upstream, up
        self.enter(_FORWARDED)
        self.messages, self.input = 1, _PASSED

    # What Triton says (`upstream.HttpRequest`).

    def answer_whole(self, answer: WholeAnswer) -> None:
        now, downstream = time.monotonic(), self.downstream
        if self.stage.is_over:
            self._triton_is_done(now)
            return
        if self.kind.is_stream:
            self._answer_in_parts(answer)
            return
        data: Buffer | None = answer.data
        if self.kind.is_usual:
            data = downstream.own.usual_answer(bytes(answer.data))
        if (data is None or not self.kind.is_usual) and AnswerReader.is_needed(
            self.kind.method, downstream.own
        ):
            data, _ = AnswerReader(self.kind.method, downstream.own).feed(answer.data)
        data = answer.data if data is None else data
        size, codec, names, budget = (
            len(data),
            self.client.codec,
            downstream.own.names,
            downstream.replica.budget,
        )
        code = answer.trailers.kind.code
        downstream.replica.grpc.sent_bytes += size
        waits = not codec.takes_now(self.stream, size)
        codec.send_answer(
            self.stream,
            head_block(answer.fields, names),
            data,
            trailers_block(answer.trailers, names),
            owned=UnreadResponse(budget, size, None) if waits else None,
        )
        if waits and budget.is_exceeded:
            codec.reset(self.stream, ErrorCode.ENHANCE_YOUR_CALM)
            code = Status.RESOURCE_EXHAUSTED.name
        self._finish(_ANSWERED, code, now)
        self.up = None

    def _answer_in_parts(self, answer: WholeAnswer) -> None:
        """Of a stream: it may have been begun here, and its messages are looked at one by one."""
        answer.stream.arrived(len(answer.data))
        self.answer_began(answer.fields, end=False)
        self.answer_data(Data(answer.stream, answer.data, end=False))
        self.answer_ended(answer.trailers)

    def answer_began(self, fields: Fields[AnswerKind], *, end: bool) -> None:
        downstream = self.downstream
        if not end and AnswerReader.is_needed(self.kind.method, downstream.own):
            self.answers = AnswerReader(self.kind.method, downstream.own, is_decoupled=self.is_decoupled)
        if self.stage.is_over:
            if end:
                self._triton_is_done(time.monotonic())
        elif end:
            self._end_with(fields)
        elif self.output is _NOTHING:  # else it began with headers of ours
            self.output = _HEADERS
            self.client.codec.send_headers(self.stream, head_block(fields, downstream.own.names))

    def answer_data(self, data: Data) -> None:
        payload: Buffer = data.data
        finals = 0
        if not self.kind.is_stream and self.output is _HEADERS:
            self._look_at_size(payload)
        if self.answers is not None:
            payload, finals = self.answers.feed(data.data, show_marks=self._shows_marks)
        if self.stage.is_over or not payload:
            data.release()
        else:
            self._send(payload, data)
        if finals:
            self._answered_messages(finals)
        if self.running and self.answers is not None and self.answers.unfinished_bytes:
            self.running[0].has_run(cost.of_grpc_answer(self.answers.unfinished_bytes))

    def _look_at_size(self, beginning: Buffer) -> None:
        """Of a unary answer that does not come in one piece."""
        self.output = _CONTENT
        admission = self.admission
        if (
            admission is not None
            and self.up is not None
            and self.up.local_done
            and len(beginning) >= PREFIX_BYTES
        ):
            size = read_prefix(beginning)[1]
            if size > LARGE_ANSWER_BYTES:
                admission.has_run(cost.of_grpc_answer(size))

    def answer_ended(self, fields: Fields[AnswerKind]) -> None:
        if self.stage.is_over:
            self._triton_is_done(time.monotonic())
        else:
            self._end_with(fields)

    def answer_broke(self, reason: str) -> None:
        self.up = None
        if self.stage.is_over:
            self._triton_is_done(time.monotonic())
        else:
            self.refuse(GrpcError(Status.UNAVAILABLE, reason, retry_after="1"))

    @property
    def _shows_marks(self) -> bool:
        return not self.is_decoupled or (self.reader is not None and self.reader.wants_final)

    def _end_with(self, fields: Fields[AnswerKind]) -> None:
        """Triton's status, in trailers or alone."""
        names = self.downstream.own.names
        block = trailers_block(fields, names) if self.output is not _NOTHING else head_block(fields, names)
        self.client.codec.send_headers(self.stream, block, end=True)
        self._finish(_ANSWERED, fields.kind.code, time.monotonic())

    def _send(self, payload: Buffer, data: Data) -> None:
        """Content for the client, and what Triton is owed for it."""
        codec, budget, size = self.client.codec, self.replica.budget, len(payload)
        self.replica.grpc.sent_bytes += size
        if codec.takes_now(self.stream, size):
            codec.send_data(self.stream, payload, owned=data)
            return
        codec.send_data(self.stream, payload, owned=UnreadResponse(budget, size, data))
        if budget.is_exceeded:
            self.cut()

    def _answered_messages(self, count: int) -> None:
        """So many messages of a stream are answered for good."""
        now, admissions = time.monotonic(), self.running
        self.prolong(now)
        while count and admissions:
            admissions.popleft().release(now)
            count -= 1
        if self.stage.is_over and not admissions and self.up is not None and self.upstream is not None:
            self.upstream.reset(self.up)
            self._triton_is_done(now)

    # Answered, refused, left.

    def respond(self, message: bytes) -> None:
        """Answer a unary call here."""
        if not self.stage.is_over:
            data = framed(message)
            self.replica.grpc.sent_bytes += len(data)
            self.client.codec.send_answer(self.stream, RESPONSE_BLOCK, data, OK_TRAILERS_BLOCK)
            self._leave(_ANSWERED, Status.OK.name)

    def respond_part(self, data: bytes) -> None:
        """One more message of ours."""
        if not self.stage.is_over:
            if self.output is _NOTHING:
                self.output = _HEADERS
                self.client.codec.send_headers(self.stream, RESPONSE_BLOCK)
            self.replica.grpc.sent_bytes += len(data)
            self.client.codec.send_data(self.stream, data)

    def refuse(self, refusal: GrpcError) -> None:
        """End the call with a status of our own."""
        if self.stage.is_over:
            return
        if self.kind.method == MODEL_READY and refusal.status is Status.NOT_FOUND:
            self.respond(b"")  # ready: false, which is what Triton says of models it does not have
            return
        block = hpack.encode(trailers(refusal)) if self.output is not _NOTHING else trailers_only(refusal)
        self.client.codec.send_headers(self.stream, block, end=True)
        self._leave(_REFUSED, refusal.status.name)

    def _refuse_message(self, refusal: GrpcError) -> None:
        """In a stream the refusal of one message is a message, unless the client wants a status.

        Triton 2.51 tells of a model that it does not have in a message either way.
        """
        as_status = self.kind.errors_as_status and refusal.status is not Status.NOT_FOUND
        if not self.kind.is_stream or as_status:
            self.refuse(refusal)
        else:
            self.respond_part(stream_error(str(refusal), refusal.request_id))

    def client_left(self) -> None:
        """Reset, or gone."""
        if not self.stage.is_over:
            self._leave(_ABORTED, Status.CANCELLED.name)

    def is_late(self, now: float) -> bool:
        if super().is_late(now):
            return True
        has_come = not self.stage.is_pending or self.kind.is_stream or self.admission is not None
        return not has_come and now - self.began > self.downstream.arrival_seconds

    def is_overdue(self, now: float) -> bool:
        """It, or the message of a stream that is next, has waited for its turn for longer than it may."""
        return super().is_overdue(now) or (self.queued is not None and self.queued.is_overdue(now))

    def is_too_slow(self, now: float) -> bool:
        """Whether a message that Triton has the beginning of keeps others waiting for too long."""
        return bool(self._unsent_bytes and not self.outbox) and self.is_sent_too_slowly(
            self.stream.received, now, is_awaited=not self.stream.held
        )

    def is_taken_too_slowly(self, now: float) -> bool:
        """Whether its client leaves so much of Triton's answer lying here that others wait for too long."""
        up = self.up
        if up is None or self.stage.is_over:
            return False
        is_awaited = bool(self.stream.queue) or (up.held > 0 and not self.client.is_writable)
        others_wait = is_awaited and self._keeps_others_waiting
        return self.is_read_too_slowly(up.received - up.held, now, others_wait=others_wait)

    @property
    def _keeps_others_waiting(self) -> bool:
        if self.kind.is_stream:
            return any(one.keeps_others_waiting for one in self.running or ())
        admission = self.admission
        return admission is not None and admission.keeps_others_waiting

    def cut(self) -> None:
        """Its client gets no more of the answer; the reset passes what it does not read."""
        self.client.codec.reset(self.stream, ErrorCode.ENHANCE_YOUR_CALM)
        self._leave(_ABORTED, Status.RESOURCE_EXHAUSTED.name)

    def out_of_time(self) -> None:
        """Triton has had its time for a call without a client."""
        if self.up is not None and self.upstream is not None:
            self.upstream.reset(self.up)
        self._triton_is_done(time.monotonic())

    def _leave(self, stage: Stage, code: str) -> None:
        """It is over for the client; Triton may still have it."""
        up, in_triton = self.up, False
        if self._unsent_bytes and self.running:
            self._set_half_message_aside(self.running)
        if up is not None and self.upstream is not None and not up.is_closed:
            in_triton = self._goes_on(up)
            if not in_triton:
                self.up = None
                self.upstream.reset(up)
        self._finish(stage, code, time.monotonic(), in_triton=in_triton)

    def _goes_on(self, up: Stream) -> bool:
        """Whether Triton may finish a call without a client.

        Triton does not stop what it has begun, so another in its place would be one too many; and Triton 2.51
        dies (SIGSEGV in its gRPC handler, within seconds) of many complete unary calls that are reset or
        reach their deadline, and (double free) of some tens of complete streams of a decoupled model. Only one
        whose requests have not ended is cancelled: it may go on for very long, and can stop.
        """
        if self.kind.is_stream:
            return bool(self.running) and (up.local_done or not self.is_decoupled)
        return up.local_done

    def _set_half_message_aside(self, admissions: deque[Admission]) -> None:
        """Triton never runs the last message of a stream, whose end it will not get. What it has of it is there
        until it has run the others."""
        self.admission = admissions.pop()
        self.admission.step_aside()

    def _finish(self, stage: Stage, code: str, now: float, *, in_triton: bool = False) -> None:
        """Once for each call: nothing of it waits, and it is counted."""
        self.end(stage, code, now, in_triton=in_triton)
        if self._deadline_step:
            self._forget_deadline()
        if self.outbox:
            outbox, self.outbox = self.outbox, None
            for _, piece in outbox:
                piece.release()
        if self._data is not None:
            self._settle_data()
        if self.kind.is_stream:
            self._finish_stream(now, in_triton=in_triton)
        if self.watches:
            self.downstream.watchers.discard(self)
        if in_triton:
            self.downstream.given_up.add(self)
        if self.input is not _OPEN and self.stream.is_closed:
            self.stream.owner = None  # a circle is the garbage collector's work, and it has enough

    def _finish_stream(self, now: float, *, in_triton: bool) -> None:
        queued, self.queued = self.queued, None
        if queued is not None:
            queued.release(now)
        for admission in self.running or ():
            if in_triton:
                admission.give_up(now)
            else:
                admission.release(now)
        if not in_triton:
            self.running = None

    def _triton_is_done(self, now: float) -> None:
        """Triton has nothing of a call any more that was given up."""
        self.up = None
        self.downstream.given_up.discard(self)
        self.triton_is_done(now)
        running, self.running = self.running, None
        for admission in running or ():
            admission.release(now)

    def _forget_deadline(self) -> None:
        self.downstream.deadlines.unset(self._deadline_step, self)
        self._deadline_step = 0


def _too_much_metadata(size_bytes: int, most_bytes: int) -> GrpcError:
    return GrpcError(Status.RESOURCE_EXHAUSTED, f"metadata of {size_bytes} bytes; {most_bytes} are taken")
