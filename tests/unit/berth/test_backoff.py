"""Pauses between tries."""

import logging
from collections.abc import Iterator

import pytest

from berth.runtime.backoff import Backoff


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_pauses_are_spread_evenly_around_their_length() -> None:
    def pauses(unit: float, **more: float) -> list[float]:
        backoff = Backoff(initial_seconds=1, cap_seconds=3, random_unit=lambda: unit, **more)
        return [round(backoff.next(), 6) for _ in range(3)]

    assert pauses(0.5) == [1, 2, 3]
    assert pauses(0.0, jitter=0.5) == [0.5, 1, 1.5]
    assert pauses(1.0, jitter=0.5) == [1.5, 3, 4.5]
    assert pauses(0.5, factor=3) == [1, 3, 3]
    low, high = pauses(0.0)[0], pauses(1.0)[0]
    assert 0.5 <= low < 1 < high <= 1.5
    assert 1 - low == pytest.approx(high - 1)
    drawn = {Backoff(initial_seconds=1, cap_seconds=1).next() for _ in range(20)}
    assert len(drawn) > 10  # of many callers no two come back at once


def test_backoff_grows_to_its_cap_and_starts_again() -> None:
    backoff = Backoff(initial_seconds=1, cap_seconds=5, jitter=0.5, random_unit=lambda: 0.5)
    assert [backoff.next() for _ in range(4)] == [1, 2, 4, 5]
    backoff.failures = 10**6
    assert backoff.next() == 5
    backoff.reset()
    assert backoff.next() == 1
