from fractions import Fraction

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.quantity import ceil_units, format_bytes, parse_bytes, parse_quantity


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
    "text", ["", " ", "Mi", "1 Gi", "1gi", "1GiB", "0x10", "1e", "--1", "١", "1" * 65, "1e9999", "nan", "inf"]
)
def test_not_a_quantity(text: str) -> None:
    with pytest.raises(InvalidValue, match="is not a quantity"):
        parse_quantity(text)


def test_bytes_must_be_whole_and_not_negative() -> None:
    with pytest.raises(InvalidValue, match="not a whole number of bytes"):
        parse_bytes("1500m")
    with pytest.raises(InvalidValue, match="negative"):
        parse_bytes("-1")


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
