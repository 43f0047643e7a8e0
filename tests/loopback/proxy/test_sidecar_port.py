"""A sidecar between real sockets: what goes through it, and what its clients hear when there is no gateway."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from proxy.request.traffic import Figures
from proxy.sidecar import port as port_module
from proxy.sidecar.gateway import GatewayAccess, NodeGateway
from proxy.sidecar.port import Port
from proxy.transport import tunnel as splice
from proxy.transport.tunnel import Watermark
from proxy.wire.preamble import ACCEPTED, PREAMBLE_BYTES, Kind
from proxy.wire.report import Report
from tests.fakes.eventually import until
from tests.fakes.gateway import TICKET, FakeGateway, Serve, echo, gateway
from tests.fakes.uv import on_uvloop

ANYWHERE = Endpoint("127.0.0.1", 0)


class Sidecar:
    """One port of a sidecar, and where it leads."""

    def __init__(self, way: NodeGateway, port: Port, watermark: Watermark) -> None:
        self.way, self.port, self.watermark = way, port, watermark
        self.writers: list[asyncio.StreamWriter] = []

    async def slow_client(self) -> asyncio.StreamWriter:
        """One that asks, and takes next to nothing of the answer."""
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", self.port.port))
        _, writer = await asyncio.open_connection(sock=one, limit=1024)
        self.writers.append(writer)
        writer.write(b"x")
        return writer

    async def client(self, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port.port, **more)
        self.writers.append(writer)
        return reader, writer


@asynccontextmanager
async def sidecar(
    target: FakeGateway | None, kind: Kind = Kind.REST, *, most: int = 100, watermark: Watermark | None = None
) -> AsyncIterator[Sidecar]:
    way, watermark = NodeGateway(), Watermark() if watermark is None else watermark
    if target is not None:
        way.access = GatewayAccess(target.endpoint, TICKET)
    port = Port(kind, way, watermark, most=most, what="--http-listen")
    port.start(ANYWHERE)
    one = Sidecar(way, port, watermark)
    try:
        yield one
    finally:
        port.close()
        for writer in one.writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


@on_uvloop
async def test_clients_that_come_all_at_once_ask_the_gateway_in_file() -> None:
    """It has room for so many only that it does not know yet, of all the node's pods."""
    waiting, most, may_answer = 0, 0, asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting, most
        waiting, most = waiting + 1, max(most, waiting + 1)
        await reader.readexactly(PREAMBLE_BYTES + 1)
        await may_answer.wait()
        waiting -= 1
        writer.write(ACCEPTED + b"y")
        await reader.read(-1)
        writer.close()

    there = await asyncio.start_server(take, "127.0.0.1", 0)
    async with there, sidecar(None, most=400) as one:
        one.way.access = GatewayAccess(Endpoint(*there.sockets[0].getsockname()[:2]), TICKET)
        clients = [await one.client() for _ in range(300)]
        for _, writer in clients:
            writer.write(b"x")
        await until(lambda: waiting == 64)
        await asyncio.sleep(0.1)
        may_answer.set()
        for reader, writer in clients:
            assert await reader.readexactly(1) == b"y"
            writer.close()
        assert most == 64


@pytest.mark.parametrize("seed", range(5))
@on_uvloop
async def test_every_byte_goes_through_however_it_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    sent = draw.randbytes(draw.choice([1, 5000, 3_000_000]))
    async with gateway() as target, sidecar(target) as one:
        reader, writer = await one.client()

        async def say() -> None:
            at = 0
            while at < len(sent):
                size = draw.choice([1, 7, 4096, 65537, 400_000])
                writer.write(sent[at : at + size])
                at += size
                await writer.drain()
                if draw.random() < 0.2:
                    await asyncio.sleep(0.001)
            writer.write_eof()

        saying = asyncio.create_task(say())
        received = await asyncio.wait_for(reader.read(-1), 20)
        await saying
        assert received == sent
        writer.close()
        await until(lambda: len(one.port) == 0)
        await until(lambda: target.serving == 0)


@on_uvloop
async def test_a_hundred_mebibytes_each_way() -> None:
    size, piece = 100 * 1024**2, bytes(1024**2)
    async with gateway() as target, sidecar(target) as one:
        reader, writer = await one.client(limit=1024**2)

        async def say() -> None:
            for _ in range(size // len(piece)):
                writer.write(piece)
                await writer.drain()
            writer.write_eof()

        saying, received = asyncio.create_task(say()), 0
        while data := await reader.read(1024**2):
            received += len(data)
        await saying
        assert received == size
        assert one.watermark.held_bytes == 0
        writer.close()
        await until(lambda: len(one.port) == 0)


@on_uvloop
async def test_what_one_does_not_take_the_other_does_not_send() -> None:
    """Neither a client that does not read nor a gateway that does not fills the sidecar."""
    taken = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        while True:
            writer.write(bytes(65536))
            await writer.drain()
            taken += 65536

    async with gateway(pour) as target, sidecar(target) as one:
        _, writer = await one.client(limit=1024)
        writer.write(b"x")
        before = -1
        while taken != before:
            before = taken
            await asyncio.sleep(0.3)
        assert 0 < one.watermark.held_bytes <= 400_000
        writer.transport.abort()
        await until(lambda: one.watermark.held_bytes == 0 and len(one.port) == 0)

    enough = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await enough.wait()

    async with gateway(deaf) as target, sidecar(target) as one:
        _, writer = await one.client()
        writer.write(bytes(30 * 1024**2))
        await until(lambda: one.watermark.held_bytes > 0)
        await asyncio.sleep(0.2)
        assert one.watermark.held_bytes <= 400_000
        assert writer.transport.get_write_buffer_size() > 10 * 1024**2
        enough.set()
        await until(lambda: one.watermark.held_bytes == 0 and len(one.port) == 0)


@on_uvloop
async def test_many_slow_readers_hold_little_and_the_others_go_on() -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        while True:
            writer.write(bytes(65536))
            await writer.drain()

    watermark = Watermark(high_bytes=1024**2, low_bytes=256 * 1024)
    async with gateway(pour) as target, sidecar(target, watermark=watermark) as one:
        slow = [await one.slow_client() for _ in range(60)]
        await until(lambda: watermark.is_high)
        await asyncio.sleep(0.5)
        # A piece of up to 4 KiB for each on top of what they held when it became one too many.
        assert watermark.held_bytes < 1024**2 + 400_000 + 60 * (65536 + 2 * 4096)
        target.serve = echo
        reader, writer = await one.client()
        sent = random.randbytes(500_000)
        writer.write(sent)
        assert await asyncio.wait_for(reader.readexactly(len(sent)), 10) == sent
        for other in slow:
            other.transport.abort()
        await until(lambda: not watermark.is_high)
        writer.write(sent)
        assert await asyncio.wait_for(reader.readexactly(len(sent)), 10) == sent
        assert watermark.held_bytes == 0
        writer.close()


@on_uvloop
async def test_a_client_that_has_said_all_still_hears_the_answer() -> None:
    async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = await reader.read(-1)
        await asyncio.sleep(0.05)
        writer.write(whole[::-1])

    async with gateway(answer_at_the_end) as target, sidecar(target) as one:
        reader, writer = await one.client()
        writer.write(b"abc")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(-1), 30) == b"cba"
        writer.close()
        await until(lambda: len(one.port) == 0)


@on_uvloop
async def test_a_gateway_that_has_said_all_still_hears_the_client() -> None:
    received: list[bytes] = []

    async def answer_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"early")
        writer.write_eof()
        received.append(await reader.read(-1))

    async with gateway(answer_first) as target, sidecar(target) as one:
        reader, writer = await one.client()
        writer.write(b"x")
        assert await asyncio.wait_for(reader.read(-1), 30) == b"early"
        await asyncio.sleep(0.05)
        writer.write(b"rest")
        writer.close()
        await until(lambda: received)
        assert received == [b"rest"]
        await until(lambda: len(one.port) == 0)


@on_uvloop
async def test_a_client_that_does_not_end_after_the_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "LINGER_SECONDS", 0.1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"done")

    async with gateway(answer) as target, sidecar(target) as one:
        reader, writer = await one.client()
        writer.write(b"x")
        assert await asyncio.wait_for(reader.read(-1), 30) == b"done"
        await until(lambda: len(one.port) == 0)
        writer.close()


@on_uvloop
async def test_a_client_that_goes_is_gone_for_the_gateway_too() -> None:
    ended = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"event\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    async with gateway(hold) as target, sidecar(target) as one:
        reader, writer = await one.client()
        writer.write(b"x")
        await reader.readline()
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 30)
        await until(lambda: len(one.port) == 0)


REQUEST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"


async def rest_answer(one: Sidecar, request: bytes = REQUEST) -> bytes:
    reader, writer = await one.client()
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(-1), 30)
    writer.close()
    return answer


def is_503(answer: bytes, why: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return (
        head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        and b"Retry-After: 1\r\n" in head
        and b"Connection: close" in head
        and b"Content-Length: %d\r\n" % len(body) in head
        and body.startswith(b'{"error": "')
        and why in body
    )


@on_uvloop
async def test_without_a_gateway_every_request_is_answered_503() -> None:
    async with sidecar(None) as one:
        assert is_503(await rest_answer(one), b"the agent has not named")
    async with gateway() as target:
        pass
    async with sidecar(target) as one:  # it is gone
        assert is_503(await rest_answer(one), b"cannot be reached")
    async with gateway() as target, sidecar(target) as one:
        target.ticket = bytes(32)  # another's now
        assert is_503(await rest_answer(one), b"does not accept this pod's ticket")
        one.way.record(Report("draining", Figures().to_json()).to_line())
        assert is_503(await rest_answer(one), b"takes nothing new for this model: draining")
        await until(lambda: len(one.port) == 0)


@on_uvloop
async def test_a_gateway_that_does_not_answer_is_waited_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from proxy.sidecar import gateway as module

    monkeypatch.setattr(module, "ASK_SECONDS", 0.2)
    accepted: list[Any] = []

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        await asyncio.sleep(60)

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    async with sidecar(None) as one:
        one.way.access = GatewayAccess(Endpoint("127.0.0.1", server.sockets[0].getsockname()[1]), TICKET)
        assert is_503(await rest_answer(one), b"does not answer")
    assert accepted
    server.close()
    for writer in accepted:
        writer.transport.abort()


@on_uvloop
async def test_a_request_whose_gateway_ends_before_its_answer_is_answered_503() -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.transport.abort()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)

    for serve in (die, hang_up):
        async with gateway(serve) as target, sidecar(target) as one:
            assert is_503(await rest_answer(one), b"has ended the connection")
            await until(lambda one=one: len(one.port) == 0)


@on_uvloop
async def test_an_answer_that_has_begun_is_never_followed_by_another() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.transport.abort()

    async with gateway(half) as target, sidecar(target) as one:
        answer = await rest_answer(one)
        assert answer.endswith(b"half")
        assert answer.count(b"HTTP/1.1") == 1


@on_uvloop
async def test_a_ticket_and_an_address_that_change_count_for_the_next_connection() -> None:
    async def name(text: bytes) -> Serve:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(1):
                writer.write(text)

        return serve

    async with gateway(await name(b"a")) as first, gateway(await name(b"b")) as second, sidecar(first) as one:
        old = await one.client()
        old[1].write(b"?")
        assert await old[0].readexactly(1) == b"a"
        second.ticket = bytes(reversed(TICKET))
        one.way.access = GatewayAccess(second.endpoint, second.ticket)
        new = await one.client()
        new[1].write(b"?")
        assert await new[0].readexactly(1) == b"b"
        old[1].write(b"?")
        assert await old[0].readexactly(1) == b"a"
        for _, writer in (old, new):
            writer.close()


@on_uvloop
async def test_a_silent_client_makes_room_for_one_that_speaks() -> None:
    async with gateway() as target, sidecar(target, most=5) as one:
        silent = [await one.client() for _ in range(5)]
        await until(lambda: len(one.port) == 5)
        assert target.serving == 0
        speaking = []
        for _ in range(5):
            reader, writer = await one.client()
            writer.write(b"hello")
            assert await asyncio.wait_for(reader.readexactly(5), 30) == b"hello"
            speaking.append(writer)
        for reader, writer in silent:
            assert await asyncio.wait_for(reader.read(-1), 30) == b""
            writer.close()
        reader, writer = await one.client()  # none of the others goes for it
        with pytest.raises(ConnectionResetError):
            writer.write(b"x")
            assert await asyncio.wait_for(reader.read(-1), 30) == b""
            raise ConnectionResetError
        assert len(one.port) == 5
        for writer in speaking:
            writer.close()


@on_uvloop
async def test_a_client_that_is_silent_for_long_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(port_module._SILENT_SECONDS, Kind.REST, 0.1)
    async with gateway() as target, sidecar(target) as one:
        reader, _ = await one.client()
        assert await asyncio.wait_for(reader.read(-1), 30) == b""
        assert len(one.port) == 0
