"""Pods that wait to be placed. Pure; the clock is injected.

Active pods are tried by priority, then age. A pod that found no place is parked: it is tried again
after its backoff (500 ms doubling to 2 min, the proof of concept's), or at once when something in
the cluster has changed that could help. A pod whose Binding failed is held for its whole backoff,
because it is the API server that needs the pause.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from berth.contract.ids import PodUid
from berth.runtime.backoff import Backoff
from binder.demand import Demand

INITIAL_SECONDS, CAP_SECONDS = 0.5, 120.0
_ALWAYS = float("-inf")
Order = tuple[int, str, str]


def _backoff() -> Backoff:
    return Backoff(initial_seconds=INITIAL_SECONDS, cap_seconds=CAP_SECONDS)


@dataclass(slots=True)
class Waiting:
    """One pod in the queue. `due`: tried from this time on; a wake brings it forward, but not before
    `not_before`. `reasons`: why it was refused last; `message`: what its owner was told of that."""

    demand: Demand
    due: float
    not_before: float = _ALWAYS
    reasons: str = ""
    message: str = ""
    backoff: Backoff = field(default_factory=_backoff)

    @property
    def uid(self) -> PodUid:
        return self.demand.model.ref.uid

    @property
    def order(self) -> Order:
        return (-self.demand.priority, self.demand.created, self.uid)


class SchedulingQueue:
    """At most one entry a pod; a pod that is deleted is simply taken out.

    Two heaps hold (key, uid) of pods that are due and of pods that are not yet. An entry of a heap
    that the pod's own state does not bear out is old, and is skipped.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[PodUid, Waiting] = {}
        self._ready: list[tuple[Order, PodUid]] = []
        self._later: list[tuple[float, PodUid]] = []

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

    def put(self, demand: Demand, *, told: str = "") -> bool:
        """Add a pod, or take its change: what it asks for now may fit where the old did not. True for
        a pod that was not known.

        `told`: what its owner was told before, by an earlier leader perhaps.
        """
        uid, now = demand.model.ref.uid, self._clock()
        known = self._waiting.get(uid)
        if known is None:
            self._enter(Waiting(demand, due=now, message=told))
        elif known.demand != demand:
            known.demand = demand
            self._bring_forward(known, now)
        return known is None

    def remove(self, uid: PodUid) -> None:
        self._waiting.pop(uid, None)

    def pop(self) -> Waiting | None:
        """Take out the next pod whose time has come."""
        self._sort_in_due()
        while self._ready:
            order, uid = heapq.heappop(self._ready)
            waiting = self._waiting.get(uid)
            if waiting is not None and self._is_ready(waiting) and waiting.order == order:
                del self._waiting[uid]
                return waiting
        return None

    def park(self, waiting: Waiting) -> None:
        """Put back a pod that found no place."""
        waiting.due, waiting.not_before = self._clock() + waiting.backoff.next(), _ALWAYS
        self._put_back(waiting)

    def hold(self, waiting: Waiting) -> None:
        """Put back a pod whose Binding failed: nothing wakes it before its backoff is over."""
        waiting.due = waiting.not_before = self._clock() + waiting.backoff.next()
        self._put_back(waiting)

    def wake(self, may_fit: Callable[[Demand], bool] = lambda _: True) -> None:
        """Something has changed: the pods that may fit now may be tried now."""
        now = self._clock()
        for waiting in self._waiting.values():
            if waiting.due > max(now, waiting.not_before) and may_fit(waiting.demand):
                self._bring_forward(waiting, now)

    def seconds_to_next(self) -> float | None:
        """Until the next pod's time comes; None when none waits for a time."""
        self._sort_in_due()
        if self._ready:
            return 0.0
        return max(0.0, self._later[0][0] - self._clock()) if self._later else None

    def _bring_forward(self, waiting: Waiting, now: float) -> None:
        waiting.due = min(waiting.due, max(now, waiting.not_before))
        self._file(waiting)

    def _put_back(self, waiting: Waiting) -> None:
        # A newer state of the pod stands.
        if waiting.uid not in self._waiting:
            self._enter(waiting)

    def _enter(self, waiting: Waiting) -> None:
        self._waiting[waiting.uid] = waiting
        self._file(waiting)

    def _file(self, waiting: Waiting) -> None:
        if waiting.demand.gated:
            return  # its change brings it here again
        if waiting.due <= self._clock():
            heapq.heappush(self._ready, (waiting.order, waiting.uid))
        else:
            heapq.heappush(self._later, (waiting.due, waiting.uid))

    def _sort_in_due(self) -> None:
        """Move on whose time has come, and drop what is old from the heads of both heaps."""
        now = self._clock()
        while self._later:
            due, uid = self._later[0]
            waiting = self._waiting.get(uid)
            if waiting is not None and waiting.due == due and due > now:
                break
            heapq.heappop(self._later)
            if waiting is not None and waiting.due == due:
                self._file(waiting)
        while self._ready:
            order, uid = self._ready[0]
            waiting = self._waiting.get(uid)
            if waiting is not None and self._is_ready(waiting) and waiting.order == order:
                break
            heapq.heappop(self._ready)

    def _is_ready(self, waiting: Waiting) -> bool:
        return waiting.due <= self._clock() and not waiting.demand.gated
