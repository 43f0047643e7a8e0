"""What the models of one activator may take together, and of that the models of one namespace. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from proxy.activator.histogram import Histogram
from proxy.request.budget import Budget

# Of all models of a process: one may have no more than is then free for all others.
MOST_BUFFERED: Final = 65_536
BUFFERED_BYTES: Final = 256 * 1024**2
# Each costs a pass of the scaler and perhaps a write; when an outage ends, many models start in one second.
COLD_STARTS_PER_SECOND, COLD_START_BURST = 100.0, 500
# Of those, one namespace's.
TENANT_COLD_STARTS_PER_SECOND, TENANT_COLD_START_BURST = 80.0, 400
# How many times what is left for all others a namespace may have.
_TENANT_SHARE: Final = 2
FORWARDED, ABANDONED = "forwarded", "abandoned"


class TokenBucket:
    """So many a second in the long run, so many at once, and none that `whole` has not."""

    def __init__(self, per_second: float, burst: int, whole: "TokenBucket | None" = None) -> None:
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
    """What all models of one namespace take of a whole: at most twice what is then left for all others. A single model may
    have as much as without it; however many a tenant has, another still finds room."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Budget) -> None:
        super().__init__(whole.limit_bytes, whole)
        self._whole = whole

    @property
    def free_bytes(self) -> int:
        """For one of its models, whose own limit is by the whole."""
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
class ProbeLoad:
    """How many pods that do not serve yet are probed again and again. The more there are the less often is each: however
    many a tenant has, to probe them costs no more."""

    probed: int = 0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Bounds:
    """What all models of a process may take together, or all of one namespace."""

    places: Budget = field(default_factory=lambda: Budget(MOST_BUFFERED))
    memory: Budget = field(default_factory=lambda: Budget(BUFFERED_BYTES))
    connections: Budget = field(default_factory=lambda: Budget(MOST_BUFFERED))
    cold_starts: TokenBucket = field(
        default_factory=lambda: TokenBucket(COLD_STARTS_PER_SECOND, COLD_START_BURST)
    )
    probe_load: ProbeLoad = field(default_factory=ProbeLoad)
    # How long requests of all models were buffered, by what became of them.
    buffered_seconds: Mapping[str, Histogram] = field(
        default_factory=lambda: {FORWARDED: Histogram(), ABANDONED: Histogram()}
    )

    def of_tenant(self) -> "Bounds":
        """A part of it, of one namespace: all its models together leave something to all others."""
        return Bounds(
            places=TenantBudget(self.places),
            memory=TenantBudget(self.memory),
            connections=TenantBudget(self.connections),
            cold_starts=TokenBucket(TENANT_COLD_STARTS_PER_SECOND, TENANT_COLD_START_BURST, self.cold_starts),
            buffered_seconds=self.buffered_seconds,
        )
