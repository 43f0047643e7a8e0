"""`berth proxy` as a whole, but for Triton and the agent, which are fakes here."""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.admin import AdminServer
from proxy import app as module
from proxy import memory
from proxy.config import ProxyOptions
from proxy.request.endpoint import UpstreamEndpoint
from proxy.upstream.health import Upstream
from proxy.upstream.queries import Answer
from tests.fakes.eventually import until

ANYWHERE = Endpoint("127.0.0.1", 0)
TRITON = Endpoint("127.0.0.1", 1)


def options(**more: Any) -> ProxyOptions:
    wanted = {
        "http_listen": ANYWHERE,
        "grpc_listen": ANYWHERE,
        "admin_listen": ANYWHERE,
        "triton_http": TRITON,
        "triton_grpc": TRITON,
        "drain_delay": 0.0,
        **more,
    }
    return ProxyOptions(model=ModelName("own"), **wanted)


class Stage:
    """What the proxy has around it, and what happened there, in order."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.ready = 200
        self.access: UpstreamEndpoint | None = None
        self.admin: AdminServer | None = None
        self.server: Any = None

    async def fetch(self, upstream: Upstream, path: str) -> Answer:
        self.access = upstream.endpoint
        return Answer(self.ready if path.endswith("/ready") else 200, b"{}")

    @asynccontextmanager
    async def running(self, **more: Any) -> AsyncIterator[asyncio.Event]:
        stop = asyncio.Event()
        proxy = asyncio.create_task(module.main(options(**more), stop))
        try:
            await until(lambda: self.server is not None or proxy.done())
            yield stop
            stop.set()
            await asyncio.wait_for(proxy, 5)
        finally:
            proxy.cancel()

    async def get(self, path: str, **headers: str) -> tuple[int, bytes, str]:
        assert self.admin is not None
        url = f"http://127.0.0.1:{self.admin.port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            return answer.status, await answer.read(), answer.content_type


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    one = Stage()
    serving = module.serving

    @asynccontextmanager
    async def watched(*what: Any) -> AsyncIterator[Any]:
        async with serving(*what) as server:
            one.server = server
            stop_accepting, idle = server.stop_accepting, server.idle

            async def stopped() -> None:
                one.log.append("stopped")
                await stop_accepting()

            async def is_idle() -> None:
                await idle()
                one.log.append("idle")

            monkeypatch.setattr(server, "stop_accepting", stopped)
            monkeypatch.setattr(server, "idle", is_idle)
            yield server

    class Admin(AdminServer):
        async def __aenter__(self) -> AdminServer:
            one.admin = self
            return await super().__aenter__()

    monkeypatch.setattr(module, "serving", watched)
    monkeypatch.setattr(module, "AdminServer", Admin)
    monkeypatch.setattr(module, "settle", lambda: one.log.append("settled"))
    monkeypatch.setattr(Upstream, "fetch", lambda upstream, path: one.fetch(upstream, path))
    return one


async def test_a_proxy_alone_serves_the_triton_that_it_was_told(stage: Stage) -> None:
    async with stage.running():
        await until(lambda: stage.access)
        assert stage.access == UpstreamEndpoint(TRITON, TRITON)
        await until(lambda: stage.server.figures().model_ready)
        assert (await stage.get("/readyz"))[0] == 200
        _, text, _ = await stage.get("/metrics")
        assert b"berth_proxy_model_ready 1.0" in text
    assert stage.log == ["settled", "stopped", "idle"]


async def test_it_is_unready_first_and_serves_on_while_that_is_being_told(stage: Stage) -> None:
    async with stage.running(drain_delay=0.2) as stop:
        await until(lambda: stage.server.figures().model_ready)
        change = stage.server._copy.next_change()
        stop.set()
        await until(change.is_set)  # who watches is told
        status, why, _ = await stage.get("/readyz")
        assert (status, why) == (503, b"draining\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.server.http_port.port)
        writer.write(b"GET /v2/health/ready HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")  # served, and not ready
        writer.close()
        assert "stopped" not in stage.log
    assert stage.log[-2:] == ["stopped", "idle"]


async def test_the_end_does_not_wait_for_ever(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async with stage.running(drain_timeout=0.05):
        stage.server._copy.admissions.running = 1  # a request that never ends
    assert "drain: out of time" in [record.message for record in caplog.records]
    assert stage.log[-1] == "stopped"


@pytest.mark.parametrize("status", [200, 400])
async def test_readiness_is_tritons(stage: Stage, status: int) -> None:
    stage.ready = status
    async with stage.running():
        await until(lambda: stage.access)
        await asyncio.sleep(0.01)
        ready, why, _ = await stage.get("/readyz")
        assert ready == (200 if status == 200 else 503)
        assert status == 200 or b"Triton does not serve own (400)" in why
        assert (await stage.get("/livez"))[0] == 200


async def test_the_load_is_told_in_knatives_words(stage: Stage) -> None:
    async with stage.running():
        stage.server._copy.load = SimpleNamespace(average_concurrency=2.5, requests=7.0)
        await asyncio.sleep(0.01)
        _, text, kind = await stage.get("/stat")
        told = json.loads(text)
        assert kind == "application/json"
        assert (told["podName"], told["averageConcurrentRequests"]) == (socket.gethostname(), 2.5)
        assert told["requestCount"] == 7
        assert 0 < told["processUptime"] < 60
        assert isinstance(told["timestamp"], int)
        _, text, kind = await stage.get("/stat", Accept="application/protobuf, */*;q=0.1")
        assert kind == "application/protobuf"
        name = socket.gethostname().encode()
        assert text.startswith(bytes([0x0A, len(name)]) + name + b"\x11" + struct.pack("<d", 2.5))


@pytest.mark.parametrize("workers", [1, 2])
async def test_several_workers_are_a_crew(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    crews: list[Any] = []

    class Crew:
        def __init__(self, *what: Any) -> None:
            crews.append(what)

        async def __aenter__(self) -> Any:
            stage.server = SimpleNamespace(
                figures=dict, stop_accepting=lambda: asyncio.sleep(0), idle=lambda: asyncio.sleep(0)
            )
            return stage.server

        async def __aexit__(self, *_: object) -> None:
            stage.log.append("crew closed")

    monkeypatch.setattr(module, "Crew", Crew)
    async with stage.running(workers=workers):
        assert len(crews) == (workers == 2)
        if crews:
            wanted, copy, _ = crews[0]
            assert (wanted.workers, copy.names.public) == (2, b"own")
            await until(lambda: copy.not_ready() is None)
    assert ("crew closed" in stage.log) == (workers == 2)


async def test_what_keeps_the_proxy_alive_ends_it_where_it_breaks(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(_: Upstream) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(Upstream, "poll", breaks)
    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(module.main(options(), asyncio.Event()), 5)


def test_memory_that_was_freed_is_kept_for_the_next_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """malloc.h: -1 is the size at the heap's end from which it is given back, -3 the one that is mapped by itself."""
    asked: dict[int, int] = {}
    frozen: list[bool] = []
    library = SimpleNamespace(mallopt=asked.__setitem__)
    monkeypatch.setattr(memory, "gc", SimpleNamespace(freeze=lambda: frozen.append(True)))
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda name: name or library))
    memory.settle()
    assert set(asked) == {-1, -3}
    assert 256 * 1024 < asked[-3] < asked[-1] < 256 * 1024**2  # one read fits, and a few of them are kept
    assert frozen == [True]
    del library.mallopt  # as in musl
    memory.settle()
    assert frozen == [True, True]


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
