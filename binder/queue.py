"""Pods that wait to be placed. Pure; the clock is injected.

Active pods are tried by priority, then age. A pod that found no place is parked: it is tried again
after its backoff (500 ms doubling to 2 min, the proof of concept's), or at once when something in
the cluster has changed that could help. A pod whose Binding failed is held for its whole backoff,
because it is the API server that needs the pause.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from berth.contract.ids import PodUid
from berth.runtime.backoff import Backoff
from binder.demand import Demand

INITIAL_SECONDS, CAP_SECONDS = 0.5, 120.0
_ALWAYS = float("-inf")


def _backoff() -> Backoff:
    return Backoff(initial_seconds=INITIAL_SECONDS, cap_seconds=CAP_SECONDS)


@dataclass(slots=True)
class Waiting:
    """One pod in the queue. `due`: tried from this time on; a wake brings it forward, but not before
    `not_before`. `message`: what its owner was told last."""

    demand: Demand
    due: float
    not_before: float = _ALWAYS
    message: str = ""
    backoff: Backoff = field(default_factory=_backoff)

    @property
    def order(self) -> tuple[int, str, str]:
        return (-self.demand.priority, self.demand.created, self.demand.model.ref.uid)

    def bring_forward(self, now: float) -> None:
        self.due = min(self.due, max(now, self.not_before))


class SchedulingQueue:
    """At most one entry a pod; a pod that is deleted is simply taken out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[PodUid, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def counts(self) -> Mapping[str, int]:
        """How many pods are ready to be tried, parked for a time, and gated."""
        now, counts = self._clock(), {"ready": 0, "parked": 0, "gated": 0}
        for waiting in self._waiting.values():
            counts["gated" if waiting.demand.gated else "ready" if waiting.due <= now else "parked"] += 1
        return counts

    def put(self, demand: Demand, *, told: str = "") -> None:
        """Add a pod, or take its change: what it asks for now may fit where the old did not.

        `told`: what its owner was told before, by an earlier leader perhaps.
        """
        uid, now = demand.model.ref.uid, self._clock()
        known = self._waiting.get(uid)
        if known is None:
            self._waiting[uid] = Waiting(demand, due=now, message=told)
        elif known.demand != demand:
            known.demand = demand
            known.bring_forward(now)

    def remove(self, uid: PodUid) -> None:
        self._waiting.pop(uid, None)

    def pop(self) -> Waiting | None:
        """Take out the next pod whose time has come."""
        now = self._clock()
        ready = [w for w in self._waiting.values() if w.due <= now and not w.demand.gated]
        if not ready:
            return None
        first = min(ready, key=lambda waiting: waiting.order)
        del self._waiting[first.demand.model.ref.uid]
        return first

    def park(self, waiting: Waiting) -> None:
        """Put back a pod that found no place."""
        waiting.due, waiting.not_before = self._clock() + waiting.backoff.next(), _ALWAYS
        self._put_back(waiting)

    def hold(self, waiting: Waiting) -> None:
        """Put back a pod whose Binding failed: nothing wakes it before its backoff is over."""
        waiting.due = waiting.not_before = self._clock() + waiting.backoff.next()
        self._put_back(waiting)

    def wake(self) -> None:
        """Something has changed that may let pods in: all may be tried now."""
        now = self._clock()
        for waiting in self._waiting.values():
            waiting.bring_forward(now)

    def seconds_to_next(self) -> float | None:
        """Until the next pod's time comes; None when none waits for a time."""
        dues = [w.due for w in self._waiting.values() if not w.demand.gated]
        return max(0.0, min(dues) - self._clock()) if dues else None

    def _put_back(self, waiting: Waiting) -> None:
        # A newer state of the pod stands.
        self._waiting.setdefault(waiting.demand.model.ref.uid, waiting)
