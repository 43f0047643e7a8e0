"""Who is served behind the aggregator: by certificates of real connections."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.runtime.errors import CannotStart, ConfigError
from localcluster.addresses import free_port
from localcluster.credentials import make_client_certificate, make_serving_certificate
from scaler.export import front_proxy
from scaler.export.external_metrics import ExternalMetrics
from scaler.export.front_proxy import FrontProxyPort, front_proxy_of
from scaler.export.tls import TlsFiles
from tests.fakes.kube import connected
from tests.fakes.models_view import FakeModels

HOST = "127.0.0.1"
SECONDS = 20.0
METRIC = "/apis/external.metrics.k8s.io/v1beta1/namespaces/a/berth-rps"
SPOOFED = {"X-Remote-User": "system:kube-aggregator", "X-Remote-Group": "system:masters"}
# What a caller is not served with: no connection, or one that is broken off.
Broken = (aiohttp.ClientError, ssl.SSLError, ConnectionError)


class World:
    """An API server that tells what a test lets it, and certificates."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port(HOST)
        self.data: dict[str, str] = {}
        self.is_down, self.asked_for = False, 0
        self.models = FakeModels()
        self.models.add("a/m")
        self.server = TlsFiles(directory / "server.crt", directory / "server.key")
        make_serving_certificate(self.server.cert, self.server.key, hosts=[HOST])

    def make(self, name: str, *, user: str = "front-proxy-client") -> str:
        """A client certificate that is an authority of itself; returns it."""
        certificate = self.directory / f"{name}.crt"
        make_client_certificate(certificate, self.directory / f"{name}.key", user=user, group="g")
        return certificate.read_text()

    def allow(self, authority: str, *names: str, clients: str = "") -> None:
        self.data = {
            "requestheader-client-ca-file": authority,
            "requestheader-allowed-names": json.dumps(names),
            "client-ca-file": clients,
        }

    async def config_map(self, request: web.Request) -> web.Response:
        assert request.path.endswith("/kube-system/configmaps/extension-apiserver-authentication")
        self.asked_for += 1
        if self.is_down:
            return web.Response(status=500)
        return web.json_response({"data": self.data})

    @asynccontextmanager
    async def session(self, certificate: str | None) -> AsyncIterator[aiohttp.ClientSession]:
        context = ssl.create_default_context(cafile=str(self.server.cert))
        if certificate is not None:
            directory = self.directory
            context.load_cert_chain(directory / f"{certificate}.crt", directory / f"{certificate}.key")
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(f"https://{HOST}:{self.port}", connector=connector) as session:
            yield session

    async def asked(self, certificate: str | None) -> int | None:
        """The status that a caller with this certificate is answered with; None: not even that."""
        async with self.session(certificate) as session:
            with suppress(*Broken):
                async with session.get(METRIC, headers=SPOOFED) as response:
                    return response.status
        return None

    async def served_to(self, certificate: str) -> None:
        async with asyncio.timeout(SECONDS):
            while await self.asked(certificate) != 200:
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    async with connected(world.config_map) as client:
        port = FrontProxyPort(
            client, world.server, ExternalMetrics(world.models).application, look_seconds=0.1
        )
        running = asyncio.create_task(port.run(Endpoint(HOST, world.port)))
        try:
            yield world
            assert not running.done()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def test_only_the_aggregators_certificate_is_served(world: World) -> None:
    authority = world.make("aggregator")
    world.make("stranger")
    world.allow(authority, "front-proxy-client", "other")
    await world.served_to("aggregator")
    assert await world.asked("stranger") is None, "another authority, the same name"
    assert await world.asked(None) is None, "headers without a certificate"


async def test_a_name_that_is_not_the_aggregators_is_refused(world: World) -> None:
    """As where one authority signs for others, too."""
    aggregator, other = world.make("aggregator"), world.make("other", user="somebody")
    world.allow(aggregator + other, "front-proxy-client")
    await world.served_to("aggregator")
    assert await world.asked("other") == 401


async def test_nobody_is_served_before_the_api_server_has_said_who_it_is(world: World) -> None:
    authority = world.make("aggregator")
    assert await world.asked("aggregator") is None
    world.allow(authority)
    await world.served_to("aggregator")


async def test_an_authority_that_is_replaced_takes_its_connections_with_it(world: World) -> None:
    world.allow(world.make("old"))
    await world.served_to("old")
    async with world.session("old") as session:
        async with session.get(METRIC) as response:
            assert response.status == 200
        world.allow(world.make("new"))
        await world.served_to("new")
        with pytest.raises(Broken):
            await session.get(METRIC)
    assert await world.asked("old") is None


async def test_a_handshake_that_began_before_ends_with_its_authority(world: World) -> None:
    """Else whoever kept one back would be let in by what counts no more."""
    world.allow(world.make("old"))
    await world.served_to("old")
    raw = socket.create_connection((HOST, world.port))
    raw.setblocking(False)
    await asyncio.sleep(0.2)  # it is taken, and waits for the first word
    world.allow(world.make("new"))
    await world.served_to("new")
    context = ssl.create_default_context(cafile=str(world.server.cert))
    context.load_cert_chain(world.directory / "old.crt", world.directory / "old.key")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection(sock=raw, ssl=context, server_hostname=HOST)


async def test_while_the_api_server_is_away_its_last_word_holds(world: World) -> None:
    world.allow(world.make("aggregator"))
    await world.served_to("aggregator")
    world.is_down, before = True, world.asked_for
    async with asyncio.timeout(SECONDS):
        while world.asked_for < before + 2:
            assert await world.asked("aggregator") == 200
    assert await world.asked("aggregator") == 200


async def test_an_aggregator_that_is_taken_away_is_served_no_more(world: World) -> None:
    world.allow(world.make("aggregator"))
    await world.served_to("aggregator")
    world.data = {}

    async def is_served() -> bool:
        with suppress(TimeoutError):  # nobody looks at who comes now
            async with asyncio.timeout(1.0):
                return await world.asked("aggregator") == 200
        return False

    async with asyncio.timeout(SECONDS):
        while await is_served():
            await asyncio.sleep(0.05)


async def test_a_renewed_certificate_of_the_server_needs_no_restart(world: World) -> None:
    world.allow(world.make("aggregator"))
    await world.served_to("aggregator")
    world.server.key.write_text("half of it")
    await asyncio.sleep(0.3)
    make_serving_certificate(world.server.cert, world.server.key, hosts=[HOST])
    await world.served_to("aggregator")


async def test_who_says_nothing_holds_up_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_proxy, "_HANDSHAKE_SECONDS", 0.5)
    world.allow(world.make("aggregator"))
    await world.served_to("aggregator")
    silent = [await asyncio.open_connection(HOST, world.port) for _ in range(20)]
    await world.served_to("aggregator")
    async with asyncio.timeout(SECONDS):
        for reader, writer in silent:
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()


async def test_a_start_that_cannot_go_well_says_why(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with connected(world.config_map) as client:
        port = FrontProxyPort(client, world.server, ExternalMetrics(world.models).application)
        taken = await asyncio.start_server(lambda *_: None, HOST, world.port)
        with pytest.raises(CannotStart, match="--external-metrics-listen"):
            await port.run(Endpoint(HOST, world.port))
        taken.close()
        await taken.wait_closed()
        world.server.key.unlink()
        with pytest.raises(ConfigError, match="--tls-key"):
            await port.run(Endpoint(HOST, world.port))


@pytest.mark.parametrize("names", [frozenset[str](), frozenset({"", "front-proxy-client"})])
def test_a_certificate_without_a_name_is_nobodys(names: frozenset[str]) -> None:
    front = front_proxy.FrontProxy("x", names)
    assert front.refusal({"subject": ((("commonName", "front-proxy-client"),),)}) is None
    nameless: tuple[dict[str, Any], ...] = (
        {},
        {"subject": ((("commonName", ""),),)},
        {"subject": ((("organizationName", "front-proxy-client"),),)},
    )
    for certificate in nameless:
        assert front.refusal(certificate)


def data_of(world: World) -> dict[str, Any]:
    return {"data": world.data}


def test_anybodys_certificate_is_not_the_aggregators(tmp_path: Path) -> None:
    """Where the authority is that of all clients, only a name tells them apart."""
    world = World(tmp_path)
    authority, other = world.make("all"), world.make("other")
    world.allow(authority, clients=f"# ours\n{other}\n{authority}")
    with pytest.raises(InvalidValue, match="--requestheader-allowed-names"):
        front_proxy_of(data_of(world))
    world.allow(authority, "aggregator", clients=authority)
    assert front_proxy_of(data_of(world)).names == {"aggregator"}
    world.allow(authority, clients=other)
    assert front_proxy_of(data_of(world)).names == frozenset()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"requestheader-client-ca-file": ""},
        {"requestheader-client-ca-file": "x", "requestheader-allowed-names": "not json"},
        {"requestheader-client-ca-file": "x", "requestheader-allowed-names": "[{}]"},
    ],
)
def test_an_api_server_without_an_aggregator_serves_nobody(data: dict[str, str]) -> None:
    with pytest.raises(InvalidValue):
        front_proxy_of({"data": data})
