"""Protobuf's wire format, as far as policy needs it: which model a message names, and what it requests.

Everything is read by `read_field`. Strict where a reader could be misled: a truncated message, a wrong
wire type for a known field, groups and overlong varints are refused. The last of a repeated scalar field
counts, as in every protobuf parser (protobuf.dev/programming-guides/encoding). Field numbers:
grpc_service.proto.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_NAME, _ID, _PARAMETERS, _INPUTS, _OUTPUTS = 1, 3, 4, 5, 6
_TENSOR_NAME, _SHAPE = 1, 3
_CONTENTS = 5
# The beginning of a field that says how long it is.
_BEGINNING_BYTES = 16
_INPUT_PARAMETERS, _OUTPUT_PARAMETERS = 4, 2
# What decides, of a request and of its tensors: everything else is passed over.
_OF_INTEREST: Final[Mapping[int, frozenset[int]]] = {
    0: frozenset({_MODEL_NAME, _PARAMETERS, _INPUTS, _OUTPUTS}),
    _INPUTS: frozenset({_SHAPE, _INPUT_PARAMETERS}),
    _OUTPUTS: frozenset({_TENSOR_NAME, _OUTPUT_PARAMETERS}),
}
_MAP_KEY, _MAP_VALUE, _BOOL = 1, 2, 1
_SHARED_MEMORY: Final = b"shared_memory_"
_CLASSIFICATION: Final = b"classification"
_MAX_VARINT_BYTES = 10

# Fields of one request, those of its tensors counted: enough for 2 500 inputs.
# Each takes time, and a packed message of 100 KB can hold millions.
MAX_FIELDS: Final = 16_384
# Of one entry of a map, which has two.
_ENTRY_FIELDS = 16
# Of length-delimited fields whose numbers need no second byte, beside the first: nearly all there are.
_SHORT_KEYS_BUT_1: Final = frozenset(range(_MODEL_NAME + 1 << 3 | _BYTES, 0x80, 8))

# What is kept of one field while a large message streams by: names, ids, parameters, small tensors.
COLLECT_BYTES: Final = 64 * 1024


class BadMessage(Exception):
    """Not a message that every parser would read alike."""


class _Truncated(BadMessage):
    """The bytes end inside a number or a field."""


class Field(NamedTuple):
    """One field: its number and, for length-delimited ones, its content; else None."""

    number: int
    content: bytes | None


def read_field(data: bytes, at: int) -> tuple[int, int, int, int]:
    """The field that begins at `at`: number, wire type, and where its content begins and ends.

    The end may be beyond that of `data`, of which the caller knows whether more is to come. Raises BadMessage.
    """
    try:
        key, at = data[at], at + 1
        if key >= 0x80:
            key, at = _varint(data, at - 1)
        if not 8 <= key < 1 << 32:
            raise BadMessage(f"field number {key >> 3}")
        kind = key & 7
        if kind == _BYTES:
            size, at = data[at], at + 1
            if size >= 0x80:
                size, at = _varint(data, at - 1)
            return key >> 3, kind, at, at + size
        if kind == _VARINT:
            return key >> 3, kind, at, _varint(data, at)[1]
    except IndexError:
        raise _Truncated("a message ends inside a number") from None
    if kind == _FIXED64:
        return key >> 3, kind, at, at + 8
    if kind == _FIXED32:
        return key >> 3, kind, at, at + 4
    raise BadMessage(f"wire type {kind}")


def fields(message: bytes, most: int = MAX_FIELDS) -> Iterator[Field]:
    """The top-level fields in order. Raises BadMessage, for more than `most` of them too."""
    at, end, count = 0, len(message), 0
    while at < end:
        number, kind, start, at = read_field(message, at)
        count += 1
        if count > most:
            raise _too_many(most)
        if at > end:
            raise _Truncated("a field is longer than its message")
        yield Field(number, message[start:at] if kind == _BYTES else None)


def model_name(message: bytes) -> bytes:
    """Field 1 of a request: `name` or `model_name`; empty where it is absent."""
    return _last(message, _MODEL_NAME)


def names_just(message: bytes, name_field: bytes) -> bool:
    """Whether a request begins with this field 1 and has no other; False is no verdict. The quick way to what
    `model_name` tells."""
    if not message.startswith(name_field):
        return False
    at, end = len(name_field), len(message)
    try:
        while at < end:
            if message[at] in _SHORT_KEYS_BUT_1 and message[at + 1] < 0x80:
                at += 2 + message[at + 1]
                continue
            number, _, _, at = read_field(message, at)
            if number == _MODEL_NAME:
                return False
    except (BadMessage, IndexError):
        return False
    return at == end


def request_id(message: bytes) -> bytes:
    """ModelInferRequest.id, or nothing where the message cannot be read."""
    try:
        return _last(message, _ID)
    except BadMessage:
        return b""


def needs_closer_look(message: bytes) -> bool:
    """Whether a ModelInferRequest may ask for more than tensors: such keys stand in a message as they are."""
    return _SHARED_MEMORY in message or _CLASSIFICATION in message


def encode_bytes(number: int, content: bytes) -> bytes:
    """One length-delimited field."""
    return encode_varint(number << 3 | _BYTES) + encode_varint(len(content)) + content


def encode_varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def bool_parameter(key: bytes, value: bool) -> bytes:
    """An entry of `parameters` in a ModelInferRequest."""
    entry = encode_bytes(_MAP_KEY, key) + encode_bytes(_MAP_VALUE, bytes([_BOOL << 3, value]))
    return encode_bytes(_PARAMETERS, entry)


# Of a message, the fields that hold text, or messages with such: number → None, or what is in it.
Texts = Mapping[int, "Texts | None"]


def replace(message: bytes, texts: Texts, old: bytes, new: bytes, most: int = MAX_FIELDS) -> bytes:
    """The message with `old` replaced in its texts, all lengths as they must be then. Raises BadMessage."""
    if old not in message:
        return message
    out, at, end, count = [], 0, len(message), 0
    while at < end:
        began = at
        number, kind, start, at = read_field(message, at)
        count += 1
        if count > most:
            raise _too_many(most)
        if at > end:
            raise _Truncated("a field is longer than its message")
        if kind != _BYTES or number not in texts:
            out.append(message[began:at])
            continue
        content, inner = message[start:at], texts[number]
        content = content.replace(old, new) if inner is None else replace(content, inner, old, new, most)
        out.append(encode_bytes(number, content))
    return b"".join(out)


class InferReader:
    """Reads a ModelInferRequest as it streams by, in pieces of any size, and keeps only what decides.

    `feed` raises AsksForSharedMemory or BadMessage, `finish` BadMessage if the message ended inside a
    field. `name` is the model's as far as it was read, `classified` the outputs of which classes are
    wanted, `has_empty_input` whether some input's shape holds a 0. Contents of tensors are skipped; `lists`
    tells those that are not raw: the field that they are made of, 0 for several, and their bytes.
    """

    __slots__ = (
        "_count",
        "_left",
        "_need",
        "_pending",
        "_skip",
        "_tensor",
        "_tensor_name",
        "_wants_classes",
        "classified",
        "has_empty_input",
        "lists",
        "name",
        "shared_memory",
    )

    def __init__(self) -> None:
        self.name = b""
        self.classified: list[str] = []
        self.shared_memory: str | None = None
        self.has_empty_input = False
        self.lists: list[tuple[int, int]] = []
        # A field that has begun and is not whole, and how much of it there must be to go on.
        self._pending, self._need = bytearray(), 0
        # Bytes to come that are of no interest.
        self._skip = 0
        self._count = 0
        # The tensor that is being read: its field's number, bytes left, name, whether its classes are wanted.
        self._tensor = self._left = 0
        self._tensor_name, self._wants_classes = b"", False

    def feed(self, piece: bytes) -> None:
        if self._skip:
            passed = min(self._skip, len(piece))
            self._skip -= passed
            if passed == len(piece):
                return
            piece = piece[passed:]
        if self._pending:
            self._pending += piece
            if len(self._pending) < self._need:
                return
            piece = bytes(self._pending)
            self._pending.clear()
        at = self._read(piece)
        if at < len(piece):
            self._pending += piece[at:]

    def skim(self, size: int) -> bool:
        """Pass over so many bytes if all of them are contents of no interest, and more of those follow."""
        if size >= self._skip:
            return False
        self._skip -= size
        return True

    def finish(self) -> None:
        if self._pending or self._skip or self._tensor:
            raise BadMessage("a field is longer than its message")

    def _read(self, data: bytes) -> int:
        """Take every field that is whole or need not be; returns where the rest begins."""
        at, end = 0, len(data)
        while at < end:
            try:
                number, kind, start, stop = read_field(data, at)
            except _Truncated:
                self._need = end - at + 1
                return at
            tensor = self._tensor
            if tensor and stop - at > self._left:
                raise _beyond_tensor()
            if stop <= end:
                if tensor or number not in (_INPUTS, _OUTPUTS):
                    self._take(tensor, number, kind, data, start, stop)
                else:
                    self._take_tensor(number, kind, data, start, stop)
            elif not tensor and number in (_INPUTS, _OUTPUTS) and stop - start > COLLECT_BYTES:
                self._begin_tensor(number, kind)
                self._left, stop = stop - start, start
            elif kind == _BYTES and number not in _OF_INTEREST[tensor]:
                if tensor == _INPUTS and number == _CONTENTS:
                    if end - start < _BEGINNING_BYTES < stop - start:
                        self._need = start - at + _BEGINNING_BYTES
                        return at
                    self._take_list(data, start, stop)
                self._skip = stop - end
            else:
                _require_small(number, stop - start)
                self._need = stop - at
                return at
            self._count_fields(1)
            if tensor:
                self._left -= stop - at
                if not self._left:
                    self._end_tensor()
            at = stop
        return at

    def _take_tensor(self, number: int, kind: int, data: bytes, at: int, end: int) -> None:
        """A tensor that is there as a whole."""
        self._begin_tensor(number, kind)
        count = 0
        while at < end:
            inner, kind, start, stop = read_field(data, at)
            if stop > end:
                raise _beyond_tensor()
            count += 1
            if inner in _OF_INTEREST[number] or inner == _CONTENTS:
                self._take(number, inner, kind, data, start, stop)
            at = stop
            if count > MAX_FIELDS:
                break
        self._count_fields(count)
        self._end_tensor()

    def _begin_tensor(self, number: int, kind: int) -> None:
        _require_bytes(number, kind)
        self._tensor = number
        self._tensor_name, self._wants_classes = b"", False

    def _end_tensor(self) -> None:
        if self._wants_classes:
            self.classified.append(self._tensor_name.decode(errors="replace"))
        self._tensor = 0

    def _take(self, tensor: int, number: int, kind: int, data: bytes, start: int, stop: int) -> None:
        """A field that is whole, of a tensor or (0) of the message."""
        if tensor == _INPUTS and number == _CONTENTS:
            self._take_list(data, start, stop)
        if number not in _OF_INTEREST[tensor]:
            return
        if tensor == _INPUTS and number == _SHAPE and kind == _VARINT:  # a size that stands alone
            self.has_empty_input = self.has_empty_input or _varint(data, start)[0] == 0
            return
        _require_bytes(number, kind)
        _require_small(number, stop - start)
        content = data[start:stop]
        if tensor == _INPUTS and number == _SHAPE:
            self._count_fields(len(content))
            self.has_empty_input = self.has_empty_input or _holds_zero(content)
        elif tensor == _OUTPUTS and number == _TENSOR_NAME:
            self._tensor_name = content
        elif not tensor and number == _MODEL_NAME:
            self.name = content
        else:
            self._take_parameter(tensor, _last(content, _MAP_KEY, _ENTRY_FIELDS))

    def _take_list(self, data: bytes, start: int, stop: int) -> None:
        """Contents, of which the beginning is here."""
        try:
            number, _, _, end = read_field(data[start : start + _BEGINNING_BYTES], 0)
        except BadMessage:
            number, end = 0, 0
        self.lists.append((number if end == stop - start else 0, stop - start))

    def _take_parameter(self, tensor: int, key: bytes) -> None:
        if key.startswith(_SHARED_MEMORY):
            self.shared_memory = ""
        elif tensor == _OUTPUTS and key == _CLASSIFICATION:
            self._wants_classes = True

    def _count_fields(self, count: int) -> None:
        self._count += count
        if self._count > MAX_FIELDS:
            raise _too_many(MAX_FIELDS)


def _holds_zero(packed: bytes) -> bool:
    at = 0
    while at < len(packed):
        value, at = packed[at], at + 1
        if value >= 0x80:
            value, at = _whole_varint(packed, at - 1)
        if value == 0:
            return True
    return False


def _require_bytes(number: int, kind: int) -> None:
    if kind != _BYTES:
        raise BadMessage(f"field {number} has the wrong wire type")


def _require_small(number: int, size: int) -> None:
    if size > COLLECT_BYTES:
        raise BadMessage(f"field {number} of {size} bytes; {COLLECT_BYTES} are taken")


def _too_many(most: int) -> BadMessage:
    return BadMessage(f"more than {most} fields, which is as many as are taken")


def _beyond_tensor() -> BadMessage:
    return BadMessage("a field is longer than its tensor")


def _last(message: bytes, number: int, most: int = MAX_FIELDS) -> bytes:
    """The content of the last field of that number, empty where there is none."""
    found, at, end, left = b"", 0, len(message), most
    while at < end:
        found_number, kind, start, at = read_field(message, at)
        if not left:
            raise _too_many(most)
        left -= 1
        if at > end:
            raise _Truncated("a field is longer than its message")
        if found_number == number:
            _require_bytes(number, kind)
            found = message[start:at]
    return found


def _whole_varint(data: bytes, at: int) -> tuple[int, int]:
    try:
        return _varint(data, at)
    except IndexError:
        raise _Truncated("a message ends inside a number") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Raises IndexError where the bytes end, and BadMessage."""
    value = shift = 0
    for _ in range(_MAX_VARINT_BYTES):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, at
        shift += 7
    raise BadMessage("a number is longer than 64 bits")
