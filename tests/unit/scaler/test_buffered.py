"""What activators report, as Knative's would have: its own cases (pkg/activator/handler/concurrency_reporter_test.go)."""

import pytest

from berth.contract.activation import Report
from berth.contract.scaling import ModelKey
from proxy.request.load import LoadMeter
from scaler.core.buffered import BufferedRequests
from scaler.decision.load import Stat

MODEL = ModelKey("a", "m")


class Activator:
    """Reports each tick, and at once what makes it hold."""

    def __init__(self) -> None:
        self.meter, self.buffered = LoadMeter(0.0, lambda: 0.0), BufferedRequests()
        self.sent: list[tuple[float, float]] = []

    def report(self, now: float) -> None:
        arrived, load = self.meter.arrived, self.meter.report(now)
        told = report(self.meter.concurrency, load.average_concurrency if now else 0.0, arrived)
        stat = self.buffered.report("act", told)
        assert stat is not None
        self.sent.append((stat.concurrency, stat.requests))

    def play(self, events: str) -> list[tuple[float, float]]:
        for event in events.split(", "):
            kind, time = event.split()
            now = float(time)
            if kind == "in":
                before = self.meter.concurrency
                self.meter.enter(now)
                if before == 0 and not self.buffered.requests:
                    self.report(now)
            elif kind == "out":
                self.meter.leave(now)
            else:
                self.report(now)
        return self.sent


def report(
    held: int, average: float, arrived: float, *, cold_start: bool = True, forwarded: float = 0.0
) -> Report:
    return Report(
        version=1,
        model=MODEL,
        buffered=held,
        average_buffered=average,
        arrived=arrived,
        forwarded=forwarded,
        buffered_bytes=0,
        oldest_seconds=0.0,
        cold_start=cold_start,
        rest_port=1,
        grpc_port=2,
    )


@pytest.mark.parametrize(
    ("events", "sent"),
    [
        ("in 0", [(1, 1)]),
        ("in 0, out 1, in 1, out 2, tick 2", [(1, 1), (0, 1)]),
        ("in 0, in 0, tick 1, tick 2", [(1, 1), (1, 1), (2, 0)]),
        ("in 0, out 1, tick 1, tick 2, in 3", [(1, 1), (0, 0), (0, 0), (1, 1)]),
        ("in 0, in 0, out 1, out 2, tick 2", [(1, 1), (0.5, 1)]),
    ],
)
def test_events(events: str, sent: list[tuple[float, float]]) -> None:
    assert Activator().play(events) == sent


def test_each_activator_has_a_first_request() -> None:
    buffered = BufferedRequests()
    assert buffered.report("one", report(1, 0.0, 1)) == Stat(1.0, 0.0, 1.0, 0.0)
    assert buffered.report("two", report(1, 0.0, 1)) == Stat(1.0, 0.0, 1.0, 0.0)
    assert buffered.requests == 2
    buffered.activator_gone("one")
    assert buffered.requests == 1


def test_who_attaches_anew_tells_what_it_holds() -> None:
    """A scaler that has just begun hears of many at once, and takes nothing off afterwards."""
    buffered = BufferedRequests()
    assert buffered.report("one", report(50, 50.0, 3)) == Stat(50.0, 0.0, 3.0, 0.0)
    assert buffered.report("one", report(50, 50.0, 0)) == Stat(50.0, 0.0, 0.0, 0.0)


def test_what_is_forwarded_is_counted_by_who_takes_it() -> None:
    buffered = BufferedRequests()
    assert buffered.report("one", report(0, 0.5, 2, cold_start=False, forwarded=4)) == Stat(
        0.5, 0.0, 2.0, 4.0
    )


def test_who_holds_nobody_wakes_nobody() -> None:
    buffered = BufferedRequests()
    assert buffered.report("one", report(0, 0.0, 3)) == Stat(0.0, 0.0, 3.0, 0.0)
    assert buffered.requests == 0
