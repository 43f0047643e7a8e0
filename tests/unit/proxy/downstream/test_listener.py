"""The listening ports."""

import asyncio
import resource
import socket
import ssl
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.runtime.listening import listening_sockets
from proxy.downstream import listener as listener_module
from proxy.downstream.listener import Clients, Listener
from proxy.request.traffic import Traffic

ANYWHERE = Endpoint("127.0.0.1", 0)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The process' limits on descriptors, soft and hard; the last one is in force."""
    known = [(1024, 4096)]
    monkeypatch.setattr(
        listener_module,
        "resource",
        SimpleNamespace(
            RLIMIT_NOFILE=resource.RLIMIT_NOFILE,
            RLIM_INFINITY=resource.RLIM_INFINITY,
            getrlimit=lambda which: known[-1] if which == resource.RLIMIT_NOFILE else (0, 0),
            setrlimit=lambda which, both: known.append(both) if which == resource.RLIMIT_NOFILE else None,
        ),
    )
    return known


def test_as_many_descriptors_are_taken_as_may_be(limits: list[tuple[int, int]]) -> None:
    assert listener_module.allow_descriptors() == 4096
    assert limits == [(1024, 4096), (4096, 4096)]
    assert listener_module.allow_descriptors() == 4096
    assert len(limits) == 2  # nothing to change
    limits.append((1024, resource.RLIM_INFINITY))
    assert listener_module.allow_descriptors() == sys.maxsize


@pytest.mark.parametrize("descriptors", [256, 1024, 1_000_000])
def test_a_listener_takes_so_many_clients_that_descriptors_are_left(
    limits: list[tuple[int, int]], descriptors: int
) -> None:
    """Two for each client of each of the two ports, and some for everything else."""
    limits.append((descriptors, descriptors))
    traffic = Traffic()
    listener: Clients[Any] = Clients(traffic)
    clients: list[Any] = []
    while listener.connected(one := object()):
        clients.append(one)
        assert len(clients) == traffic.connections <= 100_000
    most = len(clients)
    assert 0.7 * min(descriptors / 4, 16_384) <= most <= (descriptors - 32) / 4
    assert traffic.connections == most
    assert set(listener) == set(clients)
    listener.disconnected(clients[0])
    listener.disconnected(clients[0])  # a second time changes nothing
    assert traffic.connections == most - 1
    assert listener.connected(clients[0])


async def test_a_port_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd that connects at once finds room; a handshake has some seconds, an answer that is being taken minutes."""
    made: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    create = loop.create_server

    async def create_server(*what: Any, **more: Any) -> Any:
        made.append(more)
        return await create(*what, **{name: more[name] for name in more if "ssl" not in name})

    monkeypatch.setattr(loop, "create_server", create_server)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listener = Listener(asyncio.Protocol, what="--http-listen")
    await listener.start(ANYWHERE, tls=context)
    port = listener.port
    await listener.renew(context)
    assert listener.port == port
    await listener.stop()
    assert len(made) == 2
    for one in made:
        assert one["backlog"] in range(1024, 65536)
        assert one["ssl"] is context
        assert 1 < one["ssl_handshake_timeout"] < 60
        assert 60 <= one["ssl_shutdown_timeout"] < 3600
    plain = Listener(asyncio.Protocol, what="--http-listen")
    await plain.start(ANYWHERE)
    assert not made[2].get("ssl")
    assert not made[2].get("reuse_port")
    await plain.stop()


async def test_processes_may_share_a_port() -> None:
    """Each listens at sockets of its own, which were bound for it."""
    first = listening_sockets(ANYWHERE, share_port=True)
    port = first[0].getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        listening_sockets(Endpoint("127.0.0.1", port))
    second = listening_sockets(Endpoint("127.0.0.1", port), share_port=True)
    listeners = [Listener(asyncio.Protocol, what="--http-listen") for _ in range(2)]
    for listener, sockets in zip(listeners, (first, second), strict=True):
        await listener.start(ANYWHERE, sockets=sockets)
        assert listener.port == port
    for listener in listeners:
        await listener.stop()
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
