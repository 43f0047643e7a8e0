"""Several serving processes as one: both ends of what they say to each other, here as tasks of one process."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.errors import EXIT_CRASH, CannotStart
from proxy import worker as worker_module
from proxy import workers as module
from proxy.config import ProxyOptions
from proxy.policy.model_facts import ModelFacts
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.replica import Replica
from proxy.request.traffic import Figures
from proxy.server import Server, own_replica
from proxy.upstream.health import Upstream
from proxy.workers import Crew
from tests.fakes.eventually import until

ANYWHERE = Endpoint("127.0.0.1", 0)


def options(**more: Any) -> ProxyOptions:
    wanted = {"http_listen": ANYWHERE, "grpc_listen": ANYWHERE, "workers": 2, **more}
    return ProxyOptions(model=ModelName("own"), **wanted)


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


Main = Callable[[socket.socket, tuple[int, int] | None], Any]


class Stage:
    """Where workers are started, and what they are made of."""

    def __init__(self) -> None:
        self.main: Main = worker_module.main
        self.processes: list[Process] = []
        self.servers: list[Server] = []
        self.copies: list[Replica] = []
        self.wheres: list[UpstreamCluster] = []
        self.descriptors: list[tuple[int, ...]] = []

    async def create(self, *command: str, pass_fds: tuple[int, ...], **_: Any) -> Process:
        theirs, *shared = (os.dup(one) for one in pass_fds)
        assert command[1:] == ("-m", "proxy.worker", *map(str, pass_fds))
        self.descriptors.append(tuple(shared))
        control = socket.socket(fileno=theirs)
        limits = (shared[0], shared[1]) if shared else None
        self.processes.append(Process(asyncio.create_task(self.main(control, limits))))
        return self.processes[-1]


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    one = Stage()
    serving, open_upstream = worker_module.serving, worker_module.open_upstream

    @asynccontextmanager
    async def watched(*what: Any, **more: Any) -> AsyncIterator[Server]:
        assert more.pop("share_ports")  # each has ports of its own here
        async with serving(*what, **more) as server:
            one.servers.append(server)
            yield server

    @asynccontextmanager
    async def opened(copy: Replica, where: UpstreamCluster) -> AsyncIterator[Upstream]:
        async with open_upstream(copy, where) as upstream:
            one.copies.append(copy)
            one.wheres.append(where)
            yield upstream

    monkeypatch.setattr(asyncio, "create_subprocess_exec", one.create)
    monkeypatch.setattr(worker_module, "serving", watched)
    monkeypatch.setattr(worker_module, "open_upstream", opened)
    monkeypatch.setattr(worker_module, "configure_logging", lambda **_: None)
    monkeypatch.setattr(worker_module, "settle", lambda: None)
    monkeypatch.setattr(worker_module, "_FIGURES_SECONDS", 0.01)
    monkeypatch.setattr(worker_module, "_IDLE_LOOK_SECONDS", 0.01)
    yield one
    for process in one.processes:
        process.work.cancel()
    await asyncio.gather(*(process.work for process in one.processes), return_exceptions=True)


def own() -> tuple[Replica, UpstreamCluster]:
    return own_replica(options()), UpstreamCluster()


async def test_every_worker_hears_of_every_change(stage: Stage) -> None:
    copy, where = own()
    copy.withheld = "broken"
    async with Crew(options(), copy, where):
        await until(lambda: [one.not_served for one in stage.copies] == [copy.not_served] * 2)
        assert [one.endpoint for one in stage.wheres] == [None, None]
        changes = [one.next_change() for one in stage.copies]
        told = UpstreamEndpoint(Endpoint("h", 1), Endpoint("g", 2), {"key": "k"}, {"meta": "m"})
        where.move(told)
        copy.facts = ModelFacts(is_decoupled=True)
        copy.triton_says(None)
        await until(lambda: all(change.is_set() for change in changes))
        for one in stage.copies:
            assert (one.facts, one.is_served) == (copy.facts, True)
        kept = [one.endpoint for one in stage.wheres]
        assert kept == [told, told]
        # Whoever watches hears of it, and the last reason counts, which the first process alone knows.
        await until(lambda: [one.not_ready() for one in stage.copies] == ["broken"] * 2)
        changes = [one.next_change() for one in stage.copies]
        copy.withheld = None
        await until(lambda: all(change.is_set() for change in changes))
        assert [one.not_ready() for one in stage.copies] == [None] * 2
        copy.drain()
        await until(lambda: [one.not_ready() for one in stage.copies] == ["draining"] * 2)
        # The same way to Triton is the same object: what was looked up for it is still good.
        assert all(one.endpoint is was for one, was in zip(stage.wheres, kept, strict=True))


async def test_a_change_that_nobody_announces_is_told_too(stage: Stage) -> None:
    """As where Triton is, which changes without a change of readiness."""
    copy, where = own()
    async with Crew(options(), copy, where):
        await until(lambda: [one.not_served for one in stage.copies] == [copy.not_served] * 2)
        changes = [one.next_change() for one in stage.copies]
        where.move(UpstreamEndpoint(ANYWHERE, ANYWHERE))
        await until(lambda: [one.endpoint for one in stage.wheres] == [where.endpoint] * 2)
        assert not any(change.is_set() for change in changes)  # not a change of readiness


async def test_their_figures_are_one_report(stage: Stage) -> None:
    copy, where = own()
    async with Crew(options(), copy, where) as crew:
        assert not crew.figures().model_ready
        copy.triton_says(None)
        assert crew.figures().model_ready  # by the one that knows
        for number, server in enumerate(stage.servers, 1):
            server._copy.rest.answered("200", 0.1)
            server._copy.rest.received_bytes += number
        await until(lambda: crew.figures().rest.codes == {"200": 2})
        assert crew.figures().rest.received_bytes == 3


async def test_they_end_together_once_all_have_nothing_to_do(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    async with Crew(options(), *own()) as crew:
        stage.servers[1]._copy.admissions.running = 1  # a request that nobody has told of yet
        await crew.stop_accepting()
        ending = asyncio.create_task(crew.idle())
        await until(lambda: crew.figures().running == 1)
        await asyncio.sleep(0.03)
        assert not ending.done()
        stage.servers[1]._copy.admissions.running = 0
        await asyncio.wait_for(ending, 5)
        for server in stage.servers:
            with pytest.raises(OSError, match="not listening"):
                assert server.http_port.port
    assert [await process.wait() for process in stage.processes] == [0, 0]
    assert not any(process.killed for process in stage.processes)


async def test_nobody_is_idle_before_it_takes_nothing_new(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    async with Crew(options(), *own()) as crew:
        ending = asyncio.create_task(crew.idle())
        await asyncio.sleep(0.05)
        assert not ending.done()
        await crew.stop_accepting()
        await asyncio.wait_for(ending, 5)


@pytest.mark.parametrize(("limit", "slots"), [(0, None), (3, [3, 30])])
async def test_they_share_one_limit(stage: Stage, limit: int, slots: list[int] | None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with Crew(options(container_concurrency=limit), *own()):
        if slots is None:
            assert stage.descriptors == [(), ()]
            return
        first, second = stage.descriptors
        assert len(first) == 2
        for descriptor, free in zip(first, slots, strict=True):
            for _ in range(free):
                assert os.eventfd_read(descriptor) == 1
        for descriptor in second:
            with pytest.raises(BlockingIOError):  # the first has taken them all
                os.eventfd_read(descriptor)
    await asyncio.gather(*(process.work for process in stage.processes))
    for descriptor in (one for pair in stage.descriptors for one in pair):
        os.close(descriptor)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before  # the first process keeps none of them


async def test_what_they_may_take_together_is_divided(stage: Stage) -> None:
    wanted = options(workers=4, max_inflight_bytes=1000)
    copy, where = own()
    async with Crew(wanted, copy, where):
        for budgets in zip(*((one.budget, one.admissions.bytes) for one in stage.copies), strict=True):
            assert [one.limit_bytes for one in budgets] == [250] * 4


async def test_a_worker_that_cannot_serve_is_told_with_its_reason(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = options(http_listen=Endpoint("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(CannotStart, match="--http-listen: cannot listen on"):
            async with Crew(wanted, *own()):
                raise AssertionError("it serves")
    assert [process.work.result() for process in stage.processes] == [3, 3]


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
        async with Crew(options(), *own()):
            raise AssertionError("it serves")
    assert [process.killed for process in stage.processes] == [True, True]


@pytest.mark.parametrize("when", ["at once", "later"])
async def test_a_worker_that_dies_takes_the_proxy_along(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    if when == "at once":

        async def dies(control: socket.socket, _: object) -> int:
            control.close()
            return 1

        stage.main = dies
    async with Crew(options(), *own()):
        if when == "later":
            await asyncio.sleep(0.02)
            assert not codes
            stage.processes[0].kill()
        await until(lambda: codes)
    assert set(codes) == {EXIT_CRASH}


async def test_a_workers_signals_are_the_first_processs_business(stage: Stage) -> None:
    """A terminal sends them to all: who serves goes on until it is told."""
    async with Crew(options(workers=1), *own()) as crew:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        await asyncio.sleep(0.02)
        assert not stage.processes[0].work.done()
        assert crew.figures().running == 0


async def test_what_is_said_is_one_line_each(stage: Stage) -> None:
    """And large enough for every key and model; what a worker says that is not known is left alone."""
    said: list[dict[str, Any]] = []

    async def talks(control: socket.socket, _: object) -> int:
        reader, writer = await asyncio.open_unix_connection(sock=control, limit=1024**2)
        writer.write(b'{"news": 1}\n')
        told = {"figures": Figures(running=7).to_json(), "takesNothingNew": False}
        writer.write(json.dumps(told).encode() + b"\n")
        while line := await reader.readline():
            said.append(json.loads(line))
        writer.close()
        return 0

    stage.main = talks
    copy, where = own()
    copy.withheld = "no"
    copy.facts = ModelFacts(fixed_outputs=frozenset(f"output {number:0100}" for number in range(3000)))
    async with Crew(options(workers=1), copy, where) as crew:
        assert crew.figures().running == 7
        await until(lambda: len(said) >= 2)
    assert list(said[0]) == ["options"]
    assert (said[1]["notServed"], said[1]["access"]) == (copy.not_served, None)
