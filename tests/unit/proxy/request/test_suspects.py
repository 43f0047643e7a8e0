"""Who is named when Triton dies, and who is held."""

import pytest

from proxy.request.outlier_detection import LONGEST_HOLD_SECONDS, WINDOW_SECONDS, OutlierDetector


def test_one_that_was_alone_twice_within_the_window_is_held_for_a_minute() -> None:
    suspects = OutlierDetector()
    suspects.triton_died(["a"], 1000)
    assert suspects.held("a", 1000) is None  # once may be chance
    suspects.triton_died(["a"], 1000 + WINDOW_SECONDS)
    hold = suspects.held("a", 1600)
    assert hold is not None
    assert hold.seconds == 60
    assert "Triton has died" in hold.reason
    assert suspects.held("a", 1659.5) is not None
    assert suspects.held("a", 1660) is None


def test_twice_with_more_time_between_is_chance() -> None:
    suspects = OutlierDetector()
    suspects.triton_died(["a"], 0)
    suspects.triton_died(["a"], WINDOW_SECONDS + 1)
    assert suspects.held("a", WINDOW_SECONDS + 1) is None


def test_of_several_none_is_held_but_all_are_counted() -> None:
    suspects = OutlierDetector()
    for now in range(5):
        suspects.triton_died({"a", "b"}, now)
    assert (suspects.held("a", 5), suspects.held("b", 5)) == (None, None)
    assert suspects.deaths == {"a": 5, "b": 5}


def test_nobody_in_it_is_nobody() -> None:
    suspects = OutlierDetector()
    suspects.triton_died([], 0)
    assert suspects.deaths == {}


def test_each_hold_is_twice_the_last_up_to_a_bound() -> None:
    """Its window begins when a hold ends: while it lasts the copy cannot show that it is harmless."""
    suspects, now, holds = OutlierDetector(), 0.0, []
    suspects.triton_died(["a"], now)
    for _ in range(9):
        suspects.triton_died(["a"], now)
        hold = suspects.held("a", now)
        assert hold is not None
        holds.append(hold.seconds)
        now += hold.seconds + WINDOW_SECONDS
    assert holds == [60, 120, 240, 480, 960, 1920, LONGEST_HOLD_SECONDS, LONGEST_HOLD_SECONDS, 3600]


def test_after_a_quiet_time_it_is_forgiven() -> None:
    suspects = OutlierDetector()
    for now in (0, 1, 70):
        suspects.triton_died(["a"], now)
    hold = suspects.held("a", 70)
    assert hold is not None
    assert hold.seconds == 120
    later = 70 + 120 + WINDOW_SECONDS + 1
    suspects.triton_died(["a"], later)
    assert suspects.held("a", later) is None  # the first time again
    suspects.triton_died(["a"], later + 1)
    hold = suspects.held("a", later + 1)
    assert hold is not None
    assert hold.seconds == 60


@pytest.mark.parametrize("there", [["b"], []])
def test_a_copy_that_is_gone_is_forgotten(there: list[str]) -> None:
    suspects = OutlierDetector()
    for _ in range(2):
        suspects.triton_died(["a"], 0)
    suspects.triton_died(["a", "b"], 0)
    suspects.keep(there)
    assert suspects.held("a", 0) is None
    assert set(suspects.deaths) == set(there)
    suspects.triton_died(["a"], 1)
    assert suspects.held("a", 1) is None
