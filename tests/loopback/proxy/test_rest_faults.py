"""The REST downstream before an upstream that breaks off, dawdles or is away, and at its own end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from proxy.downstream.listener import Listener
from proxy.downstream.rest.connection import RestConnection
from proxy.downstream.rest.downstream import RestDownstream, RestShared
from proxy.policy.names import Names
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.replica import Replica

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"
METADATA = b"GET /v2/models/m HTTP/1.1\r\nHost: h\r\n\r\n"
EVENTS = b"POST /v2/models/m/generate_stream HTTP/%s\r\nHost: h\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Scripted:
    """Answers every request with these pieces; None cuts the connection, an event is waited for."""

    pieces: list[bytes | asyncio.Event | None] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)
    tasks: list["asyncio.Task[None] | None"] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        with closing(writer):
            while head := await read_head(reader):
                self.asked.append(head)
                for piece in self.pieces:
                    if piece is None:
                        return
                    if isinstance(piece, asyncio.Event):
                        await piece.wait()
                    else:
                        writer.write(piece)

    async def end(self) -> None:
        for piece in self.pieces:
            if isinstance(piece, asyncio.Event):
                piece.set()
        await asyncio.gather(*(task for task in self.tasks if task is not None))


async def read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@dataclass
class Downstream:
    rest: RestDownstream
    triton: Scripted
    port: Listener

    async def ask(self, request: bytes) -> bytes:
        """Everything that comes until the connection ends, or falls silent."""
        async with self.connected() as (reader, writer):
            writer.write(request)
            return await all_of(reader)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    def answered(self, code: str) -> int:
        return self.rest.replica.rest.codes.get(code, 0)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""


@pytest_asyncio.fixture
async def downstream() -> AsyncIterator[Downstream]:
    triton = Scripted()
    server = await asyncio.start_server(triton.serve, "127.0.0.1", 0)
    here = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    limits = ReplicaLimits(
        container_concurrency=1, queue_depth=1, max_json_bytes=1024, request_timeout_seconds=0.5
    )
    replica, shared = (
        Replica(Names(b"m", b"m"), limits),
        RestShared(UpstreamCluster(UpstreamEndpoint(here, here))),
    )
    replica.triton_says(None)
    rest = RestDownstream(shared, replica)
    port = Listener(lambda: RestConnection(rest), what="--http-listen")
    await port.start(Endpoint("127.0.0.1", 0))
    ticking = asyncio.create_task(tick(rest))
    yield Downstream(rest, triton, port)
    ticking.cancel()
    await port.stop()
    rest.close()
    await shared.close()
    server.close()
    await triton.end()


async def tick(rest: RestDownstream) -> None:
    while True:
        await asyncio.sleep(0.1)
        rest.tick(time.monotonic())


def once(body: bytes) -> bytes:
    return body.replace(b"\r\nHost", b"\r\nConnection: close\r\nHost")


@pytest.mark.parametrize("stall", [None, asyncio.Event], ids=["cut", "late"])
async def test_an_answer_that_breaks_off_is_never_finished_with_another(
    downstream: Downstream, stall: Callable[[], asyncio.Event] | None
) -> None:
    """A second head would be taken for the missing part of the first one's body."""
    downstream.triton.pieces = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nbegun",
        stall() if stall else None,
    ]
    received = bytearray()
    async with downstream.connected() as (reader, writer):
        writer.write(METADATA)
        with pytest.raises((ConnectionError, EOFError)):
            while chunk := await asyncio.wait_for(reader.read(4096), 30):
                received += chunk
            raise EOFError
    assert received.count(b"HTTP/1.1") <= 1
    assert b"error" not in received
    assert downstream.answered("504" if stall else "502") == 1


async def test_a_cut_before_the_answer_is_refused(downstream: Downstream) -> None:
    downstream.triton.pieces = [None]
    answer = await downstream.ask(once(METADATA))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"Triton broke off" in answer


async def test_a_triton_that_is_absent_is_unavailable_and_worth_another_try(downstream: Downstream) -> None:
    downstream.rest.shared.cluster.move(UpstreamEndpoint(Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 1)))
    answer = await downstream.ask(once(METADATA))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"Retry-After: 1" in answer


async def test_an_answer_in_many_pieces_is_read_to_its_end(downstream: Downstream) -> None:
    body = [b'{"name":"triton",', b'"extensions":["trace",', b'"statistics"]}']
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    pause = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, pause.set)
    downstream.triton.pieces = [head % len(b"".join(body)), body[0], pause, body[1], body[2]]
    answer = await downstream.ask(once(b"GET /v2 HTTP/1.1\r\nHost: h\r\n\r\n"))
    assert answer.endswith(b'{"name": "triton", "extensions": ["statistics"]}')


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_events_go_to_old_and_new_clients(downstream: Downstream, version: bytes) -> None:
    downstream.triton.pieces = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"a\r\ndata: {}\n\n\r\n",
        b"0\r\n\r\n",
    ]
    answer = await downstream.ask(EVENTS % version)
    assert b"data: {}\n\n" in answer
    assert (b"chunked" in answer) is (version == b"1.1")


async def test_an_event_is_passed_on_when_it_comes(downstream: Downstream) -> None:
    rest = asyncio.Event()
    downstream.triton.pieces = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"a\r\ndata: {}\n\n\r\n",
        rest,
        b"0\r\n\r\n",
    ]
    async with downstream.connected() as (reader, writer):
        writer.write(EVENTS % b"1.1")
        await asyncio.wait_for(reader.readuntil(b"data: {}\n\n"), 30)
        assert downstream.rest.replica.admissions.running == 1  # it holds its slot to its end
        rest.set()
        await all_of(reader)
    await asyncio.wait_for(downstream.rest.replica.admissions.idle(), 30)


async def test_the_end_takes_idle_connections_along_and_lets_the_others_finish(
    downstream: Downstream,
) -> None:
    answer, port = asyncio.Event(), downstream.port.port
    downstream.triton.pieces = [answer, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]
    async with downstream.connected() as (idle, idle_writer), downstream.connected() as (busy, busy_writer):
        idle_writer.write(LIVE)
        await idle.readuntil(b"\r\n\r\n")
        busy_writer.write(METADATA)
        while not downstream.triton.asked:
            await asyncio.sleep(0)
        await downstream.port.stop()
        downstream.rest.stop_accepting()
        answer.set()
        last = await all_of(busy)
        assert await all_of(idle) == b""  # a moment later: its next request might have been on its way
    assert last.endswith(b"{}")
    assert b"Connection: close" in last
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n",
        b"Content-Encoding: x\r\n",
        b"Inference-Header-Content-Length: " + b"9" * 5000 + b"\r\n",
        b"Inference-Header-Content-Length: 1\r\nInference-Header-Content-Length: 2\r\n",
        b"Inference-Header-Content-Length: \xb2\r\n",
    ],
)
async def test_headers_that_two_readers_could_read_differently_are_refused(
    downstream: Downstream, lines: bytes
) -> None:
    request = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 2\r\n"
    answer = await downstream.ask(request + lines + b"\r\n{}")
    assert answer.split(b" ")[1] in (b"400", b"415")
    assert downstream.triton.asked == []


async def test_a_client_cannot_fill_the_log(downstream: Downstream, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert b" 400 " in await downstream.ask(b"GET /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n")
    assert caplog.records == []
