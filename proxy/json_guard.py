"""JSON from clients, checked before Triton reads it. Pure.

Triton 2.51 dies of JSON nested about 200 000 deep and of a declared shape with a huge product, each
in one request, whatever model it names; and it obeys shared-memory parameters. A body that two
parsers could read differently (a key twice) is refused, because Triton's takes the first and ours
the last.
"""

import json
from collections.abc import Iterable
from typing import Any

# No request of the inference protocol is deeper than a tensor's nested data; numpy stops at 64 dimensions.
MAX_DEPTH = 100
MAX_DIMENSIONS = 64
_SHARED_MEMORY = "shared_memory_"
_TOO_DEEP = f"JSON is nested deeper than {MAX_DEPTH}"


class BadJson(Exception):
    """The body is refused; the message is for the client."""


def check_infer(body: bytes, *, binary_bytes: int | None) -> None:
    """An inference request, or the JSON header of a binary one with that many bytes behind it."""
    request = _parse(body)
    _check_tensors(request.get("inputs"), "inputs", len(body) + (binary_bytes or 0))
    outputs = request.get("outputs")
    for index, tensor in enumerate(_tensors(outputs, "outputs")):
        _check_parameters(tensor, f"outputs[{index}]")
    _check_parameters(request, "request")


def check_generate(body: bytes) -> None:
    """A generate request: flat keys that name tensors."""
    _check_parameters(_parse(body), "request")


def check_object(body: bytes) -> dict[str, Any]:
    """Any other JSON body; empty is an empty object."""
    return _parse(body) if body else {}


def _parse(body: bytes) -> dict[str, Any]:
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


def _children(node: object) -> Iterable[object]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one key twice")
    return found


def _check_tensors(tensors: Any, what: str, available_bytes: int) -> None:
    for index, tensor in enumerate(_tensors(tensors, what)):
        where = f"{what}[{index}]"
        _check_parameters(tensor, where)
        _check_shape(tensor.get("shape"), where, available_bytes)


def _tensors(tensors: Any, what: str) -> list[dict[str, Any]]:
    if tensors is None:
        return []
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise BadJson(f"{what} must be a list of objects")
    return tensors


def _check_shape(shape: Any, where: str, available_bytes: int) -> None:
    """Every element takes at least one byte of the request, so a shape can hold no more than it has bytes."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise BadJson(f"{where}.shape must be a list of at most {MAX_DIMENSIONS} numbers")
    elements = 1
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise BadJson(f"{where}.shape holds something other than sizes")
        elements *= size
        if size and elements > available_bytes:
            raise BadJson(f"{where}.shape declares more elements than the request can hold")


def _check_parameters(holder: dict[str, Any], where: str) -> None:
    parameters = holder.get("parameters")
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise BadJson(f"{where}.parameters must be an object")
    if any(key.startswith(_SHARED_MEMORY) for key in parameters):
        raise BadJson(f"{where}.parameters: shared memory is not available")
