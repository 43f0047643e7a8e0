"""One fact of every node: asked of few rows as of many, whatever values have occurred."""

import numpy as np
import pytest

from binder.cache.column import Column, Rows

VALUES = ("a", None, "b", "a", "9")
SOME = [slice(0, 5), slice(0, 2), np.array([4]), np.array([3, 0])]


def column_of(values: tuple[str | None, ...] = VALUES) -> Column:
    column = Column(5)
    for row, value in enumerate(values):
        column.set(row, value)
    return column


def of(rows: Rows) -> list[str | None]:
    return np.array(VALUES, object)[rows].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", SOME, ids=str)
def test_each_question_is_answered_row_by_row(rows: Rows) -> None:
    column, values = column_of(), of(rows)
    for wanted in (("a",), ("a", "b"), (None,), ("unheard of",), ()):
        assert column.is_one_of(wanted, rows).tolist() == [value in wanted for value in values]
    assert column.map(rows, lambda value: len(value or ""), np.int64).tolist() == [
        len(value or "") for value in values
    ]
    for wanted in ("a", "9"):
        found = column.where(rows, lambda value, wanted=wanted: value == wanted)  # type: ignore[misc]
        expected = [value == wanted for value in values]
        assert ([False] * len(values) if found is None else found.tolist()) == expected
    assert column.where(rows, lambda value: value == "unheard of") is None


def test_all_rows_at_once_are_each_alone() -> None:
    filled = Column(5)
    filled.fill(VALUES)
    alone = column_of()
    assert [filled.values[code] for code in filled.codes] == [alone.values[code] for code in alone.codes]
    filled.widen(8)
    assert filled.codes.tolist() == [*alone.codes.tolist(), 0, 0, 0]


def test_numbers_are_read_once_and_those_that_come_later_too() -> None:
    read = list[str | None]()

    def number(value: str | None) -> int | None:
        read.append(value)
        return int(value) if value is not None and value.isdigit() else None

    column = column_of()
    for _ in range(2):
        is_integer, integers = column.integers(number)
    assert (is_integer.tolist(), integers.tolist()) == ([False, False, False, True], [0, 0, 0, 9])
    column.set(0, "10")
    assert column.integers(number)[1].tolist() == [0, 0, 0, 9, 10]
    assert read == [None, "a", "b", "9", "10"]
