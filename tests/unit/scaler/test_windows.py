"""Averages over windows: Knative's own cases (pkg/autoscaler/aggregation/*_test.go, metrics/collector_test.go)."""

from random import Random
from typing import Any

import pytest

from scaler.decision.decider import DelayWindow
from scaler.decision.defaults import Defaults
from scaler.decision.load import Load, Stat, extrapolated, sample_size
from scaler.decision.spec import spec_of
from scaler.decision.windows import LinearWindow, WeightedWindow, coefficient
from scaler.go import power

SECOND = 1_000_000_000


def test_one_window_through_a_day() -> None:
    window = LinearWindow(5)
    recorded = []

    def did(*values: tuple[int, float], at: int) -> None:
        for second, value in values:
            window.record(second, value)
        recorded.append(window.average(at))

    did((0, 1), at=0)
    did((1, 2), (2, 3), (3, 4), (4, 5), at=4)
    did(at=6)
    did(at=10)
    did((6, 91), at=6)
    did((60, 1984), at=60)
    did((57, 4), at=60)
    did((61, 5), at=61)
    did((58, 10), at=61)
    did((55, 10), (56, 10), at=61)
    did((66, 10), at=66)
    assert recorded == [1, 3, 4, 0, 20.6, 1984, 497, 398.6, 400.6, 400.6, 10]


def test_a_window_of_one_second_has_the_newest_alone() -> None:
    window = LinearWindow(1)
    window.record(0, float("inf"))
    window.record(1, 3)
    assert window.average(1) == 3


def test_the_next_second_of_a_window_that_has_begun_anew_is_its_first() -> None:
    window = LinearWindow(5)
    window.record(0, 5)
    window.resize(10, 60)
    window.record(1, 2)
    assert window.average(1) == 2


def test_backwards() -> None:
    window = LinearWindow(5)
    for second in range(8, -1, -1):
        window.record(second, 5)
    assert window.average(5) == 5


def test_other_lengths_in_between() -> None:
    window = LinearWindow(5)
    for second in range(6):
        window.record(second, second + 1)
    assert window.average(5) == 4
    window.resize(10, 5)
    assert window.average(5) == 4
    window.record(6, 7)
    assert window.average(6) == 4.5
    window.resize(4, 6)
    assert window.average(6) == 5.5


def test_a_window_that_was_empty_is_empty_when_it_has_another_length() -> None:
    window = LinearWindow(5)
    window.record(5, 3)
    window.resize(6, 11)
    assert window.average(5) == 0
    window.record(12, 4)
    assert window.average(12) == 4


def test_long_and_short() -> None:
    long, short = LinearWindow(6), LinearWindow(2)
    for second in range(10):
        long.record(second, second + 5)
        short.record(second, second + 5)
    assert (long.average(9), short.average(9)) == (11.5, 13.5)


def test_six_decimals_half_away_from_zero() -> None:
    window = LinearWindow(60)
    for second, value in ((1, 1), (2, 1), (3, 0)):
        window.record(second, value)
    assert window.average(3) == 0.666667
    window = LinearWindow(60)
    window.record(1, -0.0000005)
    assert window.average(1) == -0.000001


def test_a_second_before_it_is_empty_it_reads_zero() -> None:
    window = LinearWindow(6)
    window.record(10, 3)
    assert [(window.is_empty(second), window.average(second)) for second in (15, 16, 17)] == [
        (False, 3),
        (False, 0),
        (True, 0),
    ]
    assert LinearWindow(6).is_empty(0)
    assert LinearWindow(6).average(0) == 0


def test_weights() -> None:
    window, c = WeightedWindow(5), coefficient(5)
    window.record(0, 2)
    assert (window.average(0), window.average(1)) == (2 * c, 2 * (c * (1 - c)))
    window.record(1, 2)
    assert window.average(1) == 2 * c + 2 * (c * (1 - c))
    window = WeightedWindow(5)
    for second, value in enumerate((2, 3, 4, 5, 6)):
        window.record(second, value)
    assert round(window.average(4), 3) == 5.812
    assert window.average(14) == 0
    window.resize(100, 4)
    assert window.average(4) == pytest.approx(6 * 0.2 + 5 * 0.16 + 4 * 0.128 + 3 * 0.1024 + 2 * 0.08192)


def _each_weighed(window: WeightedWindow, second: int) -> float:
    """As Knative does it: all of them, one after the other."""
    size, last = window._size, window._last
    late = max(second - last, 0)
    newest = coefficient(size)
    weight, average = newest * power(1 - newest, late) if late else newest, 0.0
    for age in range(size - late):
        average += window._buckets[(last - age) % size] * weight
        weight *= 1 - newest
    return average


@pytest.mark.parametrize(("stable", "panic"), [(3600, 360), (600, 600), (60, 6)])
@pytest.mark.parametrize("kind", ["steady", "rare", "of all sizes", "holes"])
def test_what_is_left_out_of_a_weighted_average_changes_no_bit(stable: int, panic: int, kind: str) -> None:
    chance, now, read_once = Random(kind), 10_000, 0
    long, short = WeightedWindow(stable), WeightedWindow(panic)
    for number in range(500):
        now += chance.choice((1, 1, 1, 2, 7, 70, 400, 4000)) if kind == "holes" and number % 9 == 0 else 1
        value = chance.uniform(0, 500)
        if kind == "rare" and number % 150:
            value = 0.0
        if kind == "of all sizes":
            value = 10 ** chance.uniform(-30, 20) * chance.choice((1, 1, -1))
        second = now - chance.choice((0, 0, 0, 2, 300))
        for window in (long, short):
            window.record(second, value)
        if kind == "holes" and number == 300:
            long.resize(2 * stable, now)
            short.resize(panic + 30, now)
        if number % 5 and number < 490:
            continue
        second = now + chance.choice((0, 0, 1, 3))
        stated = long.average(second)
        assert stated == _each_weighed(long, second)
        if short.reads_as(long, second):
            assert stated == _each_weighed(short, second)
            read_once += 1
        assert short.average(second) == _each_weighed(short, second)
    assert read_once or panic < 200 or kind != "steady"


def test_two_windows_of_one_model_are_read_once_while_the_short_one_has_all_that_counts() -> None:
    def recorded(size: int, resized: int = 0) -> WeightedWindow:
        window = WeightedWindow(size)
        for second in range(400):
            window.record(second, 1.0)
        if resized:  # nothing is left of it: it was not told anything for so long
            window.resize(resized, 1000)
            window.record(399, 1.0)
        return window

    long = recorded(3600)
    long.average(399)
    assert recorded(360).reads_as(long, 399)
    assert not recorded(170).reads_as(long, 399)
    assert not recorded(360, resized=370).reads_as(long, 399)
    long.average(600)
    assert not recorded(360).reads_as(long, 600)
    long = recorded(390, resized=3600)
    long.average(399)
    assert not recorded(360).reads_as(long, 399)


@pytest.mark.parametrize(("size", "weight"), [(6, 0.78456), (40, 0.20567), (60, 0.2), (100, 0.2)])
def test_the_newest_weighs_most_in_a_short_window(size: int, weight: float) -> None:
    assert round(coefficient(size), 5) == weight


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([(0, 5)], 5),
        ([(0, 6), (0, 5)], 6),
        ([(0, 6), (2, 5)], 6),
        ([(0, 5), (2, 8)], 8),
        ([(0, 5), (12, 4)], 4),
        ([(0, 5), (8, 4)], 5),
        ([(0, 5), (10, 4)], 4),
        ([(0, 5), (1, 5), (2, 3), (10, 2)], 3),
    ],
)
def test_the_largest_of_five_slots(values: list[tuple[int, int]], largest: int) -> None:
    window = DelayWindow(9)
    assert [window.largest_with(second, value) for second, value in values][-1] == largest


def load(**more: Any) -> Load:
    return Load(spec_of({}, Defaults(), **more))


def test_what_others_have_counted_counts_once() -> None:
    stat = Stat(20, 5, 30, 10)
    recorded = load()
    recorded.record(stat, 0)
    assert recorded.averages(0) == (15, 15)
    rps = Load(spec_of({"autoscaling.knative.dev/metric": "rps"}, Defaults()))
    rps.record(stat, 0)
    assert rps.averages(0) == (20, 20)


def test_reports_of_one_second_add_up() -> None:
    recorded = load()
    recorded.record(Stat(2), 5 * SECOND)
    recorded.record(Stat(3), 5 * SECOND + SECOND - 1)
    assert recorded.averages(5 * SECOND) == (5, 5)


def test_nothing_is_known_after_a_window_without_reports() -> None:
    assert load().averages(0) is None
    assert load(scraped=False).averages(0) == (0, 0)
    recorded = load()
    recorded.record(Stat(1), 0)
    assert recorded.averages(60 * SECOND) == (0, 0)
    assert recorded.averages(61 * SECOND) is None


def test_samples() -> None:
    assert [sample_size(replicas) for replicas in (0, 1, 2, 5, 10, 100, 1000)] == [0, 1, 2, 4, 7, 14, 16]
    assert extrapolated(Stat(4, 1, 30, 6), 2, 5) == Stat(10, 2.5, 75, 15)
