"""Whether the histories that are held against Knative's decider would show a mistake: one is made at a time."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scaler.decision.replay import Replay
from tests.oracles.histories import histories

ROOT = Path(__file__).parents[3]
# File, what stands there once, what stands there instead.
MISTAKES = {
    "the threshold must be passed": ("decision.decider", "panic / counted >= spec", "panic / counted > spec"),
    "panic is over a moment earlier": ("decision.decider", "SECOND_NS < now_ns", "SECOND_NS <= now_ns"),
    "panic is over a second later": ("decision.decider", "SECOND_NS < now_ns", "SECOND_NS + SECOND_NS < now_ns"),
    "the threshold is met by what the rates allow": (
        "decision.decider",
        "self._panic_or_not(panic / counted",
        "self._panic_or_not(_recommended(spec, panic, counted) / counted",
    ),
    "down by the rate, rounded up": ("decision.decider", "floor(counted / spec", "ceil(counted / spec"),
    "the most of the last panic is kept": ("decision.decider", "self._most_in_panic = 0", "pass"),
    "a burst that no replica counts for": ("decision.decider", "ready * spec.total", "max(ready, 1) * spec.total"),
    "the activation scale before the rates": (
        "decision.decider",
        "replicas = to_int32(smaller(larger(wanted, least), most))",
        "replicas = to_int32(smaller(larger(max(wanted, spec.activation_scale), least), most))",
    ),
    "panic goes down with its figure": (
        "decision.decider",
        "max(self._most_in_panic, desired, _recommended(spec, panic, counted))",
        "max(desired, _recommended(spec, panic, counted))",
    ),
    "slots of one second": ("decision.decider", "SLOT_SECONDS: Final = 2", "SLOT_SECONDS: Final = 1"),
    "a slot too long": ("decision.decider", "slot - maxima[0][0] >= self._slots", "slot - maxima[0][0] > self._slots"),
    "over a window from the start on": ("decision.windows", "self._last - self._first + 1\n", "self._size\n"),
    "a window ends a second later": ("decision.windows", "if late >= self._size:", "if late > self._size:"),
    "nothing is known a second earlier": ("decision.windows", "second - self._last > self._size", "second - self._last >= self._size"),
    "late values count as new ones": ("decision.windows", "if second + size <= last:", "if second < last:"),
    "weights decay from the reader's time": ("decision.windows", "* power(decay, late) if late", "if late"),
    "a resized window is as young as it was": ("decision.windows", "self._first = self._last - (self._size - 1)", "pass"),
    "six decimals, cut": ("go", "if rest >= 0.5:", "if rest >= 1.5:"),
}  # fmt: skip


@contextmanager
def scaler_with(file: str, before: str, after: str) -> Iterator[ModuleType]:
    """scaler.decision.replay of a package in which one text is another."""
    finder = _Changed(file, before, after)
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "scaler"}
    try:
        for name in own:
            del sys.modules[name]
        sys.meta_path.insert(0, finder)
        yield importlib.import_module("scaler.decision.replay")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "scaler"]:
            del sys.modules[name]
        sys.modules.update(own)


class _Changed:
    """Finds one module before anything else does."""

    def __init__(self, file: str, before: str, after: str) -> None:
        self._name, self._path = f"scaler.{file}", ROOT / "scaler" / f"{file.replace('.', '/')}.py"
        text = self._path.read_text()
        assert text.count(before) == 1, f"{before!r} stands {text.count(before)} times in {self._path}"
        self._text = text.replace(before, after)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._name else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._text, str(self._path), "exec"), vars(module))


def answers(replay: type[Replay], lines: list[str]) -> list[Any]:
    core = replay()
    return [core.answer(line) for line in lines]


def differs(replay: type[Replay], lines: list[str], right: list[Any]) -> bool:
    try:
        return answers(replay, lines) != right
    except ArithmeticError:
        return True


@pytest.fixture(scope="module")
def told() -> list[tuple[list[str], list[Any]]]:
    """Histories, and what is right."""
    return [(lines, answers(Replay, lines)) for lines in histories("teeth", 8_000)]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(told: list[tuple[list[str], list[Any]]], mistake: str) -> None:
    with scaler_with(*MISTAKES[mistake]) as changed:
        assert any(differs(changed.Replay, lines, right) for lines, right in told)


def test_without_a_mistake_nothing_shows(told: list[tuple[list[str], list[Any]]]) -> None:
    with scaler_with("decision.decider", "SECOND_NS < now_ns", "SECOND_NS < now_ns") as same:
        assert same.Replay is not Replay
        assert all(answers(same.Replay, lines) == right for lines, right in told[:20])
