"""One process of a plane: what its replicas share, what arrives at its ports, its figures and its end."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint, UnixSocket
from berth.contract.gateway import ReplicaLimits
from berth.contract.ids import ModelName
from berth.runtime.errors import CannotStart
from proxy.config import ProxyOptions
from proxy.gateway import app, standalone
from proxy.gateway import replica as replica_module
from proxy.gateway import serving as module
from proxy.gateway.config import GatewayOptions
from proxy.gateway.serving import Server, open_server
from proxy.gateway.spec import Events
from proxy.request.admission import shared_limit
from proxy.request.grpc_head import INFER
from proxy.request.messages import framed
from proxy.request.replica import Replica
from proxy.wire.preamble import Kind
from tests.fakes.agent_control import replica_of
from tests.fakes.data_plane import GrpcPair, RestPair, settle, triton_at_hand
from tests.fakes.eventually import until
from tests.fakes.grpc_peers import Both, request
from tests.unit.proxy.downstream.test_connection import OK, infer

ANYWHERE = Endpoint("127.0.0.1", 0)
NOWHERE = Endpoint("127.0.0.1", 1)
WATCH = "/grpc.health.v1.Health/Watch"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"


def events() -> Events:
    return Events(asyncio.Event())


# Many replicas.


def gateway_options(**more: Any) -> GatewayOptions:
    return GatewayOptions(control=UnixSocket("/nowhere"), listen=ANYWHERE, **more)


@contextmanager
def replicas(workers: int, **more: Any) -> Iterator[list[Replica]]:
    """Two, in one of so many processes."""
    config = app.plane_config(gateway_options(workers=workers, **more))
    server = Server(config, events(), lambda _: None)
    limits = ReplicaLimits(queue_depth=100)
    made = [server._make_replica(replica_of(uid, limits=limits)).replica for uid in "ab"]
    yield made
    for one in made:
        one.admissions.close()


@pytest.mark.parametrize(("workers", "running"), [(1, [7, 3]), (2, [4, 2])])
async def test_all_replicas_of_all_processes_have_so_many_rest_requests_with_triton(
    workers: int, running: list[int]
) -> None:
    """Triton drops the answers of more (`proxy.request.outstanding`, which says how replicas share 16, or 8)."""
    with replicas(workers, triton_rest_requests=16) as made:
        for one in made:
            for _ in range(40):
                one.admissions.admit(0.0, list, is_rest=True)
        assert [one.admissions.running for one in made] == running


@pytest.mark.parametrize("workers", [1, 2])
async def test_all_replicas_of_all_processes_keep_to_one_memory(workers: int) -> None:
    """One may have as much as it leaves to the others, of its process' part (`proxy.request.budget`)."""
    with replicas(workers, memory_budget=1000) as (first, second):
        for budget, most in ((first.budget, 500 // workers), (second.budget, 250 // workers)):
            assert not budget.take(most + 1)
            assert budget.take(most)


async def test_a_page_of_loads_is_old_when_another_second_has_closed() -> None:
    """A scaler that asks each second would else read the second before the last."""
    workers: Any = SimpleNamespace(statuses=list, seconds=lambda: workers.closed, closed=1)
    page = app.Gateway(gateway_options(), workers, events(), asyncio.Event())._stat()
    before = page.news()
    assert page.news() == before
    workers.closed = 2
    assert page.news() != before


# One replica.


def options(**more: Any) -> ProxyOptions:
    wanted = {"http_listen": ANYWHERE, "grpc_listen": ANYWHERE, **more}
    return ProxyOptions(model=ModelName("own"), triton_http=NOWHERE, triton_grpc=NOWHERE, **wanted)


@asynccontextmanager
async def serving(**more: Any) -> AsyncIterator[Server]:
    wanted = options(**more)
    spec = standalone.static_spec(wanted)
    async with open_server(standalone.plane_config(wanted), events(), spec) as server:
        yield server


class Whole:
    """A server without sockets, whose replica Triton serves."""

    def __init__(self, *, shared: tuple[int, int] | None = None, **more: Any) -> None:
        wanted = options(**more)
        self.server = Server(standalone.plane_config(wanted), events(), lambda _: shared)
        self.server.apply(standalone.static_spec(wanted))
        self.served = self.server._only_replica()
        self.replica = self.served.replica
        self.replica.triton_says(None)

    def rest(self) -> RestPair:
        return RestPair(downstream=self.served.downstream(Kind.REST))  # type: ignore[arg-type]

    def grpc(self) -> Both:
        both = Both(GrpcPair(downstream=self.served.downstream(Kind.GRPC)))  # type: ignore[arg-type]
        both.exchange()
        return both

    @property
    def figures(self) -> Any:
        (stats,) = self.server.status().stats.values()
        return stats.figures


@pytest.fixture
async def whole(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def polls_for_ever(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(module.Upstream, "poll", polls_for_ever)
    made: list[Whole] = []

    def make(**more: Any) -> Whole:
        made.append(Whole(**more))
        return made[-1]

    with triton_at_hand(), RestPair.triton_at_hand():
        yield make
        for one in made:
            await one.server.close()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("workers", "each"), [(1, 16), (2, 8), (8, 2)])
async def test_a_single_replica_has_all_rest_requests_that_triton_can_answer(
    whole: Callable[..., Whole], workers: int, each: int, is_shared: bool
) -> None:
    """There is no other for which any would have to be kept (`proxy.request.outstanding`)."""
    shared = shared_limit(100, 100) if is_shared else None
    one = whole(triton_rest_requests=16, workers=workers, queue_depth=100, shared=shared)
    admitted = [one.replica.admissions.admit(0.0, list, is_rest=True) for _ in range(40)]
    assert sum(admission.is_running for admission in admitted) == each
    assert one.replica.admissions.running == each
    for admission in reversed(admitted):
        admission.release(0.0)


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
    assert (one.figures.running, one.figures.waiting) == (2, 1)
    assert grpc.client.status(refused) == 14
    grpc.triton.answer(answered, b"fine")
    grpc.exchange()
    await until(lambda: one.figures.waiting == 0)  # where it is shared the kernel tells of the slot
    await settle()
    assert one.figures.running == 2
    for upstream in rest.tritons:
        upstream.data_received(OK)
    assert rest.to_client.sent == late.to_client.sent == OK
    assert (one.figures.running, one.figures.rest.codes) == (0, {"200": 2})
    assert one.figures.grpc.codes == {"UNAVAILABLE": 1, "OK": 1}


async def test_the_figures_show_clients_readiness_and_load(
    whole: Callable[..., Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.05)
    one = whole()
    rest, grpc, _idle = one.rest(), one.grpc(), one.rest()
    rest.client.data_received(infer())
    await settle()
    stream = call(grpc)
    figures = one.figures
    assert (figures.rest.connections, figures.grpc.connections, figures.busy_connections) == (2, 1, 2)
    assert figures.model_ready
    assert one.server.status().not_ready == {}
    assert (figures.average_concurrency, figures.requests_per_second) == (0, 0)  # of the last second
    ticking = asyncio.create_task(one.server.tick())
    await until(lambda: one.figures.requests_per_second)
    await until(lambda: not one.figures.requests_per_second)
    assert one.figures.average_concurrency == pytest.approx(2)
    assert one.server.seconds >= 2
    ticking.cancel()
    one.replica.triton_says("gone")
    assert not one.figures.model_ready
    assert list(one.server.status().not_ready.values()) == ["gone"]
    rest.tritons[0].data_received(OK)
    grpc.triton.answer(stream, b"fine")
    grpc.exchange()
    assert one.figures.busy_connections == 0
    rest.client.connection_lost(None)
    assert one.figures.rest.connections == 1


async def test_a_request_that_waits_too_long_ends_while_the_server_runs(
    whole: Callable[..., Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.01)
    one = whole(request_timeout=0.1)
    rest, grpc = one.rest(), one.grpc()
    rest.client.data_received(infer())
    stream = call(grpc)
    began = time.monotonic()
    ticking = asyncio.create_task(one.server.tick())

    def ended() -> bool:
        grpc.exchange()
        return bool(rest.to_client.sent) and grpc.client.status(stream) is not None

    await until(ended)
    assert time.monotonic() - began > 0.08
    assert rest.to_client.sent.startswith(b"HTTP/1.1 504 ")
    assert grpc.client.status(stream) == 4
    ticking.cancel()


async def test_a_client_that_watches_sees_every_change_and_again_after_a_while(
    whole: Callable[..., Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = whole()
    one.replica.withheld = "not yet"
    both = one.grpc()
    stream = both.client.call(WATCH)
    both.client.send(stream, framed(b""), end=True)
    await settle()
    both.exchange()
    for reason, said in ((None, b"\x08\x01"), ("gone", b"\x08\x02"), (None, b"\x08\x01")):
        one.replica.withheld = reason
        await settle()
        both.exchange()
        assert both.client.data[stream].endswith(framed(said))
    assert both.client.data[stream].startswith(framed(b"\x08\x02"))
    assert one.figures.busy_connections == 0  # a client that only watches holds up no end
    monkeypatch.setattr(replica_module, "_WATCH_SECONDS", 0.005)
    one.replica.announce()
    before = len(both.client.data[stream])

    def told_again() -> bool:
        both.exchange()
        return len(both.client.data[stream]) >= before + 3 * len(framed(b"\x08\x01"))

    await until(told_again)


@pytest.mark.parametrize("what", ["runs", "waits", "is not delivered"])
async def test_it_is_idle_once_every_answer_is_delivered(whole: Callable[..., Whole], what: str) -> None:
    one = whole(container_concurrency=1, queue_depth=1)
    pair, second = one.rest(), one.rest()
    pair.to_client.stall(pair.client)
    pair.client.data_received(infer())
    if what == "waits":
        second.client.data_received(infer())
    await settle()
    await one.server.drain_all()
    assert not one.server.is_idle
    pair.tritons[0].data_received(OK)
    if what == "waits":
        pair.to_client.drain()
        await settle()
        assert not one.server.is_idle
        pair.tritons[-1].data_received(OK)
        assert second.to_client.sent.startswith(OK[:15])
    elif what == "is not delivered":
        assert not one.server.is_idle
    pair.to_client.drain()
    await until(lambda: one.server.is_idle)
    assert b"Connection: close" in pair.to_client.sent


async def asked(port: int, data: bytes = LIVE) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(100), 5)
    writer.close()
    return answer


async def test_both_ports_are_served_and_closed_by_a_drain() -> None:
    async with serving() as server:
        rest, grpc = server.ports
        assert (await asked(rest)).startswith(b"HTTP/1.1 200 OK\r\n")
        assert (await asked(grpc, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"))[3] == 4
        idle, writer = await asyncio.open_connection("127.0.0.1", rest)
        writer.write(LIVE)
        await idle.readuntil(b"\r\n\r\n")
        await server.drain_all()
        assert await asyncio.wait_for(idle.read(), 5) == b""  # ended, as nothing is under way on it
        writer.close()
        for port in (rest, grpc):
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: server.is_idle)


async def test_a_port_that_is_taken_is_named_by_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = Endpoint("127.0.0.1", taken.getsockname()[1])
        for flag in ("--http-listen", "--grpc-listen"):
            with pytest.raises(CannotStart, match=f"{flag}: cannot listen on 127.0.0.1:{port.port}"):
                async with serving(**{flag.removeprefix("--").replace("-", "_"): port}):
                    raise AssertionError("it serves")


async def test_the_end_breaks_off_clients_that_are_still_connected() -> None:
    async with serving() as server:
        readers = [await asyncio.open_connection("127.0.0.1", port) for port in server.ports]
        readers[0][1].write(LIVE)
        await readers[0][0].readuntil(b"\r\n\r\n")
        await readers[1][0].readexactly(9)
    for reader, writer in readers:
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_a_client_too_many_is_hung_up_on(whole: Callable[..., Whole]) -> None:
    one = whole()
    rest, grpc = one.rest(), one.grpc().pair
    for downstream in (rest.downstream, grpc.downstream):
        downstream.clients._most = 1  # type: ignore[attr-defined]
    late, too_late = one.rest(), GrpcPair(downstream=grpc.downstream)
    assert (rest.to_client.open, late.to_client.open) == (True, False)
    assert (grpc.to_client.open, too_late.to_client.open) == (True, False)
    assert not late.to_client.sent
    assert not too_late.to_client.sent
    assert one.figures.rest.connections == one.figures.grpc.connections == 1
    for gone in (late, too_late):
        gone.client.connection_lost(None)
    assert one.figures.rest.connections == one.figures.grpc.connections == 1


async def test_a_defect_in_what_looks_after_the_only_replica_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(module.Upstream, "poll", breaks)
    with pytest.raises(ExceptionGroup):
        async with asyncio.timeout(5), serving():
            await asyncio.Event().wait()
    assert "boom" in caplog.text
