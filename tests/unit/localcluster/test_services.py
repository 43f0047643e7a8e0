"""Where a connection to a Service goes: out of its slices, and on the wire."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from ipaddress import IPv4Network
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.kube import client
from localcluster import in_pod
from localcluster.addresses import free_port
from localcluster.kube_proxy import KubeProxy
from localcluster.services import ServicePort, backends, here, service_range

Json = dict[str, Any]
OF = ServicePort("default", "m", "http")
READY: Json = {"ready": True, "serving": True, "terminating": False}
ENDING: Json = {"ready": False, "serving": True, "terminating": True}
ENDED: Json = {"ready": False, "serving": False, "terminating": True}


def slice_of(port: int, *endpoints: tuple[str, Json], name: str = "http") -> Json:
    return {
        "ports": [{"name": "other", "port": 1}, {"name": name, "port": port}],
        "endpoints": [
            {"addresses": [address], "conditions": conditions} for address, conditions in endpoints
        ],
    }


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([], []),
        ([slice_of(9000, ("10.20.1.3", READY))], ["127.20.1.3:9000"]),
        (
            [slice_of(9000, ("10.20.1.3", READY)), slice_of(20004, ("10.20.2.9", READY))],
            ["127.20.1.3:9000", "127.20.2.9:20004"],
        ),
        # Unknown counts as ready (discovery/v1, EndpointConditions).
        ([slice_of(9000, ("10.20.1.3", {}))], ["127.20.1.3:9000"]),
        (
            [slice_of(9000, ("10.20.1.3", ENDING)), slice_of(20004, ("10.20.2.9", READY))],
            ["127.20.2.9:20004"],
        ),
        ([slice_of(9000, ("10.20.1.3", ENDING), ("10.20.1.4", ENDED))], ["127.20.1.3:9000"]),
        ([slice_of(9000, ("10.20.1.3", READY), name="grpc")], []),
        ([{"ports": None, "endpoints": None}], []),
    ],
)
def test_a_connection_goes_to_the_union_of_the_slices(slices: list[Json], expected: list[str]) -> None:
    assert [str(endpoint) for endpoint in backends(slices, "http")] == expected


def test_a_port_without_a_name_is_the_only_one() -> None:
    one = {"ports": [{"port": 7}], "endpoints": [{"addresses": ["10.1.2.3"]}]}
    assert backends([one], "") == (Endpoint("127.1.2.3", 7),)


def test_what_the_api_server_knows_as_10_is_loopback_here() -> None:
    assert here("10.77.1.2") == "127.77.1.2"
    assert here("192.168.1.2") == "192.168.1.2"
    assert service_range("127.77") == IPv4Network("10.77.255.0/24")


def test_in_a_pod_addresses_are_those_that_it_knows_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_parsed", client._parsed)
    in_pod._use_addresses("127.20.0.1")
    read = client._parsed(b'{"addresses": ["10.20.1.3"], "clusterIP": "10.20.255.7", "other": ["10.2.0.1"]}')
    assert read == {"addresses": ["127.20.1.3"], "clusterIP": "127.20.255.7", "other": ["10.2.0.1"]}


class Known:
    """Services of which a test says where they lead."""

    def __init__(self, at: Endpoint) -> None:
        self.at, self.targets = at, tuple[Endpoint, ...]()
        self.changed = asyncio.Event()

    def ports(self) -> dict[ServicePort, Endpoint]:
        return {OF: self.at}

    def backends(self, of: ServicePort) -> tuple[Endpoint, ...]:
        assert of == OF
        return self.targets

    async def lead_to(self, *targets: Endpoint) -> None:
        self.targets = targets
        self.changed.set()
        while self.changed.is_set():
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)


@asynccontextmanager
async def proxied() -> AsyncIterator[Known]:
    known = Known(Endpoint("127.0.0.1", free_port("127.0.0.1")))
    running = asyncio.create_task(KubeProxy(known).run())  # type: ignore[arg-type]
    try:
        yield known
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers, once the client has said all, who it is and what it said."""
    said = await reader.read()
    writer.write(f"{writer.get_extra_info('peername')[0]} ".encode() + said.upper())
    writer.close()


async def ask(at: Endpoint, *, source: str, text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(at.host, at.port, local_addr=(source, 0))
    with closing(writer):
        writer.write(text)
        writer.write_eof()
        return await reader.read()


async def test_the_endpoint_hears_the_client_itself_and_all_that_it_says() -> None:
    async with proxied() as known, await asyncio.start_server(upper, "127.0.0.3", 0) as server:
        await known.lead_to(Endpoint(*server.sockets[0].getsockname()))
        text = b"a" * 3_000_000
        assert await ask(known.at, source="127.0.0.9", text=text) == b"127.0.0.9 " + text.upper()


async def test_where_a_service_leads_nowhere_a_client_is_refused() -> None:
    async with proxied() as known, await asyncio.start_server(upper, "127.0.0.3", 0) as server:
        with pytest.raises(ConnectionRefusedError):
            await ask(known.at, source="127.0.0.9", text=b"")
        await known.lead_to(Endpoint(*server.sockets[0].getsockname()))
        reader, writer = await asyncio.open_connection(known.at.host, known.at.port)
        writer.write(b"before ")
        await asyncio.sleep(0)
        await known.lead_to()
        with pytest.raises(ConnectionRefusedError):
            await ask(known.at, source="127.0.0.9", text=b"")
        writer.write(b"and after")  # what has a connection keeps it
        writer.write_eof()
        assert await reader.read() == b"127.0.0.1 BEFORE AND AFTER"
        writer.close()


async def test_a_dead_endpoint_is_a_reset_for_the_client() -> None:
    async with proxied() as known:
        await known.lead_to(Endpoint("127.0.0.3", free_port("127.0.0.3")))
        with pytest.raises(ConnectionResetError):
            await ask(known.at, source="127.0.0.9", text=b"")
