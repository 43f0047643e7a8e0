"""Why a request is not served, before either protocol puts it into its own words. Pure."""

from dataclasses import dataclass
from enum import Enum, auto


class Why(Enum):
    """REST's status, gRPC's: 400 INVALID_ARGUMENT, 413 RESOURCE_EXHAUSTED, then 503 and at most "try again"."""

    INVALID = auto()
    TOO_LARGE = auto()  # of any time
    NO_ROOM = auto()  # for its bytes; 503, RESOURCE_EXHAUSTED
    QUEUE_FULL = auto()  # 503, UNAVAILABLE
    NOT_SERVED = auto()  # Triton cannot be asked now; 503, UNAVAILABLE


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


class NotServed(Refusal):
    """Triton cannot be asked now; the message says why."""

    def __init__(self, message: str) -> None:
        super().__init__(Why.NOT_SERVED, message)
