"""How busy the model is: time-weighted average concurrency and arrivals, second by second.

Knative's request_metric.go: a request counts from its arrival, queued time included, to its end; the
average of a period is Σ concurrency x dt / Σ dt. Pure; the caller passes the time.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One period's figures. Of a scaler that reads now and then: `second` grows by one with each period, so that what
    is read twice counts once, and what was missed is known to be. Times are seconds since 1970."""

    average_concurrency: float
    requests: float
    uptime_seconds: float
    timestamp: float
    second: int = 0
    # At most a period too late; 0: none has arrived yet.
    last_arrival: float = 0.0


class LoadMeter:
    """Counts requests in flight. `report()` closes a period and begins the next.

    `now` is seconds on one monotonic clock and never goes back.
    """

    def __init__(self, now: float, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._began = self._period_start = self._last = now
        self._area = 0.0
        self._arrived = 0
        # Of its start: a process that comes anew goes on above its predecessor.
        self._second = int(wall())
        # When the period ended in which one arrived.
        self._last_arrival: float | None = None
        self.concurrency = 0

    def enter(self, now: float) -> None:
        self._area += self.concurrency * (now - self._last)
        self._last = now
        self.concurrency += 1
        self._arrived += 1

    @property
    def arrived(self) -> int:
        """In this period, so far."""
        return self._arrived

    def refused(self) -> None:
        """One arrived and was rejected at once: load all the same, which an autoscaler must see."""
        self._arrived += 1

    def leave(self, now: float) -> None:
        self._area += self.concurrency * (now - self._last)
        self._last = now
        self.concurrency -= 1

    def report(self, now: float) -> LoadReport:
        self._area += self.concurrency * (now - self._last)
        self._last = now
        seconds = self._last - self._period_start
        average = self._area / seconds if seconds > 0 else float(self.concurrency)
        rate = self._arrived / seconds if seconds > 0 else float(self._arrived)
        closed = self._wall()
        if self._arrived:
            self._last_arrival = now
        # A clock that is set does not make it older.
        arrived = 0.0 if self._last_arrival is None else closed - (now - self._last_arrival)
        self._second += 1
        self._period_start, self._area, self._arrived = self._last, 0.0, 0
        return LoadReport(average, rate, self._last - self._began, closed, self._second, arrived)


def encode_stat(report: LoadReport, *, pod_name: str) -> bytes:
    """Knative's Stat message (serving, pkg/autoscaler/metrics/stat.proto): pod_name=1 and doubles 2 to 6,
    timestamp=7 as int64 seconds."""
    name = pod_name.encode()
    out = bytes([0x0A]) + _varint(len(name)) + name if name else b""
    doubles = ((2, report.average_concurrency), (4, report.requests), (6, report.uptime_seconds))
    for number, value in doubles:
        out += bytes([number << 3 | 1]) + struct.pack("<d", value)
    return out + bytes([7 << 3]) + _varint(int(report.timestamp))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
