"""The kinds of verdict on a field of ModelConfig, and the walk that writes a message by them.

A message is copied field by field into an empty one, so what has no verdict cannot get through, unknown
fields included.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from agent.admission.errors import InvalidModel
from agent.admission.files import require_inside
from agent.admission.settings import Setting, Settings


class Verdict(Protocol):
    """What is done with one value of a field."""

    def take(self, value: Any, where: str) -> Any:
        """The value to write. Raises InvalidModel."""
        ...


@dataclass(frozen=True)
class Keep:
    """Any value of its type is harmless: a switch, or a closed choice of Triton's."""

    def take(self, value: Any, where: str) -> Any:
        return value


@dataclass(frozen=True)
class OneOf:
    """Of an enum those values that are taken, by name."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]

    def take(self, value: int, where: str) -> int:
        if value not in self.numbers:
            raise InvalidModel(f"{where}: {value} is none of {', '.join(self.names)}")
        return value


@dataclass(frozen=True)
class Number:
    """An integer within bounds. `also`: one more value with a meaning of its own."""

    lowest: int
    highest: int
    also: int | None = None

    def take(self, value: int, where: str) -> int:
        if not self.lowest <= value <= self.highest and value != self.also:
            also = "" if self.also is None else f"{self.also} or "
            raise InvalidModel(f"{where}: {value}; {also}{self.lowest} to {self.highest} is taken")
        return value


@dataclass(frozen=True)
class Real:
    """A finite number."""

    def take(self, value: float, where: str) -> float:
        if not math.isfinite(value):
            raise InvalidModel(f"{where}: {value}; a finite number is taken")
        return value


@dataclass(frozen=True)
class Text:
    """Printable text. `pattern`: what it must look like, with `like` as an example of what is right."""

    characters: int = 256
    pattern: str | None = None
    like: str = ""

    def take(self, value: str, where: str) -> str:
        if len(value) > self.characters:
            raise InvalidModel(f"{where}: {len(value)} characters; at most {self.characters} are taken")
        if not all(character.isprintable() or character in "\t\n\r" for character in value):
            raise InvalidModel(f"{where}: {value[:80]!r} holds control or other unprintable characters")
        if self.pattern is not None and not re.fullmatch(self.pattern, value, re.ASCII):
            raise InvalidModel(f"{where}: {value[:80]!r}; {self.like} is taken")
        return value


@dataclass(frozen=True)
class Understood:
    """Text that is something else to its reader: what was understood is written."""

    setting: Setting

    def take(self, value: str, where: str) -> str:
        written = self.setting.written(value)
        if written is None:
            raise InvalidModel(f"{where}: {value[:80]!r}; {self.setting.like} is taken")
        return written


@dataclass(frozen=True)
class Inside:
    """The name of a file inside the model's directory. Whether it is there is looked at later."""

    def take(self, value: str, where: str) -> str:
        require_inside(value, where=where)
        return value


@dataclass(frozen=True)
class Refused:
    """Never taken; `why` says what would be right."""

    why: str

    def take(self, value: Any, where: str) -> Any:
        raise InvalidModel(f"{where}: {self.why}")


@dataclass(frozen=True)
class Written:
    """Whatever it says, something else is written: `by` says what."""

    by: str

    def take(self, value: Any, where: str) -> Any:
        return value


@dataclass(frozen=True)
class Parts:
    """A message, judged by the verdicts on its own fields."""

    def take(self, value: Any, where: str) -> Any:
        raise AssertionError("the walk goes into it")


@dataclass(frozen=True)
class Many:
    """A repeated field of at most so many values."""

    at_most: int
    each: Verdict


@dataclass(frozen=True)
class Named:
    """A map of at most so many entries."""

    at_most: int
    key: Verdict
    value: Verdict


Rule = Verdict | Many | Named
Table = Mapping[str, Mapping[str, Rule]]
_PACKAGE = "inference."


def written_anew(message: Message, table: Table, *, where: str) -> Message:
    """A new message with what the table takes of this one. Raises InvalidModel naming the field."""
    fresh = type(message)()
    fresh.SetInParent()
    rules = table.get(message.DESCRIPTOR.full_name.removeprefix(_PACKAGE), {})
    for field, value in message.ListFields():
        rule = rules.get(field.name)
        place = f"{where}{field.name}"
        if rule is None:
            raise InvalidModel(f"{place}: Berth does not know this field; leave it out")
        if isinstance(rule, Named):
            _take_map(fresh, field, value, rule, table, place)
        elif isinstance(rule, Many):
            _require_few(value, rule.at_most, place)
            for at, one in enumerate(value):
                _add(fresh, field, _one(one, rule.each, table, f"{place}[{at}]"))
        else:
            _set(fresh, field, _one(value, rule, table, place))
    return fresh


def understood(name: str, value: str, settings: Settings, where: str) -> str:
    """What is written for a parameter of this name. Raises InvalidModel."""
    setting = settings.get(name)
    if setting is None:
        known = ", ".join(sorted(settings)) or "none"
        raise InvalidModel(f"{where}: not taken; leave it out. What is taken: {known}")
    return Understood(setting).take(value, where)


def _take_map(
    fresh: Message, field: FieldDescriptor, value: Mapping[Any, Any], rule: Named, table: Table, place: str
) -> None:
    _require_few(value, rule.at_most, place)
    target = getattr(fresh, field.name)
    for key in sorted(value):
        shown = f"{place}[{str(key)[:80]!r}]"
        taken = _one(value[key], rule.value, table, shown)
        name = rule.key.take(key, f"{shown}: its name")
        if isinstance(taken, Message):
            target[name].CopyFrom(taken)
        else:
            target[name] = taken


def _one(value: Any, rule: Verdict, table: Table, place: str) -> Any:
    if isinstance(rule, Parts):
        return written_anew(value, table, where=f"{place}.")
    return rule.take(value, place)


def _set(fresh: Message, field: FieldDescriptor, value: Any) -> None:
    if isinstance(value, Message):
        getattr(fresh, field.name).CopyFrom(value)
        getattr(fresh, field.name).SetInParent()
    else:
        setattr(fresh, field.name, value)


def _add(fresh: Message, field: FieldDescriptor, value: Any) -> None:
    target = getattr(fresh, field.name)
    if isinstance(value, Message):
        target.add().CopyFrom(value)
    else:
        target.append(value)


def _require_few(value: Any, at_most: int, place: str) -> None:
    if len(value) > at_most:
        raise InvalidModel(f"{place}: {len(value)} entries; at most {at_most} are taken")
