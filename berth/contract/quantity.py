"""Kubernetes quantities as exact integers.

The grammar is that of k8s.io/apimachinery/pkg/api/resource/quantity.go: a signed decimal with a
binary suffix (Ki..Ei), a decimal suffix (n, u, m, "", k..E) or an exponent. The API server takes amounts
that no machine has, `5E` of CPU or `1e400`; they count as MOST.
"""

import re
from fractions import Fraction

from berth.contract.errors import InvalidValue

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))(?P<suffix>[KMGTPE]i|[numkMGTPE]|[eE][+-]?\d{1,10})?", re.ASCII
)
_BINARY = {suffix: Fraction(1024) ** (i + 1) for i, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))}
_DECIMAL = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
}
_SCALES = _BINARY | _DECIMAL
_TEXT_LIMIT = 64
# Beyond it every quantity is more than MOST, or less than any unit.
_EXPONENT_LIMIT = 99

MOST = 2**62
"""4 Ei, more than any machine has of anything: a larger amount counts as so much. The sum and the
difference of two such amounts are still within 64 bits."""


def parse_quantity(text: str | int | float) -> Fraction:
    """Read a quantity (`400Mi`, `1.5Gi`, `250m`, `1e3`) without rounding. Raises InvalidValue.

    An exponent beyond ±99 counts as ±99: its value has as many digits as it says.
    """
    source = str(text).strip()
    match = _QUANTITY.fullmatch(source) if len(source) <= _TEXT_LIMIT else None
    if match is None:
        raise InvalidValue(f"{source[:_TEXT_LIMIT]!r} is not a quantity; write e.g. 400Mi, 11Gi or 500m")
    number, suffix = Fraction(match["number"]), match["suffix"] or ""
    if suffix[:1] in {"e", "E"} and len(suffix) > 1 and not suffix.endswith("i"):
        return number * Fraction(10) ** max(-_EXPONENT_LIMIT, min(int(suffix[1:]), _EXPONENT_LIMIT))
    return number * _SCALES.get(suffix, Fraction(1))


def parse_bytes(text: str | int | float) -> int:
    """Read a quantity as whole, non-negative bytes, MOST at most. Raises InvalidValue."""
    value = parse_quantity(text)
    if value.denominator != 1:
        raise InvalidValue(f"{str(text)!r} is not a whole number of bytes")
    if value < 0:
        raise InvalidValue(f"{str(text)!r} is negative")
    return min(int(value), MOST)


def ceil_units(text: str | int | float, *, per_unit: int = 1) -> int:
    """Read a non-negative quantity rounded up to 1/per_unit (`per_unit=1000` for CPU in milli-cores),
    MOST at most. Raises InvalidValue."""
    scaled = parse_quantity(text) * per_unit
    if scaled < 0:
        raise InvalidValue(f"{str(text)!r} is negative")
    return min(-(-scaled.numerator // scaled.denominator), MOST)


def format_bytes(count: int) -> str:
    """Bytes for people, in binary units with at most one decimal: `400 MiB`, `1.2 GiB`."""
    sign, size = ("-" if count < 0 else ""), float(abs(count))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    digits = f"{size:.1f}".removesuffix(".0")
    return f"{sign}{digits} {unit}"
