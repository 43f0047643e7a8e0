"""Several processes that serve as one: both ends of their channel, with the workers as tasks of this process."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.errors import EXIT_CRASH, CannotStart
from proxy.config import ProxyOptions
from proxy.gateway import worker as worker_module
from proxy.gateway import worker_pool as module
from proxy.gateway.plane_config import PlaneConfig
from proxy.gateway.serving import Server
from proxy.gateway.spec import Events, Spec
from proxy.gateway.standalone import plane_config, static_spec
from proxy.gateway.worker_pool import WorkerPool
from proxy.request.replica import Replica
from tests.fakes.eventually import until

ANYWHERE = Endpoint("127.0.0.1", 0)
NOWHERE = Endpoint("127.0.0.1", 1)


class Process:
    """A worker's process: its `main` as a task, or something else in its place."""

    def __init__(self, work: asyncio.Task[int]) -> None:
        self.work, self.killed = work, False

    async def wait(self) -> int:
        try:
            return await asyncio.shield(self.work)
        except asyncio.CancelledError:
            if not self.work.cancelled():
                raise
            return -signal.SIGKILL

    def kill(self) -> None:
        self.killed = True
        self.work.cancel()


Main = Callable[[socket.socket, Sequence[Sequence[socket.socket]]], Any]


class Stage:
    """Where workers are started, and what they are made of."""

    def __init__(self) -> None:
        self.main: Main = worker_module.main
        self.processes: list[Process] = []
        self.servers: list[Server] = []
        self.wake = asyncio.Event()
        self.events = Events(self.wake)

    async def create(self, *command: str, pass_fds: tuple[int, ...], **_: Any) -> Process:
        assert command[1:3] == ("-m", "proxy.gateway.worker")
        copies = {str(one): os.dup(one) for one in pass_fds}
        control, *ports = command[3:]
        sockets = [[socket.socket(fileno=copies[one]) for one in port.split(",")] for port in ports]
        work = self._run(socket.socket(fileno=copies[control]), sockets)
        self.processes.append(Process(asyncio.create_task(work)))
        return self.processes[-1]

    async def _run(self, control: socket.socket, sockets: list[list[socket.socket]]) -> int:
        try:
            code: int = await self.main(control, sockets)
        finally:  # as with a process
            for one in (one for of_port in sockets for one in of_port):
                one.close()
        return code

    @asynccontextmanager
    async def pool(self, **more: Any) -> AsyncIterator[WorkerPool]:
        config, spec = planned(**more)
        async with WorkerPool(config, self.events, spec) as pool:
            yield pool

    @property
    def replicas(self) -> list[Replica]:
        return [server._only_replica().replica for server in self.servers]


def planned(**more: Any) -> tuple[PlaneConfig, Spec]:
    wanted = {"http_listen": ANYWHERE, "grpc_listen": ANYWHERE, "workers": 2, **more}
    options = ProxyOptions(model=ModelName("own"), triton_http=NOWHERE, triton_grpc=NOWHERE, **wanted)
    return plane_config(options), static_spec(options)


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    one = Stage()
    open_server = worker_module.open_server

    @asynccontextmanager
    async def watched(*what: Any, **more: Any) -> AsyncIterator[Server]:
        async with open_server(*what, **more) as server:
            one.servers.append(server)
            yield server

    monkeypatch.setattr(asyncio, "create_subprocess_exec", one.create)
    monkeypatch.setattr(worker_module, "open_server", watched)
    monkeypatch.setattr(worker_module, "configure_logging", lambda **_: None)
    monkeypatch.setattr(worker_module, "settle", lambda: None)
    monkeypatch.setattr(worker_module, "_STATUS_SECONDS", 0.01)
    monkeypatch.setattr(worker_module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    yield one
    for process in one.processes:
        process.work.cancel()
    await asyncio.gather(*(process.work for process in one.processes), return_exceptions=True)


async def test_every_worker_applies_every_spec_and_has_the_first_before_its_ports_are_open(
    stage: Stage,
) -> None:
    async with stage.pool() as pool:
        assert [one.names.public for one in stage.replicas] == [b"own"] * 2
        assert pool.ports == stage.servers[0].ports == stage.servers[1].ports
        _, spec = planned()
        changes = [one.next_change() for one in stage.replicas]
        pool.apply(Spec(replicas=spec.replicas, leaving=frozenset({spec.replicas[0].pod_uid})))
        await until(lambda: [one.not_ready() for one in stage.replicas] == ["draining"] * 2)
        assert all(change.is_set() for change in changes)


async def test_their_statuses_are_one_report(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_STATUS_SECONDS", 60)
    async with stage.pool() as pool:
        before = pool.seconds()
        for reason in (None, "gone"):
            for replica in stage.replicas:
                replica.triton_says(reason)  # which is reported at once
            await until(
                lambda reason=reason: (  # type: ignore[misc]
                    [set(one.not_ready.values()) for one in pool.statuses()] == [{reason} - {None}] * 2
                )
            )
        assert pool.seconds() > before


async def test_a_crash_that_a_worker_notices_is_an_event_of_the_pool(stage: Stage) -> None:
    async with stage.pool():
        stage.wake.clear()
        stage.servers[1]._events.triton_crashed(["a", "b"])
        await until(stage.wake.is_set)
        assert stage.events.take_crashes() == [frozenset({"a", "b"})]


async def test_they_end_together_once_none_has_anything_to_do(stage: Stage) -> None:
    async with stage.pool() as pool:
        stage.replicas[1].admissions.running = 1
        ending = asyncio.create_task(pool.idle())
        await asyncio.sleep(0.03)
        assert not ending.done()  # nothing has been told to end yet
        await pool.drain_all()
        await until(lambda: [one.is_idle for one in pool._workers] == [True, False])
        assert not ending.done()
        stage.replicas[1].admissions.running = 0
        await asyncio.wait_for(ending, 5)
        for server in stage.servers:
            with pytest.raises(OSError, match="not listening"):
                assert server.ports
    assert [await process.wait() for process in stage.processes] == [0, 0]
    assert not any(process.killed for process in stage.processes)


@pytest.mark.parametrize("limit", [0, 3])
async def test_they_share_one_limit(stage: Stage, limit: int) -> None:
    """Without one each has its own queue, and asks no other for anything."""
    async with stage.pool(container_concurrency=limit, queue_depth=2):
        first, second = (one.admissions for one in stage.replicas)
        admitted = [admissions.admit(0.0, list) for admissions in (first, second, first, second)]
        assert [one.is_running for one in admitted] == ([True] * 4 if limit == 0 else [True] * 3 + [False])
        for one in admitted:
            one.release(0.0)
    await asyncio.gather(*(process.work for process in stage.processes))


async def test_what_they_may_take_together_is_divided(stage: Stage) -> None:
    async with stage.pool(workers=4, max_inflight_bytes=1000):
        for budgets in zip(*((one.budget, one.admissions.bytes) for one in stage.replicas), strict=True):
            assert [one.limit_bytes for one in budgets] == [250] * 4


async def test_a_worker_that_cannot_serve_says_why(stage: Stage) -> None:
    missing = Path("/missing")
    with pytest.raises(CannotStart, match="--tls-cert /missing"):
        async with stage.pool(tls_cert=missing, tls_key=missing):
            raise AssertionError("it serves")
    assert [process.work.result() for process in stage.processes] == [3, 3]


@pytest.mark.parametrize("flag", ["--http-listen", "--grpc-listen"])
async def test_a_port_that_is_taken_is_named_by_its_flag(stage: Stage, flag: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Endpoint("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(CannotStart, match=f"{flag}: cannot listen on"):
            async with stage.pool(**{flag.removeprefix("--").replace("-", "_"): listen}):
                raise AssertionError("it serves")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not stage.processes


async def test_workers_that_do_not_start_are_not_waited_for_long(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(control: socket.socket, _: object) -> int:
        with control:
            await asyncio.sleep(60)
        return 0

    monkeypatch.setattr(module, "_START_SECONDS", 0.02)
    monkeypatch.setattr(module, "_END_SECONDS", 0.02)
    stage.main = hangs
    with pytest.raises(CannotStart, match="--workers"):
        async with stage.pool():
            raise AssertionError("it serves")
    assert [process.killed for process in stage.processes] == [True, True]


async def test_a_worker_that_ends_before_it_serves_is_no_worker(stage: Stage) -> None:
    async def dies(control: socket.socket, _: object) -> int:
        control.close()
        return 1

    stage.main = dies
    with pytest.raises(CannotStart, match="ended at once"):
        async with stage.pool():
            raise AssertionError("it serves")


async def test_a_worker_that_dies_ends_the_process(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    async with stage.pool():
        await asyncio.sleep(0.02)
        assert not codes
        stage.processes[0].kill()
        await until(lambda: codes)
    assert codes == [EXIT_CRASH]


async def test_signals_are_the_first_processs_business(stage: Stage) -> None:
    """A terminal sends them to all: a worker serves until its channel ends."""
    async with stage.pool(workers=1):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        await asyncio.sleep(0.02)
        assert not stage.processes[0].work.done()
