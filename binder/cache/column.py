"""One fact of every node side by side: a small number a row, and the values behind the numbers."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Codes = NDArray[np.int32]
# Which rows: all of them (`NodeTable.all_rows`), or some by number.
Rows = slice | NDArray[np.intp]


class Column:
    """One fact of every node as a small number, with the values behind the numbers. 0 is absent."""

    def __init__(self, capacity: int) -> None:
        self.codes: Codes = np.zeros(capacity, np.int32)
        self.values: list[Any] = [None]
        self._code_of: dict[Hashable, int] = {None: 0}
        # Of each value, from its first use.
        self._is_integer, self._integers = np.zeros(0, np.bool_), np.zeros(0, np.int64)

    def set(self, row: int, value: Hashable) -> None:
        code = self._code_of.get(value)
        if code is None:
            code = self._code_of[value] = len(self.values)
            self.values.append(value)
        self.codes[row] = code

    def fill(self, values: Iterable[Hashable]) -> None:
        """All rows from the first one on."""
        code_of = self._code_of
        codes = [code_of.setdefault(value, len(code_of)) for value in values]
        self.codes[: len(codes)] = codes
        self.values = list(code_of)

    def is_one_of(self, values: Iterable[Hashable], rows: Rows) -> Bools:
        """Where the fact is one of these values. None is absence."""
        codes = [code for value in values if (code := self._code_of.get(value)) is not None]
        if len(codes) == 1:
            only: Bools = self.codes[rows] == codes[0]
            return only
        chosen = np.zeros(len(self.values), np.bool_)
        chosen[codes] = True
        found: Bools = chosen[self.codes[rows]]
        return found

    def where(self, rows: Rows, holds: Callable[[Any], bool]) -> Bools | None:
        """Where something holds of the fact; None where it holds of no value that has occurred."""
        codes = self.codes[rows]
        if len(codes) < len(self.values):
            found: Bools = np.array([holds(self.values[code]) for code in codes], np.bool_)
            return found if found.any() else None
        chosen = [holds(value) for value in self.values]
        return np.array(chosen, np.bool_)[codes] if any(chosen) else None

    def map(self, rows: Rows, figure: Callable[[Any], Any], kind: Any) -> NDArray[Any]:
        """`figure` of each row's value, computed once for each value that occurs."""
        codes = self.codes[rows]
        if len(codes) < len(self.values):
            return np.array([figure(self.values[code]) for code in codes], kind)
        figures: NDArray[Any] = np.array([figure(value) for value in self.values], kind)[codes]
        return figures

    def integers(self, read: Callable[[Any], int | None]) -> tuple[Bools, Ints]:
        """Of each value whether it is a number, and which: read once, always by the same `read`."""
        if more := [read(value) for value in self.values[len(self._integers) :]]:
            self._is_integer = np.append(self._is_integer, [one is not None for one in more])
            self._integers = np.append(self._integers, np.array([one or 0 for one in more], np.int64))
        return self._is_integer, self._integers

    def widen(self, capacity: int) -> None:
        self.codes = grown(self.codes, (capacity,), 0)


def grown(array: NDArray[Any], shape: tuple[int, ...], filling: Any) -> NDArray[Any]:
    """The same figures at the beginning of a larger array."""
    larger = np.full(shape, filling, array.dtype, order="F")
    larger[tuple(slice(length) for length in array.shape)] = array
    return larger
