"""Seconds, counted in buckets for Prometheus. Pure."""

import bisect
from dataclasses import dataclass, field
from typing import Final

# From a decision to the loading of a large model.
BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(slots=True)
class Histogram:
    """Of one series."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        out, total = [], 0
        for bound, count in zip((*BUCKETS, float("inf")), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return out
