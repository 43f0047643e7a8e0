"""The queue in which a model's requests wait for a copy, and its bounds. Pure but for the clock that it is given.

It is the data plane's own queue (`exchange.admission`) with a limit that moves: as many run at once as the copies
that are ready have slots, and none while there is no copy, which is not "no limit". So whatever waits has passed
every check, and what is refused is refused before it wakes anything.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from berth.contract.scaling import HoldLimits
from proxy.activator.histogram import Histogram
from proxy.policy.refusal import Why
from proxy.request.admission import Admission, Admissions, AdmissionState
from proxy.request.budget import Budget
from proxy.request.load import LoadMeter

# Of all models of a process: one may have no more than is then free for all others.
MOST_HELD: Final = 65_536
HELD_BYTES: Final = 256 * 1024**2
# Each costs a look of the scaler and perhaps a write; an outage's end wakes many models in one second.
WAKES_PER_SECOND, WAKE_BURST = 100.0, 500
# Of those, one namespace's.
TENANT_WAKES_PER_SECOND, TENANT_WAKE_BURST = 80.0, 400
# How many times what is left for all others a namespace may have.
_TENANT_SHARE: Final = 2
FORWARDED, ABANDONED = "forwarded", "abandoned"
OVERDUE: Final = "no copy of the model has taken the request within hold-timeout"
TOO_MANY_WAKES: Final = "the model is being woken too often"


class Bucket:
    """Tokens: so many a second in the long run, so many at once, and none that `whole` has not."""

    def __init__(self, per_second: float, burst: int, whole: "Bucket | None" = None) -> None:
        self._per_second, self._burst, self._whole = per_second, burst, whole
        self._left, self._at = float(burst), 0.0

    def change(self, per_second: float, burst: int) -> None:
        self._per_second, self._burst = per_second, burst
        self._left = min(self._left, burst)

    def has_one(self, now: float) -> bool:
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_second)
        self._at = now
        return self._left >= 1 and (self._whole is None or self._whole.has_one(now))

    def take(self) -> None:
        """After `has_one`."""
        self._left -= 1
        if self._whole is not None:
            self._whole.take()


class TenantBudget(Budget):
    """What all models of one namespace take of a whole: at most twice what is then left for all others. A model by itself
    may have as much as without it; however many a tenant has, another still finds room."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Budget) -> None:
        super().__init__(whole.limit_bytes, whole)
        self._whole = whole

    @property
    def free_bytes(self) -> int:
        """For one of its models, whose own rule is by the whole."""
        return self._whole.free_bytes

    def has_room(self, size_bytes: int) -> bool:
        most = _TENANT_SHARE * (self._whole.free_bytes - size_bytes)
        return self.used_bytes + size_bytes <= most and self._whole.has_room(size_bytes)

    def take(self, size_bytes: int) -> bool:
        if not self.has_room(size_bytes) or not self._whole.take(size_bytes):
            return False
        self.used_bytes += size_bytes
        return True


@dataclass(slots=True)
class Looks:
    """Copies that do not serve yet, and are asked again and again whether they do. The more there are the less often is
    each: however many a tenant has, to ask them costs no more."""

    asked: int = 0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Bounds:
    """What all models of a process may take together, or all of one namespace."""

    places: Budget = field(default_factory=lambda: Budget(MOST_HELD))
    memory: Budget = field(default_factory=lambda: Budget(HELD_BYTES))
    connections: Budget = field(default_factory=lambda: Budget(MOST_HELD))
    wakes: Bucket = field(default_factory=lambda: Bucket(WAKES_PER_SECOND, WAKE_BURST))
    looks: Looks = field(default_factory=Looks)
    # How long those of all models waited here, by what became of them.
    buffered: Mapping[str, Histogram] = field(
        default_factory=lambda: {FORWARDED: Histogram(), ABANDONED: Histogram()}
    )

    def of_tenant(self) -> "Bounds":
        """A part of it, of one namespace: all its models together leave something to all others."""
        return Bounds(
            places=TenantBudget(self.places),
            memory=TenantBudget(self.memory),
            connections=TenantBudget(self.connections),
            wakes=Bucket(TENANT_WAKES_PER_SECOND, TENANT_WAKE_BURST, self.wakes),
            buffered=self.buffered,
        )


@dataclass(frozen=True, slots=True)
class Counted:
    """Since the last look but for what is said to be now. `arrived`: the refused ones too."""

    held: int  # now
    average_held: float
    arrived: int
    forwarded: int
    oldest_seconds: float  # now
    # Since a copy came for those that waited; 0: none has.
    served_ago: float


class Hold(Admissions):
    """One model's. `allow` tells how many may run."""

    def __init__(
        self,
        meter: LoadMeter,
        limits: HoldLimits,
        bounds: Bounds,
        woken: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`woken`: told when a request waits for which there is no copy, and none waited before."""
        super().__init__(meter, limit=0, queue_depth=0, bytes=Budget(sys.maxsize))
        self._bounds, self._woken, self._clock = bounds, woken, clock
        self._places = Budget(limits.requests, bounds.places)
        self._wakes = Bucket(limits.wakes_per_second, limits.wake_burst)
        self._seconds = limits.seconds
        self._held = LoadMeter(clock(), time.time)
        # Since the last look: those that had to wait, those of them that went on, those that were turned away.
        self._waited = self._granted = self._refused = 0
        # Since when each of those that wait does.
        self._since: dict[Admission, float] = {}
        # By reason, all that ever were.
        self.refusals: Counter[str] = Counter()
        # Those that had their slot, and whose copy went before it heard of them.
        self.seeking = 0
        self._slots = 0
        # When a copy came for those that waited, since the last look.
        self._served_at: float | None = None

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def arrived(self) -> int:
        """Since the last look."""
        return self._meter.arrived

    @property
    def held(self) -> int:
        """Requests that wait here."""
        return self.waiting + self.seeking

    @property
    def wakes(self) -> bool:
        """Whether a copy must come for somebody."""
        return not self._slots and self.held > 0 and self.closed is None

    def set_limits(self, limits: HoldLimits) -> None:
        """For whatever comes from now on."""
        self._places.limit_bytes, self._seconds = limits.requests, limits.seconds
        self._wakes.change(limits.wakes_per_second, limits.wake_burst)

    def allow(self, slots: int) -> None:
        """So many may run from now on; those that do stay."""
        was, self._slots = self._slots, slots
        if slots and not was and self.held:
            self._served_at = self._clock()
        self.hand_out()
        if was and self.wakes:  # its copies have gone, and these were not told as waiting for one
            self._woken()

    def let_all_go(self) -> None:
        """Everybody's turn has come, though there is no copy: each is told why, and ends."""
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
        """As Admissions', for as long as a request may be held. Raises Refusal."""
        had = self.held
        admission = super().admit(
            now, granted, cost_bytes=cost_bytes, deadline=min(deadline, now + self._seconds)
        )
        if admission.is_waiting:
            self._since[admission] = now
        if not had and self.wakes:
            self._woken()
        return admission

    def released(self, admission: Admission, was: AdmissionState, now: float) -> None:
        self._has_waited(admission, ABANDONED, now)
        super().released(admission, was, now)

    def _has_waited(self, admission: Admission, result: str, now: float) -> None:
        """If it has not been told yet what became of it."""
        since = self._since.pop(admission, None)
        if since is not None:
            self._bounds.buffered[result].observe(max(0.0, now - since))

    def seeks(self, now: float) -> None:
        """One that had its slot waits for a copy again."""
        had, self.seeking = self.held, self.seeking + 1
        self._held.enter(now)
        if not had and self.wakes:
            self._woken()

    def has_found(self, now: float) -> None:
        """It has one, or nobody waits for it any more."""
        self.seeking -= 1
        self._held.leave(now)

    def look(self, now: float) -> Counted:
        """What was counted since the last look. Before the meter's period is closed."""
        arrived = self._meter.arrived
        counted = Counted(
            held=self.held,
            average_held=self._held.report(now).average_concurrency,
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
        """`allow` and `set_limits` do."""

    def _take(self) -> bool:
        return self.running < self._slots

    def _take_place(self) -> bool:
        """Raises Refusal."""
        now, bounds = self._clock(), self._bounds
        is_wake = not self._slots and not self.held
        if is_wake and not (self._wakes.has_one(now) and bounds.wakes.has_one(now)):
            self._refuse(Why.NO_ROOM, TOO_MANY_WAKES)
        if not self._places.take(1):
            self._refuse(Why.NO_ROOM, self._why_no_place())
        if is_wake:
            self._wakes.take()
            bounds.wakes.take()
        self._held.enter(now)
        self._waited += 1
        return True

    def _give_place(self) -> None:
        self._places.give(1)
        self._held.leave(self._clock())

    def _next(self) -> Admission | None:
        waiting = len(self._waiting)
        admission = super()._next()
        if admission is not None:
            self._has_waited(admission, FORWARDED, self._clock())
        self._granted += len(self._waiting) < waiting
        return admission

    def _why_no_place(self) -> str:
        if self._places.used_bytes >= self._places.limit_bytes:
            return f"{self._places.used_bytes} requests wait for a copy of the model already (hold-requests)"
        return "too many requests of all models wait for a copy already"

    def _refuse(self, why: Why, message: str) -> None:
        self._refused += 1
        self.refusals["WAKES" if message is TOO_MANY_WAKES else why.name] += 1
        super()._refuse(why, message)
