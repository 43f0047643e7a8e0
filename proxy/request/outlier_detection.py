"""Which replica ends the node's Triton: who had requests in it when it died, and who is kept from it for a while. Pure.

One that is alone in it when it dies is the likely cause; once may be chance. Of several that are in it together
nothing tells which it was: they are named, and none is ejected.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

# Alone in a Triton that dies twice within this time: ejected.
WINDOW_SECONDS: Final = 600.0
FIRST_EJECTION_SECONDS: Final = 60.0
LONGEST_EJECTION_SECONDS: Final = 3600.0


@dataclass(slots=True)
class _Record:
    """`alone_at`: when it was alone last. `ejections`: how often it has been ejected since it was last forgiven."""

    alone_at: float
    ejections: int = 0
    ejected_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Ejection:
    """Why a replica's requests do not go to Triton, and for how long."""

    reason: str
    seconds: float


class OutlierDetector:
    """By pod uid. `now`: seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        # Triton's deaths by who was in it: for a metric.
        self.deaths: dict[str, int] = {}

    def triton_died(self, inside: Collection[str], now: float) -> None:
        """Triton went with requests of these in it."""
        for one in inside:
            self.deaths[one] = self.deaths.get(one, 0) + 1
        if len(inside) == 1:
            self._was_alone(next(iter(inside)), now)

    def _was_alone(self, one: str, now: float) -> None:
        record = self._records.get(one)
        if record is None or self._is_forgiven(record, now):
            self._records[one] = _Record(now)
            return
        record.alone_at = now
        record.ejected_until = now + min(
            FIRST_EJECTION_SECONDS * 2**record.ejections, LONGEST_EJECTION_SECONDS
        )
        record.ejections += record.ejected_until - now < LONGEST_EJECTION_SECONDS

    @staticmethod
    def _is_forgiven(record: _Record, now: float) -> bool:
        """While it was ejected it could not be in Triton: that time does not speak for it."""
        return now - max(record.alone_at, record.ejected_until) > WINDOW_SECONDS

    def ejection(self, one: str, now: float) -> Ejection | None:
        """Whether it is kept from Triton now."""
        record = self._records.get(one)
        if record is None or now >= record.ejected_until:
            return None
        return Ejection(
            "Triton has died more than once with requests of this model alone in it: it is ejected",
            record.ejected_until - now,
        )

    def keep(self, there: Collection[str]) -> None:
        """Forget all but these, which are the replicas that there are."""
        self._records = {one: record for one, record in self._records.items() if one in there}
        self.deaths = {one: count for one, count in self.deaths.items() if one in there}
