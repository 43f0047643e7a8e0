"""An end that was broken off is passed on as one (data-plane D4): through the sidecar, and through what it shares."""

import asyncio
import contextlib
import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from proxy.transport import tunnel as splice
from proxy.wire.preamble import PREAMBLE_BYTES
from tests.fakes.agent_control import replica_of
from tests.fakes.eventually import until
from tests.fakes.gateway import gateway
from tests.fakes.triton_rest import BODY, fake_triton
from tests.fakes.uv import on_uvloop
from tests.loopback.proxy.test_sidecar_and_gateway import gateway_of
from tests.loopback.proxy.test_sidecar_port import Sidecar, sidecar

LINGER = struct.pack("ii", 1, 0)
JSON = json.dumps(BODY).encode()
ASKED = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s" % (len(JSON), JSON)


def break_off(writer: asyncio.StreamWriter) -> None:
    sock: Any = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
    writer.transport.abort()


class Ends:
    """How connections have ended at the gateway."""

    def __init__(self, answer: bytes = b"") -> None:
        self.seen, self.answer, self.reached = list[str](), answer, asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(self.answer)
        self.reached.set()
        try:
            await reader.read(-1)
        except ConnectionResetError:
            self.seen.append("reset")
        else:
            self.seen.append("end")


@pytest.mark.parametrize("answer", [b"", b"the first part"])
@on_uvloop
async def test_a_client_that_is_reset_is_reset_at_the_gateway(answer: bytes) -> None:
    ends = Ends(answer)
    async with gateway(ends.serve) as target, sidecar(target) as one:
        reader, writer = await one.client()
        writer.write(b"x")
        await asyncio.wait_for(ends.reached.wait(), 30)
        assert await asyncio.wait_for(reader.readexactly(len(answer)), 30) == answer
        break_off(writer)
        await until(lambda: ends.seen)
        assert ends.seen == ["reset"]
        await until(lambda: len(one.port) == 0)


@on_uvloop
async def test_a_client_that_has_said_all_is_none_that_was_broken_off() -> None:
    ends = Ends(b"answer")
    async with gateway(ends.serve) as target, sidecar(target) as one:
        reader, writer = await one.client()
        writer.write(b"x")
        await asyncio.wait_for(ends.reached.wait(), 30)
        writer.write_eof()
        await until(lambda: ends.seen)
        assert ends.seen == ["end"]
        assert await asyncio.wait_for(reader.read(-1), 30) == b"answer"


@on_uvloop
async def test_a_sidecar_that_ends_breaks_off_what_waits_at_the_gateway() -> None:
    ends = Ends()
    async with gateway(ends.serve) as target, sidecar(target) as one:
        _, writer = await one.client()
        writer.write(b"x")
        await asyncio.wait_for(ends.reached.wait(), 30)
        await until(lambda: len(one.watermark) == 1)
        one.port.close()
        await until(lambda: ends.seen)
        assert ends.seen == ["reset"]


@on_uvloop
async def test_a_client_that_goes_before_the_gateway_has_taken_it_is_reset_there() -> None:
    """Its first bytes are there already."""
    ends = Ends()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(PREAMBLE_BYTES)
        await ends.serve(reader, writer)
        writer.close()

    async with gateway() as target:
        slow = await asyncio.start_server(take, "127.0.0.1", 0)
        async with slow, sidecar(target) as one:
            access = one.way.access
            assert access is not None
            port = slow.sockets[0].getsockname()[1]
            one.way.access = type(access)(Endpoint("127.0.0.1", port), access.ticket)
            _, writer = await one.client()
            writer.write(b"x")
            await asyncio.wait_for(ends.reached.wait(), 30)
            one.port.close()
            await until(lambda: ends.seen)
            assert ends.seen == ["reset"]


async def taken_by(one: Sidecar, *, after: asyncio.Event) -> tuple[int, str]:
    """What a slow client gets, and how it ends."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30)
    await asyncio.to_thread(sock.connect, ("127.0.0.1", one.port.port))
    sock.sendall(b"x")
    await after.wait()

    def take() -> tuple[int, str]:
        count = 0
        with sock:
            try:
                while piece := sock.recv(65536):
                    count += len(piece)
            except ConnectionResetError:
                return count, "reset"
        return count, "end"

    return await asyncio.to_thread(take)


@pytest.mark.parametrize("size", [10, 300_000])
@on_uvloop
async def test_an_answer_that_was_broken_off_is_at_the_client_too(size: int) -> None:
    """And nothing is lost of what had come: it would be taken for whole by whoever reads to the end."""
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(bytes(size))
        await until(lambda: splice.unsent_bytes(writer.transport) == 0)
        break_off(writer)
        gone.set()

    async with gateway(answer) as target, sidecar(target) as one:
        assert await taken_by(one, after=gone) == (size, "reset")
        await until(lambda: len(one.port) == 0)


@on_uvloop
async def test_a_client_that_does_not_take_what_was_broken_off_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splice, "LINGER_SECONDS", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(bytes(300_000))
        await until(lambda: splice.unsent_bytes(writer.transport) == 0)
        break_off(writer)

    async with gateway(answer) as target, sidecar(target) as one:
        await one.slow_client()
        await until(lambda: len(one.port) == 1)
        await until(lambda: len(one.port) == 0)
        assert len(one.watermark) == 0


async def test_waiters_that_were_reset_are_not_executed(tmp_path: Path) -> None:
    """Through a sidecar and the real gateway: the place in the queue is free at once, and Triton hears of none of them."""
    replica = replica_of("uid-1", "m", limits=ReplicaLimits(container_concurrency=1, queue_depth=4))
    async with fake_triton() as upstream, gateway_of(tmp_path, upstream.endpoint) as (real, control):
        control.tell([replica])
        target: Any = type("Target", (), {"endpoint": Endpoint("127.0.0.1", real.port)})
        async with sidecar(target) as one:
            access = one.way.access
            assert access is not None
            one.way.access = type(access)(access.endpoint, replica.ticket)
            upstream.may_answer.clear()

            def waiting() -> int:
                return sum(one.figures.waiting for one in real.control_plane.stats().values())

            await until(
                lambda: real.control_plane.stats() and real.control_plane.stats()["uid-1"].figures.model_ready
            )
            first = await one.client()
            first[1].write(ASKED)
            await until(lambda: upstream.running)
            waiters = [await one.client() for _ in range(4)]
            for _, writer in waiters:
                writer.write(ASKED)
            await until(lambda: waiting() == 4)
            for _, writer in waiters:
                break_off(writer)
            await until(lambda: waiting() == 0)
            upstream.may_answer.set()
            assert (await asyncio.wait_for(first[0].readline(), 30)).startswith(b"HTTP/1.1 200 ")
            with contextlib.suppress(ConnectionError):
                first[1].close()
        assert upstream.most == 1
