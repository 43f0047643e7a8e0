"""Numbers and durations as Go reads, converts and rounds them: Knative's annotations and decisions are defined so.

Go 1.26: strconv.ParseInt, ParseFloat and ParseBool, time.ParseDuration, math.Round and Pow, and the conversion of a
float to an int32 as amd64 does it (other processors saturate there). Parsers raise InvalidValue.
"""

import math
import re
from typing import Final

from berth.contract.errors import InvalidValue

SECOND_NS: Final = 1_000_000_000
INT32_MAX: Final = 2**31 - 1
INT32_MIN: Final = -(2**31)
_INT64_LIMIT: Final = 2**63

_INTEGER = re.compile(r"[+-]?[0-9]+")
_DIGITS = r"[0-9](?:_?[0-9])*"
_HEX = r"[0-9a-fA-F](?:_?[0-9a-fA-F])*"
_DECIMAL = re.compile(rf"[+-]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?")
_HEXADECIMAL = re.compile(rf"[+-]?0[xX]_?(?:{_HEX}(?:\.(?:{_HEX})?)?|\.{_HEX})[pP][+-]?{_DIGITS}")
_SPECIAL = re.compile(r"[+-]?inf(?:inity)?|nan", re.IGNORECASE | re.ASCII)
_DURATION_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?([^0-9.]+)")
_UNITS_NS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # micro sign
    "μs": 1_000,  # Greek letter mu
    "ms": 1_000_000,
    "s": SECOND_NS,
    "m": 60 * SECOND_NS,
    "h": 3600 * SECOND_NS,
}


def parse_int(text: str, bits: int = 64) -> int:
    if not _INTEGER.fullmatch(text):
        raise InvalidValue(f"{text!r} is not an integer")
    # Python refuses to read more than some thousand digits; a few are enough to be out of range.
    digits = text.lstrip("+-").lstrip("0")
    value = int(digits or "0") if len(digits) < 20 else _INT64_LIMIT
    value = -value if text[0] == "-" else value
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise InvalidValue(f"{text!r} is out of range")
    return value


def parse_float(text: str) -> float:
    if _SPECIAL.fullmatch(text):
        return float(text)
    try:
        if _DECIMAL.fullmatch(text):
            value = float(text)
        elif _HEXADECIMAL.fullmatch(text):
            value = float.fromhex(text.replace("_", ""))
        else:
            raise InvalidValue(f"{text!r} is not a number")
    except OverflowError:
        value = math.inf
    if math.isinf(value):
        raise InvalidValue(f"{text!r} is out of range")
    return value


def parse_bool(text: str) -> bool:
    if text in ("1", "t", "T", "true", "TRUE", "True"):
        return True
    if text in ("0", "f", "F", "false", "FALSE", "False"):
        return False
    raise InvalidValue(f"{text!r} is neither true nor false")


def parse_duration_ns(text: str) -> int:
    """`1h30m`, `90s`, `1.5m`, `0`."""
    rest = text[1:] if text[:1] in ("+", "-") else text
    if rest == "0":
        return 0
    total = place = 0
    while place < len(rest):
        part = _DURATION_PART.match(rest, place)
        if part is None or not (part[1] or part[2]):
            raise _no_duration(text)
        total += _part_ns(text, part[1], part[2] or "", part[3])
        if total > _INT64_LIMIT:
            raise _no_duration(text)
        place = part.end()
    negative = text[:1] == "-"
    if not rest or (total == _INT64_LIMIT and not negative):
        raise _no_duration(text)
    return -total if negative else total


def _part_ns(text: str, whole: str, fraction: str, unit: str) -> int:
    unit_ns = _UNITS_NS.get(unit)
    digits = whole.lstrip("0")
    if unit_ns is None or len(digits) > 19 or int(digits or "0") > _INT64_LIMIT // unit_ns:
        raise _no_duration(text)
    value, scale = _fraction(fraction)
    total = int(digits or "0") * unit_ns
    total += int(float(value) * (float(unit_ns) / scale)) if value else 0
    if total > _INT64_LIMIT:
        raise _no_duration(text)
    return total


def _fraction(digits: str) -> tuple[int, float]:
    """What stands behind the point, and by what it is to be divided. Digits that 63 bits cannot hold are dropped
    (time.leadingFraction)."""
    value, scale = 0, 1.0
    for digit in digits:
        if value > (_INT64_LIMIT - 1) // 10 or value * 10 + int(digit) > _INT64_LIMIT:
            break
        value, scale = value * 10 + int(digit), scale * 10
    return value, scale


def _no_duration(text: str) -> InvalidValue:
    return InvalidValue(f"{text!r} is not a duration")


def ceil(value: float) -> float:
    """math.ceil, of what is not finite as well, and not of unlimited length."""
    return float(math.ceil(value)) if math.isfinite(value) else value


def floor(value: float) -> float:
    return float(math.floor(value)) if math.isfinite(value) else value


def larger(one: float, other: float) -> float:
    """math.Max: what is no number stays so."""
    return math.nan if one != one or other != other else max(one, other)


def smaller(one: float, other: float) -> float:
    """math.Min."""
    return math.nan if one != one or other != other else min(one, other)


def to_int32(value: float) -> int:
    """int32(value), without a fraction; what does not fit is the smallest of all."""
    return int(value) if INT32_MIN - 1 < value < INT32_MAX + 1 else INT32_MIN


def round_to_micro(value: float) -> float:
    """Six decimals, half away from zero (roundToNDigits of pkg/autoscaler/aggregation/bucketing.go)."""
    rest, whole = math.modf(value * 1e6)
    if rest >= 0.5:
        whole += 1.0
    elif rest <= -0.5:
        whole -= 1.0
    return whole / 1e6


def round_to_second(duration_ns: int) -> int:
    """Whole seconds, half away from zero (time.Duration.Round)."""
    seconds, rest = divmod(abs(duration_ns), SECOND_NS)
    seconds += 2 * rest >= SECOND_NS
    return seconds if duration_ns >= 0 else -seconds


def power(base: float, exponent: int) -> float:
    """math.Pow of a positive base and exponent: by squares, which rounds otherwise than the C library does."""
    if exponent == 1:
        return base
    result, shift = 1.0, 0
    fraction, exponent_of_2 = math.frexp(base)
    while exponent:
        if abs(exponent_of_2) > 1 << 12:
            shift += exponent_of_2
            break
        if exponent & 1:
            result, shift = result * fraction, shift + exponent_of_2
        fraction, exponent_of_2 = fraction * fraction, exponent_of_2 * 2
        if fraction < 0.5:
            fraction, exponent_of_2 = fraction + fraction, exponent_of_2 - 1
        exponent >>= 1
    return math.ldexp(result, shift)
