"""Protobuf's wire format, as far as policy needs it: which model a message names, and what it asks for.

Strict where a reader could be led astray: a truncated message, a wrong wire type for a known field,
groups and overlong varints are refused. The last of a repeated scalar field counts, as in every
protobuf parser (protobuf.dev/programming-guides/encoding). Field numbers: grpc_service.proto.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_NAME, _ID, _PARAMETERS, _INPUTS, _OUTPUTS = 1, 3, 4, 5, 6
_TENSOR_PARAMETERS = {_INPUTS: 4, _OUTPUTS: 2}
_TENSOR_NAME, _SHAPE = 1, 3
_MAP_KEY, _MAP_VALUE, _BOOL = 1, 2, 1
_SHARED_MEMORY: Final = b"shared_memory_"
_CLASSIFICATION: Final = b"classification"
_MAX_VARINT_BYTES = 10

# Fields of one request, those of its tensors counted: enough for 2 500 inputs.
# Each takes time, and a packed message of 100 KB can hold millions.
MAX_FIELDS: Final = 16_384
# Of one entry of a map, which has two.
_ENTRY_FIELDS = 16

# What the guard keeps of one field while a large message streams by: names, ids, parameters.
COLLECT_BYTES: Final = 64 * 1024


class BadMessage(Exception):
    """Not a message that every parser would read alike."""


class AsksForSharedMemory(Exception):
    """The request points into shared memory, which its tenant has no business in."""


class Field(NamedTuple):
    """One field: its number and, for length-delimited ones, its content; else None."""

    number: int
    content: bytes | None


def fields(message: bytes, most: int = MAX_FIELDS) -> Iterator[Field]:
    """The top-level fields in order. Raises BadMessage, for more than `most` of them too."""
    at, end, count = 0, len(message), 0
    while at < end:
        count += 1
        if count > most:
            raise _too_many(most)
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if not 1 <= number < 1 << 29:
            raise BadMessage(f"field number {number}")
        if kind == _BYTES:
            size, at = _varint(message, at)
            if at + size > end:
                raise BadMessage("a field is longer than its message")
            yield Field(number, message[at : at + size])
            at += size
        else:
            at = _skip(message, at, kind)
            yield Field(number, None)


def model_name(message: bytes) -> bytes:
    """Field 1 of a request: `name` or `model_name`; empty where it is absent."""
    return _last(message, _MODEL_NAME)


def request_id(message: bytes) -> bytes:
    """ModelInferRequest.id, or nothing where the message cannot be read."""
    try:
        return _last(message, _ID)
    except BadMessage:
        return b""


def names_model(message: bytes, own_field: bytes) -> bool:
    """Whether a ModelInferRequest names the model whose encoded field 1 is `own_field`, and no other.

    The quick way for what clients send: the name first, then fields of less than 2^28 bytes. False
    is no verdict: `model_name` then tells.
    """
    if not message.startswith(own_field):
        return False
    at, end = len(own_field), len(message)
    try:
        for _ in range(MAX_FIELDS):
            if at >= end:
                break
            key = message[at]
            # Single-byte keys of length-delimited fields other than 1.
            if key & 0x87 != _BYTES or key < 0x12:
                return False
            size = message[at + 1]
            at += 2
            if size & 0x80:
                size &= 0x7F
                shift = 7
                while True:
                    byte = message[at]
                    at += 1
                    size |= (byte & 0x7F) << shift
                    if byte < 0x80:
                        break
                    shift += 7
                    if shift > 21:
                        return False
            at += size
    except IndexError:
        return False
    return at == end


def needs_closer_look(message: bytes) -> bool:
    """Whether a ModelInferRequest may ask for more than tensors: such keys stand in a message as they are."""
    return _SHARED_MEMORY in message or _CLASSIFICATION in message


def encode_bytes(number: int, content: bytes) -> bytes:
    """One length-delimited field."""
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(content)) + content


def bool_parameter(key: bytes, value: bool) -> bytes:
    """An entry of `parameters` in a ModelInferRequest."""
    entry = encode_bytes(_MAP_KEY, key) + encode_bytes(_MAP_VALUE, bytes([_BOOL << 3, value]))
    return encode_bytes(_PARAMETERS, entry)


@dataclass(slots=True)
class InferWalker:
    """Reads a ModelInferRequest as it streams by, in pieces of any size, and keeps only what decides.

    `feed` raises AsksForSharedMemory or BadMessage, `finish` BadMessage if the message ended inside a
    field. `name` is the model's as far as it was read, `classified` the outputs of which classes are
    wanted, `has_empty_input` whether some input's shape holds a 0. Contents of tensors are skipped.
    """

    name: bytes = b""
    classified: list[bytes] = field(default_factory=list)
    has_empty_input: bool = False
    _pending: bytes = b""
    _skip: int = 0
    _count: int = 0
    # The tensor that is being read: its field's number, bytes left, name, whether its classes are wanted.
    _tensor: int = 0
    _left: int = 0
    _tensor_name: bytes = b""
    _wants_classes: bool = False

    def feed(self, piece: bytes) -> None:
        at, end = 0, len(piece)
        if self._skip:
            at = min(self._skip, end)
            self._consume(at)
            self._skip -= at
            if at == end:
                return
        data = self._pending + piece[at:]
        self._pending = data[self._fields(data) :]

    def skim(self, size: int) -> bool:
        """Pass over so many bytes if all of them are contents of no interest, and more of those follow."""
        if size >= self._skip:
            return False
        self._consume(size)
        self._skip -= size
        return True

    def finish(self) -> None:
        self._end_tensor()
        if self._pending or self._skip or self._tensor:
            raise BadMessage("a field is longer than its message")

    def _fields(self, data: bytes) -> int:
        """Take every field that is complete or can be skipped; returns where the rest begins."""
        at = 0
        while at < len(data):
            self._end_tensor()
            taken = self._field(data, at)
            if not taken:
                break
            at += taken
            self._counts(1)
        return at

    def _counts(self, fields: int) -> None:
        self._count += fields
        if self._count > MAX_FIELDS:
            raise _too_many(MAX_FIELDS)

    def _field(self, data: bytes, start: int) -> int:
        """Bytes taken of one field, 0 where more are needed to tell."""
        try:
            key, at = _varint(data, start)
            number, kind = key >> 3, key & 7
            if not 1 <= number < 1 << 29:
                raise BadMessage(f"field number {number}")
            if kind != _BYTES:
                return self._plain_field(data, start, at, number, kind)
            size, at = _varint(data, at)
        except _Truncated:
            return 0
        head = at - start
        if self._tensor and head + size > self._left:
            raise BadMessage("a field is longer than its tensor")
        if not self._tensor and number in _TENSOR_PARAMETERS:
            self._tensor, self._left = number, size
            self._tensor_name, self._wants_classes = b"", False
            return head
        if not self._is_collected(number):
            taken = min(len(data) - at, size)
            self._consume(head + taken)
            self._skip = size - taken
            return head + taken
        if size > COLLECT_BYTES:
            raise BadMessage(f"field {number} of {size} bytes; {COLLECT_BYTES} are taken")
        if len(data) - at < size:
            return 0
        self._take(number, data[at : at + size])
        self._consume(head + size)
        return head + size

    def _plain_field(self, data: bytes, start: int, at: int, number: int, kind: int) -> int:
        """A number: of no interest, unless it is a size that stands alone in an input's shape."""
        end = _skip(data, at, kind)
        if self._tensor == _INPUTS and number == _SHAPE and kind == _VARINT:
            self.has_empty_input = self.has_empty_input or _varint(data, at)[0] == 0
        elif self._is_collected(number) or (not self._tensor and number in _TENSOR_PARAMETERS):
            raise BadMessage(f"field {number} has the wrong wire type")
        self._consume(end - start)
        return end - start

    def _is_collected(self, number: int) -> bool:
        if not self._tensor:
            return number in (_MODEL_NAME, _PARAMETERS)
        if number == _TENSOR_PARAMETERS[self._tensor]:
            return True
        return number == (_SHAPE if self._tensor == _INPUTS else _TENSOR_NAME)

    def _take(self, number: int, content: bytes) -> None:
        if not self._tensor and number == _MODEL_NAME:
            self.name = content
        elif self._tensor == _OUTPUTS and number == _TENSOR_NAME:
            self._tensor_name = content
        elif self._tensor == _INPUTS and number == _SHAPE:
            self._counts(len(content))
            self.has_empty_input = self.has_empty_input or _holds_zero(content)
        else:
            self._take_parameter(_last(content, _MAP_KEY, _ENTRY_FIELDS))

    def _take_parameter(self, key: bytes) -> None:
        if key.startswith(_SHARED_MEMORY):
            raise AsksForSharedMemory
        if self._tensor == _OUTPUTS and key == _CLASSIFICATION:
            self._wants_classes = True

    def _consume(self, size: int) -> None:
        if self._tensor:
            self._left -= size
            if self._left < 0:
                raise BadMessage("a field is longer than its tensor")

    def _end_tensor(self) -> None:
        if self._tensor and not self._left and not self._skip:
            if self._wants_classes:
                self.classified.append(self._tensor_name)
            self._tensor = 0


def _holds_zero(packed: bytes) -> bool:
    at = 0
    while at < len(packed):
        value, at = _varint(packed, at)
        if value == 0:
            return True
    return False


class _Truncated(BadMessage):
    """The bytes end inside a number or a field."""


def _too_many(most: int) -> BadMessage:
    return BadMessage(f"more than {most} fields, which is as many as are taken")


def _last(message: bytes, number: int, most: int = MAX_FIELDS) -> bytes:
    found = b""
    for entry in fields(message, most):
        if entry.number == number:
            found = _content(entry)
    return found


def _content(entry: Field) -> bytes:
    if entry.content is None:
        raise BadMessage(f"field {entry.number} has the wrong wire type")
    return entry.content


def _skip(data: bytes, at: int, kind: int) -> int:
    if kind == _VARINT:
        return _varint(data, at)[1]
    size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
    if size is None:
        raise BadMessage(f"wire type {kind}")
    if at + size > len(data):
        raise _Truncated("a field is longer than its message")
    return at + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if at + index >= len(data):
            raise _Truncated("a message ends inside a number")
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, at + index + 1
    raise BadMessage("a number is longer than 64 bits")


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The own model's name as requests carry it."""

    name: bytes
    field: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", encode_bytes(_MODEL_NAME, self.name))
