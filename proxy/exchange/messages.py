"""gRPC messages on their way through: cut out of whatever DATA frames they came in, checked, passed on.

A message of up to HOLD_BYTES is checked whole before a byte of it goes on. A longer one is read as it
streams by: should it turn out to be refused only at its end, it is never completed upstream.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from proxy.codecs import protobuf
from proxy.codecs.classification import NO_CLASSES
from proxy.codecs.grpc_status import Refused, Status
from proxy.codecs.packing import CODINGS, BadPacking, UnpacksTooLarge, unpack, unpack_beginning
from proxy.exchange.model_facts import ModelFacts
from proxy.exchange.policy import unknown_model

PREFIX_BYTES: Final = 5
HOLD_BYTES: Final = 256 * 1024
# Triton's own limit for gRPC messages.
_MAX_MESSAGE = 2**31 - 1

FINAL_FLAG: Final = b"triton_final_response"
_WANTS_FINAL: Final = b"triton_enable_empty_final_response"
FINAL_REQUEST: Final = protobuf.bool_parameter(_WANTS_FINAL, True)

_prefix = struct.Struct(">BI")
read_prefix = _prefix.unpack_from


def framed(message: bytes) -> bytes:
    """The message with its prefix, not compressed."""
    return _prefix.pack(0, len(message)) + message


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to pass on. `begins`: they are the first of a message."""

    data: bytes
    begins: bool


class Guard(Protocol):
    """What the messages of one RPC must be."""

    def whole(self, message: bytes) -> bytes:
        """Check a message; returns what goes on in its place. Raises Refused."""
        ...

    def walker(self) -> "Walk | None":
        """For a message too long to be held; None if none may be."""
        ...


class Walk(Protocol):
    def feed(self, piece: bytes) -> None:
        """Raises Refused."""
        ...

    def skim(self, size: int) -> bool:
        """True if so many bytes are of no interest, nor the next: they need not be fed."""
        ...

    def finish(self) -> None:
        """The message is complete. Raises Refused."""
        ...


class InferGuard:
    """ModelInferRequest: the own model, nothing in shared memory, no classes of what may be empty."""

    def __init__(self, own: protobuf.OwnModel, facts: Callable[[], ModelFacts]) -> None:
        self._own, self._facts = own, facts

    def whole(self, message: bytes) -> bytes:
        try:
            if not protobuf.names_model(message, self._own.field):
                _require_own(self._own, protobuf.model_name(message), protobuf.request_id(message))
            if protobuf.needs_closer_look(message):
                walk = self.walker()
                walk.feed(message)
                walk.finish()
        except protobuf.BadMessage as error:
            raise _refused(error, protobuf.request_id(message)) from error
        except Refused as refusal:
            refusal.request_id = protobuf.request_id(message)
            raise
        return message

    def walker(self) -> Walk:
        return _InferWalk(self._own, self._facts)


class _InferWalk:
    def __init__(self, own: protobuf.OwnModel, facts: Callable[[], ModelFacts]) -> None:
        self._own, self._facts, self._walker = own, facts, protobuf.InferWalker()

    def feed(self, piece: bytes) -> None:
        try:
            self._walker.feed(piece)
        except (protobuf.BadMessage, protobuf.AsksForSharedMemory) as error:
            raise _refused(error) from error
        # Clients write the name first: what names somebody else is refused before any of it goes on.
        if self._walker.name:
            _require_own(self._own, self._walker.name)

    def skim(self, size: int) -> bool:
        return self._walker.skim(size)

    def finish(self) -> None:
        try:
            self._walker.finish()
        except protobuf.BadMessage as error:
            raise _refused(error) from error
        _require_own(self._own, self._walker.name)
        for output in self._walker.classified:
            if self._walker.has_empty_input or not self._facts().has_classes(output.decode(errors="replace")):
                raise Refused(Status.INVALID_ARGUMENT, NO_CLASSES)


class NameGuard:
    """A request whose field 1 names a model. `fill`: an absent name asks for all models; ask for the own."""

    def __init__(
        self, own: protobuf.OwnModel, hidden: Callable[[bytes], Refused], *, fill: bool = False
    ) -> None:
        self._own, self._hidden, self._fill = own, hidden, fill

    def whole(self, message: bytes) -> bytes:
        try:
            name = protobuf.model_name(message)
        except protobuf.BadMessage as error:
            raise _refused(error) from error
        if not name and self._fill:
            return message + self._own.field
        if name != self._own.name:
            raise self._hidden(name)
        return message

    def walker(self) -> None:
        return None


class AnyGuard:
    """A request that is answered here."""

    def whole(self, message: bytes) -> bytes:
        return message

    def walker(self) -> None:
        return None


class MessageReader:
    """One call's messages. `feed` gives pieces to pass on and refusals of single messages, in order."""

    def __init__(self, guard: Guard, *, encoding: str, inflate_limit: int, ask_final: bool = False) -> None:
        self._guard, self._encoding, self._inflate_limit = guard, encoding, inflate_limit
        self._ask_final = ask_final
        self._buffer = bytearray()
        # Of the message that streams by: bytes to come, how it is checked (None: it is refused).
        self._left = 0
        self._walk: Walk | None = None
        self._passed = False
        self._prefix = b""
        self.wants_final = False

    @property
    def is_between_messages(self) -> bool:
        return not self._buffer and not self._left

    @property
    def gathered(self) -> int:
        """Bytes of a message that is not whole yet."""
        return len(self._buffer)

    def skim(self, size: int) -> bool:
        """Whether so many bytes are the middle of a long tensor, to be passed on without a look."""
        if self._walk is None or size >= self._left or not self._passed or not self._walk.skim(size):
            return False
        self._left -= size
        return True

    def drop(self) -> None:
        """What has gone on of the message that streams by was dropped: so is what is still to come of it."""
        if self._left and self._passed:
            self._walk = None

    def feed(self, payload: bytes) -> list[Piece | Refused]:
        """Raises Refused when the call cannot go on: a part of a message that is refused has gone on."""
        out: list[Piece | Refused] = []
        if self._left:
            payload = self._stream(payload, out)
        if payload:
            self._buffer += payload
            self._cut(out)
        return out

    def _cut(self, out: list[Piece | Refused]) -> None:
        while len(self._buffer) >= PREFIX_BYTES:
            flag, size = read_prefix(self._buffer)
            self._require_readable(flag, size)
            if size > self._hold_limit(flag):
                self._begin_stream(size, out)
                return
            end = PREFIX_BYTES + size
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[PREFIX_BYTES:end])
            del self._buffer[:end]
            out.append(self._whole(flag, message))

    def _hold_limit(self, flag: int) -> int:
        return self._inflate_limit if flag else HOLD_BYTES

    def _require_readable(self, flag: int, size: int) -> None:
        if flag not in (0, 1):
            raise Refused(Status.INVALID_ARGUMENT, f"a message's compressed flag is {flag}, not 0 or 1")
        if flag and self._encoding not in CODINGS:
            raise Refused(
                Status.UNIMPLEMENTED,
                f"a compressed message with grpc-encoding {self._encoding!r}; gzip and deflate are taken",
                grpc_accept_encoding="identity, deflate, gzip",
            )
        if flag and size > self._inflate_limit:
            raise Refused(
                Status.RESOURCE_EXHAUSTED,
                f"a compressed message of {size} bytes; {self._inflate_limit} are taken: send it as it is",
            )
        if size > _MAX_MESSAGE:
            raise Refused(Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes; {_MAX_MESSAGE} are taken")

    def _whole(self, flag: int, message: bytes) -> Piece | Refused:
        try:
            if flag:
                message = inflate(message, self._encoding, self._inflate_limit)
            message = self._guard.whole(message)
        except Refused as refusal:
            return refusal
        if self._ask_final:
            self.wants_final = self.wants_final or _WANTS_FINAL in message
            message += FINAL_REQUEST
        return Piece(framed(message), begins=True)

    def _begin_stream(self, size: int, out: list[Piece | Refused]) -> None:
        walk = self._guard.walker()
        if walk is None:
            raise Refused(Status.RESOURCE_EXHAUSTED, f"a request of {size} bytes")
        self._walk, self._left, self._passed = walk, size, False
        payload = bytes(self._buffer[PREFIX_BYTES:])
        self._buffer.clear()
        if self._ask_final:
            size += len(FINAL_REQUEST)
        self._prefix = _prefix.pack(0, size)
        self._stream(payload, out)

    def _stream(self, payload: bytes, out: list[Piece | Refused]) -> bytes:
        """Pass on what belongs to the long message; returns what comes after it."""
        mine, rest = payload[: self._left], payload[self._left :]
        self._left -= len(mine)
        try:
            if self._walk is not None:
                self._walk.feed(mine)
                if not self._left:
                    self._walk.finish()
        except Refused as refusal:
            if self._passed:
                raise
            self._walk = None
            out.append(refusal)
            return rest
        if self._walk is not None and (mine or not self._left):
            begins = not self._passed
            data = (self._prefix if begins else b"") + mine
            if not self._left and self._ask_final:
                data += FINAL_REQUEST
            out.append(Piece(data, begins))
            self._passed = True
        return rest


class ResponseReader:
    """Counts the responses of a decoupled model's stream that are final, which only their content tells.

    Triton marks every response with `triton_final_response`, and sends one that is nothing but the
    mark if the request asks for it. Every request is made to ask; who had not asked is not shown it.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._left = 0

    def feed(self, payload: bytes, *, show_marks: bool) -> tuple[bytes, int]:
        """What goes on to the client, and how many requests it completes."""
        out, finals = [], 0
        if self._left:
            out.append(payload[: self._left])
            payload = payload[self._left :]
            self._left -= len(out[0])
        self._buffer += payload
        while len(self._buffer) >= PREFIX_BYTES:
            flag, size = read_prefix(self._buffer)
            end = PREFIX_BYTES + size
            if len(self._buffer) < min(end, HOLD_BYTES):
                break
            is_final, is_mark = _finality_of(
                flag, bytes(self._buffer[PREFIX_BYTES : min(end, HOLD_BYTES)]), size
            )
            finals += is_final
            if is_mark and not show_marks:
                del self._buffer[:end]
                continue
            out.append(bytes(self._buffer[:end]))
            del self._buffer[:end]
            self._left = end - len(out[-1])
        return b"".join(out), finals


_ERROR_MESSAGE, _INFER_RESPONSE = 1, 2
_RESPONSE_PARAMETERS, _RESPONSE_TENSORS = 4, (5, 6)
_MARK = protobuf.encode_bytes(1, FINAL_FLAG)
_FINAL_ENTRY = _MARK + protobuf.encode_bytes(2, b"\x08\x01")


def _finality_of(flag: int, beginning: bytes, size: int) -> tuple[bool, bool]:
    """`_finality` of a message of `size` bytes, packed or not, from its first HOLD_BYTES."""
    is_whole = len(beginning) == size
    if flag:
        try:
            beginning = unpack_beginning(beginning, HOLD_BYTES)
        except BadPacking:  # in a coding that nobody has asked for
            return False, False
        is_whole = is_whole and len(beginning) < HOLD_BYTES
    if is_whole:
        return _finality(beginning)
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


def inflate(data: bytes, encoding: str, limit: int) -> bytes:
    """Unpack a message within a bound. Raises Refused."""
    try:
        return unpack(data, encoding, limit)
    except BadPacking as error:
        raise Refused(Status.INVALID_ARGUMENT, f"a message {error}") from error
    except UnpacksTooLarge as error:
        message = f"a compressed message unpacks to more than {limit} bytes"
        raise Refused(Status.RESOURCE_EXHAUSTED, message) from error


def _require_own(own: protobuf.OwnModel, name: bytes, request_id: bytes = b"") -> None:
    if name != own.name:
        shown = name.decode(errors="replace")
        raise Refused(Status.NOT_FOUND, unknown_model(shown), request_id=request_id)


def _refused(error: Exception, request_id: bytes = b"") -> Refused:
    if isinstance(error, protobuf.AsksForSharedMemory):
        return Refused(Status.INVALID_ARGUMENT, "shared memory is not available", request_id=request_id)
    return Refused(Status.INVALID_ARGUMENT, f"unreadable request: {error}", request_id=request_id)
