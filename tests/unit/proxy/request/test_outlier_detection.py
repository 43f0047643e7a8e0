"""Who is named when Triton dies, and who is held."""

import pytest

from proxy.request.outlier_detection import LONGEST_EJECTION_SECONDS, WINDOW_SECONDS, OutlierDetector


def test_one_that_was_alone_twice_within_the_window_is_held_for_a_minute() -> None:
    detector = OutlierDetector()
    detector.triton_died(["a"], 1000)
    assert detector.ejection("a", 1000) is None  # once may be chance
    detector.triton_died(["a"], 1000 + WINDOW_SECONDS)
    ejection = detector.ejection("a", 1600)
    assert ejection is not None
    assert ejection.seconds == 60
    assert "Triton has died" in ejection.reason
    assert detector.ejection("a", 1659.5) is not None
    assert detector.ejection("a", 1660) is None


def test_twice_with_more_time_between_is_chance() -> None:
    detector = OutlierDetector()
    detector.triton_died(["a"], 0)
    detector.triton_died(["a"], WINDOW_SECONDS + 1)
    assert detector.ejection("a", WINDOW_SECONDS + 1) is None


def test_of_several_none_is_held_but_all_are_counted() -> None:
    detector = OutlierDetector()
    for now in range(5):
        detector.triton_died({"a", "b"}, now)
    assert (detector.ejection("a", 5), detector.ejection("b", 5)) == (None, None)
    assert detector.deaths == {"a": 5, "b": 5}


def test_nobody_in_it_is_nobody() -> None:
    detector = OutlierDetector()
    detector.triton_died([], 0)
    assert detector.deaths == {}


def test_each_hold_is_twice_the_last_up_to_a_bound() -> None:
    """Its window begins when a ejection ends: while it lasts the replica cannot show that it is harmless."""
    detector, now, ejections = OutlierDetector(), 0.0, []
    detector.triton_died(["a"], now)
    for _ in range(9):
        detector.triton_died(["a"], now)
        ejection = detector.ejection("a", now)
        assert ejection is not None
        ejections.append(ejection.seconds)
        now += ejection.seconds + WINDOW_SECONDS
    assert ejections == [
        60,
        120,
        240,
        480,
        960,
        1920,
        LONGEST_EJECTION_SECONDS,
        LONGEST_EJECTION_SECONDS,
        3600,
    ]


def test_after_a_quiet_time_it_is_forgiven() -> None:
    detector = OutlierDetector()
    for now in (0, 1, 70):
        detector.triton_died(["a"], now)
    ejection = detector.ejection("a", 70)
    assert ejection is not None
    assert ejection.seconds == 120
    later = 70 + 120 + WINDOW_SECONDS + 1
    detector.triton_died(["a"], later)
    assert detector.ejection("a", later) is None  # the first time again
    detector.triton_died(["a"], later + 1)
    ejection = detector.ejection("a", later + 1)
    assert ejection is not None
    assert ejection.seconds == 60


@pytest.mark.parametrize("there", [["b"], []])
def test_a_replica_that_has_gone_is_forgotten(there: list[str]) -> None:
    detector = OutlierDetector()
    for _ in range(2):
        detector.triton_died(["a"], 0)
    detector.triton_died(["a", "b"], 0)
    detector.keep(there)
    assert detector.ejection("a", 0) is None
    assert set(detector.deaths) == set(there)
    detector.triton_died(["a"], 1)
    assert detector.ejection("a", 1) is None
