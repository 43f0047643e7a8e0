from fractions import Fraction

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.quantity import MOST, ceil_units, format_bytes, parse_bytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("400Mi", 400 * 1024**2),
        ("11Gi", 11 * 1024**3),
        ("1.5Gi", 3 * 1024**3 // 2),
        ("1e3", 1000),
        ("1E3", 1000),
        ("2E", 2 * 10**18),
        ("1Ei", 1024**6),
        (".5Ki", 512),
        ("5.", 5),
        ("+7k", 7000),
        (123, 123),
    ],
)
def test_whole_bytes(text: str | int, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "Mi", "1 Gi", "1gi", "1GiB", "0x10", "1e", "--1", "١", "1" * 65, "1e99999999999", "nan", "inf"],
)
def test_not_a_quantity(text: str) -> None:
    with pytest.raises(InvalidValue, match="is not a quantity"):
        parse_quantity(text)


def test_bytes_must_be_whole_and_not_negative() -> None:
    with pytest.raises(InvalidValue, match="not a whole number of bytes"):
        parse_bytes("1500m")
    with pytest.raises(InvalidValue, match="negative"):
        parse_bytes("-1")


@pytest.mark.parametrize("text", ["5E", "9E", "1e400", "1e9999999999", "123456E", "9" * 60 + "Ei"])
def test_more_than_any_machine_has_counts_as_the_most(text: str) -> None:
    """All of them pass the API server's validation."""
    assert parse_bytes(text) == ceil_units(text, per_unit=1000) == MOST


@pytest.mark.parametrize("text", ["1n", "1e-400", "-0", "1e-9999999999", "0e400"])
def test_less_than_a_unit_is_a_unit_or_nothing(text: str) -> None:
    assert ceil_units(text) == (0 if "0" in text[:2] else 1)


def test_no_amount_is_negative() -> None:
    with pytest.raises(InvalidValue, match="negative"):
        ceil_units("-1m", per_unit=1000)


def test_cpu_is_rounded_up_to_millicores() -> None:
    assert ceil_units("250m", per_unit=1000) == 250
    assert ceil_units("0.1", per_unit=1000) == 100
    assert ceil_units("1u", per_unit=1000) == 1
    assert parse_quantity("250m") == Fraction(1, 4)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (400 * 1024**2, "400 MiB"),
        (1288490189, "1.2 GiB"),
        (-1024, "-1 KiB"),
        (5 * 1024**5, "5120 TiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1Ki", 2**10),
        ("1Mi", 2**20),
        ("1Gi", 2**30),
        ("1Ti", 2**40),
        ("1Pi", 2**50),
        ("1Ei", 2**60),
        ("1k", 10**3),
        ("1M", 10**6),
        ("1G", 10**9),
        ("1T", 10**12),
        ("1P", 10**15),
        ("1E", 10**18),
        ("1000m", 1),
        ("2000000u", 2),
        ("3000000000n", 3),
        ("2e+3", 2000),
        ("5000e-3", 5),
        (" 7 ", 7),
        ("0" * 63 + "1", 1),
    ],
)
def test_every_suffix(text: str, value: int) -> None:
    assert parse_bytes(text) == value


def test_amounts_are_exact_and_rounded_up_only_at_the_end() -> None:
    assert parse_bytes("0") == 0
    assert ceil_units("1.5") == 2
    assert ceil_units("2") == 2
    assert ceil_units("0.0001", per_unit=1000) == 1
    assert ceil_units("2000m") == 2
    assert parse_quantity("0.1") * 10 == 1
    with pytest.raises(InvalidValue, match="^'" + "9" * 64 + "' is not a quantity"):
        parse_quantity("9" * 70)


@pytest.mark.parametrize(
    ("count", "text"),
    [(1024, "1 KiB"), (1536, "1.5 KiB"), (2**40, "1 TiB"), (-(2**20), "-1 MiB"), (2**20 - 1, "1024 KiB")],
)
def test_amounts_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
