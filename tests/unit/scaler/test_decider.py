"""How many replicas are wanted: Knative's own cases (pkg/autoscaler/scaling/autoscaler_test.go), and what lies between them."""

from dataclasses import replace

import pytest

from scaler.decision.decider import Decider
from scaler.decision.defaults import Defaults
from scaler.decision.load import Averages
from scaler.decision.spec import Spec, spec_of

SECOND = 1_000_000_000
ZERO = spec_of({}, Defaults())


def spec(target: float = 10, burst: float = 0, **more: object) -> Spec:
    """Up and down by ten, panic at twice, a window of 60 s, three quarters of what a replica can have."""
    values: dict[str, object] = {
        "target": target,
        "total": target / 0.75,
        "target_burst_capacity": burst,
        "max_scale_up_rate": 10.0,
        "max_scale_down_rate": 10.0,
        **more,
    }
    return replace(ZERO, **values)  # type: ignore[arg-type]


# Target, burst; then for each decision: ready, stable, panic, at second; desired, excess burst capacity.
Row = tuple[int, float, float, float, int, int]
CASES: dict[str, tuple[Spec, list[Row]]] = {
    "nothing": (spec(10, 100), [(1, 0, 0, 0, 0, -87)]),
    "unlimited burst": (spec(181, -1), [(1, 21, 26, 0, 1, -1)]),
    "no burst": (spec(10, 0), [(1, 50, 49, 0, 5, 0)]),
    "panics": (spec(10, 100), [(1, 50, 50, 0, 5, -137)]),
    "no panic": (spec(10, 100), [(5, 50, 50, 0, 5, -84)]),
    "up by 1.1, and by one at least": (spec(1, 1982, max_scale_up_rate=1.1), [(2, 3, 3.1, 0, 3, -1983)]),
    "down by 1.1": (spec(10, 1982, max_scale_down_rate=1.1), [(100, 1, 1, 0, 90, -650)]),
    "down by 1.1, not reachable": (
        spec(10, 1982, max_scale_down_rate=1.1, reachable=False),
        [(100, 1, 1, 0, 1, -650)],
    ),
    "the panic's figure rules": (spec(10, 84), [(1, 50, 100, 0, 10, -171)]),
    "stable only": (spec(10, 101), [(1, 50, 10, 0, 5, -98), (1, 100, 10, 0, 10, -98)]),
    "requests": (spec(10, 101, metric="rps"), [(1, 50, 50, 0, 5, -138), (1, 100, 99, 0, 10, -187)]),
    "leaves panic": (
        spec(1, 98),
        [(10, 11, 25, 0, 25, -110), (40, 30, 41, 30, 41, -86), (55, 50, 56, 62, 50, -81)],
    ),
    "panic goes on": (spec(1, 98), [(10, 11, 25, 0, 25, -110), (40, 30, 80, 30, 80, -125)]),
    "less": (spec(10, 98), [(8, 100, 100, 0, 10, -92), (8, 50, 50, 0, 5, -42)]),
    "to zero": (spec(10, 75), [(1, 1, 0, 0, 1, -62), (1, 0, 0, 0, 0, -62)]),
    "activation scale": (spec(10, 75, activation_scale=2), [(1, 0, 0, 0, 0, -62), (1, 1, 0, 0, 2, -62)]),
    "by powers": (
        spec(1, 101),
        [
            (1, 6, 6, 0, 6, -106),
            (6, 36, 36, 0, 36, -129),
            (36, 216, 216, 1, 216, -269),
            (216, 1296, 1296, 1, 1296, -1109),
            (1296, 1296, 1296, 2, 1296, 331),
        ],
    ),
    "held by panic, then down": (
        spec(10, 93),
        [(1, 100, 100, 0, 10, -180), (10, 100, 1000, 0, 100, -960), (10, 1, 1, 30, 100, 39), (10, 1, 1, 61, 1, 39)],
    ),
    "a window after panic it is not over, a moment later it is": (
        spec(10, 0),
        [(1, 100, 100, 0, 10, 0), (10, 10, 10, 60, 10, 0), (10, 10, 10, 60.5, 1, 0)],
    ),
    "up by ten": (spec(10, 61), [(1, 1000, 1001, 0, 10, -1049), (10, 1000, 1001, 0, 100, -929)]),
    "down by ten": (spec(10, 61), [(100, 1, 1, 0, 10, 1271), (10, 1, 1, 0, 1, 71)]),
    "no replica counts as one for rates and as none for bursts": (spec(10, 81), [(0, 1000, 888, 0, 10, -969)]),
    "the threshold is met by what the rates would not allow": (
        spec(1, 0, max_scale_up_rate=1.5),
        [(1, 1, 2, 0, 2, 0), (2, 1, 1, 1, 2, 0)],
    ),
    "after panic its most is forgotten": (
        spec(10, 0),
        [(1, 100, 100, 0, 10, 0), (10, 10, 10, 61, 1, 0), (2, 10, 40, 62, 4, 0)],
    ),
    "more than 32 bits of burst": (spec(1, 1e12), [(1, 1, 1, 0, 1, -(2**31))]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decisions(name: str) -> None:
    made_with, rows = CASES[name]
    decider = Decider(made_with, ready=1, now_ns=0)
    for ready, stable, panic, at, desired, burst in rows:
        made = decider.decide(Averages(stable, panic), ready=ready, now_ns=int(at * SECOND))
        assert (made.desired, made.excess_burst_capacity) == (desired, burst), (ready, stable, panic, at)


@pytest.mark.parametrize(("stable", "panic", "desired"), [(50, 30, 50), (20, 30, 30)])
def test_in_panic_the_larger_of_both_rules(stable: float, panic: float, desired: int) -> None:
    decider = Decider(spec(1, 100), ready=5, now_ns=-5 * SECOND)
    made = decider.decide(Averages(stable, panic), ready=5, now_ns=0)
    assert (made.desired, made.excess_burst_capacity) == (desired, -124)


def test_another_target() -> None:
    decider = Decider(spec(10, 77), ready=1, now_ns=0)
    made = decider.decide(Averages(100, 101), ready=1, now_ns=0)
    assert (made.desired, made.excess_burst_capacity) == (10, -165)
    decider.update(spec(1, 71))
    made = decider.decide(Averages(100, 101), ready=10, now_ns=0)
    assert (made.desired, made.excess_burst_capacity) == (100, -159)


@pytest.mark.parametrize(("ready", "in_panic"), [(0, False), (1, False), (2, True)])
def test_who_begins_with_replicas_keeps_them_for_a_window(ready: int, in_panic: bool) -> None:
    decider = Decider(spec(max_scale_down_rate=1000.0), ready=ready, now_ns=0)
    assert decider.in_panic == in_panic
    assert decider.decide(Averages(0, 0), ready=ready, now_ns=60 * SECOND).desired == (
        ready if in_panic else 0
    )
    assert decider.decide(Averages(0, 0), ready=ready, now_ns=60 * SECOND + 1).desired == 0


# Knative's time zero is the year 1.
YEAR_1 = -62_135_596_800


def delayed(seconds: int, *, reachable: bool = True) -> Spec:
    return spec(10, 0, panic_threshold=100.0, scale_down_delay_seconds=seconds, reachable=reachable)


def test_fewer_replicas_only_after_the_delay() -> None:
    decider = Decider(delayed(300), ready=1, now_ns=0)
    told = []
    for load, at in ((40, 2), (0, 300), (0, 302), (40, 540), (30, 600), (0, 660), (0, 840), (0, 900)):
        now_ns = (YEAR_1 + at) * SECOND
        told.append(decider.decide(Averages(load, load), ready=1, now_ns=now_ns).desired)
    assert told == [4, 4, 0, 4, 4, 4, 3, 0]


def test_what_is_not_reachable_is_not_delayed() -> None:
    decider = Decider(delayed(300), ready=1, now_ns=0)
    assert decider.decide(Averages(40, 40), ready=1, now_ns=2 * SECOND).desired == 4
    assert decider.decide(Averages(0, 0), ready=1, now_ns=60 * SECOND).desired == 4
    decider.update(delayed(300, reachable=False))
    assert decider.decide(Averages(0, 0), ready=1, now_ns=60 * SECOND).desired == 0


def test_without_a_delay_the_last_decision_stands() -> None:
    decider = Decider(delayed(0), ready=1, now_ns=0)
    assert decider.decide(Averages(40, 40), ready=1, now_ns=0).desired == 4
    decider.update(delayed(300))
    assert decider.decide(Averages(20, 20), ready=1, now_ns=SECOND // 2).desired == 2


def test_a_clock_that_goes_back_ends_nothing() -> None:
    """Knative's delay window ends its process there."""
    decider = Decider(delayed(2), ready=1, now_ns=0)
    told = [
        decider.decide(Averages(load, load), ready=1, now_ns=at * SECOND).desired
        for load, at in ((40, 10), (30, 8), (20, 6), (10, 12))
    ]
    assert told == [4, 3, 2, 1]


@pytest.mark.parametrize("load", [float("inf"), float("nan"), 1e308, -1e308, -0.0])
def test_loads_that_are_none(load: float) -> None:
    """There is a decision of 32 bits, whatever it is."""
    made = Decider(spec(0.01, 5), ready=1, now_ns=0).decide(Averages(load, load), ready=1, now_ns=0)
    assert -(2**31) <= made.desired < 2**31
    assert -(2**31) <= made.excess_burst_capacity < 2**31
