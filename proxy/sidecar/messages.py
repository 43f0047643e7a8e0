"""The few messages of the agent's API that the sidecar needs, by their field numbers (node_agent.proto). Pure."""

import struct
from dataclasses import dataclass, field
from typing import Final

from berth.contract.gateway import ReplicaLimits
from proxy.wire.protobuf import BadMessage, encode_bytes, encode_varint, read_field

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_FAILED: Final = 6
_OUTCOMES: Final = ("OUTCOME_UNSPECIFIED", "OUTCOME_UNLOADED", "OUTCOME_KEPT")

Value = int | bytes


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """`endpoint` is empty where the agent names no gateway. `ticket`: a secret, never logged."""

    has_failed: bool = False
    reason: str = ""
    endpoint: str = ""
    ticket: bytes = field(default=b"", repr=False)


def watch_request(model: str, limits: ReplicaLimits) -> bytes:
    """WatchModelRequest: model_name = 1, limits = 2."""
    return encode_bytes(1, model.encode()) + encode_bytes(2, _limits(limits))


def unload_request(model: str) -> bytes:
    """UnloadRequest: model_name = 1."""
    return encode_bytes(1, model.encode())


def read_status(message: bytes) -> ModelStatus:
    """ModelStatus: state = 2, reason = 3, gateway = 8 {endpoint = 1, ticket = 2}. Raises BadMessage."""
    status = _last_of_each(message)
    gateway = _last_of_each(_content(status, 8))
    return ModelStatus(
        status.get(2) == _FAILED,
        _text(_content(status, 3)),
        _text(_content(gateway, 1)),
        _content(gateway, 2),
    )


def read_outcome(message: bytes) -> str:
    """UnloadResponse: outcome = 1. Its name, or what it says instead."""
    try:
        value = _last_of_each(message).get(1, 0)
    except BadMessage:
        value = -1
    known = isinstance(value, int) and 0 <= value < len(_OUTCOMES)
    return _OUTCOMES[value] if known else str(value)  # type: ignore[index]


def _limits(limits: ReplicaLimits) -> bytes:
    """ReplicaLimits; what is None is left out."""
    out = _number(1, limits.container_concurrency)
    if limits.queue_depth is not None:
        out += _number(2, limits.queue_depth)
    out += encode_varint(3 << 3 | _FIXED64) + struct.pack("<d", limits.request_timeout_seconds)
    return out + _number(4, limits.max_json_bytes) + _number(5, limits.max_request_bytes)


def _number(number: int, value: int) -> bytes:
    return encode_varint(number << 3 | _VARINT) + encode_varint(value)


def _last_of_each(message: bytes) -> dict[int, Value]:
    """The numbers and contents of a message; of what comes twice the last. Raises BadMessage."""
    found: dict[int, Value] = {}
    at = 0
    while at < len(message):
        number, kind, start, at = read_field(message, at)
        if at > len(message):
            raise BadMessage("a field is longer than its message")
        if kind == _BYTES:
            found[number] = message[start:at]
        elif kind == _VARINT:
            found[number] = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(message[start:at]))
    return found


def _content(found: dict[int, Value], number: int) -> bytes:
    value = found.get(number, b"")
    if not isinstance(value, bytes):
        raise BadMessage(f"field {number} has the wrong wire type")
    return value


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
