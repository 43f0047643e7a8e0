"""JSON from clients, read once and written anew for Triton. Pure.

Triton 2.51 dies, in one request and whatever model it names, of JSON nested about 200 000 deep, of a
declared shape with a huge product, and of values of another type than it expects (a number where a
tensor should be); and it applies shared-memory parameters. So a body must be what the inference
protocol says, type by type (github.com/kserve/open-inference-protocol, inference_rest). What goes on
to Triton is made of what was decoded here: of a key that stands twice and of an unknown key
nothing is left that another reader could take for something else. Only the text of tensors' data,
which is arrays of plain values, goes on as it came.

Time and memory grow with the body's size and with nothing else.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from proxy.policy import infer
from proxy.policy.infer import KnowsOutputs
from proxy.policy.refusal import Refusal, Why

# No request of the inference protocol is deeper than a tensor's nested data; numpy stops at 64 dimensions. What
# is allowed beyond is room for a quick look (`_require_shallow`).
MAX_DEPTH = 300
MAX_DIMENSIONS = 64
# Keys with their values, wherever they stand: thousands of tensors.
MAX_MEMBERS = 50_000
# Numbers that JSON does not have.
MAX_WORDS = 100_000
# A shape is so many bytes at most: as many numbers of 64 bits, and room for spaces.
_SHAPE_BYTES = 4096
# Up to this size a body of which something was left out is read once more, to tell of a key that stands twice.
_READ_AGAIN_BYTES = 256 * 1024
_BRACKET = ord("[")
_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "UINT8", "INT8"), 1),
    **dict.fromkeys(("UINT16", "INT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("UINT32", "INT32", "FP32"), 4),
    **dict.fromkeys(("UINT64", "INT64", "FP64"), 8),
}
# Before each element of a tensor of BYTES.
_LENGTH_BYTES = 4
_TOO_DEEP = f"JSON is nested deeper than {MAX_DEPTH}"
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}:'))
_WINDOW_BYTES = 64 * 1024
_BLOCK_BYTES = 224
_FLAT_STEPS = 4
_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
# Numbers that JSON does not have and Triton takes, and how they are spelt meanwhile, wherever they stand:
# as numbers that no float can hold, so they pass in data and in strings and nowhere else.
_STEM = b"9e999"
_SPELT = ((b"NaN", _STEM + b"1"), (b"Infinity", _STEM + b"2"), (b"Inf", _STEM + b"3"))

_Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Parameters = dict[str, bool | _Int | float | str]


class _Tensor(Struct, gc=False):
    """One of `inputs`. `shape` and `data` are looked at apart."""

    name: str
    datatype: str
    shape: Raw
    parameters: _Parameters | UnsetType = UNSET
    data: Raw | UnsetType = UNSET


class _Output(Struct, gc=False):
    """One of `outputs`."""

    name: str
    parameters: _Parameters | UnsetType = UNSET


class _InferRequest(Struct, gc=False):
    inputs: list[_Tensor]
    outputs: list[_Output] | UnsetType = UNSET
    parameters: _Parameters | UnsetType = UNSET
    id: str | UnsetType = UNSET


class _IndexRequest(Struct, gc=False):
    ready: bool = False


_infer = msgspec.json.Decoder(_InferRequest)
_generate = msgspec.json.Decoder(dict[str, Raw])
_index = msgspec.json.Decoder(_IndexRequest)
_shape: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(
    Annotated[list[_Size], Meta(max_length=MAX_DIMENSIONS)]
)
_parameters = msgspec.json.Decoder(_Parameters)
_encoder = msgspec.json.Encoder()


class BadJson(Refusal):
    """Not a body of the inference protocol, or one that costs too much to read; the message is for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(Why.INVALID, message)


class _Found:
    """What `infer.check` is to decide on."""

    __slots__ = ("classified", "has_empty_input", "shared_memory")

    def __init__(self) -> None:
        self.shared_memory: str | None = None
        self.classified: list[str] = []
        self.has_empty_input = False

    def look_at(self, parameters: dict[str, Any], where: str) -> None:
        if self.shared_memory is None and any(map(infer.points_into_shared_memory, parameters)):
            self.shared_memory = where


def check_infer(body: bytes, facts: KnowsOutputs, *, binary_bytes: int = 0) -> bytes:
    """An inference request, or the JSON header of a binary one with that many bytes behind it, written anew."""
    objects = _require_simple(body)  # numbers that JSON does not have change nothing in that
    try:
        return _infer_anew(body, objects, facts, binary_bytes)
    except BadJson as error:
        return _finite(error, body, objects, _infer_anew, facts, binary_bytes)


def check_generate(body: bytes) -> bytes:
    """A generate request, written anew: flat keys that name tensors, and parameters."""
    objects = _require_simple(body)
    try:
        return _generate_anew(body, objects)
    except BadJson as error:
        return _finite(error, body, objects, _generate_anew)


def _infer_anew(body: bytes, objects: int, facts: KnowsOutputs, binary_bytes: int) -> bytes:
    request: _InferRequest = _decoded(_infer, body)
    found = _Found()
    is_plain = objects == _count_objects(request, found)
    infer.check(found, facts)
    binary_left = binary_bytes
    for index, tensor in enumerate(request.inputs):
        binary_left -= _require_content(tensor, index, len(body) + binary_bytes)
        if tensor.data is not UNSET and not is_plain:
            _require_plain(bytes(tensor.data), f"inputs[{index}].data")
    if binary_left:
        raise BadJson(
            f"{binary_bytes} bytes follow the JSON, and the inputs' binary_data_size are "
            f"{binary_bytes - binary_left} together"
        )
    return _written(request, body)


def _require_content(tensor: _Tensor, index: int, available: int) -> int:
    """What a tensor declares is there: else Triton makes room for what never comes. Raises BadJson.

    Returns how many bytes of tensors behind the JSON are its own.
    """
    sizes = _sizes(tensor.shape, index)
    elements = 1
    for size in sizes:
        elements *= size or 1  # a 0 makes the product 0, but the others may be multiplied before it
    room = available  # without data binary_data_size tells more; without that Triton refuses
    if tensor.data is not UNSET and 0 not in sizes:
        room = (len(tensor.data) + 1) // 2  # a digit and a comma at least for each
    if elements > room:
        raise BadJson(f"inputs[{index}].shape declares more elements than its data can hold")
    if tensor.data is not UNSET and memoryview(tensor.data)[0] != _BRACKET:
        raise BadJson(f"inputs[{index}].data must be an array")
    binary = UNSET if tensor.parameters is UNSET else tensor.parameters.get("binary_data_size", UNSET)
    return 0 if binary is UNSET else _binary_size(tensor, index, 0 if 0 in sizes else elements, binary)


def _binary_size(tensor: _Tensor, index: int, elements: int, size: object) -> int:
    """What `binary_data_size` says. Raises BadJson where the tensor's shape and datatype say otherwise."""
    where = f"inputs[{index}].parameters.binary_data_size"
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BadJson(f"{where} must be a number of bytes")
    if tensor.data is not UNSET:
        raise BadJson(f"inputs[{index}] has data and {where}")
    each = _ELEMENT_BYTES.get(tensor.datatype)
    if each is not None and size != elements * each:
        raise BadJson(f"{where} is {size}; {elements} x {tensor.datatype} are {elements * each} bytes")
    if tensor.datatype == "BYTES" and size < elements * _LENGTH_BYTES:
        raise BadJson(f"{where} is {size}; {elements} x BYTES are {elements * _LENGTH_BYTES} bytes at least")
    return size


def _generate_anew(body: bytes, objects: int) -> bytes:
    request: dict[str, Any] = _decoded(_generate, body)
    found = _Found()
    for key, value in request.items():
        if key == "parameters":
            request[key] = _decoded(_parameters, bytes(value))
            found.look_at(request[key], "parameters")
        else:
            data = bytes(value)
            if data.startswith((b"{", b"n")):
                raise BadJson(f"{key} must be an array, or a number, string or boolean")
            if objects > 1:
                _require_plain(data, key)
    infer.check_begun(found)
    return _written(request, body)


def _finite(error: BadJson, body: bytes, objects: int, write: Callable[..., bytes], *how: object) -> bytes:
    """Write a body anew that may be refused only for numbers which JSON does not have. Raises BadJson."""
    words = [(word, number) for word, number in _SPELT if word in body]
    if not words:
        raise error
    if len(body) > MAX_WORDS and sum(body.count(word) for word, _ in words) > MAX_WORDS:
        raise BadJson(f"more than {MAX_WORDS} times NaN or Infinity; the binary extension has room for more")
    if _STEM in body:
        raise BadJson(f"a number with {_STEM.decode()} and NaN or Infinity in one request")
    for word, number in words:
        body = body.replace(word, number)
    body = write(body, objects, *how)
    for word, number in words:
        body = body.replace(number, word)
    return body


def asks_for_ready_only(body: bytes) -> bool:
    """What a request for the index says; nothing is said by an empty one. Raises BadJson."""
    if not body:
        return False
    _require_simple(body)
    ready: bool = _decoded(_index, body).ready
    return ready


def _require_simple(body: bytes) -> int:
    """Not so deep, and not so many keys, that reading it would cost much. Raises BadJson.

    Returns how many objects and nulls it has at most. Of text that is no JSON the beginning is judged
    rightly, up to where it is none: it is not read further.
    """
    objects = body.count(b"{")
    if b"null" in body:
        objects += body.count(b"null")
    is_short = len(body) <= MAX_MEMBERS or body.count(b":") <= MAX_MEMBERS
    if is_short and body.count(b"[") + objects <= MAX_DEPTH:
        return objects
    structure = _structure(body)
    _require_shallow(structure)
    if structure.count(b":") > MAX_MEMBERS:
        raise BadJson(f"JSON has more than {MAX_MEMBERS} keys")
    return structure.count(b"{")


def _structure(text: bytes) -> bytes:
    """Brackets, braces and colons as they follow each other outside of strings; a null is a brace that opens."""
    if b"null" in text:
        text = text.replace(b"null", b"{")
    if b"\\" in text:  # from the left, so a quote that is left has an even number of backslashes before it
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes side by side change nothing in what is outside and what is inside.
    text = text.translate(None, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' not in text:
        return text
    outside, is_inside = [], False
    for start in range(0, len(text), _WINDOW_BYTES):
        pieces = text[start : start + _WINDOW_BYTES].split(b'"')
        outside.append(b"".join(pieces[is_inside::2]))
        is_inside ^= len(pieces) % 2 == 0
    return b"".join(outside)


def _require_shallow(structure: bytes) -> None:
    """By blocks: in the middle of one it is not deeper than if all that opens came first.

    So the last steps to the bound may be refused, which no tensor of MAX_DIMENSIONS needs.
    """
    brackets, depth, most = structure.translate(_AS_BRACKETS, b":"), 0, MAX_DEPTH
    while len(brackets) > _WINDOW_BYTES and most > MAX_DEPTH - _FLAT_STEPS:
        # Empty lists make nothing deeper but by themselves.
        windows = range(0, len(brackets), _WINDOW_BYTES)
        flat = b"".join([brackets[at : at + _WINDOW_BYTES].replace(b"[]", b"") for at in windows])
        if len(flat) > len(brackets) // 2:
            break
        brackets, most = flat, most - 1
    for start in range(0, len(brackets), _BLOCK_BYTES):
        block = brackets[start : start + _BLOCK_BYTES]
        opening = block.count(b"[")
        if depth + opening > most:
            raise BadJson(_TOO_DEEP)
        depth += 2 * opening - len(block)


def _decoded(decoder: Any, body: bytes) -> Any:
    """Raises BadJson, in the words of msgspec: what was expected, what came, and where."""
    try:
        request = decoder.decode(body)
        if not body.isascii():
            body.decode()  # the decoder does not look into what it leaves as it is
    except RecursionError:
        raise BadJson(_TOO_DEEP) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadJson(f"not a request of the inference protocol: {error}") from error
    return request


def _written(request: object, body: bytes) -> bytes:
    """What goes on: the request as it was decoded. Raises BadJson where a key stands twice."""
    written = _encoder.encode(request)
    # Triton never sees what was left out, and most of it is harmless: the client should hear of the rest.
    if (
        len(body) != len(written)
        and len(body) <= _READ_AGAIN_BYTES
        and body.count(b":") != written.count(b":")
    ):
        _require_unique(body)
    return written


def _require_unique(body: bytes) -> None:
    try:
        json.loads(body, object_pairs_hook=_unique)
    except RecursionError:
        raise BadJson(_TOO_DEEP) from None
    except ValueError as error:
        raise BadJson(f"not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("an object has one key twice")


def _sizes(shape: Raw, index: int) -> list[int]:
    if len(shape) > _SHAPE_BYTES:
        raise BadJson(f"inputs[{index}].shape is longer than {_SHAPE_BYTES} bytes")
    try:
        return _shape.decode(shape)
    except msgspec.MsgspecError as error:
        raise BadJson(f"inputs[{index}].shape: {error}") from error


def _require_plain(data: bytes, where: str) -> None:
    """Arrays of arrays of numbers, strings and booleans; no objects, no null."""
    if b"{" in _structure(data):
        raise BadJson(f"{where} must hold numbers, strings or booleans")


def _count_objects(request: _InferRequest, found: _Found) -> int:
    """How many objects the request is made of. What its parameters ask for is found on the way."""
    objects = 1 + len(request.inputs)
    if request.parameters is not UNSET:
        objects += 1
        found.look_at(request.parameters, "parameters")
    for index, tensor in enumerate(request.inputs):
        if tensor.parameters is not UNSET:
            objects += 1
            found.look_at(tensor.parameters, f"inputs[{index}].parameters")
    if request.outputs is not UNSET:
        objects += len(request.outputs)
        for index, output in enumerate(request.outputs):
            if output.parameters is not UNSET:
                objects += 1
                found.look_at(output.parameters, f"outputs[{index}].parameters")
                if "classification" in output.parameters:
                    found.classified.append(output.name)
    if found.classified and found.shared_memory is None:
        found.has_empty_input = any(0 in _sizes(one.shape, index) for index, one in enumerate(request.inputs))
    return objects
