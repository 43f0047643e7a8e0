import asyncio
import io
import json
import logging
import socket
import threading
import time
from contextlib import redirect_stderr
from dataclasses import dataclass

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry, Counter

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.runtime import options as opt
from berth.runtime.admin import AdminServer
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.backoff import Backoff
from berth.runtime.errors import CannotStart, ConfigError
from berth.runtime.logs import configure_logging, fields
from berth.runtime.options import CommonOptions, parse_options
from berth.runtime.process import run_process
from berth.runtime.tasks import TaskReturned, in_thread, repeat, supervise


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    node_name: str = opt.option("the node")
    listen: Endpoint = opt.endpoint("where to listen", default="127.0.0.1:1")
    period: float = opt.seconds("how often", default=5.0, minimum=0.1)
    elect: bool = opt.switch("elect", default=True)
    names: tuple[str, ...] = opt.option("names", default=(), parse=opt.words)


def parse(*argv: str, **environ: str) -> Options:
    return parse_options(Options, process="agent", summary="s", argv=argv, environ=environ)


def test_flag_beats_environment_beats_default() -> None:
    assert parse("--node-name", "n").period == 5.0
    assert parse("--node-name", "n", BERTH_AGENT_PERIOD="2").period == 2.0
    assert parse("--node-name", "n", "--period", "3", BERTH_AGENT_PERIOD="2").period == 3.0


def test_switches_and_lists() -> None:
    assert parse("--node-name", "n", "--no-elect").elect is False
    assert parse("--node-name", "n", BERTH_AGENT_ELECT="off").elect is False
    assert parse("--node-name", "n", "--names", "b, a,,a").names == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {}, r"--node-name is required \(or set BERTH_AGENT_NODE_NAME\)"),
        (["--node-name", "n", "--listen", "x"], {}, "--listen: 'x' is not HOST:PORT"),
        (["--node-name", "n", "--period", "0"], {}, "--period: '0' is out of range"),
        (["--node-name", "n", "--period", "nan"], {}, "--period: 'nan' is out of range"),
        (["--node-name", "n"], {"BERTH_AGENT_ELECT": "maybe"}, r"--elect \(from BERTH_AGENT_ELECT\)"),
        (["--node-name", "n", "--nod", "m"], {}, "unrecognized arguments: --nod"),
    ],
)
def test_a_wrong_flag_is_named(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv, **environ)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--node-name" in shown
    assert "required; BERTH_AGENT_NODE_NAME" in shown
    assert "default 5 s; BERTH_AGENT_PERIOD" in shown


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:x", "a:65536", "::1:80", "a:-1", "a:٣"])
def test_not_an_endpoint(text: str) -> None:
    with pytest.raises(InvalidValue, match="not HOST:PORT"):
        Endpoint.parse(text)


def test_an_ipv6_address_without_brackets_is_shown_with_them() -> None:
    with pytest.raises(InvalidValue, match=r"brackets: \[fd00::1\]:8470$"):
        Endpoint.parse("fd00::1:8470")


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_brackets_take_both_families(host: str) -> None:
    """As `--agent=[$(HOST_IP)]:8470` in a pod: which family it is its author does not know."""
    endpoint = Endpoint.parse(f"[{host}]:8470")
    assert endpoint == Endpoint(host, 8470)
    assert Endpoint.parse(str(endpoint)) == endpoint


def test_endpoints() -> None:
    assert str(Endpoint.parse("[::1]:80")) == "[::1]:80"
    assert Endpoint.parse("h:0") == Endpoint("h", 0)


def test_backoff_grows_to_its_cap_and_starts_again() -> None:
    backoff = Backoff(initial_seconds=1, cap_seconds=5, jitter=0.5, random_unit=lambda: 0.5)
    assert [backoff.next() for _ in range(4)] == [1, 2, 4, 5]
    backoff.failures = 10**6
    assert backoff.next() == 5
    backoff.reset()
    assert backoff.next() == 1


async def _ends() -> None:
    return None


async def test_an_eternal_task_that_returns_is_a_failure() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with supervise() as tasks:
            tasks.eternal("short", _ends())
            await asyncio.Event().wait()
    assert caught.group_contains(TaskReturned)


async def test_leaving_the_block_cancels_the_tasks() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with supervise() as tasks:
        tasks.eternal("long", work())
        await asyncio.sleep(0)
    assert ended.is_set()


async def test_a_failing_step_is_repeated_and_a_wake_is_not_lost() -> None:
    calls: list[str] = []
    wake, done = asyncio.Event(), asyncio.Event()

    async def step() -> None:
        calls.append("x")
        if len(calls) == 1:
            raise RuntimeError("once")
        if len(calls) == 2:
            wake.set()  # a wake during the pass must cause another pass
        if len(calls) == 3:
            done.set()

    backoff = Backoff(initial_seconds=0, cap_seconds=0)
    task = asyncio.create_task(repeat(step, name="t", interval_seconds=3600, wake=wake, backoff=backoff))
    async with asyncio.timeout(5):
        await done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@dataclass(frozen=True, kw_only=True)
class NoOptions(CommonOptions):
    pass


async def test_a_trouble_that_lasts_is_said_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = [RuntimeError("a"), RuntimeError("a"), RuntimeError("b"), None, None]
    done, wake = asyncio.Event(), asyncio.Event()

    async def step() -> None:
        outcome = outcomes.pop(0)
        (wake if outcomes else done).set()
        if outcome:
            raise outcome

    caplog.set_level(logging.INFO)
    backoff = Backoff(initial_seconds=0, cap_seconds=0)
    task = asyncio.create_task(repeat(step, name="t", interval_seconds=3600, wake=wake, backoff=backoff))
    async with asyncio.timeout(5):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    said = [record.getMessage() for record in caplog.records if record.name == "berth.runtime.tasks"]
    assert said == ["pass failed, will be tried again"] * 2 + ["pass succeeds again"]


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


def test_json_logs_are_one_object_a_line_whatever_is_logged() -> None:
    stderr, handlers, level = io.StringIO(), logging.root.handlers[:], logging.root.level
    try:
        with redirect_stderr(stderr):
            configure_logging(format="json", level="info")
            logging.getLogger("x").info("two\nlines", extra=fields(pod='a"b\n', count=1))
    finally:
        logging.root.handlers[:], logging.root.level = handlers, level
    line = json.loads(stderr.getvalue())
    assert (line["message"], line["pod"], line["count"]) == ("two\nlines", 'a"b\n', 1)


async def test_admin_port() -> None:
    reason: list[str | None] = ["not synced"]
    stuck: list[str | None] = [None]
    registry = CollectorRegistry()
    Counter("berth_things", "t", registry=registry).inc()
    admin = AdminServer(
        Endpoint("127.0.0.1", 0),
        not_ready=lambda: reason[0],
        not_alive=lambda: stuck[0],
        pages={"/metrics": metrics_page(registry)},
    )
    async with admin, ClientSession(f"http://127.0.0.1:{admin.port}") as session:
        async with session.get("/readyz") as answer:
            assert (answer.status, await answer.text()) == (503, "not synced\n")
        reason[0] = None
        for path in ("/readyz", "/livez"):
            async with session.get(path) as answer:
                assert answer.status == 200
        stuck[0] = "hangs"
        async with session.get("/livez") as answer:
            assert (answer.status, await answer.text()) == (503, "hangs\n")
        async with session.get("/metrics") as answer:
            assert "berth_things_total 1.0" in await answer.text()


async def test_a_taken_port_is_cannot_start_and_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Endpoint("127.0.0.1", taken.getsockname()[1])
        admin = AdminServer(listen, not_ready=lambda: None)
        with pytest.raises(CannotStart, match=f"--admin-listen: cannot listen on {listen}"):
            async with admin:
                pass


async def test_cancelled_work_in_a_thread_is_waited_for() -> None:
    """Whoever cleans up after it must not race against the thread."""
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.2)
        done.set()

    task = asyncio.create_task(in_thread(work))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()
    assert await in_thread(sum, [1, 2]) == 3
