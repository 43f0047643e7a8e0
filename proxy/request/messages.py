"""gRPC messages on their way through: cut out of whatever DATA frames they came in, checked, passed on.

A message of up to HOLD_BYTES is checked whole before a byte of it goes on. A longer one is read as it
streams by: should it turn out to be refused only at its end, it is never completed upstream.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from proxy.policy import cost, infer
from proxy.policy.model_facts import ModelFacts
from proxy.policy.names import Names
from proxy.policy.refusal import Flags, Refusal, in_grpc
from proxy.policy.routes import SERVICE
from proxy.request.lifecycle import too_large
from proxy.request.minimum_rate import BEGUN_BYTES
from proxy.wire import protobuf
from proxy.wire.grpc_status import GrpcError, Status
from proxy.wire.h2.frames import DEFAULT_MAX_FRAME
from proxy.wire.packing import CODINGS, BadPacking, Unpacking, UnpacksTooLarge, unpack_beginning

INFER: Final = f"/{SERVICE}/ModelInfer"
STREAM_INFER: Final = f"/{SERVICE}/ModelStreamInfer"
STATISTICS: Final = f"/{SERVICE}/ModelStatistics"
METADATA: Final = f"/{SERVICE}/ModelMetadata"
CONFIG: Final = f"/{SERVICE}/ModelConfig"
MODEL_READY: Final = f"/{SERVICE}/ModelReady"

PREFIX_BYTES: Final = 5
HOLD_BYTES: Final = 256 * 1024
# A shorter message is not read for what it costs.
_SHORT_BYTES: Final = 16 * 1024
# Triton's own limit for gRPC messages.
_MAX_MESSAGE = 2**31 - 1
# Of an answer that is gathered so that the names in it can be replaced: a model's configuration, say.
_GATHER_BYTES = 4 * 1024 * 1024

FINAL_FLAG: Final = b"triton_final_response"
_WANTS_FINAL: Final = b"triton_enable_empty_final_response"
FINAL_REQUEST: Final = protobuf.bool_parameter(_WANTS_FINAL, True)

Buffer = bytes | memoryview

_prefix = struct.Struct(">BI")
read_prefix = _prefix.unpack_from
pack_prefix = _prefix.pack


def framed(message: bytes) -> bytes:
    """The message with its prefix, not compressed."""
    return _prefix.pack(0, len(message)) + message


@dataclass(frozen=True, slots=True)
class ModelFields:
    """A model's names as messages carry them: field 1 of a request or of an answer.

    `appended`: what makes a request for the public name one for the server's: of a field that comes twice
    the last one counts. Nothing where both are the same.
    """

    names: Names
    public: bytes = field(init=False)
    server: bytes = field(init=False)
    appended: bytes = field(init=False)

    def __post_init__(self) -> None:
        public, server = (
            protobuf.encode_bytes(1, self.names.public),
            protobuf.encode_bytes(1, self.names.server),
        )
        object.__setattr__(self, "public", public)
        object.__setattr__(self, "server", server)
        object.__setattr__(self, "appended", b"" if self.names.are_same else server)

    def usual_answer(self, data: bytes) -> bytes | None:
        """A ModelInferResponse in its one frame as clients get it; None where it is another."""
        if self.names.are_same:
            return data
        at = PREFIX_BYTES + len(self.server)
        if len(data) < at or not data.startswith(self.server, PREFIX_BYTES):
            return None
        flag, size = read_prefix(data)
        if flag or size != len(data) - PREFIX_BYTES:
            return None
        return pack_prefix(0, size - len(self.server) + len(self.public)) + self.public + data[at:]


class Piece(NamedTuple):
    """Bytes to pass on. `begins_bytes`: the size of the message that they begin, 0 if they are in its middle.

    `cost_bytes`: what they let Triton take, as far as is known by then (`cost`): of the whole message, or more of it.
    """

    data: bytes
    begins_bytes: int
    cost_bytes: int


class Unfinished(Enum):
    """Of a message that is being unpacked, step by step."""

    UNFINISHED = auto()


class Guard(Protocol):
    """What the messages of one RPC must be."""

    # What is put behind each of them.
    appended: bytes

    def whole(self, message: bytes) -> bytes:
        """Check a message; returns what goes on in its place, without what is appended. Raises GrpcError."""
        ...

    def cost_bytes(self, message: bytes) -> int:
        """What a message costs Triton that `whole` has let pass."""
        ...

    def walker(self) -> "Walk | None":
        """For a message too long to be buffered; None if none may be."""
        ...


class Walk(Protocol):
    # What the message costs Triton beyond its size, as far as it was read.
    extra_bytes: int

    def feed(self, piece: bytes) -> None:
        """Raises GrpcError."""
        ...

    def skim(self, size: int) -> bool:
        """True if so many bytes are of no interest, nor the next: they need not be fed."""
        ...

    def finish(self) -> None:
        """The message is complete. Raises GrpcError."""
        ...


class InferGuard:
    """ModelInferRequest: the own model, nothing in shared memory, no classes of what may be empty."""

    def __init__(self, own: ModelFields, facts: Callable[[], ModelFacts]) -> None:
        self._own, self._facts, self._name = own, facts, own.names.public
        self.appended = own.appended

    def plain(self, payload: Buffer) -> bytes | None:
        """For a fast path: the message of a whole frame, of which reading could find nothing that `infer.check` refuses,
        nor a name that is not the own. None is no verdict."""
        size = len(payload)
        if not PREFIX_BYTES <= size <= DEFAULT_MAX_FRAME:
            return None
        packed, length = read_prefix(payload)
        if packed or length != size - PREFIX_BYTES:
            return None
        message = bytes(payload[PREFIX_BYTES:])
        if protobuf.needs_closer_look(message) or not protobuf.names_just(message, self._own.public):
            return None
        return message

    def framed(self, message: bytes, payload: Buffer) -> Buffer:
        """What goes on of a payload that is `plain`."""
        appended = self.appended
        if not appended:
            return payload
        return b"".join((pack_prefix(0, len(message) + len(appended)), message, appended))

    def whole(self, message: bytes) -> bytes:
        try:
            if protobuf.needs_closer_look(message):
                walk = self.walker()
                walk.feed(message)
                walk.finish()
            else:
                infer.require_own(protobuf.model_name(message), self._name)
        except protobuf.BadMessage as error:
            raise _unreadable(error, protobuf.request_id(message)) from error
        except Refusal as refusal:
            raise in_grpc(refusal, protobuf.request_id(message)) from refusal
        except GrpcError as refused:
            refused.request_id = protobuf.request_id(message)
            raise
        return message

    def cost_bytes(self, message: bytes) -> int:
        if len(message) <= _SHORT_BYTES:
            return cost.of_short_message(len(message))
        reader = protobuf.InferReader()
        try:
            reader.feed(message)
        except protobuf.BadMessage as error:
            raise _unreadable(error) from error
        return cost.of_message(len(message)) + _cost_of_lists(reader)

    def walker(self) -> Walk:
        return _InferWalk(self._name, self._facts)


class _InferWalk:
    def __init__(self, own: bytes, facts: Callable[[], ModelFacts]) -> None:
        self._own, self._facts, self._reader = own, facts, protobuf.InferReader()
        self.extra_bytes = 0

    def feed(self, piece: bytes) -> None:
        reader = self._reader
        try:
            reader.feed(piece)
        except protobuf.BadMessage as error:
            self._check_begun()  # what was found before counts first
            raise _unreadable(error) from error
        if reader.lists:
            self.extra_bytes += _cost_of_lists(reader)
            reader.lists.clear()
        self._check_begun()

    def _check_begun(self) -> None:
        """Clients write the name first: what names another model is refused before any of it goes on."""
        try:
            infer.check_begun(self._reader)
            if self._reader.name:
                infer.require_own(self._reader.name, self._own)
        except Refusal as refusal:
            raise in_grpc(refusal) from refusal

    def skim(self, size: int) -> bool:
        return self._reader.skim(size)

    def finish(self) -> None:
        try:
            self._reader.finish()
            infer.require_own(self._reader.name, self._own)
            infer.check(self._reader, self._facts())
        except protobuf.BadMessage as error:
            raise _unreadable(error) from error
        except Refusal as refusal:
            raise in_grpc(refusal) from refusal


def _cost_of_lists(reader: protobuf.InferReader) -> int:
    return sum(cost.of_list(field, size) for field, size in reader.lists)


class NameGuard:
    """A request whose field 1 names a model. `fill`: an absent name requests all models; request the own."""

    def __init__(self, own: ModelFields, hidden: Callable[[bytes], GrpcError], *, fill: bool = False) -> None:
        self._own, self._hidden, self._fill = own, hidden, fill
        self.appended = own.appended

    def whole(self, message: bytes) -> bytes:
        try:
            name = protobuf.model_name(message)
        except protobuf.BadMessage as error:
            raise _unreadable(error) from error
        if not name and self._fill:
            return message + self._own.public
        if not infer.is_own(name, self._own.names.public):
            raise self._hidden(name)
        return message

    def cost_bytes(self, message: bytes) -> int:
        return len(message)

    def walker(self) -> None:
        return None


class AnyGuard:
    """A request that is answered here."""

    appended = b""

    def whole(self, message: bytes) -> bytes:
        return message

    def cost_bytes(self, message: bytes) -> int:
        return len(message)

    def walker(self) -> None:
        return None


class MessageReader:
    """One call's messages. What came is pushed; pieces to pass on and refusals of single messages are pulled,
    in order, one at a time: each may take its time."""

    def __init__(
        self,
        guard: Guard,
        *,
        encoding: str,
        inflate_limit: int,
        message_limit: int,
        ask_final: bool = False,
        flags: Flags = Flags(),
    ) -> None:
        """The limits are those of one message: of a packed one, and of any. `flags`: what sets them."""
        self._guard, self._encoding = guard, encoding
        self._inflate_limit, self._message_limit = inflate_limit, message_limit
        self.asks_final, self._flags = ask_final, flags
        self._appended = guard.appended + (FINAL_REQUEST if ask_final else b"")
        self._buffer = bytearray()
        # Of the message that streams by: bytes to come, how it is checked (None: it is refused).
        self._left = 0
        self._walk: Walk | None = None
        self._unpacking: Unpacking | None = None
        self._prefix = b""
        self._passed = False
        # What was said of its lists' cost.
        self._charged = 0
        self.wants_final = False

    @property
    def is_between_messages(self) -> bool:
        return not self._buffer and not self._left and self._unpacking is None

    @property
    def gathered(self) -> int:
        """Bytes that are here and have not been pulled."""
        return len(self._buffer) + (0 if self._unpacking is None else self._unpacking.size_bytes)

    def skim(self, size: int) -> bool:
        """Whether so many bytes are the middle of a long tensor, to be passed on without a look."""
        if self._walk is None or self._buffer or size >= self._left or not self._passed:
            return False
        if not self._walk.skim(size):
            return False
        self._left -= size
        return True

    def drop(self) -> None:
        """What has gone on of the message that streams by was dropped: so is what is still to come of it."""
        if self._passed:
            self._walk, self._passed = None, False

    def push(self, payload: Buffer) -> None:
        self._buffer += payload

    def pull(self) -> Piece | GrpcError | Unfinished | None:
        """None: more must come first. Unfinished: there is more to do before. Raises GrpcError when the call cannot go on: a part of a message that is
        refused has gone on, or one is so long that the rest of it is dropped."""
        if self._unpacking is not None:
            return self._unpack(self._unpacking)
        while self._left and self._buffer:
            item = self._stream()
            if item is not None:
                return item
        if self._left or len(self._buffer) < PREFIX_BYTES:
            return None
        flag, size = read_prefix(self._buffer)
        self._require_readable(flag, size)
        if size > (self._inflate_limit if flag else HOLD_BYTES):
            if len(self._buffer) < BEGUN_BYTES and self._guard.walker() is not None:
                return None
            self._begin_stream(size)
            return self.pull()
        end = PREFIX_BYTES + size
        if len(self._buffer) < end:
            return None
        message = bytes(memoryview(self._buffer)[PREFIX_BYTES:end])
        del self._buffer[:end]
        if not flag:
            return self._whole(message)
        self._unpacking = Unpacking(message, self._encoding, self._inflate_limit)
        return self._unpack(self._unpacking)

    def _require_readable(self, flag: int, size: int) -> None:
        if flag not in (0, 1):
            raise GrpcError(Status.INVALID_ARGUMENT, f"a message's compressed flag is {flag}, not 0 or 1")
        if flag and self._encoding not in CODINGS:
            raise GrpcError(
                Status.UNIMPLEMENTED,
                f"a compressed message with grpc-encoding {self._encoding!r}; gzip and deflate are taken",
                grpc_accept_encoding="identity, deflate, gzip",
            )
        if flag and size > self._inflate_limit:
            raise GrpcError(
                Status.RESOURCE_EXHAUSTED,
                f"a compressed message of {size} bytes; {self._inflate_limit} are taken "
                f"({self._flags.json}): send it as it is",
            )
        if size > self._message_limit:
            raise in_grpc(too_large(self._message_limit, self._flags.request))
        if size > _MAX_MESSAGE - len(self._appended):
            raise GrpcError(Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes; {_MAX_MESSAGE} are taken")

    def _unpack(self, unpacking: Unpacking) -> Piece | GrpcError | Unfinished:
        """A step further."""
        try:
            if not unpacking.step():
                return Unfinished.UNFINISHED
        except (BadPacking, UnpacksTooLarge) as error:
            self._unpacking = None
            return _not_unpacked(error, self._inflate_limit, self._flags.json)
        self._unpacking = None
        return self._whole(unpacking.content)

    def _whole(self, message: bytes) -> Piece | GrpcError:
        try:
            message = self._guard.whole(message)
            cost_bytes = self._guard.cost_bytes(message)
        except GrpcError as refusal:
            return refusal
        if self.asks_final:
            self.wants_final = self.wants_final or _WANTS_FINAL in message
        size = len(message) + len(self._appended)
        whole = b"".join((pack_prefix(0, size), message, self._appended))
        return Piece(whole, PREFIX_BYTES + size, cost_bytes)

    def _begin_stream(self, size: int) -> None:
        walk = self._guard.walker()
        if walk is None:
            raise GrpcError(Status.RESOURCE_EXHAUSTED, f"a request of {size} bytes")
        self._walk, self._left, self._passed, self._charged = walk, size, False, 0
        del self._buffer[:PREFIX_BYTES]
        self._prefix = pack_prefix(0, size + len(self._appended))

    def _stream(self) -> Piece | GrpcError | None:
        """Pass on what is there of the long message."""
        mine = bytes(memoryview(self._buffer)[: self._left])
        del self._buffer[: len(mine)]
        self._left -= len(mine)
        walk = self._walk
        if walk is None:
            return None
        try:
            walk.feed(mine)
            if not self._left:
                walk.finish()
        except GrpcError as refusal:
            self._walk = None
            if self._passed:
                raise
            return refusal
        if not self._left:
            mine += self._appended
        more, self._charged = walk.extra_bytes - self._charged, walk.extra_bytes
        was_passed, self._passed = self._passed, self._left > 0
        if was_passed:
            return Piece(mine, 0, more)
        size = PREFIX_BYTES + read_prefix(self._prefix)[1]
        return Piece(self._prefix + mine, size, cost.of_message(size) + more)


_ERROR_MESSAGE, _INFER_RESPONSE = 1, 2
_RESPONSE_PARAMETERS, _RESPONSE_TENSORS = 4, (5, 6)
_MARK = protobuf.encode_bytes(1, FINAL_FLAG)
_FINAL_ENTRY = _MARK + protobuf.encode_bytes(2, b"\x08\x01")
_INFER_RESPONSE_KEY = b"\x12"
# What stands before the name in an answer of a stream: the key and the length of infer_response.
_HEAD_BYTES = 6

# Where an answer names its model (grpc_service.proto, model_config.proto).
_TEXTS: Mapping[str, protobuf.Texts] = {
    INFER: {1: None},
    STREAM_INFER: {1: None, 2: {1: None}},
    METADATA: {1: None},
    STATISTICS: {1: {1: None}},
    # name, instance groups, default_model_filename, parameters' values, the models of an ensemble's steps
    CONFIG: {1: {1: None, 7: {1: None}, 8: None, 14: {2: {1: None}}, 15: {1: {1: None}}}},
}


class AnswerReader:
    """One call's answers on their way to the client: under the public name, and counted.

    Of a decoupled model's stream only the content of its answers tells which are final. Triton marks every
    response with `triton_final_response`, and sends one that is nothing but the mark if the request wants
    it. Every request is made to ask; who had not asked is not shown it.
    """

    def __init__(self, method: str, own: ModelFields, *, is_decoupled: bool = False) -> None:
        self._own, self._is_decoupled = own, is_decoupled
        self._texts: protobuf.Texts = {} if own.names.are_same else _TEXTS.get(method, {})
        self._is_stream = method == STREAM_INFER
        # Tensors stream by once the names before them are seen; other answers are small.
        self._gathers = HOLD_BYTES if method in (INFER, STREAM_INFER) else _GATHER_BYTES
        self._buffer = bytearray()
        self._left = 0
        self._whole_bytes = 0

    @staticmethod
    def is_needed(method: str, own: ModelFields) -> bool:
        """Whether there is anything to be seen to: in a stream there always is."""
        return method == STREAM_INFER or (not own.names.are_same and method in _TEXTS)

    @property
    def gathered(self) -> int:
        return len(self._buffer)

    @property
    def unfinished_bytes(self) -> int:
        """The size of a long answer that has begun, and is all that its request gets; 0 where there is none."""
        return self._whole_bytes if self._left and not self._is_decoupled else 0

    def feed(self, payload: Buffer, *, show_marks: bool = True) -> tuple[bytes, int]:
        """What goes on to the client, and how many requests it completes."""
        finals = 0
        out: list[Buffer] = []
        if self._left:
            out.append(payload[: self._left])
            self._left -= len(out[0])
            finals += not self._left and not self._is_decoupled
            payload = payload[len(out[0]) :]
        if payload:
            self._buffer += payload
        while len(self._buffer) >= PREFIX_BYTES:
            taken = self._take(show_marks=show_marks)
            if taken is None:
                break
            piece, count = taken
            finals += count
            out.append(piece)
        return (bytes(out[0]) if len(out) == 1 else b"".join(out)), finals

    def _take(self, *, show_marks: bool) -> tuple[bytes, int] | None:
        """The message that begins in the buffer, or its beginning; None where more must be seen."""
        flag, size = read_prefix(self._buffer)
        have = len(self._buffer) - PREFIX_BYTES
        seen = min(size, have)
        is_whole = seen == size
        beginning = bytes(memoryview(self._buffer)[PREFIX_BYTES : PREFIX_BYTES + seen])
        if self._is_decoupled and not is_whole and have < HOLD_BYTES:
            return None
        shown = self._renamed(flag, size, beginning)
        if shown is None:
            return None
        del self._buffer[: PREFIX_BYTES + seen]
        self._left, self._whole_bytes = size - seen, size
        if not self._is_decoupled:
            return shown, int(is_whole)
        is_final, is_mark = _finality_of(flag, beginning, size)
        return (b"" if is_mark and not show_marks else shown), int(is_final)

    def _renamed(self, flag: int, size: int, beginning: bytes) -> bytes | None:
        """The prefix and what is there of a message of `size` bytes, under the public name."""
        if not self._texts or flag:  # Triton does not learn that its answers may be packed
            return pack_prefix(flag, size) + beginning
        quick = self._renamed_at_its_beginning(size, beginning)
        if quick is not None:
            return quick
        if len(beginning) < min(size, len(self._own.server) + _HEAD_BYTES):
            return None
        if len(beginning) < size:
            return None if size <= self._gathers else pack_prefix(flag, size) + beginning
        try:
            names = self._own.names
            return framed(protobuf.replace(beginning, self._texts, names.server, names.public, HOLD_BYTES))
        except protobuf.BadMessage:
            return pack_prefix(flag, size) + beginning

    def _renamed_at_its_beginning(self, size: int, beginning: bytes) -> bytes | None:
        """Triton writes the fields in their order, so the name of a tensor answer comes first."""
        server, public = self._own.server, self._own.public
        if not self._is_stream:
            if self._texts is not _TEXTS[INFER] or not beginning.startswith(server):
                return None
            return pack_prefix(0, size - len(server) + len(public)) + public + beginning[len(server) :]
        if not beginning.startswith(_INFER_RESPONSE_KEY):
            return None
        try:
            _, _, start, stop = protobuf.read_field(beginning, 0)
        except protobuf.BadMessage:
            return None
        if stop != size or not beginning.startswith(server, start):
            return None
        inner = stop - start - len(server) + len(public)
        head = _INFER_RESPONSE_KEY + protobuf.encode_varint(inner) + public
        rest = beginning[start + len(server) :]
        return b"".join((pack_prefix(0, size - start - len(server) + len(head)), head, rest))


def _finality_of(flag: int, beginning: bytes, size: int) -> tuple[bool, bool]:
    """`_finality` of a message of `size` bytes, packed or not, from its first HOLD_BYTES."""
    beginning = beginning[:HOLD_BYTES]
    is_whole = len(beginning) == size
    if flag:
        try:
            beginning = unpack_beginning(beginning, HOLD_BYTES)
        except BadPacking:  # in a coding that was not requested
            return False, False
        is_whole = is_whole and len(beginning) < HOLD_BYTES
    if is_whole:
        try:
            return _finality(beginning)
        except protobuf.BadMessage:
            return False, False
    return _FINAL_ENTRY in beginning, False  # not the mark alone; it stands before the tensors


def _finality(message: bytes) -> tuple[bool, bool]:
    """Whether a ModelStreamInferResponse is the last of its request, and whether it is the mark alone."""
    is_error = is_marked = is_final = has_tensors = False
    for part in protobuf.fields(message, HOLD_BYTES):
        if part.number == _ERROR_MESSAGE:
            is_error = bool(part.content)
        elif part.number == _INFER_RESPONSE:
            for inner in protobuf.fields(part.content or b"", HOLD_BYTES):
                has_tensors = has_tensors or inner.number in _RESPONSE_TENSORS
                if inner.number == _RESPONSE_PARAMETERS and (inner.content or b"").startswith(_MARK):
                    is_marked, is_final = True, inner.content == _FINAL_ENTRY
    # An error without a mark has stopped the request before the model had it.
    is_final = is_final or (is_error and not is_marked)
    return is_final, is_final and not is_error and not has_tensors


def stream_error(message: str, request_id: bytes) -> bytes:
    """A refused message of a ModelStreamInfer, as Triton tells of one: in the stream, with its id."""
    response = (
        protobuf.encode_bytes(_INFER_RESPONSE, protobuf.encode_bytes(3, request_id)) if request_id else b""
    )
    return framed(protobuf.encode_bytes(_ERROR_MESSAGE, message.encode()) + response)


def _not_unpacked(error: BadPacking | UnpacksTooLarge, limit_bytes: int, flag: str) -> GrpcError:
    if isinstance(error, BadPacking):
        return GrpcError(Status.INVALID_ARGUMENT, f"a message {error}")
    message = f"a compressed message unpacks to more than {limit_bytes} bytes ({flag}): send it as it is"
    return GrpcError(Status.RESOURCE_EXHAUSTED, message)


def _unreadable(error: protobuf.BadMessage, request_id: bytes = b"") -> GrpcError:
    return GrpcError(Status.INVALID_ARGUMENT, f"unreadable request: {error}", request_id=request_id)
