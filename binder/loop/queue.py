"""Pods that wait to be placed. Pure; the clock is injected.

Active pods are tried by priority, then age. A pod that found no place is parked. Something in the
cluster that may help it (`requeue`) wakes it, once a short pause since its last try is over: 500 ms, twice
as long each time that it was woken in vain, up to 10 s (kube-scheduler's backoffQ). Without that it is
tried again after its own backoff (500 ms doubling to 2 min, the proof of concept's), which is there for
what is not foreseen: it takes its turn behind those who have a reason to be tried, but it has one.
A pod whose Binding failed waits for its whole backoff, because it is the API server that needs the pause.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from berth.contract.ids import PodUid
from berth.contract.wait_reason import WaitReason
from berth.runtime.backoff import Backoff
from binder.loop.conditions import LastMessage, statements_of
from binder.loop.requeue import NodeToStatus, QueueingHint
from binder.pod.demand import Demand

INITIAL_SECONDS, CAP_SECONDS = 0.5, 120.0
WOKEN_CAP_SECONDS = 10.0
# After so many who have a reason one gets a turn whose time alone has come.
TURN = 8
_MOST_QUESTIONS = 4096
_ALWAYS = float("-inf")
Order = tuple[int, str, str]


def _backoff(cap_seconds: float) -> Backoff:
    return Backoff(initial_seconds=INITIAL_SECONDS, cap_seconds=cap_seconds)


@dataclass(slots=True)
class Waiting:
    """One pod in the queue. `due`: tried from this time on; a wake brings it forward, but not before
    `not_before`; `again`: its time without one. `status`: how it stood when it was refused last; `hint`: what may have helped it since.
    `message`: what was reported to its owner last, `reason`: to programs; `last`: why it was refused, as far as that was reported."""

    demand: Demand
    due: float
    not_before: float = _ALWAYS
    again: float = _ALWAYS
    status: NodeToStatus | None = None
    hint: QueueingHint | None = None
    message: str = ""
    reason: WaitReason | None = None
    last: LastMessage = LastMessage()
    backoff: Backoff = field(default_factory=lambda: _backoff(CAP_SECONDS))
    pause: Backoff = field(default_factory=lambda: _backoff(WOKEN_CAP_SECONDS))
    pause_seconds: float = 0.0

    @property
    def uid(self) -> PodUid:
        return self.demand.model.ref.uid

    @property
    def order(self) -> Order:
        return (-self.demand.priority, self.demand.created, self.uid)

    @property
    def has_reason(self) -> bool:
        """It is new, has changed, or something may have helped it."""
        return self.status is None or self.hint is not None


class SchedulingQueue:
    """At most one entry a pod; a pod that is deleted is simply taken out.

    Three heaps hold (key, uid): of pods that are due for a reason, of those that are due, and of those
    that are not yet. An entry of a heap that the pod's own state does not bear out is old, and is skipped.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[PodUid, Waiting] = {}
        # Of them those that were refused and may be woken: looked at whenever something changes.
        self._parked: dict[PodUid, Waiting] = {}
        self._ready: list[tuple[Order, PodUid]] = []
        self._again: list[tuple[Order, PodUid]] = []
        self._later: list[tuple[float, PodUid]] = []
        self._since_turn = 0
        # The pod that was refused last of those who ask the same.
        self._refused: OrderedDict[Hashable, PodUid] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def demands(self) -> Iterator[Demand]:
        return (waiting.demand for waiting in self._waiting.values())

    def counts(self) -> Mapping[str, int]:
        """How many pods are ready to be tried, parked for a time, and gated."""
        now, counts = self._clock(), {"ready": 0, "parked": 0, "gated": 0}
        for waiting in self._waiting.values():
            counts["gated" if waiting.demand.gated else "ready" if waiting.due <= now else "parked"] += 1
        return counts

    def put(self, demand: Demand, *, message: str = "", reason: WaitReason | None = None) -> bool:
        """Add a pod, or take its change: what it requests now may fit where the old did not. True for
        a pod that was not known.

        `message`: what was reported before to its owner, by an earlier leader perhaps, `reason`: to programs.
        """
        uid, now = demand.model.ref.uid, self._clock()
        known = self._waiting.get(uid)
        if known is None:
            last = LastMessage(statements=statements_of(message), at=now) if message else LastMessage()
            self._enter(Waiting(demand, due=now, message=message, reason=reason, last=last))
        elif known.demand != demand:
            known.demand, known.due = demand, now if known.status is not None else known.due
            known.status = known.hint = None
            known.last = LastMessage(known.last.reasons)
            self._file(known)
        return known is None

    def find(self, uid: PodUid) -> Waiting | None:
        return self._waiting.get(uid)

    def note_refused(self, waiting: Waiting) -> None:
        """The pod was refused: who asks the same need not be tried."""
        self._refused[waiting.demand.question] = waiting.uid
        if len(self._refused) > _MOST_QUESTIONS:
            self._refused.popitem(last=False)

    def refused_alike(self, demand: Demand) -> Waiting | None:
        """A pod that asks the same, was refused, and that nothing may have helped since."""
        uid = self._refused.get(demand.question)
        known = None if uid is None else self.find(uid)
        if known is None or known.status is None or (known.hint is not None and known.hint.is_change):
            return None
        return known if known.demand.question == demand.question else None

    def remove(self, uid: PodUid) -> None:
        self._waiting.pop(uid, None)
        self._parked.pop(uid, None)

    def pop(self) -> Waiting | None:
        """Take out the next pod whose time has come."""
        self._sort_in_due()
        if self._again and (not self._ready or self._since_turn >= TURN):
            self._since_turn = 0
            return self._take(heapq.heappop(self._again)[1])
        if self._ready:
            self._since_turn += 1
            return self._take(heapq.heappop(self._ready)[1])
        return None

    def park(self, waiting: Waiting, status: NodeToStatus) -> None:
        """Put back a pod that found no place, and how it stood."""
        waiting.due = waiting.again = self._clock() + waiting.backoff.next()
        self._pause(waiting, status)

    def park_again(self, waiting: Waiting, status: NodeToStatus) -> None:
        """Put back a pod that was woken and not even tried: its hint was outdated by then."""
        waiting.due = waiting.again
        self._pause(waiting, status)

    def hold(self, waiting: Waiting) -> None:
        """Put back a pod whose Binding failed: nothing wakes it before its backoff is over."""
        waiting.due = waiting.not_before = self._clock() + waiting.backoff.next()
        waiting.status, waiting.hint = None, None
        self._put_back(waiting)

    @property
    def has_parked(self) -> bool:
        return bool(self._parked)

    def parked(self) -> list[Waiting]:
        """Those that were refused and may be woken."""
        return list(self._parked.values())

    def with_hint(self) -> list[Demand]:
        """Those that have a reason to be tried, now or after a pause, in their order."""
        found = [one for one in self._waiting.values() if one.has_reason and not one.demand.gated]
        return [one.demand for one in sorted(found, key=lambda one: one.order)]

    def wake(self, waiting: Waiting, hint: QueueingHint) -> None:
        """Something may have helped this pod: try it as soon as its pause is over."""
        before = (waiting.due, waiting.has_reason)
        waiting.hint = hint if waiting.hint is None else waiting.hint.and_also(hint)
        waiting.due = min(waiting.due, max(self._clock(), waiting.not_before))
        if (waiting.due, waiting.has_reason) != before:
            self._file(waiting)

    def seconds_to_next(self) -> float | None:
        """Until the next pod's time comes; None when none waits for a time."""
        self._sort_in_due()
        if self._ready or self._again:
            return 0.0
        return max(0.0, self._later[0][0] - self._clock()) if self._later else None

    def _pause(self, waiting: Waiting, status: NodeToStatus) -> None:
        if waiting.hint is not None or not waiting.pause_seconds:
            waiting.pause_seconds = waiting.pause.next()
        waiting.not_before = self._clock() + waiting.pause_seconds
        waiting.status, waiting.hint = status, None
        self._put_back(waiting)

    def _take(self, uid: PodUid) -> Waiting:
        self._parked.pop(uid, None)
        return self._waiting.pop(uid)

    def _put_back(self, waiting: Waiting) -> None:
        # A newer state of the pod stands.
        if waiting.uid not in self._waiting:
            self._enter(waiting)

    def _enter(self, waiting: Waiting) -> None:
        self._waiting[waiting.uid] = waiting
        self._file(waiting)

    def _file(self, waiting: Waiting) -> None:
        if waiting.status is None or waiting.demand.gated:
            self._parked.pop(waiting.uid, None)
        else:
            self._parked[waiting.uid] = waiting
        if waiting.demand.gated:
            return  # its change adds it here again
        if waiting.due > self._clock():
            heapq.heappush(self._later, (waiting.due, waiting.uid))
        else:
            heapq.heappush(self._ready if waiting.has_reason else self._again, (waiting.order, waiting.uid))

    def _sort_in_due(self) -> None:
        """Move on whose time has come, and drop what is old from the heads of the heaps."""
        now = self._clock()
        while self._later:
            due, uid = self._later[0]
            waiting = self._waiting.get(uid)
            if waiting is not None and waiting.due == due and due > now:
                break
            heapq.heappop(self._later)
            if waiting is not None and waiting.due == due:
                self._file(waiting)
        for heap, for_a_reason in ((self._ready, True), (self._again, False)):
            while heap and not self._is_ready(*heap[0], for_a_reason=for_a_reason):
                heapq.heappop(heap)

    def _is_ready(self, order: Order, uid: PodUid, *, for_a_reason: bool) -> bool:
        waiting = self._waiting.get(uid)
        return (
            waiting is not None
            and waiting.due <= self._clock()
            and not waiting.demand.gated
            and waiting.order == order
            and waiting.has_reason == for_a_reason
        )
