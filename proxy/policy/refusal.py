"""Why a request is not served, and what either protocol says of it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from proxy.wire.grpc_status import GrpcError, Status


class Why(Enum):
    INVALID = auto()
    FOREIGN_MODEL = auto()
    TOO_LARGE = auto()  # of any time
    NO_ROOM = auto()  # for its bytes
    QUEUE_FULL = auto()
    NOT_SERVED = auto()  # Triton cannot be asked now


@dataclass(frozen=True, slots=True)
class Form:
    """What clients receive. `retries`: it may succeed a little later, and the answer says so."""

    http: int
    grpc: Status
    retries: bool = False


FORMS: Final[Mapping[Why, Form]] = {
    Why.INVALID: Form(400, Status.INVALID_ARGUMENT),
    Why.FOREIGN_MODEL: Form(404, Status.NOT_FOUND),
    Why.TOO_LARGE: Form(413, Status.RESOURCE_EXHAUSTED),
    Why.NO_ROOM: Form(503, Status.RESOURCE_EXHAUSTED, retries=True),
    Why.QUEUE_FULL: Form(503, Status.UNAVAILABLE, retries=True),
    Why.NOT_SERVED: Form(503, Status.UNAVAILABLE, retries=True),
}


@dataclass(frozen=True, slots=True)
class Flags:
    """Which option sets a limit, for those that are refused: what their operator may change. These are a pod's own."""

    json: str = "--max-json-bytes"
    request: str = "--max-request-bytes"
    inflight: str = "--max-inflight-bytes"


class Refusal(Exception):
    """The message is for the client."""

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.why = why

    @property
    def form(self) -> Form:
        return FORMS[self.why]


class NotServed(Refusal):
    """Triton cannot be asked now; the message says why."""

    def __init__(self, message: str) -> None:
        super().__init__(Why.NOT_SERVED, message)


def in_grpc(refusal: Refusal, request_id: bytes = b"") -> GrpcError:
    """`request_id`: of the message that is refused, where it has one."""
    again = {"retry_after": "1"} if refusal.form.retries else {}
    return GrpcError(refusal.form.grpc, str(refusal), request_id=request_id, **again)
