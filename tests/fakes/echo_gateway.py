"""The whole gateway on real sockets, with clients that echo in place of the protocols, and a Triton that is ready."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from berth.contract.endpoint import Endpoint, UnixSocket
from proxy.gateway import serving as serving_module
from proxy.gateway.app import Gateway, serving
from proxy.gateway.config import GatewayOptions
from proxy.gateway.data_plane import DataPlane
from proxy.request.replica import Replica
from proxy.wire.preamble import Kind
from tests.fakes.agent_control import Agent, replica_of
from tests.fakes.eventually import until
from tests.fakes.sidecars import connect

ANYWHERE = Endpoint("127.0.0.1", 0)


class Echo(asyncio.Protocol):
    """Says back what it hears, with its replica's public name; `work` is a request that Triton has until told."""

    def __init__(self, clients: "EchoClients") -> None:
        self._clients = clients
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._clients.clients.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.clients.discard(self)

    def data_received(self, data: bytes) -> None:
        replica = self._clients.replica
        if data == b"work":
            self._clients.work.append(replica.admissions.admit(0.0, lambda: None))
        self.transport.write(replica.names.public + b" " + data)


class EchoClients:
    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.clients: set[Echo] = set()
        self.work: list[Any] = []
        self.told = 0
        self.stopped = False

    def connection(self) -> asyncio.Protocol:
        return Echo(self)

    @property
    def busy_connections(self) -> int:
        return 0

    def tick(self, now: float) -> None: ...

    def readiness_changed(self) -> None:
        self.told += 1

    def stop_accepting(self) -> None:
        self.stopped = True

    def close(self) -> None:
        for client in list(self.clients):
            client.transport.abort()


class RunningGateway:
    """A running gateway."""

    def __init__(self, gateway: Gateway, plane: DataPlane, port: int, path: str) -> None:
        self.gateway, self.plane, self.port, self.path = gateway, plane, port, path
        self.clients: dict[bytes, EchoClients] = {}

    def served(self, uid: str) -> Replica:
        return self.plane._by_uid[uid].replica


def echo_gateways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a gateway with these options."""
    made: dict[bytes, EchoClients] = {}
    parts: list[Any] = []

    def make_downstream(self: Any, kind: Kind, replica: Replica, _: Any) -> EchoClients:
        return made.setdefault(replica.names.server, EchoClients(replica))

    class Seen(serving_module.Server):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            parts.append(self)

        _make_downstream = make_downstream  # type: ignore[assignment]

    class Ready:
        def __init__(self, replica: Replica, *_: Any) -> None:
            self._replica = replica

        async def poll(self) -> None:
            self._replica.triton_says(None)
            await asyncio.Event().wait()

    monkeypatch.setattr(serving_module, "Server", Seen)
    monkeypatch.setattr(serving_module, "Upstream", Ready)

    @asynccontextmanager
    async def run(**more: Any) -> AsyncIterator[RunningGateway]:
        wanted: dict[str, Any] = {
            "control": UnixSocket(str(tmp_path / "control")),
            "listen": ANYWHERE,
            "admin_listen": ANYWHERE,
            **more,
        }
        async with serving(GatewayOptions(**wanted)) as gateway:
            here = RunningGateway(gateway, parts[-1]._data_plane, gateway.port, str(tmp_path / "control"))
            here.clients = made
            yield here

    return run


async def get(here: RunningGateway, path: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{here.gateway.admin.port}{path}"
        async with session.get(url, headers=headers) as answer:
            return answer.status, (await answer.read()).decode("latin-1")


async def echoed(here: RunningGateway, uid: str, *, kind: Kind = Kind.REST) -> bytes:
    reader, writer = await connect(here.port, replica_of(uid).ticket, kind)
    writer.write(b"hello")
    async with asyncio.timeout(5):
        answer = await reader.read(100)
    writer.close()
    return answer


async def known(here: RunningGateway, agent: Agent, *replicas: Any) -> None:
    agent.tell(replicas)
    wanted = {replica.pod_uid for replica in replicas}
    await until(lambda: set(here.plane._by_uid) == wanted and here.gateway.control_plane.registry.is_listed)
