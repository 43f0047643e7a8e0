"""One process of the data plane: what both protocols share, its figures, its ports and its end."""

import asyncio
import contextlib
import resource
import socket
import ssl
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.errors import CannotStart
from proxy import server as module
from proxy.config import ProxyOptions
from proxy.downstream import listener as listener_module
from proxy.downstream.listener import Clients, Listener
from proxy.request.admission import shared_limit
from proxy.request.grpc_head import INFER
from proxy.request.messages import framed
from proxy.request.replica import Replica
from proxy.request.traffic import Traffic
from proxy.server import Server, serving
from proxy.server import own_replica as own_copy_of
from proxy.transport import tcp
from proxy.upstream.health import Upstream
from tests.fakes.data_plane import GrpcPair, RestPair, own_upstream, settle, triton_at_hand
from tests.fakes.grpc_peers import Both, request
from tests.unit.proxy.downstream.test_connection import OK, infer

ANYWHERE = Endpoint("127.0.0.1", 0)
WATCH = "/grpc.health.v1.Health/Watch"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"


def options(**more: Any) -> ProxyOptions:
    return ProxyOptions(model=ModelName("own"), http_listen=ANYWHERE, grpc_listen=ANYWHERE, **more)


def own() -> tuple[Replica, Upstream]:
    upstream = own_upstream()
    return upstream.replica, upstream


class Whole:
    """A server without sockets."""

    def __init__(self, *, shared: tuple[int, int] | None = None, **more: Any) -> None:
        self.copy = own_copy_of(options(**more), shared=shared)
        self.copy.triton_says(None)
        self.server = Server(self.copy, own_upstream(replica=self.copy))

    def rest(self) -> RestPair:
        return RestPair(downstream=self.server.rest)

    def grpc(self) -> Both:
        both = Both(GrpcPair(downstream=self.server.grpc))
        both.exchange()
        return both


@pytest.fixture
async def whole() -> Any:
    with triton_at_hand(), RestPair.triton_at_hand():
        yield Whole


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("workers", "each"), [(1, 7), (2, 4), (8, 2)])
async def test_the_workers_of_a_proxy_together_have_so_many_rest_requests_with_triton(
    workers: int, each: int, is_shared: bool
) -> None:
    """Triton drops the answers of more (exchange/outstanding.py, which says why 7 of 16 for one copy)."""
    copy = own_copy_of(
        options(triton_rest_requests=16, workers=workers, queue_depth=100),
        shared=shared_limit(100, 100) if is_shared else None,
    )
    admitted = [copy.admissions.admit(0.0, list, is_rest=True) for _ in range(40)]
    assert sum(one.is_running for one in admitted) == each
    assert copy.admissions.running == each
    for one in reversed(admitted):
        one.release(0.0)
    copy.admissions.close()


def call(both: Both) -> int:
    stream = both.client.call(INFER)
    both.client.send(stream, framed(request()), end=True)
    both.exchange()
    return stream


@pytest.mark.parametrize("is_shared", [False, True])
async def test_one_limit_for_both_protocols(whole: Callable[..., Whole], is_shared: bool) -> None:
    shared = shared_limit(2, 1) if is_shared else None
    one = whole(shared=shared, **({} if is_shared else {"container_concurrency": 2, "queue_depth": 1}))
    rest, grpc, late = one.rest(), one.grpc(), one.rest()
    rest.client.data_received(infer())
    await settle()
    answered = call(grpc)
    late.client.data_received(infer())
    refused = call(grpc)
    assert (one.server.figures().running, one.server.figures().waiting) == (2, 1)
    assert grpc.client.status(refused) == 14
    grpc.triton.answer(answered, b"fine")
    grpc.exchange()
    if is_shared:
        await asyncio.sleep(0.01)  # the kernel tells of the slot
    await settle()
    assert (one.server.figures().running, one.server.figures().waiting) == (2, 0)
    for upstream in rest.tritons:
        upstream.data_received(OK)
    assert rest.to_client.sent == late.to_client.sent == OK
    figures = one.server.figures()
    assert (figures.running, figures.rest.codes) == (0, {"200": 2})
    assert figures.grpc.codes == {"UNAVAILABLE": 1, "OK": 1}


async def test_the_figures_tell_of_clients_readiness_and_load(
    whole: Callable[..., Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.05)
    one = whole()
    rest, grpc, _idle = one.rest(), one.grpc(), one.rest()
    rest.client.data_received(infer())
    await settle()
    stream = call(grpc)
    figures = one.server.figures()
    assert (figures.rest.connections, figures.grpc.connections, figures.busy_connections) == (2, 1, 2)
    assert figures.model_ready
    assert (figures.average_concurrency, figures.requests_per_second) == (0, 0)  # of the last second
    ticking = asyncio.create_task(one.server.tick())
    async with asyncio.timeout(5):
        while not one.server.figures().requests_per_second:
            await asyncio.sleep(0.001)
        while one.server.figures().requests_per_second:
            await asyncio.sleep(0.001)
    assert one.server.figures().average_concurrency == pytest.approx(2)
    ticking.cancel()
    one.copy.triton_says("gone")
    assert not one.server.figures().model_ready
    rest.tritons[0].data_received(OK)
    grpc.triton.answer(stream, b"fine")
    grpc.exchange()
    assert one.server.figures().busy_connections == 0
    rest.client.connection_lost(None)
    assert one.server.figures().rest.connections == 1


async def test_what_waits_too_long_is_told_so_while_the_server_runs(
    whole: Callable[..., Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.01)
    one = whole(request_timeout=0.1)
    rest, grpc = one.rest(), one.grpc()
    rest.client.data_received(infer())
    stream = call(grpc)
    began = time.monotonic()
    ticking = asyncio.create_task(one.server.tick())
    async with asyncio.timeout(5):
        while not rest.to_client.sent or grpc.client.status(stream) is None:
            await asyncio.sleep(0.005)
            grpc.exchange()
    assert time.monotonic() - began > 0.08
    assert rest.to_client.sent.startswith(b"HTTP/1.1 504 ")
    assert grpc.client.status(stream) == 4
    ticking.cancel()


async def test_who_watches_is_told_of_every_change(whole: Callable[..., Whole]) -> None:
    one = whole()
    one.copy.withheld = "not yet"
    both = one.grpc()
    stream = both.client.call(WATCH)
    both.client.send(stream, framed(b""), end=True)
    telling = asyncio.create_task(one.server.tell_watchers())
    await settle()
    both.exchange()
    for reason, said in ((None, b"\x08\x01"), ("gone", b"\x08\x02"), (None, b"\x08\x01")):
        one.copy.withheld = reason
        await settle()
        both.exchange()
        assert both.client.data[stream].endswith(framed(said))
    assert both.client.data[stream].startswith(framed(b"\x08\x02"))
    assert one.server.figures().busy_connections == 0  # who only watches holds up no end
    telling.cancel()


async def test_watchers_are_told_again_though_nobody_announces(
    whole: Callable[..., Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.005)
    one = whole()
    both = one.grpc()
    stream = both.client.call(WATCH)
    both.client.send(stream, framed(b""), end=True)
    both.exchange()
    telling = asyncio.create_task(one.server.tell_watchers())
    async with asyncio.timeout(5):
        while both.client.data[stream].count(framed(b"\x08\x01")) < 3:
            await asyncio.sleep(0.001)
            both.exchange()
    telling.cancel()


@pytest.mark.parametrize("what", ["runs", "waits", "is not delivered"])
async def test_the_end_waits_for_every_answer(
    whole: Callable[..., Whole], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    one = whole(container_concurrency=1, queue_depth=1)
    pair, second = one.rest(), one.rest()
    pair.to_client.stall(pair.client)
    pair.client.data_received(infer())
    if what == "waits":
        second.client.data_received(infer())
    await settle()
    await one.server.stop_accepting()
    ending = asyncio.create_task(one.server.idle())
    await asyncio.sleep(0.01)
    assert not ending.done()
    pair.tritons[0].data_received(OK)
    if what == "waits":
        pair.to_client.drain()
        await settle()
        assert not ending.done()
        pair.tritons[-1].data_received(OK)
        assert second.to_client.sent.startswith(OK[:15])
    elif what == "is not delivered":
        await asyncio.sleep(0.01)
        assert not ending.done()
    pair.to_client.drain()
    await asyncio.wait_for(ending, 5)
    assert b"Connection: close" in pair.to_client.sent


async def asked(port: int, data: bytes = LIVE) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(100), 5)
    writer.close()
    return answer


async def test_both_ports_are_served_and_closed_in_order() -> None:
    async with serving(options(), *own()) as server:
        rest, grpc = server.http_port.port, server.grpc_port.port
        assert (await asked(rest)).startswith(b"HTTP/1.1 200 OK\r\n")
        assert (await asked(grpc, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"))[3] == 4
        idle, writer = await asyncio.open_connection("127.0.0.1", rest)
        writer.write(LIVE)
        await idle.readuntil(b"\r\n\r\n")
        await server.stop_accepting()
        assert await asyncio.wait_for(idle.read(), 5) == b""  # ended, as nothing is under way on it
        writer.close()
        for port in (rest, grpc):
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(server.idle(), 5)
        with pytest.raises(OSError, match="not listening"):
            assert server.http_port.port


async def test_a_port_that_is_taken_is_told_by_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = Endpoint("127.0.0.1", taken.getsockname()[1])
        for flag, more in (
            ("--http-listen", {"http_listen": port}),
            ("--grpc-listen", {"grpc_listen": port}),
        ):
            wanted = ProxyOptions(
                model=ModelName("own"), **{"http_listen": ANYWHERE, "grpc_listen": ANYWHERE, **more}
            )
            with pytest.raises(CannotStart, match=f"{flag}: cannot listen on 127.0.0.1:{port.port}"):
                async with serving(wanted, *own()):
                    raise AssertionError("it serves")


async def test_processes_may_share_a_port_where_they_are_told_to() -> None:
    async with serving(options(), *own(), share_ports=True) as first:
        ports = [Endpoint("127.0.0.1", one.port) for one in (first.http_port, first.grpc_port)]
        wanted = ProxyOptions(model=ModelName("own"), http_listen=ports[0], grpc_listen=ports[1])
        with pytest.raises(CannotStart):
            async with serving(wanted, *own()):
                raise AssertionError("it serves")
        async with serving(wanted, *own(), share_ports=True) as second:
            assert second.http_port.port == ports[0].port


async def test_the_end_breaks_off_who_is_still_there() -> None:
    async with serving(options(), *own()) as server:
        readers = []
        for port in (server.http_port.port, server.grpc_port.port):
            readers.append(await asyncio.open_connection("127.0.0.1", port))
        readers[0][1].write(LIVE)
        await readers[0][0].readuntil(b"\r\n\r\n")
        await readers[1][0].readexactly(9)
    for reader, writer in readers:
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()


# The listening ports.


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


async def test_a_port_waits_for_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert not made[2]["reuse_port"]
    await plain.stop()


async def test_a_client_too_many_is_hung_up_on(whole: Callable[..., Whole]) -> None:
    one = whole()
    for front in (one.server.rest, one.server.grpc):
        front.clients._most = 1
    rest, late = one.rest(), one.rest()
    assert (rest.to_client.open, late.to_client.open) == (True, False)
    grpc, too_late = GrpcPair(downstream=one.server.grpc), GrpcPair(downstream=one.server.grpc)
    assert (grpc.to_client.open, too_late.to_client.open) == (True, False)
    assert not late.to_client.sent
    assert not too_late.to_client.sent
    assert one.server.figures().rest.connections == one.server.figures().grpc.connections == 1
    for gone in (late, too_late):
        gone.client.connection_lost(None)
    assert one.server.figures().rest.connections == one.server.figures().grpc.connections == 1


# The sockets of both ends.


class Transport:
    """With this socket, and so much in its own buffer."""

    def __init__(self, sock: socket.socket | None, buffered: int = 0) -> None:
        self._sock, self._buffered = sock, buffered

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self._sock if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return self._buffered


def test_a_peer_that_is_gone_is_noticed() -> None:
    with socket.socket() as sock:
        tcp.keep_alive(Transport(sock))  # type: ignore[arg-type]
        option = lambda name: sock.getsockopt(socket.IPPROTO_TCP, name)  # noqa: E731
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert option(socket.TCP_NODELAY)  # an answer waits for no other
        probed = option(socket.TCP_KEEPIDLE) + option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
        assert 30 <= probed <= 60
        assert option(socket.TCP_KEEPCNT) > 1  # one packet may be lost
        assert 60_000 <= option(socket.TCP_USER_TIMEOUT) <= 600_000


def test_only_sockets_of_tcp_have_its_options() -> None:
    one, other = socket.socketpair()
    with one, other:
        tcp.keep_alive(Transport(one))  # type: ignore[arg-type]
    tcp.keep_alive(Transport(None))  # type: ignore[arg-type]
    if socket.has_ipv6:
        with socket.socket(socket.AF_INET6) as six:
            tcp.keep_alive(Transport(six))  # type: ignore[arg-type]
            assert six.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_what_has_not_reached_the_peer_is_counted_here_and_in_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sock:
        sock.connect(server.getsockname())
        peer, _ = server.accept()
        with peer:
            transport = Transport(sock, 7)
            assert tcp.unsent_bytes(transport) == 7  # type: ignore[arg-type]
            sock.setblocking(False)
            sent = 0
            with pytest.raises(BlockingIOError):
                while True:
                    sent += sock.send(bytes(65536))
            assert 7 < tcp.unsent_bytes(transport) <= 7 + sent  # type: ignore[arg-type]
    assert tcp.unsent_bytes(transport) == 7  # type: ignore[arg-type]
    assert tcp.unsent_bytes(Transport(None, 5)) == 5  # type: ignore[arg-type]
