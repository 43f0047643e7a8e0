"""The life of one request, whichever protocol it comes in and wherever it is answered. Pure.

It knows no socket and no protocol: a downstream tells what has happened, and it sees to what must be true however the
request ends, at whatever stage: it is counted once, what is buffered of it is released once, and its claim on Triton
lasts exactly as long as Triton has something of it.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final, Protocol

from berth.contract.quantity import format_bytes
from proxy.policy.refusal import Refusal, Why
from proxy.request.admission import GIVEN_UP_SECONDS, Admission
from proxy.request.minimum_rate import MinimumRate
from proxy.request.replica import Replica
from proxy.request.traffic import Traffic

# Codes for requests whose clients have gone; nginx's, where the protocol has none.
CLIENT_LEFT: Final = "499"
# Of a process in which models share what waits there.
MEMORY_FLAG: Final = "--memory-budget of the node's gateway"


class Stage(Enum):
    """How far a request is. It only ever moves on, as TRANSITIONS allows."""

    RECEIVING = auto()  # it is coming, and what has come is checked
    QUEUED = auto()  # it is here, and waits for a slot, for a connection or for an answer of our own
    FORWARDED = auto()  # Triton has it, or its beginning
    ANSWERED = auto()  # the client gets nothing more
    REFUSED = auto()  # so it is here, and what it gets is a refusal of ours
    ABORTED = auto()  # its client has gone, or cannot get the rest of the answer

    # Nothing of it has been sent to Triton yet.
    is_pending: bool
    is_over: bool
    followers: tuple["Stage", ...]


_OVER: Final = (Stage.ANSWERED, Stage.REFUSED, Stage.ABORTED)
TRANSITIONS: Final[Mapping[Stage, tuple[Stage, ...]]] = {
    Stage.RECEIVING: (Stage.FORWARDED, Stage.QUEUED, *_OVER),
    Stage.QUEUED: (Stage.FORWARDED, *_OVER),
    Stage.FORWARDED: _OVER,
    **dict.fromkeys(_OVER, ()),
}
# Looked up for every request: an attribute is read in less time than a table.
for _stage, _followers in TRANSITIONS.items():
    _stage.is_pending = Stage.FORWARDED in _followers
    _stage.is_over, _stage.followers = not _followers, _followers


class Request:
    """`deadline`: on the clock of `began`; a downstream ends what is late (`is_late`)."""

    # Of a protocol whose requests Triton takes a bounded number of at once.
    is_rest = False
    # As most requests are: what is never set costs nothing.
    stage = Stage.RECEIVING
    admission: Admission | None = None
    buffered_bytes = 0
    # Of the budget too, for being open; a request that is Triton's at once has none.
    open_bytes = 0
    # When Triton has had its time for requests without a client, on time.monotonic.
    given_up_until = 0.0
    _receiving: MinimumRate | None = None
    _answering: MinimumRate | None = None

    def __init__(self, replica: Replica, traffic: Traffic, began: float) -> None:
        replica.calls += 1
        self.replica, self.traffic, self.began = replica, traffic, began
        self.deadline = began + replica.limits.request_timeout_seconds

    def enter(self, stage: Stage) -> None:
        assert stage in self.stage.followers, f"{stage} after {self.stage}"
        self.stage = stage

    def prolong(self, now: float) -> None:
        """It has moved on, as a stream does: its time begins anew."""
        self.deadline = now + self.replica.limits.request_timeout_seconds

    @property
    def whose(self) -> object:
        """To what is shared by many replicas."""
        return self.replica

    # Received.

    def require_size(self, size_bytes: int) -> None:
        """Raises Refusal where no request may be so long."""
        if self.replica.is_too_large(size_bytes):
            raise too_large(self.replica.limits.max_request_bytes, self.replica.flags.request)

    def open(self, size_bytes: int) -> None:
        """It may stay open for long and say nothing: so many bytes are its own until it ends. Raises Refusal."""
        if not self.replica.budget.take(size_bytes):
            raise self.no_room(size_bytes)
        self.open_bytes = size_bytes

    def hold(self, size_bytes: int) -> None:
        """So many bytes of it have come and cannot go on yet. Raises Refusal where there is no room for them."""
        if not self.replica.budget.take(size_bytes):
            raise self.no_room(size_bytes)
        self.buffered_bytes += size_bytes

    def no_room(self, size_bytes: int) -> Refusal:
        """Bodies that are coming, and calls that are open, hold all that they may hold: `size_bytes` were too many.

        That is load, of which the scaler must hear, unless it has of this request already.
        """
        if self.admission is None:
            self.replica.rejected()
        return _no_room_here(self.replica, size_bytes)

    def let_go(self, size_bytes: int) -> None:
        """So many bytes of what is buffered have gone on, or were dropped."""
        self.buffered_bytes -= size_bytes
        self.replica.budget.give(size_bytes)

    def let_all_go(self) -> None:
        if self.buffered_bytes:
            self.let_go(self.buffered_bytes)

    # Admitted.

    def admit_at_once(self, now: float, cost_bytes: int, size_bytes: int) -> bool:
        """For a fast path: a request that is here with so many bytes. False where it would have to wait.

        It holds none of them, as they go on in this step; but where there is no room for more it goes no other way
        than the others do.
        """
        if not self.replica.budget.has_room(size_bytes):
            return False
        self.admission = self.replica.admissions.admit_at_once(
            now, cost_bytes=cost_bytes, deadline=self.deadline, is_rest=self.is_rest
        )
        return self.admission is not None

    def admit(
        self, now: float, granted: Callable[[], None], cost_bytes: int, *, counted: bool = True
    ) -> bool:
        """True: it may be sent to Triton. False: it waits for `granted`. Raises Refusal.

        `counted`: it is load and takes a slot; else it is a question.
        """
        admissions = self.replica.admissions if counted else self.replica.questions
        self.admission = admissions.admit(
            now, granted, cost_bytes=cost_bytes, deadline=self.deadline, is_rest=self.is_rest
        )
        return not self.admission.is_waiting

    def is_sent_too_slowly(self, received_bytes: int, now: float, *, is_awaited: bool) -> bool:
        """Of a request that has begun and is not all here: whether it keeps others waiting for too long.

        Ask every second. `is_awaited`: nothing but its client keeps the next of it from coming.
        """
        if self._receiving is None:
            self._receiving = MinimumRate(received_bytes, now)
        others_wait = is_awaited and self.replica.admissions.others_wait_for_room
        return self._receiving.is_too_slow(received_bytes, now, others_wait=others_wait)

    def is_read_too_slowly(self, taken_bytes: int, now: float, *, others_wait: bool) -> bool:
        """Of an answer that has begun and is not all taken: whether its client keeps others waiting for too long.

        Ask every second. `others_wait`: for what the answer keeps in Triton, and nothing but its client keeps it there.
        """
        if self._answering is None:
            self._answering = MinimumRate(taken_bytes, now)
        return self._answering.is_too_slow(taken_bytes, now, others_wait=others_wait)

    # Answered, refused, aborted: whichever comes first counts.

    def end(self, stage: Stage, code: str, now: float, *, in_triton: bool = False) -> None:
        """Once for each request: nothing of it waits, and it is counted. `in_triton`: Triton goes on with it."""
        self.enter(stage)
        if self.open_bytes:
            self.replica.budget.give(self.open_bytes)
            self.open_bytes = 0
        if self.buffered_bytes:
            self.let_all_go()
        self.traffic.answered(code, now - self.began)
        admission = self.admission
        if in_triton:
            self.given_up_until = now + GIVEN_UP_SECONDS
        if admission is not None:
            if in_triton:
                admission.give_up(now)
            else:
                admission.release(now)

    def triton_is_done(self, now: float) -> None:
        """Triton has nothing of it any more."""
        if self.admission is not None:
            self.admission.release(now)

    def is_late(self, now: float) -> bool:
        return now > self.deadline or self.is_overdue(now)

    def is_overdue(self, now: float) -> bool:
        """It has waited for its turn for longer than it may."""
        return self.admission is not None and self.admission.is_overdue(now)


class GivenUp(Protocol):
    """A request that Triton works on without a client."""

    @property
    def given_up_until(self) -> float: ...

    def out_of_time(self) -> None:
        """Triton has had its time for it: the request leaves `GivenUpRequests`."""
        ...


class GivenUpRequests(set[GivenUp]):
    """Of one replica, in one protocol: those that Triton is left to end, for a bounded time."""

    def tick(self, now: float) -> None:
        for request in [one for one in self if now > one.given_up_until]:
            request.out_of_time()

    def close(self) -> None:
        for request in list(self):
            request.out_of_time()


def too_large(limit_bytes: int, flag: str) -> Refusal:
    return Refusal(Why.TOO_LARGE, f"a request may have {format_bytes(limit_bytes)} ({flag})")


def _no_room_here(replica: Replica, size_bytes: int) -> Refusal:
    own, whole = replica.budget, replica.budget.parent
    if whole is None or own.used_bytes + size_bytes > own.limit_bytes:
        who, limit_bytes, flag = "they", own.limit_bytes, replica.flags.inflight
    else:
        who, limit_bytes, flag = (
            "those of all models, each no more than is free,",
            whole.limit_bytes,
            MEMORY_FLAG,
        )
    return Refusal(
        Why.NO_ROOM,
        f"too many requests are on their way at once: {who} may take {format_bytes(limit_bytes)} together ({flag})",
    )
