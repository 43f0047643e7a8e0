"""gRPC statuses (grpc/doc/statuscodes.md), and how an answer that is only a status is written."""

from enum import IntEnum
from urllib.parse import quote_from_bytes

from proxy.wire.h2 import hpack


class Status(IntEnum):
    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class GrpcError(Exception):
    """A gRPC status of our own. `request_id`: of the message that was refused, where it has one."""

    def __init__(self, status: Status, message: str, *, request_id: bytes = b"", **trailers: str) -> None:
        super().__init__(message)
        self.status, self.request_id, self.trailers = status, request_id, trailers


_RESPONSE: tuple[hpack.Header, ...] = ((b":status", b"200"), (b"content-type", b"application/grpc"))
RESPONSE_BLOCK = hpack.encode(_RESPONSE)
OK_TRAILERS_BLOCK = hpack.encode([(b"grpc-status", b"0")])


def trailers_only(refusal: GrpcError) -> bytes:
    """The block of an answer without a message."""
    return hpack.encode([*_RESPONSE, *trailers(refusal)])


def trailers(refusal: GrpcError) -> list[hpack.Header]:
    # grpc/doc/PROTOCOL-HTTP2.md: printable ASCII but for %, the rest percent-encoded.
    text = quote_from_bytes(str(refusal).encode()[:4096], safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")
    extra = [(name.replace("_", "-").encode(), value.encode()) for name, value in refusal.trailers.items()]
    return [(b"grpc-status", b"%d" % refusal.status), (b"grpc-message", text.encode()), *extra]


def try_again(message: str, *, request_id: bytes = b"") -> GrpcError:
    """For what may succeed a little later."""
    return GrpcError(Status.UNAVAILABLE, message, request_id=request_id, retry_after="1")
