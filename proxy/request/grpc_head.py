"""What one gRPC call requests, decided from its headers alone; and what an answer's headers tell. Pure.

Each field is decided once (`codecs.h2.fields`); what a call is follows from the few that tell it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from proxy.policy.names import Names
from proxy.policy.routes import Verdict, decide_rpc
from proxy.request.messages import INFER, STREAM_INFER
from proxy.wire.grpc_status import GrpcError, Status
from proxy.wire.h2 import hpack
from proxy.wire.h2.fields import Fields, Rule
from proxy.wire.headers import is_forwarded

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
# RFC 9113, 6.5.2: what a header counts in a list beside its characters.
_OVERHEAD_BYTES = 32
# A list that Triton's gRPC always takes; of longer ones it refuses some at random (C-core's soft limit).
MOST_LIST_BYTES: Final = 8192
_TYPES = (b"application/grpc", b"application/grpc+proto")
_STATUS_NAMES = {b"%d" % status: status.name for status in Status}

# Messages go on unpacked, and are to come unpacked, so that the names in them can be read.
_DROPPED = frozenset({b"te", b"content-length", b"grpc-accept-encoding"})
_TELLING = frozenset({b"content-type", b"grpc-encoding", b"triton_grpc_error"})


@dataclass(frozen=True, slots=True, eq=False)
class CallKind:
    """What all calls are whose telling fields are the same.

    `block`: the headers for Triton, without those that only go through; `list_bytes`: how much a receiver
    counts them for. `http_status`: of what is no gRPC call. `is_usual`: a ModelInfer.
    """

    method: str
    verdict: Verdict
    is_stream: bool
    is_counted: bool
    block: bytes
    list_bytes: int
    encoding: str
    errors_as_status: bool
    http_status: bytes | None
    is_usual: bool


class CallPolicy:
    """Of the headers of requests."""

    def rule(self, name: bytes) -> Rule:
        if name == b"grpc-timeout":
            return Rule.VALUE
        if name in _TELLING:
            return Rule.TELL
        if name in _DROPPED or not is_forwarded(name.decode("latin-1")):
            return Rule.DROP
        return Rule.FORWARD

    def kind(self, read: Sequence[hpack.Header]) -> CallKind:
        pseudo = {name: value for name, value in read if name.startswith(b":")}
        path = pseudo[b":path"]
        method = path.decode("latin-1")
        http_status = _why_not_grpc(pseudo[b":method"], read)
        verdict = Verdict.DENY if http_status else decide_rpc(method)
        sent = _headers(path, read) if verdict is Verdict.ALLOW else []
        return CallKind(
            method=method,
            verdict=verdict,
            is_stream=method == STREAM_INFER,
            is_counted=method in (INFER, STREAM_INFER),
            block=hpack.encode(sent),
            list_bytes=sum(len(name) + len(value) + _OVERHEAD_BYTES for name, value in sent),
            encoding=_last(read, b"grpc-encoding", b"identity").decode("latin-1"),
            errors_as_status=(b"triton_grpc_error", b"true") in read,
            http_status=http_status,
            is_usual=method == INFER and http_status is None,
        )


class DroppedPolicy:
    """Of a client's trailers: they are allowed and go no further."""

    def rule(self, name: bytes) -> Rule:
        return Rule.DROP

    def kind(self, read: Sequence[hpack.Header]) -> None:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class AnswerKind:
    """`head`: what a block begins with that begins an answer; `trailers`: that ends one. `code`: the name of its
    status, UNKNOWN where it tells none."""

    head: bytes
    trailers: bytes
    code: str


class AnswerPolicy:
    """Of Triton's headers and trailers: all go on. Only a status' message may name the model."""

    def rule(self, name: bytes) -> Rule:
        if name == b"grpc-message":
            return Rule.VALUE
        return Rule.TELL if name in (b"grpc-status", b"content-type") else Rule.FORWARD

    def kind(self, read: Sequence[hpack.Header]) -> AnswerKind:
        status = [(name, value) for name, value in read if name == b"grpc-status"]
        return AnswerKind(
            head=hpack.encode(read),
            trailers=hpack.encode(status),
            code=_STATUS_NAMES.get(_last(read, b"grpc-status", b""), Status.UNKNOWN.name),
        )


def _headers(path: bytes, read: Sequence[hpack.Header]) -> list[hpack.Header]:
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"triton"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *((name, value) for name, value in read if name == b"triton_grpc_error"),
    ]


class Keys:
    """What opens Triton, beside every call's own headers. `block`: secret, never logged."""

    __slots__ = ("block", "list_bytes")

    def __init__(self, metadata: Mapping[str, str]) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in metadata.items()]
        self.block = hpack.encode(headers, secret=frozenset(name for name, _ in headers))
        self.list_bytes = sum(len(name) + len(value) + _OVERHEAD_BYTES for name, value in headers)


def timeout_of(fields: Fields[CallKind]) -> float | None:
    """The client's deadline in seconds. Raises GrpcError."""
    seconds = None
    for _, value in fields.values:
        match = _TIMEOUT.fullmatch(value)
        if match is None:
            raise GrpcError(Status.INTERNAL, "grpc-timeout is not a number of 1 to 8 digits with a unit")
        seconds = int(match[1]) * _UNITS[match[2]]
    return seconds


def list_bytes(fields: Fields[CallKind]) -> int:
    """What Triton counts a call's headers for, at most."""
    return fields.kind.list_bytes + fields.list_bytes


def head_block(fields: Fields[AnswerKind], names: Names) -> bytes:
    """An answer's first block for the client."""
    block = fields.kind.head + fields.forwarded
    return block + _messages(fields, names) if fields.values else block


def trailers_block(fields: Fields[AnswerKind], names: Names) -> bytes:
    """An answer's last block, without what only a first one has."""
    block = fields.kind.trailers + fields.forwarded
    return block + _messages(fields, names) if fields.values else block


def _messages(fields: Fields[AnswerKind], names: Names) -> bytes:
    return hpack.encode((name, names.to_public(value)) for name, value in fields.values)


def _last(read: Sequence[hpack.Header], wanted: bytes, default: bytes) -> bytes:
    return next((value for name, value in reversed(read) if name == wanted), default)


def _why_not_grpc(method: bytes, read: Sequence[hpack.Header]) -> bytes | None:
    """The HTTP status for what is no gRPC call (grpc/doc/PROTOCOL-HTTP2.md)."""
    if method != b"POST":
        return b"405"
    types = [value for name, value in read if name == b"content-type"]
    if len(types) != 1 or types[0].partition(b";")[0].strip() not in _TYPES:
        return b"415"
    return None
