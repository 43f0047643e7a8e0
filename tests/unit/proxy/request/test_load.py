import random
import struct

import pytest

from proxy.request.load import LoadMeter, LoadReport, encode_stat


def test_the_average_is_exact() -> None:
    """Against the sum of what each request contributes to each period."""
    rng, meter, now = random.Random(7), LoadMeter(0.0, lambda: 0.0), 0.0
    spans: list[list[float]] = []
    running: list[list[float]] = []
    for period in range(50):
        arrived = 0
        for moment in sorted(rng.uniform(period, period + 1) for _ in range(rng.randrange(40))):
            now = moment
            if running and rng.random() < 0.5:
                running.pop(rng.randrange(len(running)))[1] = now
                meter.leave(now)
            else:
                running.append([now, float("inf")])
                spans.append(running[-1])
                meter.enter(now)
                arrived += 1
        report = meter.report(period + 1.0)
        expected = sum(max(0.0, min(end, period + 1) - max(start, period)) for start, end in spans)
        assert report.average_concurrency == pytest.approx(expected, abs=1e-9)
        assert report.requests == arrived


def test_average_concurrency_is_weighted_by_time() -> None:
    meter = LoadMeter(0.0, lambda: 42.0)
    meter.enter(0.25)
    meter.enter(0.5)
    meter.leave(0.75)
    report = meter.report(1.0)
    assert report == LoadReport(
        average_concurrency=(0.25 * 1 + 0.25 * 2 + 0.25 * 1),
        requests=2.0,
        uptime_seconds=1.0,
        timestamp=42.0,
        second=43,
        last_arrival=42.0,
    )
    later = meter.report(2.0)  # one is still in flight, and has arrived before
    assert (later.average_concurrency, later.requests) == (1.0, 0)


def test_each_period_has_a_number_of_its_own_and_tells_when_somebody_came_last() -> None:
    walls = iter([100.5, 101.5, 101.6, 50.0, 104.0])
    meter = LoadMeter(0.0, lambda: next(walls))
    assert [(one.second, one.last_arrival) for one in (meter.report(1.0),)] == [(101, 0.0)]
    meter.enter(1.5)
    first, then = meter.report(2.0), meter.report(3.0)  # the second one while it is still in flight
    # Somebody has set the clock back meanwhile: it is a second ago all the same.
    assert [(one.second, one.last_arrival) for one in (first, then)] == [(102, 101.6), (103, 49.0)]
    meter.refused()
    last = meter.report(4.0)
    assert (last.second, last.last_arrival) == (104, 104.0)


def test_knatives_stat_on_the_wire() -> None:
    encoded = encode_stat(LoadReport(1.5, 3.0, 60.0, 1700000000.9), pod_name="p")
    assert encoded == (
        b"\x0a\x01p"
        + b"\x11"
        + struct.pack("<d", 1.5)
        + b"\x21"
        + struct.pack("<d", 3.0)
        + b"\x31"
        + struct.pack("<d", 60.0)
        + b"\x38\x80\xe2\xcf\xaa\x06"
    )
