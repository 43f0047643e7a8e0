"""Protobuf's wire format, as far as policy needs it: which model a message names, and what it asks for.

Strict where a reader could be led astray: a truncated message, a wrong wire type for a known field,
groups and overlong varints are refused. The last of a repeated scalar field counts, as in every
protobuf parser (protobuf.dev/programming-guides/encoding). Field numbers: grpc_service.proto.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_NAME, _PARAMETERS, _INPUTS, _OUTPUTS = 1, 4, 5, 6
_INPUT_PARAMETERS, _OUTPUT_PARAMETERS = 4, 2
_MAP_KEY = 1
_SHARED_MEMORY = b"shared_memory_"
_MAX_VARINT_BYTES = 10


class BadMessage(Exception):
    """Not a message that every parser would read alike."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its number and, for length-delimited ones, its content; else None."""

    number: int
    content: bytes | None


def fields(message: bytes | memoryview) -> Iterator[Field]:
    """The top-level fields in order. Raises BadMessage."""
    view, at = memoryview(message), 0
    while at < len(view):
        key, at = _varint(view, at)
        number, kind = key >> 3, key & 7
        if not 1 <= number < 1 << 29:
            raise BadMessage(f"field number {number}")
        if kind == _BYTES:
            size, at = _varint(view, at)
            end = at + size
            if end > len(view):
                raise BadMessage("a field is longer than its message")
            yield Field(number, bytes(view[at:end]))
            at = end
        else:
            at = _skip(view, at, kind)
            yield Field(number, None)


def model_name(message: bytes) -> bytes:
    """Field 1 of a request: `name` or `model_name`; empty where it is absent."""
    name = b""
    for field in fields(message):
        if field.number == _MODEL_NAME:
            name = _content(field)
    return name


def asks_for_shared_memory(message: bytes) -> bool:
    """True if a ModelInferRequest's inputs or outputs point into shared memory."""
    for field in fields(message):
        if field.number == _PARAMETERS and _is_shared_memory(_content(field)):
            return True
        if field.number == _INPUTS and _tensor_does(_content(field), _INPUT_PARAMETERS):
            return True
        if field.number == _OUTPUTS and _tensor_does(_content(field), _OUTPUT_PARAMETERS):
            return True
    return False


def with_model_name(message: bytes, name: bytes) -> bytes:
    """The message with field 1 set: appended, so that it is the last and counts."""
    return message + encode_bytes(_MODEL_NAME, name)


def encode_bytes(number: int, content: bytes) -> bytes:
    """One length-delimited field."""
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(content)) + content


def filtered(message: bytes, number: int, keep: Callable[[bytes], bool]) -> bytes:
    """A message with only those of its fields `number` that `keep` accepts; every other field stays.

    For messages whose fields are all length-delimited, which RepositoryIndexResponse and
    ServerMetadataResponse are.
    """
    return b"".join(
        encode_bytes(field.number, _content(field))
        for field in fields(message)
        if field.number != number or keep(_content(field))
    )


def _tensor_does(tensor: bytes, parameters: int) -> bool:
    return any(_is_shared_memory(_content(field)) for field in fields(tensor) if field.number == parameters)


def _is_shared_memory(entry: bytes) -> bool:
    """One entry of a parameters map."""
    key = b""
    for field in fields(entry):
        if field.number == _MAP_KEY:
            key = _content(field)
    return key.startswith(_SHARED_MEMORY)


def _content(field: Field) -> bytes:
    if field.content is None:
        raise BadMessage(f"field {field.number} has the wrong wire type")
    return field.content


def _skip(view: memoryview, at: int, kind: int) -> int:
    if kind == _VARINT:
        return _varint(view, at)[1]
    size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
    if size is None:
        raise BadMessage(f"wire type {kind}")
    if at + size > len(view):
        raise BadMessage("a field is longer than its message")
    return at + size


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if at + index >= len(view):
            raise BadMessage("a message ends inside a number")
        byte = view[at + index]
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
