"""`berth proxy` in front of a Triton, as a whole but for Triton, which is a fake here."""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.admin import AdminServer
from proxy.config import ProxyOptions
from proxy.gateway import serving
from proxy.gateway import standalone as module
from proxy.gateway.spec import ReplicaStats, Status
from proxy.request.endpoint import UpstreamEndpoint
from proxy.request.load import LoadReport
from proxy.request.replica import Replica
from proxy.request.traffic import Figures
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
        self.servers: list[serving.Server] = []

    async def fetch(self, upstream: Upstream, path: str) -> Answer:
        self.access = upstream.endpoint
        return Answer(self.ready if path.endswith("/ready") else 200, b"{}")

    @property
    def server(self) -> serving.Server:
        return self.servers[0]

    @property
    def replica(self) -> Replica:
        return self.server._only_replica().replica

    @asynccontextmanager
    async def running(self, **more: Any) -> AsyncIterator[asyncio.Event]:
        stop = asyncio.Event()
        proxy = asyncio.create_task(module.main(options(**more), stop))
        try:
            await until(lambda: self.admin is not None or proxy.done())
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

    class Server(serving.Server):
        def __init__(self, *what: Any) -> None:
            super().__init__(*what)
            one.servers.append(self)

        async def drain_all(self) -> None:
            one.log.append("drains")
            await super().drain_all()

    class Admin(AdminServer):
        async def __aenter__(self) -> AdminServer:
            found = await super().__aenter__()
            one.admin = self
            return found

    monkeypatch.setattr(serving, "Server", Server)
    monkeypatch.setattr(module, "AdminServer", Admin)
    monkeypatch.setattr(module, "settle", lambda: one.log.append("settled"))
    monkeypatch.setattr(Upstream, "fetch", lambda upstream, path: one.fetch(upstream, path))
    return one


async def test_it_serves_the_triton_of_its_flags(stage: Stage) -> None:
    async with stage.running():
        await until(lambda: stage.access)
        assert stage.access == UpstreamEndpoint(TRITON, TRITON)
        await until(lambda: stage.replica.is_served)
        assert (await stage.get("/readyz"))[0] == 200
        _, text, _ = await stage.get("/metrics")
        assert b"berth_proxy_model_ready 1.0" in text
    assert stage.log == ["settled", "drains"]


async def test_it_is_unready_first_and_serves_on_while_that_is_reported(stage: Stage) -> None:
    async with stage.running(drain_delay=0.2) as stop:
        await until(lambda: stage.replica.is_served)
        change = stage.replica.next_change()
        stop.set()
        await until(change.is_set)  # clients that watch are told
        status, why, _ = await stage.get("/readyz")
        assert (status, why) == (503, b"draining\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.server.ports[0])
        writer.write(b"GET /v2/health/ready HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")  # served, and not ready
        writer.close()
        assert "drains" not in stage.log
    assert stage.log[-1] == "drains"


async def test_the_end_is_bounded(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async with stage.running(drain_timeout=0.05):
        stage.replica.admissions.running = 1  # a request that never ends
    assert "drain: out of time" in [record.message for record in caplog.records]
    assert stage.log[-1] == "drains"


@pytest.mark.parametrize("status", [200, 400])
async def test_readiness_is_tritons(stage: Stage, status: int) -> None:
    stage.ready = status
    async with stage.running():
        await until(lambda: "asked for yet" not in str(stage.replica.not_ready()))
        ready, why, _ = await stage.get("/readyz")
        assert ready == (200 if status == 200 else 503)
        assert status == 200 or b"Triton does not serve own (400)" in why
        assert (await stage.get("/livez"))[0] == 200


async def test_the_load_is_reported_as_knative_knows_it(stage: Stage) -> None:
    async with stage.running():
        stage.replica.load = LoadReport(2.5, 7.0, 3.0, 1700000000.5)
        _, text, kind = await stage.get("/stat")
        assert kind == "application/json"
        assert json.loads(text) == {
            "podName": socket.gethostname(),
            "averageConcurrentRequests": 2.5,
            "requestCount": 7.0,
            "processUptime": 3.0,
            "timestamp": 1700000000,
        }
        _, text, kind = await stage.get("/stat", Accept="application/protobuf, */*;q=0.1")
        assert kind == "application/protobuf"
        name = socket.gethostname().encode()
        assert text.startswith(bytes([0x0A, len(name)]) + name + b"\x11" + struct.pack("<d", 2.5))


class Workers:
    """Two of them."""

    settle_seconds = 0.0
    ports = (1, 2)

    def __init__(self, *not_ready: str | None) -> None:
        load = LoadReport(1.0, 2.0, 3.0, 4.0)
        self._statuses = [
            Status(
                stats={"static": ReplicaStats(Figures(running=1), load)},
                not_ready={} if one is None else {"static": one},
            )
            for one in not_ready
        ]

    def statuses(self) -> list[Status]:
        return self._statuses


@pytest.mark.parametrize(
    ("reasons", "reason"), [((None, None), None), (("a", "b"), "a"), ((None, "b"), "b"), (("a", None), "a")]
)
def test_it_is_ready_when_all_workers_are(reasons: tuple[str | None, ...], reason: str | None) -> None:
    wanted = options(workers=2)
    workers: Any = Workers(*reasons)
    proxy = module.StandaloneProxy(wanted, workers, module.static_spec(wanted))
    assert proxy.not_ready() == reason
    assert proxy.stats().figures.running == 2


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
