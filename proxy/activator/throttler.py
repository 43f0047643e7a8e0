"""The buffer in which a model's requests wait for a replica, and how many are let through to the replicas that there are.
Pure but for the clock that it is given.

It is the data plane's own queue (`request.admission`) with a limit that moves: as many requests run at once as the ready
replicas have slots, and none while no replica is ready, which is not "no limit". So whatever is buffered has passed every
check, and what is rejected is rejected before it starts a replica.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from berth.contract.activation import BufferLimits
from proxy.activator.bounds import ABANDONED, FORWARDED, Bounds, TokenBucket
from proxy.policy.refusal import Why
from proxy.request.admission import Admission, Admissions, AdmissionState
from proxy.request.budget import Budget
from proxy.request.load import LoadMeter

TIMED_OUT: Final = "no replica of the model has taken the request within hold-timeout"
TOO_MANY_COLD_STARTS: Final = "the model is started from zero too often"


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """Since the last report, but for what is as of now. `arrived`: rejected ones included."""

    buffered: int  # now
    average_buffered: float
    arrived: int
    forwarded: int
    oldest_seconds: float  # now
    # Since a first replica took buffered requests; 0: none has.
    served_ago: float


class Throttler(Admissions):
    """One model's. `allow` tells how many may run."""

    def __init__(
        self,
        meter: LoadMeter,
        limits: BufferLimits,
        bounds: Bounds,
        cold_start: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cold_start`: called when a request waits, no replica is ready, and no request waited before."""
        super().__init__(meter, limit=0, queue_depth=0, bytes=Budget(sys.maxsize))
        self._bounds, self._cold_start, self._clock = bounds, cold_start, clock
        self._places = Budget(limits.requests, bounds.places)
        self._cold_starts = TokenBucket(limits.cold_starts_per_second, limits.cold_start_burst)
        self._seconds = limits.seconds
        self._buffered = LoadMeter(clock(), time.time)
        # Since the last report: requests that had to wait, those of them that were let through, and rejected ones.
        self._waited = self._granted = self._refused = 0
        # Since when each waiting request waits.
        self._since: dict[Admission, float] = {}
        # By reason, since the start.
        self.refusals: Counter[str] = Counter()
        # Requests that had their slot, and whose replica went before they were sent.
        self.retrying = 0
        self._slots = 0
        # When a first replica took buffered requests, since the last report.
        self._served_at: float | None = None

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def arrived(self) -> int:
        """Since the last report."""
        return self._meter.arrived

    @property
    def buffered(self) -> int:
        """Requests that wait now."""
        return self.waiting + self.retrying

    @property
    def needs_replica(self) -> bool:
        """A request waits, and no replica is ready."""
        return not self._slots and self.buffered > 0 and self.closed is None

    def set_limits(self, limits: BufferLimits) -> None:
        """For requests that arrive from now on."""
        self._places.limit_bytes, self._seconds = limits.requests, limits.seconds
        self._cold_starts.change(limits.cold_starts_per_second, limits.cold_start_burst)

    def allow(self, slots: int) -> None:
        """So many may run from now on; those that do stay."""
        was, self._slots = self._slots, slots
        if slots and not was and self.buffered:
            self._served_at = self._clock()
        self.hand_out()
        if (
            was and self.needs_replica
        ):  # its replicas have gone, and no cold start was reported for these requests
            self._cold_start()

    def release_all(self) -> None:
        """Let all waiting requests through though no replica is ready: each ends with the reason."""
        slots, self._slots = self._slots, sys.maxsize
        self.hand_out()
        self._slots = slots

    def admit(
        self,
        now: float,
        granted: Callable[[], None],
        *,
        cost_bytes: int = 0,
        deadline: float = float("inf"),
        is_rest: bool = False,
    ) -> Admission:
        """As Admissions', until the request has been buffered for as long as it may. Raises Refusal."""
        had = self.buffered
        admission = super().admit(
            now, granted, cost_bytes=cost_bytes, deadline=min(deadline, now + self._seconds)
        )
        if admission.is_waiting:
            self._since[admission] = now
        if not had and self.needs_replica:
            self._cold_start()
        return admission

    def released(self, admission: Admission, was: AdmissionState, now: float) -> None:
        self._observe_wait(admission, ABANDONED, now)
        super().released(admission, was, now)

    def _observe_wait(self, admission: Admission, result: str, now: float) -> None:
        """Once for each request that waited."""
        since = self._since.pop(admission, None)
        if since is not None:
            self._bounds.buffered_seconds[result].observe(max(0.0, now - since))

    def retry_began(self, now: float) -> None:
        """A request that had its slot waits for a replica again."""
        had, self.retrying = self.buffered, self.retrying + 1
        self._buffered.enter(now)
        if not had and self.needs_replica:
            self._cold_start()

    def retry_ended(self, now: float) -> None:
        """It has one, or its client has gone."""
        self.retrying -= 1
        self._buffered.leave(now)

    def counts(self, now: float) -> BufferCounts:
        """Since the last call. Before the meter's period is closed."""
        arrived = self._meter.arrived
        counted = BufferCounts(
            buffered=self.buffered,
            average_buffered=self._buffered.report(now).average_concurrency,
            arrived=arrived,
            forwarded=max(0, arrived - self._refused - self._waited + self._granted),
            oldest_seconds=self._oldest_seconds(now),
            served_ago=0.0 if self._served_at is None else max(0.0, now - self._served_at),
        )
        self._served_at = None
        self._waited = self._granted = self._refused = 0
        return counted

    def _oldest_seconds(self, now: float) -> float:
        oldest = next(iter(self._waiting), None)
        return 0.0 if oldest is None else max(0.0, self._seconds - (oldest.deadline - now))

    def resize(self, *, limit: int, queue_depth: int) -> None:
        """`allow` and `set_limits` do that."""

    def _take(self) -> bool:
        return self.running < self._slots

    def _take_place(self) -> bool:
        """Raises Refusal."""
        now, bounds = self._clock(), self._bounds
        is_cold_start = not self._slots and not self.buffered
        if is_cold_start and not (self._cold_starts.has_one(now) and bounds.cold_starts.has_one(now)):
            self._refuse(Why.NO_ROOM, TOO_MANY_COLD_STARTS)
        if not self._places.take(1):
            self._refuse(Why.NO_ROOM, self._why_no_place())
        if is_cold_start:
            self._cold_starts.take()
            bounds.cold_starts.take()
        self._buffered.enter(now)
        self._waited += 1
        return True

    def _give_place(self) -> None:
        self._places.give(1)
        self._buffered.leave(self._clock())

    def _next(self) -> Admission | None:
        waiting = len(self._waiting)
        admission = super()._next()
        if admission is not None:
            self._observe_wait(admission, FORWARDED, self._clock())
        self._granted += len(self._waiting) < waiting
        return admission

    def _why_no_place(self) -> str:
        if self._places.used_bytes >= self._places.limit_bytes:
            return (
                f"{self._places.used_bytes} requests wait for a replica of the model already (hold-requests)"
            )
        return "too many requests of all models wait for a replica already"

    def _refuse(self, why: Why, message: str) -> None:
        self._refused += 1
        self.refusals["COLD_STARTS" if message is TOO_MANY_COLD_STARTS else why.name] += 1
        super()._refuse(why, message)
