"""What activators buffer, as the load that the decider records: Knative's reports, made of Berth's. Pure.

Source: knative.dev/serving v0.49.1, pkg/activator/handler/concurrency_reporter.go. The first request of a model is reported at
once, as one request, so that a replica is requested at once; the report that follows says the rest of its time. What has been
forwarded is counted by the replica that took it.
"""

import math

from berth.contract.activation import Report
from scaler.decision.load import Stat


class BufferedRequests:
    """Of one model, by activators."""

    __slots__ = ("_buffered", "_first")

    def __init__(self) -> None:
        self._buffered: dict[str, int] = {}
        # Activators whose first request has been reported and not yet been taken off.
        self._first: set[str] = set()

    @property
    def requests(self) -> int:
        return sum(self._buffered.values())

    def report(self, activator: str, report: Report) -> Stat | None:
        """The load that a report stands for; None for what cannot be one."""
        figures = report.average_buffered, report.arrived, report.forwarded, report.served_ago
        if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
            return None
        is_first = (
            report.cold_start
            and activator not in self._buffered
            and max(report.buffered, report.average_buffered) > 0
        )
        if report.buffered > 0 or is_first:
            self._buffered[activator] = report.buffered
        else:
            self._buffered.pop(activator, None)
        return Stat(
            self._concurrency(activator, report.average_buffered, is_first),
            0.0,
            report.arrived,
            report.forwarded,
        )

    def _concurrency(self, activator: str, average: float, is_first: bool) -> float:
        """What is counted for a first request is taken off the time that it is in."""
        if is_first:
            if average < 1.0:
                self._first.add(activator)
            return max(average, 1.0)
        if activator not in self._first:
            return average
        self._first.discard(activator)
        return max(average - 1.0, 0.0)

    def activator_gone(self, activator: str) -> None:
        self._buffered.pop(activator, None)
        self._first.discard(activator)
