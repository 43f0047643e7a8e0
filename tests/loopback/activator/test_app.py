"""`berth activator` as its operator sees it: a process that attaches to a scaler, buffers, cold_starts, tells and ends."""

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from berth.contract.activation import RouteMode
from berth.contract.endpoint import Endpoint
from berth.contract.scaling import ModelKey
from proxy.activator.app import ActivatorProcess, serving
from proxy.activator.config import ActivatorOptions
from scaler.activation.addresses import keep_client
from scaler.activation.ports import PortPair
from tests.fakes.eventually import until
from tests.fakes.pods import FakePod
from tests.fakes.scaler import Core, Scaler, assignment
from tests.loopback.activator.conftest import free_port
from tests.loopback.activator.test_buffering import BODY

OWN = ModelKey("a", "own")
PAIR = PortPair(20000, 20001)
CLIENT = "127.0.0.1"


class Stage:
    """A scaler, and the address of an activator that nobody else on this machine has."""

    def __init__(self, scaler: Scaler, token: Path) -> None:
        self.scaler, self.token = scaler, token
        self.address = f"127.{random.randrange(64, 250)}.{random.randrange(256)}.{random.randrange(1, 250)}"
        scaler.authenticator.addresses = frozenset({self.address})
        token.write_text("berth-system/act-1")
        self.want()

    def want(self, **more: Any) -> None:
        fields = {"public_name": "own", "rest_port": PAIR.rest, "grpc_port": PAIR.grpc, **more}
        self.scaler.core.wanted[OWN] = assignment(OWN, **fields)
        self.scaler.core.assign(OWN)

    def know(self, address: str = CLIENT, namespace: str = "a") -> None:
        meta = {"uid": address, "namespace": namespace, "name": "client"}
        self.scaler.sessions.set_client(keep_client({"metadata": meta, "status": {"podIP": address}}))

    @property
    def options(self) -> ActivatorOptions:
        return ActivatorOptions(
            scaler=self.scaler.endpoint,
            token_file=self.token,
            address=self.address,
            admin_listen=Endpoint("127.0.0.1", 0),
            drain_delay=0.2,
            drain_timeout=5.0,
        )

    @property
    def flags(self) -> list[str]:
        said = self.options
        return [
            f"--scaler={said.scaler}",
            f"--token-file={said.token_file}",
            f"--address={said.address}",
            "--drain-delay=4",
            "--drain-timeout=60",
        ]

    async def listens(self) -> None:
        board = self.scaler.activators
        await until(lambda: board.listening(board, OWN, PAIR) == {self.address}, seconds=60)

    async def ask(self) -> tuple[int, Any]:
        url = f"http://{self.address}:{PAIR.rest}/v2/models/own/infer"
        async with aiohttp.ClientSession() as session, session.post(url, data=BODY) as answer:
            return answer.status, await answer.json(content_type=None)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with Scaler(Core()).up() as scaler:
        yield Stage(scaler, tmp_path / "token")


@pytest.fixture
async def pod() -> AsyncIterator[FakePod]:
    made = await FakePod().start()
    yield made
    await made.die()


@asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[ActivatorProcess]:
    async with serving(stage.options) as activator:
        yield activator


async def scraped(port: int) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        return await answer.text()


async def ready(port: int) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as answer:
        return answer.status, await answer.text()


async def test_a_request_starts_its_model_is_buffered_and_answered(stage: Stage, pod: FakePod) -> None:
    stage.know()
    async with running(stage) as activator:
        await stage.listens()
        asked = asyncio.create_task(stage.ask())
        reports = stage.scaler.core.reports
        await until(lambda: reports)
        assert (reports[0][1].cold_start, reports[0][1].buffered) == (True, 1)
        text = await scraped(activator.admin.port)
        assert 'berth_activator_buffered_requests{model="own",namespace="a"} 1.0' in text
        assert 'berth_activator_cold_starts_total{model="own",namespace="a"} 1.0' in text
        stage.want(endpoints=(pod.as_endpoint(ready=False),))
        assert (await asked)[0] == 200
        # Each second what is buffered, and once that nothing is any more.
        await until(lambda: reports[-1][1].buffered == 0)
        assert sum(report.arrived for _, report in reports) == 1
        assert sum(report.forwarded for _, report in reports) == 1
        # A scrape may be a second old. Of the phases the last one: the others may have been reached between two looks.
        wanted = (
            'berth_activator_forwarded_requests_total{model="own",namespace="a"} 1.0',
            'cold_start_seconds_bucket{le="+Inf",phase="forwarded"} 1.0',
        )
        async with asyncio.timeout(20):
            while not all(line in text for line in wanted):
                await asyncio.sleep(0.02)
                text = await scraped(activator.admin.port)
        assert "berth_activator_scaler_connected 1.0" in text


async def test_who_is_not_known_wakes_nobody(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.activator.port._UNKNOWN_SECONDS", 0.3)
    stage.know("127.0.0.9")
    async with asyncio.timeout(30), running(stage) as activator:
        await stage.listens()
        with pytest.raises(aiohttp.ClientError):
            await stage.ask()
        stage.know(CLIENT, "b")
        await asyncio.sleep(0.1)
        with pytest.raises(aiohttp.ClientError):
            await stage.ask()
        assert stage.scaler.core.reports == []
        text = await scraped(activator.admin.port)
        assert 'refused_requests_total{model="own",namespace="a",reason="unknown-client"} 2.0' in text
        stage.want(clients=frozenset({"*"}))
        await asyncio.sleep(0.1)
        asked = asyncio.create_task(stage.ask())
        await until(lambda: stage.scaler.core.reports)
        asked.cancel()


async def test_it_is_ready_from_the_first_word_on_whether_or_not_a_scaler_is_there(
    stage: Stage, pod: FakePod
) -> None:
    stage.know()
    options = stage.options
    async with Scaler(Core(leads=False)).up() as idle:
        idle.authenticator.addresses = frozenset({stage.address})
        stage.scaler, other = idle, stage.scaler
        async with running(stage) as activator:
            await until(lambda: idle.authenticator.asked)
            assert await ready(activator.admin.port) == (
                503,
                "no scaler has sent yet which models there are\n",
            )
            idle.core.leads, idle.core.wanted = True, other.core.wanted
            stage.know()
            await stage.listens()
            assert await ready(activator.admin.port) == (200, "ok\n")
            stage.want(endpoints=(pod.as_endpoint(),))
            assert (await stage.ask())[0] == 200
            # It is killed, and for good.
            idle.sessions.end()
            idle.core.leads = False
            await until(lambda: not activator.control.is_connected)
            assert await ready(activator.admin.port) == (200, "ok\n")
            assert (await stage.ask())[0] == 200
    assert options.address == stage.address


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(1024, 320), (2**20, 65_536), (sys.maxsize, 65_536)]
)
async def test_there_are_no_more_connections_than_descriptors_for_them(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, descriptors: int, connections: int
) -> None:
    monkeypatch.setattr("proxy.activator.app.allow_descriptors", lambda: descriptors)
    bounds = ActivatorProcess(stage.options).models.bounds
    assert bounds.connections.limit_bytes == connections
    assert (bounds.places.limit_bytes, bounds.memory.limit_bytes) == (65_536, 256 * 1024**2)


async def test_what_is_held_outlives_the_scaler(stage: Stage, pod: FakePod) -> None:
    """Killed between the request and the replica: the next one is told of what waits, and brings the replica."""
    stage.know()
    async with running(stage) as activator:
        await stage.listens()
        asked = asyncio.create_task(stage.ask())
        await until(lambda: stage.scaler.core.reports)
        stage.scaler.sessions.end()
        stage.scaler.core.leads = False
        await until(lambda: not activator.control.is_connected)
        stage.scaler.core.reports.clear()
        await asyncio.sleep(0.3)
        assert not asked.done()
        stage.scaler.core.leads = True
        await until(lambda: stage.scaler.core.reports)
        assert (stage.scaler.core.reports[0][1].buffered, stage.scaler.core.reports[0][1].cold_start) == (
            1,
            True,
        )
        stage.want(endpoints=(pod.as_endpoint(),))
        assert (await asked)[0] == 200


async def test_a_client_that_started_while_no_scaler_was_there_waits_for_the_next(
    stage: Stage, pod: FakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.activator.port._UNKNOWN_SECONDS", 0.3)
    stage.know("127.0.0.9")
    async with running(stage) as activator:
        await stage.listens()
        stage.scaler.core.leads = False
        stage.scaler.sessions.end()
        await until(lambda: not activator.control.is_connected)
        asked = asyncio.create_task(stage.ask())
        await asyncio.sleep(1)
        assert not asked.done()
        stage.know()
        stage.scaler.core.leads = True
        stage.want(endpoints=(pod.as_endpoint(),))
        assert (await asked)[0] == 200


async def test_a_process_ends_in_order(stage: Stage, pod: FakePod) -> None:
    """SIGTERM: out of the slices first, serving on; then nobody new; what is buffered comes to its end."""
    stage.know()
    admin = free_port()
    command = [sys.executable, "-m", "berth.cli", "activator", *stage.flags]
    process = await asyncio.create_subprocess_exec(*command, f"--admin-listen=127.0.0.1:{admin}")
    try:
        async with asyncio.timeout(120):
            await stage.listens()
            asked = asyncio.create_task(stage.ask())
            await until(lambda: stage.scaler.core.reports)
            process.send_signal(signal.SIGTERM)
            (one,) = stage.scaler.activators
            await until(lambda: one.draining)
            assert (await ready(admin))[0] == 503
            # Not out of every kube-proxy yet: whoever comes is served.
            late = asyncio.create_task(stage.ask())
            await until(lambda: any(report.buffered == 2 for _, report in stage.scaler.core.reports))
            # Its ports close, and are told to be closed, before what is buffered has ended.
            await until(lambda: not one.open)
            with pytest.raises(aiohttp.ClientError):
                await stage.ask()
            stage.want(mode=RouteMode.SERVE, endpoints=(pod.as_endpoint(),))
            assert [(await asked)[0], (await late)[0]] == [200, 200]
            assert await process.wait() == 0
        await until(lambda: not list(stage.scaler.activators))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--scaler is required"),
        (["--scaler=x"], "--scaler: 'x' is not HOST:PORT"),
        (["--scaler=x:1", "--token-file=t", "--address=host"], "--address: 'host' is not an address"),
        (
            ["--scaler=x:1", "--token-file=t", "--address=10.0.0.1", "--max-buffered-requests=0"],
            "--max-buffered-requests: '0'",
        ),
        # Of the documentation's, so no machine has it.
        (
            ["--scaler=x:1", "--token-file=t", "--address=203.0.113.9"],
            "--address: 203.0.113.9: Cannot assign",
        ),
    ],
)
def test_bad_options_are_reported_in_one_line(
    flags: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from berth.cli import main

    assert main(["activator", *flags]) == 2
    *logged, line = capfd.readouterr().err.strip().splitlines()
    assert all(" info " in one for one in logged)
    assert said in line
