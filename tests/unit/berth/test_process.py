"""How a process begins and ends."""

import asyncio
import gc
import io
import logging
import signal
import weakref
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import berth.cli
import berth.runtime.process
from berth.contract.endpoint import Endpoint
from berth.runtime import options as opt
from berth.runtime.errors import CannotStart, ConfigError, Failed
from berth.runtime.options import CommonOptions
from berth.runtime.process import fail, run_process, spare_the_collector, starting
from berth.runtime.tasks import wait_until_set


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@dataclass(frozen=True, kw_only=True)
class Plain(CommonOptions):
    word: str = opt.option("a word", default="w")


def run(main: Any, *argv: str) -> int:
    return run_process("t", "s", Plain, main, argv)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("--x: wrong"), 2, "berth t: --x: wrong"),
        (CannotStart("no port"), 3, "berth t: no port"),
        (Failed("no such layer"), 1, "berth t: no such layer"),
        (SystemExit(7), 7, ""),
        (SystemExit("text"), 1, ""),
        (KeyboardInterrupt(), 1, ""),
        (RuntimeError("bug"), 1, "RuntimeError: bug"),
        (BaseExceptionGroup("", [BaseExceptionGroup("", [CannotStart("deep")])]), 3, "berth t: deep"),
        (ExceptionGroup("", [RuntimeError("bug"), Failed("reason")]), 1, "berth t: reason"),
    ],
)
def test_how_it_ends_tells_why(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main(_: Plain, __: asyncio.Event) -> None:
        raise error

    assert run(main) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.removesuffix("\n").endswith(said)
    if isinstance(error, (ConfigError, CannotStart, Failed)):
        assert last == said


def test_it_tells_its_options_at_its_start_and_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(options: Plain, _: asyncio.Event) -> None:
        assert options.word == "x"

    assert run(main, "--word=x") == 0
    first, last = capsys.readouterr().err.splitlines()
    assert 'starting process=t options="log_format=text log_level=info word=x"' in first
    assert last.endswith("stopped process=t")
    assert run(main, "--word") == 2
    assert capsys.readouterr().err.startswith("berth t: argument --word: expected one argument; see")
    assert fail("t", "no", 5) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_it_to_stop_and_a_second_one_makes_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(berth.runtime.process, "os", SimpleNamespace(environ={}, _exit=exits.append))

    async def main(_: Plain, stop: asyncio.Event) -> None:
        signal.raise_signal(number)
        assert await wait_until_set(stop, timeout_seconds=5)
        assert exits == []
        signal.raise_signal(number)
        while not exits:
            await asyncio.sleep(0)

    assert run(main) == 0
    assert exits == [128 + number]


def test_a_loop_of_its_own_is_used() -> None:
    made: list[asyncio.AbstractEventLoop] = []

    def factory() -> asyncio.AbstractEventLoop:
        made.append(asyncio.new_event_loop())
        return made[-1]

    async def main(_: Plain, __: asyncio.Event) -> None:
        assert [asyncio.get_running_loop()] == made

    assert run_process("t", "s", Plain, main, [], loop_factory=factory) == 0


def test_a_listener_that_cannot_listen_says_which() -> None:
    for error, reason in ((OSError(98, "in use"), "in use"), (OSError("odd"), "odd")):
        with (
            pytest.raises(CannotStart, match=f"^--listen: cannot listen on h:1: {reason}$"),
            starting("--listen", Endpoint("h", 1)),
        ):
            raise error


def test_the_collector_is_spared_what_stays() -> None:
    before, cycle = gc.get_freeze_count(), Cycle()
    gone = weakref.ref(cycle)
    try:
        gc.disable()
        del cycle
        spare_the_collector()
        assert gone() is None, "what is no longer needed does not stay for ever"
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
        gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.own = self


@dataclass(frozen=True, kw_only=True)
class NoOptions(CommonOptions):
    pass


async def _cannot_start(_: CommonOptions, __: asyncio.Event) -> None:
    raise CannotStart("no port")


async def _bad_config(_: CommonOptions, __: asyncio.Event) -> None:
    raise ExceptionGroup("several", [ConfigError("--x: wrong")])


async def _crash(_: CommonOptions, __: asyncio.Event) -> None:
    raise RuntimeError("bug")


async def _done(_: CommonOptions, __: asyncio.Event) -> None:
    return None


@pytest.mark.parametrize(
    ("main", "argv", "code", "said"),
    [
        (_done, [], 0, ""),
        (_crash, [], 1, "RuntimeError: bug"),
        (_bad_config, [], 2, "berth t: --x: wrong"),
        (_done, ["--log-level", "loud"], 2, "berth t: --log-level: 'loud' is not one of"),
        (_cannot_start, [], 3, "berth t: no port"),
    ],
)
def test_exit_codes(main: object, argv: list[str], code: int, said: str) -> None:
    stderr, handlers, level = io.StringIO(), logging.root.handlers[:], logging.root.level
    try:
        with redirect_stderr(stderr):
            assert run_process("t", "s", NoOptions, main, argv) == code  # type: ignore[arg-type]
    finally:
        logging.root.handlers[:], logging.root.level = handlers, level
    assert said in stderr.getvalue()
