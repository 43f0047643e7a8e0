"""Typed access to the fields of a JSON object that came from outside."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from berth.contract.errors import InvalidValue
from berth.contract.wire import TEXT_LIMIT, parse

T = TypeVar("T")

_LARGEST_INTEGER = 2**63 - 1  # what every reader of the wire can hold, and what a sum of them can be shown of


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object with the path that names it in errors (`node report.gpus[1]`)."""

    data: dict[str, Any]
    path: str

    @classmethod
    def parse(cls, text: str, *, what: str, limit: int = TEXT_LIMIT) -> "Fields":
        """Read `text` as one JSON object. Raises InvalidValue; never RecursionError."""
        return cls.of(parse(text, what=what, limit=limit), path=what)

    @classmethod
    def of(cls, data: object, *, path: str) -> "Fields":
        if not isinstance(data, dict):
            raise InvalidValue(f"{path} is not a JSON object")
        return cls(data, path)

    def string(self, key: str, *, default: str | None = None) -> str:
        return self._typed(key, str, "a string", default)

    def boolean(self, key: str) -> bool:
        return self._typed(key, bool, "true or false", None)

    def integer(self, key: str) -> int:
        """A non-negative integer of 64 bits."""
        value = self._typed(key, int, "an integer", None)
        if isinstance(value, bool) or not 0 <= value <= _LARGEST_INTEGER:
            raise InvalidValue(f"{self.path}.{key} is {value!r}; an integer from 0 to 2^63-1 is expected")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A non-negative integer, or None where the field is null or absent: the fact is unknown."""
        return None if self.data.get(key) is None else self.integer(key)

    def optional_string(self, key: str) -> str | None:
        return None if self.data.get(key) is None else self.string(key)

    def strings(self, key: str) -> tuple[str, ...]:
        values = self._typed(key, list, "a list of strings", None)
        if not all(isinstance(value, str) for value in values):
            raise InvalidValue(f"{self.path}.{key} holds something other than strings")
        return tuple(values)

    def optional_strings(self, key: str) -> tuple[str, ...]:
        return () if self.data.get(key) is None else self.strings(key)

    def object(self, key: str) -> "Fields":
        return Fields.of(self.data.get(key), path=f"{self.path}.{key}")

    def objects(self, key: str) -> "Iterator[Fields]":
        return (Fields.of(value, path=path) for path, value in self.items(key))

    def items(self, key: str) -> "Iterator[tuple[str, Any]]":
        """The entries of a list, each with the path that names it."""
        for position, value in enumerate(self._typed(key, list, "a list", None)):
            yield f"{self.path}.{key}[{position}]", value

    def choice(self, key: str, convert: Callable[[str], T]) -> T:
        """A string that `convert` (an Enum class, say) accepts."""
        text = self.string(key)
        try:
            return convert(text)
        except ValueError as error:
            raise InvalidValue(f"{self.path}.{key} is {text!r}: {error}") from error

    def _typed(self, key: str, kind: type[T], expected: str, default: T | None) -> T:
        value = self.data.get(key, default)
        if not isinstance(value, kind):
            raise InvalidValue(f"{self.path}.{key} is {value!r}; {expected} is expected")
        return value
