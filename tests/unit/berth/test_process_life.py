"""What an operator meets of every process: its flags, its log lines, its admin port, its end."""

import asyncio
import gc
import itertools
import json
import logging
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry, Counter

import berth.cli
import berth.runtime.process
from berth import __version__
from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.keys import Keys
from berth.kube.options import KubeOptions
from berth.runtime import options as opt
from berth.runtime.admin import AdminServer, Reply
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.backoff import Backoff
from berth.runtime.errors import CannotStart, ConfigError, Failed
from berth.runtime.logs import configure_logging, fields, one_line
from berth.runtime.options import CommonOptions, parse_options
from berth.runtime.process import fail, run_process, spare_the_collector, starting
from berth.runtime.tasks import first_of, repeat, supervise, wait_until_set, work_or_stop
from tests.fakes import leaping


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


# Flags


@pytest.mark.parametrize("text", ["inf", "infinity", "1e999", "-inf", "nan", "0.9", "-1"])
def test_a_number_is_finite_and_not_too_small(text: str) -> None:
    with pytest.raises(InvalidValue, match=rf"^'{text}' is out of range; at least 1 is expected$"):
        opt.number(minimum=1)(text)


def test_numbers_at_their_bounds() -> None:
    assert [opt.number(minimum=1)(text) for text in ("1", "2.5", "1e9")] == [1, 2.5, 1e9]
    with pytest.raises(InvalidValue, match="'ten' is not a number"):
        opt.number(minimum=1)("ten")


def test_integers_at_their_bounds() -> None:
    within = opt.integer(minimum=1, maximum=3)
    assert [within(text) for text in ("1", "3", " 2 ")] == [1, 3, 2]
    for text in ("0", "4", "-1"):
        with pytest.raises(InvalidValue, match=f"'{text}' is out of range; 1 to 3 is expected"):
            within(text)
    for text in ("1.0", "0x1", ""):
        with pytest.raises(InvalidValue, match=f"'{text}' is not an integer"):
            within(text)
    assert opt.integer()("0") == 0
    assert opt.integer()(str(2**40)) == 2**40
    for text in ("-1", str(10**30)):
        with pytest.raises(InvalidValue, match="is out of range"):
            opt.integer()(text)


@dataclass(frozen=True, kw_only=True)
class Flags(CommonOptions):
    file: str = opt.positional("the file", metavar="FILE")
    output: str | None = opt.option("where to", default=None, short="-o")
    share: float = opt.option("how much, in %", default=0.5, parse=opt.number(minimum=0), shown="half")
    dry_run: bool = opt.switch("only look", default=False)
    keep: bool = opt.switch("keep it", default=True)
    names: tuple[str, ...] = opt.option("who", default=("a", "b"), parse=opt.words)
    nobody: tuple[str, ...] = opt.option("no one", default=(), parse=opt.words)
    listen: Endpoint | None = opt.endpoint("where", default=None)
    peer: Endpoint = opt.endpoint("with whom", default="h:1")
    size: int = opt.option("how large", default=1024, parse=opt.byte_count, metavar="BYTES")


def parse(*argv: str, **environ: str) -> Flags:
    return parse_options(Flags, process="would-fit", summary="What it does.", argv=argv, environ=environ)


def test_every_kind_of_flag() -> None:
    said = parse(
        "f", "-o", "x", "--dry-run", "--no-keep", "--names=c,,c, d", "--listen=[::1]:2", "--size=1Ki"
    )
    assert (said.file, said.output, said.dry_run, said.keep) == ("f", "x", True, False)
    assert (said.names, said.listen, said.size) == (("c", "d"), Endpoint("::1", 2), 1024)
    default = parse("f")
    assert (default.output, default.dry_run, default.keep, default.listen) == (None, False, True, None)
    assert (default.names, default.peer) == (("a", "b"), Endpoint("h", 1))
    assert (default.log_format, default.log_level) == ("text", "info")
    assert parse("f", "--output=y").output == "y"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((yes, True) for yes in ("1", "TRUE", " yes", "on")),
        *((no, False) for no in ("0", "No", "off ", "false")),
    ],
)
def test_switches_in_the_environment(text: str, value: bool) -> None:
    assert parse("f", BERTH_WOULD_FIT_DRY_RUN=text).dry_run is value
    assert parse("f", BERTH_WOULD_FIT_KEEP=text).keep is value
    assert parse("f", "--dry-run", "--no-keep", BERTH_WOULD_FIT_DRY_RUN=text).dry_run is True


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {}, "the following arguments are required: FILE; see berth would-fit --help"),
        (["f"], {"BERTH_WOULD_FIT_KEEP": "y"}, r"--keep \(from BERTH_WOULD_FIT_KEEP\): 'y' is neither true"),
        (["f", "--log-level=trace"], {}, "'trace' is not one of debug, info, warning, error"),
        (["f", "--log-format=xml"], {}, "'xml' is not one of text, json"),
        (["f", "--size=1.5"], {}, "--size: '1.5' is not a whole number of bytes"),
        (["f", "--out=x"], {}, "unrecognized arguments: --out=x"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv, **environ)


def test_help_tells_every_flag_its_default_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("usage: berth would-fit ")
    assert "What it does." in shown
    assert "Each flag can also be given as BERTH_WOULD_FIT_FLAG in the environment." in shown
    for part in (
        "FILE the file",
        "-o TEXT, --output TEXT where to (default none; BERTH_WOULD_FIT_OUTPUT)",
        "how much, in % (default half; BERTH_WOULD_FIT_SHARE)",
        "--dry-run, --no-dry-run only look (default no; BERTH_WOULD_FIT_DRY_RUN)",
        "--keep, --no-keep keep it (default yes; BERTH_WOULD_FIT_KEEP)",
        "who (default a,b; BERTH_WOULD_FIT_NAMES)",
        "no one (default none; BERTH_WOULD_FIT_NOBODY)",
        "--listen HOST:PORT where (default none; BERTH_WOULD_FIT_LISTEN)",
        "--peer HOST:PORT with whom (default h:1; BERTH_WOULD_FIT_PEER)",
        "--size BYTES how large (default 1024; BERTH_WOULD_FIT_SIZE)",
        "--log-format text|json how log lines look (default text; ",
        "--log-level debug|info|warning|error ",
    ):
        assert part in shown


def test_where_the_api_server_is_and_how_keys_begin() -> None:
    def kube(*argv: str) -> KubeOptions:
        return parse_options(KubeOptions, process="agent", summary="s", argv=argv, environ={})

    assert (kube().kubeconfig, kube().system_namespace, kube().key_prefix) == (None, "berth-system", Keys())
    said = kube("--kubeconfig=k", "--system-namespace=n", "--key-prefix=example.org/")
    assert (said.kubeconfig, said.system_namespace, said.key_prefix) == ("k", "n", Keys("example.org/"))
    with pytest.raises(ConfigError, match="--key-prefix: 'x' is not a key prefix"):
        kube("--key-prefix=x")


# Log lines


def logged(format: str, level: str, say: Callable[[logging.Logger], object], capsys: Any) -> list[str]:
    configure_logging(format=format, level=level)
    say(logging.getLogger("berth.x"))
    lines: list[str] = capsys.readouterr().err.splitlines()
    return lines


def test_a_line_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = logged(
        "text",
        "info",
        lambda log: log.warning("two\nlines", extra=fields(pod="a b", none="", q='"', n=3, path="c\\d\r")),
        capsys,
    )
    stamp, _, rest = line.partition(" ")
    assert len(stamp.split(".")[1]) == 3
    assert rest == 'warning berth.x: two\\nlines pod="a b" none="" q="\\"" n=3 path=c\\\\d\\r'


def test_a_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = logged(
        "json",
        "info",
        lambda log: log.info("x", extra=fields(n=1, f=0.5, b=True, none=None, peer=Endpoint("h", 1))),
        capsys,
    )
    said = json.loads(line)
    time = said.pop("time")
    assert time.endswith("Z")
    assert len(time) == len("2026-01-01T00:00:00.000Z")
    assert said == {
        "level": "info",
        "logger": "berth.x",
        "message": "x",
        "n": 1,
        "f": 0.5,
        "b": True,
        "none": None,
        "peer": "h:1",
    }


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_crash_is_told_with_its_traceback(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(log: logging.Logger) -> None:
        try:
            raise RuntimeError("bug")
        except RuntimeError:
            log.exception("crashed")

    lines = logged(format, "info", crash, capsys)
    if format == "json":
        (line,) = lines
        assert json.loads(line)["exception"].endswith("RuntimeError: bug")
    else:
        assert lines[0].endswith("error   berth.x: crashed")
        assert lines[1] == "Traceback (most recent call last):"
        assert lines[-1] == "RuntimeError: bug"


def test_only_what_is_severe_enough_is_told_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(format="text", level="info")
    lines = logged("text", "warning", lambda log: (log.info("a"), log.warning("b")), capsys)
    assert [line.rpartition(" ")[2] for line in lines] == ["b"]
    assert one_line("a\\n\n") == "a\\\\n\\n"


# The admin port


async def test_the_admin_port_tells_metrics_in_the_form_that_is_asked_for() -> None:
    registry = CollectorRegistry()
    Counter("berth_things", "t", registry=registry).inc()
    admin = AdminServer(
        Endpoint("127.0.0.1", 0),
        not_ready=lambda: None,
        pages={"/metrics": metrics_page(registry), "/mine": lambda _: Reply(b"mine")},
    )
    async with admin, ClientSession(f"http://127.0.0.1:{admin.port}") as session:
        for accept, kind in (
            ("", "text/plain"),
            ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
        ):
            async with session.get("/metrics", headers={"Accept": accept}) as answer:
                assert answer.headers["Content-Type"].startswith(kind)
                assert ("# EOF" in await answer.text()) == (kind == "application/openmetrics-text")
        for path, text in (("/mine", "mine"), ("/livez", "ok\n"), ("/readyz", "ok\n")):
            async with session.get(path) as answer:
                assert (answer.status, await answer.text()) == (200, text)


async def test_the_admin_port_is_free_again_when_it_ends() -> None:
    for _ in range(2):
        admin = AdminServer(Endpoint("127.0.0.1", 0), not_ready=lambda: None)
        async with admin:
            port = admin.port
        with pytest.raises(OSError, match="onnect"):
            await asyncio.open_connection("127.0.0.1", port)


# The process


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


# Tasks


async def test_a_task_that_never_began_is_no_trouble() -> None:
    async def never() -> None:
        raise AssertionError

    async with supervise() as tasks:
        tasks.eternal("never", never())


async def test_a_failing_task_ends_the_others_and_says_who() -> None:
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("bug")

    with pytest.raises(ExceptionGroup) as caught:
        async with supervise() as tasks:
            tasks.eternal("waits", waits())
            tasks.eternal("fails", fails())
            await asyncio.Event().wait()
    assert caught.group_contains(RuntimeError, match="bug")
    assert ended.is_set()


def test_a_loop_comes_round_in_its_time_and_pauses_longer_while_it_fails() -> None:
    async def story() -> None:
        at: list[float] = []
        failures: list[Exception] = []

        async def step() -> None:
            at.append(leaping.now())
            if len(at) <= 12:
                raise RuntimeError("bug")

        task = asyncio.create_task(repeat(step, name="t", interval_seconds=3, on_error=failures.append))
        await asyncio.sleep(100)
        task.cancel()
        pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
        assert len(failures) == 12
        assert 0.05 < pauses[0] < 1  # what fails once is soon mended
        assert pauses[1] > pauses[0]
        assert 4 < max(pauses[:12]) < 6
        assert all(2.9 < pause < 3.1 for pause in pauses[12:])

    leaping.run(story())


def test_a_slow_loop_that_fails_is_not_tried_more_often_than_it_comes_round() -> None:
    async def story() -> None:
        count = 0

        async def step() -> None:
            nonlocal count
            count += 1
            raise RuntimeError("bug")

        task = asyncio.create_task(repeat(step, name="t", interval_seconds=300))
        await asyncio.sleep(3500)
        task.cancel()
        assert 10 < count < 25

    leaping.run(story())


async def test_a_wait_tells_whether_it_was_worth_it() -> None:
    event = asyncio.Event()
    assert await wait_until_set(event, timeout_seconds=0.01) is False
    event.set()
    assert await wait_until_set(event, timeout_seconds=0.01) is True


async def test_work_is_waited_for_until_it_ends_or_is_to_stop() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async def breaks() -> None:
        raise LookupError

    async with asyncio.timeout(5):
        assert await work_or_stop(asyncio.sleep(0, "done"), stop) == "done"
        with pytest.raises(LookupError):
            await work_or_stop(breaks(), stop)
        asyncio.get_running_loop().call_later(0.01, stop.set)
        assert await work_or_stop(for_ever(), stop) is None
        assert ended.is_set(), "it has ended before anybody goes on"
        # Nor does it outlive who waited for it.
        ended.clear()
        waiting = asyncio.create_task(work_or_stop(for_ever(), asyncio.Event()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert ended.is_set()
        assert waiting.cancelled()


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


async def test_the_first_of_several_events_is_enough_and_leaves_no_task() -> None:
    one, two = asyncio.Event(), asyncio.Event()
    waiting = asyncio.create_task(first_of(one, two))
    await asyncio.sleep(0)
    assert not waiting.done()
    two.set()
    await asyncio.wait_for(waiting, 5)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_pauses_are_spread_evenly_around_their_length() -> None:
    def pauses(unit: float, **more: float) -> list[float]:
        backoff = Backoff(initial_seconds=1, cap_seconds=3, random_unit=lambda: unit, **more)
        return [round(backoff.next(), 6) for _ in range(3)]

    assert pauses(0.5) == [1, 2, 3]
    assert pauses(0.0, jitter=0.5) == [0.5, 1, 1.5]
    assert pauses(1.0, jitter=0.5) == [1.5, 3, 4.5]
    assert pauses(0.5, factor=3) == [1, 3, 3]
    low, high = pauses(0.0)[0], pauses(1.0)[0]
    assert 0.5 <= low < 1 < high <= 1.5
    assert 1 - low == pytest.approx(high - 1)
    drawn = {Backoff(initial_seconds=1, cap_seconds=1).next() for _ in range(20)}
    assert len(drawn) > 10  # of many callers no two come back at once


# The console script


def called(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[str]:
    asked: list[str] = []

    def import_module(name: str) -> Any:
        asked.append(name)
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(berth.cli, "importlib", SimpleNamespace(import_module=import_module))
    return asked


def test_a_command_is_given_its_arguments_and_tells_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def command(argv: list[str]) -> int:
        given.append(argv)
        return 5

    asked = called(monkeypatch, SimpleNamespace(run=command))
    assert berth.cli.main(["why", "--node", "n"]) == 5
    monkeypatch.setattr(sys, "argv", ["berth", "top"])
    assert berth.cli.main() == 5
    assert (asked, given) == (["binder.cli.why", "binder.cli.top"], [["--node", "n"], []])


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_who_asks_is_told_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert berth.cli.main(argv) == 0
    shown = capsys.readouterr().out
    paragraphs = shown.split("\n\n")
    assert paragraphs[:2] == [
        "usage: berth COMMAND [--flags]",
        "GPU sharing for model serving on Kubernetes.",
    ]
    assert len(paragraphs) == 4
    for command, (_, summary) in berth.cli.COMMANDS.items():
        assert f"  {command:12} {summary}" in paragraphs[2].splitlines()


def test_every_command_can_be_run() -> None:
    names = ["agent", "binder", "loader", "proxy", "gateway", "activator", "scaler", "scale"]
    names += ["top", "why", "would-fit", "upgrade-node"]
    names += ["demo", "keys"]
    assert [*berth.cli.COMMANDS] == names
    for module, _ in berth.cli.COMMANDS.values():
        assert callable(__import__(module, fromlist=["run"]).run)


def test_its_version_and_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert berth.cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"berth {__version__}\n"
    assert berth.cli.main(["agnet"]) == 2
    assert capsys.readouterr().err == "berth: 'agnet' is not a command; see berth --help\n"


def test_what_an_image_does_not_hold_is_told_and_what_is_broken_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called(monkeypatch, ModuleNotFoundError(name="localcluster"))
    assert berth.cli.main(["demo"]) == 3
    assert "demo runs from a source checkout only: make demo" in capsys.readouterr().err
    called(monkeypatch, ModuleNotFoundError(name="grpc"))
    with pytest.raises(ModuleNotFoundError):
        berth.cli.main(["agent"])
