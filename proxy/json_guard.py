"""JSON from clients, checked before Triton reads it. Pure.

Triton 2.51 dies, in one request and whatever model it names, of JSON nested about 200 000 deep, of a
declared shape with a huge product, and of values of another type than it expects (a number where a
tensor should be); and it obeys shared-memory parameters. So a body must be what the inference
protocol says, type by type (github.com/kserve/open-inference-protocol, inference_rest), and nothing
in it may be read in two ways: of a key that stands twice, Triton takes the first and others the last.
"""

import json
import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from proxy.model_facts import NO_CLASSES, ModelFacts

# No request of the inference protocol is deeper than a tensor's nested data; numpy stops at 64 dimensions.
MAX_DEPTH = 100
MAX_DIMENSIONS = 64
_SHARED_MEMORY = "shared_memory_"
_BRACKET = ord("[")
# Keys to look at, escapes that could spell any key, and what tensors may not hold.
_SUSPECT = (b"\\u", b"shared_memory_", b"classification", b"null")
_TOO_DEEP = f"JSON is nested deeper than {MAX_DEPTH}"
# Numbers that JSON does not have and Triton takes, and the strings in which they are only text.
_NOT_FINITE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\b(?:NaN|Infinity|Inf)\b')
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')

_Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Parameters = dict[str, bool | _Int | float | str]


class _Tensor(Struct, gc=False):
    """One of `inputs`. `data` is looked at apart."""

    name: str
    datatype: str
    shape: Annotated[list[_Size], Meta(max_length=MAX_DIMENSIONS)]
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


_infer = msgspec.json.Decoder(_InferRequest)
_generate = msgspec.json.Decoder(dict[str, Raw])


class BadJson(Exception):
    """The body is refused; the message is for the client."""


def check_infer(body: bytes, facts: ModelFacts, *, binary_bytes: int = 0) -> None:
    """An inference request, or the JSON header of a binary one with that many bytes behind it."""
    request = _decoded(_infer, body)
    if not _says_all(request, body):
        _read_whole(body)
        _check_parameters(request, facts)
        for index, tensor in enumerate(request.inputs):
            if not isinstance(tensor.data, UnsetType):
                _check_data(bytes(tensor.data), f"inputs[{index}].data")
    available = len(body) + binary_bytes
    for index, tensor in enumerate(request.inputs):
        elements = 1
        for size in tensor.shape:
            elements *= size or 1  # a 0 makes the product 0, but the others may be multiplied before it
        # Every element takes at least one byte of the request.
        if elements > available:
            raise BadJson(f"inputs[{index}].shape declares more elements than the request can hold")


def _says_all(request: _InferRequest, body: bytes) -> bool:
    """Whether the bytes alone show that the decoded request is all there is, and that all of it is harmless.

    So few brackets cannot nest deep. As many braces, `shape`s and `data`s as there are tensors, and
    nothing that could spell them otherwise: then no key stands twice where it matters, and no tensor
    holds objects. Keys that ask for more than tensors can only be where their text is. False is no
    verdict: the JSON is then looked at closely.
    """
    for word in _SUSPECT:
        if word in body:
            return False
    objects = 1 + len(request.inputs)
    for tensor in request.inputs:
        if tensor.parameters is not UNSET:
            objects += 1
        if tensor.data is not UNSET and memoryview(tensor.data)[0] != _BRACKET:
            return False
    if request.outputs is not UNSET:
        objects += len(request.outputs) + sum(one.parameters is not UNSET for one in request.outputs)
    if request.parameters is not UNSET:
        objects += 1
    tensors = len(request.inputs)
    return (
        body.isascii()
        and body.count(b"{") == objects
        and body.count(b"[") + objects <= MAX_DEPTH
        and body.count(b"shape") == tensors
        and body.count(b'"data"') <= tensors
    )


def check_generate(body: bytes) -> None:
    """A generate request: flat keys that name tensors, and parameters."""
    request = _decoded(_generate, body)
    for key, value in request.items():
        if key == "parameters":
            _check_values(_decoded(_parameters, bytes(value)), "parameters")
        else:
            _check_data(bytes(value), key, may_be_scalar=True)
    _read_whole(body)


_parameters = msgspec.json.Decoder(_Parameters)


def check_object(body: bytes) -> dict[str, Any]:
    """Any other JSON body; empty is an empty object."""
    return _read_whole(body) if body else {}


def _decoded(decoder: Any, body: bytes) -> Any:
    """Raises BadJson, in the words of msgspec: what was expected, what came, and where."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise BadJson(_TOO_DEEP) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if b"NaN" in body or b"Inf" in body:
            finite = _NOT_FINITE.sub(lambda m: m[0] if m[0].startswith(b'"') else b"0.0", body)
            if finite != body:
                return _decoded(decoder, finite)
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
            _read_whole(body)  # tells of the depth, which is more of a help
        raise BadJson(f"not a request of the inference protocol: {error}") from error


def _check_data(data: bytes, where: str, *, may_be_scalar: bool = False) -> None:
    """Arrays of arrays of numbers, strings and booleans; no objects, no null."""
    if not data.startswith(b"[") and not (may_be_scalar and data[:1] not in (b"{", b"n")):
        raise BadJson(f"{where} must be an array")
    if b"{" in data or b"null" in data:
        plain = _STRING.sub(b"", data)
        if b"{" in plain or b"null" in plain:
            raise BadJson(f"{where} must hold numbers, strings or booleans")


def _check_parameters(request: _InferRequest, facts: ModelFacts) -> None:
    holders: list[tuple[str, Any]] = [("request", request)]
    holders += [(f"inputs[{index}]", tensor) for index, tensor in enumerate(request.inputs)]
    outputs = [] if isinstance(request.outputs, UnsetType) else request.outputs
    holders += [(f"outputs[{index}]", output) for index, output in enumerate(outputs)]
    for where, holder in holders:
        if not isinstance(holder.parameters, UnsetType):
            _check_values(holder.parameters, f"{where}.parameters")
    has_empty_input = any(0 in tensor.shape for tensor in request.inputs)
    for output in outputs:
        parameters = {} if isinstance(output.parameters, UnsetType) else output.parameters
        if "classification" in parameters and (has_empty_input or not facts.has_classes(output.name)):
            raise BadJson(NO_CLASSES)


def _check_values(parameters: dict[str, Any], where: str) -> None:
    if any(key.startswith(_SHARED_MEMORY) for key in parameters):
        raise BadJson(f"{where}: shared memory is not available")


def _read_whole(body: bytes) -> dict[str, Any]:
    """An object without keys that stand twice, not deeper than may be. Raises BadJson."""
    try:
        # Decoded here: json.loads would also take UTF-16 and UTF-32, which Triton reads as something else.
        value = json.loads(body.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise BadJson(_TOO_DEEP) from None
    except ValueError as error:
        raise BadJson(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadJson("a JSON object is expected")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    """Level by level; the parser has stopped at the interpreter's own limit on recursion already."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise BadJson(_TOO_DEEP)
        level = [child for node in level for child in _children(node) if isinstance(child, (dict, list))]


def _children(node: object) -> Any:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one key twice")
    return found
