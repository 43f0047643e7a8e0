"""Numbers and durations as Go reads them (what its own strconv and time packages say of the same texts)."""

import math

import pytest

from berth.contract.errors import InvalidValue
from scaler import go

DURATIONS = {
    "0": 0, "-0": 0, "1ns": 1, "1us": 1000, "1µs": 1000, "1μs": 1000, "1ms": 10**6, "90s": 90 * 10**9,
    "2m": 120 * 10**9, "1h30m": 5400 * 10**9, "1.5m": 90 * 10**9, ".5s": 5 * 10**8, "1.s": 10**9, "+5s": 5 * 10**9,
    "-1.5h": -5400 * 10**9, "0.3333333333333333333h": 20 * 60 * 10**9, "9223372036854775807ns": 2**63 - 1,
    "-9223372036854775808ns": -(2**63), "0.100000000000000000000h": 360 * 10**9, "0000000000000000000000001s": 10**9,
}  # fmt: skip
NO_DURATIONS = (
    "", "3", "-", "s", ".", "-.", ".s", "+.s", "1d", "1 s", " 1s", "1s ", "1S", "1.1.1s", "1.-1s", "1e3s", "1_0s", "١s",
    "9223372036854775808ns", "-9223372036854775809ns", "3000000h", "9223372036854775.808us", "99999999999999999999ns",
    "9223372036854ms775us808ns",
)  # fmt: skip
NUMBERS = {
    "1": 1, "+1.": 1, "-.5": -0.5, "1e3": 1000, "1E-2": 0.01, "1_0.2_5": 10.25, "0x1p-2": 0.25, "0X_1.8P1": 3, "0": 0,
    "1e-400": 0, "007": 7,
}  # fmt: skip
NO_NUMBERS = (
    "", " 1", "1 ", "1e", "e1", ".", "+", "1__0", "_1", "1_", "1_.5", "1._5", "0x1", "0x1p", "1,5", "1e400", "-1e400",
    "0x1p5000", "+nan", "nano", "infi", "١", "1f", "1_e5", "1e_5",
)  # fmt: skip


@pytest.mark.parametrize("text", DURATIONS)
def test_durations(text: str) -> None:
    assert go.parse_duration_ns(text) == DURATIONS[text]


@pytest.mark.parametrize("text", NO_DURATIONS)
def test_no_durations(text: str) -> None:
    with pytest.raises(InvalidValue, match="is not a duration"):
        go.parse_duration_ns(text)


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers(text: str) -> None:
    assert go.parse_float(text) == NUMBERS[text]


def test_numbers_that_are_none() -> None:
    assert math.isnan(go.parse_float("nAn"))
    assert [go.parse_float(text) for text in ("inf", "+Infinity", "-INF")] == [math.inf, math.inf, -math.inf]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_no_numbers(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"not a number|out of range"):
        go.parse_float(text)


@pytest.mark.parametrize(
    "text", ["", "1.0", " 1", "1_0", "0x1", "--1", "٣", "2147483648", "-2147483649", "9" * 5000]
)
def test_no_integers(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"not an integer|out of range"):
        go.parse_int(text, 32)


def test_integers() -> None:
    assert [go.parse_int(text, 32) for text in ("007", "+5", "-2147483648", "2147483647", "-0")] == [
        *(7, 5, -(2**31), 2**31 - 1, 0)
    ]
    assert go.parse_int("0" * 5000 + "9223372036854775807") == 2**63 - 1


def test_truths() -> None:
    assert [go.parse_bool(text) for text in ("1", "T", "true", "0", "f", "False")] == [True] * 3 + [False] * 3
    with pytest.raises(InvalidValue, match="'yes' is neither true nor false"):
        go.parse_bool("yes")


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.0000005, 0.000001), (0.00000049, 0), (-0.0000005, -0.000001), (2 / 3, 0.666667), (1e300, 1e300)],
)
def test_six_decimals(value: float, rounded: float) -> None:
    assert go.round_to_micro(value) == rounded


def test_what_is_not_finite_stays_so() -> None:
    assert go.ceil(math.inf) == go.floor(math.inf) == go.round_to_micro(math.inf) == math.inf
    for nan in (
        go.ceil(math.nan),
        go.larger(1, math.nan),
        go.smaller(math.nan, 1),
        go.round_to_micro(math.nan),
    ):
        assert math.isnan(nan)
    assert (go.larger(1, 2), go.smaller(1, 2)) == (2, 1)


def test_32_bits() -> None:
    values = (2147483647.5, -2147483648.5, 2147483648.0, -2147483649.0, math.inf, math.nan, 7.9, -7.9)
    assert [go.to_int32(value) for value in values] == [2**31 - 1, *[-(2**31)] * 5, 7, -7]


def test_whole_seconds() -> None:
    assert [go.round_to_second(int(seconds * 10**9)) for seconds in (30.6, 0.4, 0.5, 1.499, -0.5)] == [
        31,
        0,
        1,
        1,
        -1,
    ]


def test_powers_by_squares() -> None:
    assert go.power(0.8, 1) == 0.8
    assert go.power(0.5, 3) == 0.125
    assert go.power(0.8, 59) == pytest.approx(0.8**59, rel=1e-14)
    assert go.power(0.8, 10**6) == 0
    assert go.power(0.15, 3600) == 0
