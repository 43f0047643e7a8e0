"""Settings that are text in ModelConfig and something else to who reads them: parameters of backends and of
accelerators, and the profiles of TensorRT.

Triton's readers are C++'s: `stoi` and its kin take what begins as a number, and what does not fit the type
throws past them and ends Triton (`ParseIntValue` catches `invalid_argument`, not `out_of_range`). So nothing
that is a number, a switch or a choice goes on as it was written: it is read here, strictly, and what was
understood is written, in the one way that every reader takes alike.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

# No zeros before, no space, no point, no exponent in what is written; as much of it is taken as is written by hand.
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_REAL = re.compile(r"[+-]?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?", re.ASCII)
_YES, _NO = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})
# Nearer to zero a float of 32 bits loses its digits, which C++'s readers call out of range.
_SMALLEST_REAL = 1e-37


class Setting(Protocol):
    """What one setting may say. `like`: what is right, for people."""

    @property
    def like(self) -> str: ...

    def written(self, value: str) -> str | None:
        """What is written for a value; None where it does not go. Of what is written it gives the same."""
        ...


Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Integer:
    """A whole number within bounds."""

    lowest: int
    highest: int

    @property
    def like(self) -> str:
        return f"a whole number from {self.lowest} to {self.highest}"

    def written(self, value: str) -> str | None:
        if not _INTEGER.fullmatch(value):
            return None
        number = int(value)
        return str(number) if self.lowest <= number <= self.highest else None


@dataclass(frozen=True)
class Real:
    """A number that a float of 32 bits holds."""

    highest: float

    @property
    def like(self) -> str:
        return f"a number from {-self.highest:g} to {self.highest:g}"

    def written(self, value: str) -> str | None:
        if not _REAL.fullmatch(value):
            return None
        number = float(value)
        if not math.isfinite(number) or abs(number) > self.highest or 0 < abs(number) < _SMALLEST_REAL:
            return None
        return repr(number)


@dataclass(frozen=True)
class Switch:
    """On or off, in the words of who reads it. `off` None: only on may be said; who does not want it leaves
    it out."""

    on: str = "1"
    off: str | None = "0"

    @property
    def like(self) -> str:
        return "true or false" if self.off is not None else "true (leave it out otherwise)"

    def written(self, value: str) -> str | None:
        word = value.lower() if value.isascii() else ""
        return self.on if word in _YES else self.off if word in _NO else None


@dataclass(frozen=True)
class Choice:
    """One of some words, in whatever case. `named`: what is written for another way to say one."""

    words: tuple[str, ...]
    named: Mapping[str, str] = field(default_factory=dict)

    @property
    def like(self) -> str:
        return f"one of {', '.join((*self.words, *self.named))}"

    def written(self, value: str) -> str | None:
        return self.named.get(value) or next(
            (word for word in self.words if word.lower() == value.lower()), None
        )


@dataclass(frozen=True)
class Either:
    """What one of two takes."""

    one: Setting
    other: Setting

    @property
    def like(self) -> str:
        return f"{self.one.like}, or {self.other.like}"

    def written(self, value: str) -> str | None:
        written = self.one.written(value)
        return self.other.written(value) if written is None else written


@dataclass(frozen=True)
class ListOf:
    """Words of one pattern, with a sign between them."""

    pattern: str
    at_most: int
    like: str
    between: str = ";"

    def written(self, value: str) -> str | None:
        words = value.split(self.between)
        if len(words) > self.at_most or not all(re.fullmatch(self.pattern, word, re.ASCII) for word in words):
            return None
        return value
