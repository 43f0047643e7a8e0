"""Reports that wait to be sent to the scaler: the newest of each model, so that a scaler that is away makes nothing grow.
Pure.
"""

from collections.abc import Iterable
from dataclasses import replace

from berth.contract.activation import Report
from berth.contract.activation_codec import encode_report
from berth.contract.scaling import ModelKey
from berth.v1 import scaler_pb2 as pb

# Of one message. The scaler reads a mebibyte, which thousands of models fill that have the longest names there are.
_MOST_REPORTS, _MOST_BYTES = 5000, 900 * 1024


class ReportQueue:
    def __init__(self) -> None:
        self._pending: dict[ModelKey, Report] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def clear(self) -> None:
        self._pending.clear()

    def add(self, reports: Iterable[Report]) -> None:
        for report in reports:
            before = self._pending.get(report.model)
            self._pending[report.model] = report if before is None else merged(before, report)

    def take(self) -> pb.ControlRequest:
        """As much as one message holds."""
        messages: list[pb.ModelReport] = []
        size = 0
        for model, report in list(self._pending.items())[:_MOST_REPORTS]:
            message = encode_report(report)
            size += message.ByteSize()
            if size > _MOST_BYTES:
                break
            del self._pending[model]
            messages.append(message)
        return pb.ControlRequest(reports=pb.ModelReports(reports=messages))


def merged(earlier: Report, later: Report) -> Report:
    """Two that were not sent yet, as one."""
    return replace(
        later,
        arrived=earlier.arrived + later.arrived,
        forwarded=earlier.forwarded + later.forwarded,
        average_buffered=max(earlier.average_buffered, later.average_buffered),
        cold_start=earlier.cold_start or later.cold_start,
        served_ago=later.served_ago or earlier.served_ago,
    )
