"""Connections that a replica passes on to the leader."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest

from berth.contract.endpoint import Endpoint
from berth.runtime.errors import CannotStart
from localcluster.addresses import free_port
from scaler.export import relay
from scaler.export.relay import relaying

LEADER, STANDBY = "127.0.0.1", "127.0.0.2"
SECONDS = 20.0


@asynccontextmanager
async def echoing(port: int) -> AsyncIterator[None]:
    """The leader: says back what it hears, and ends when it has heard the end."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(echo, LEADER, port):
        yield


async def opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(SECONDS):
        return await asyncio.open_connection(STANDBY, port)


async def asked(port: int, data: bytes = b"a") -> bytes:
    """What comes back; b"" where the connection is ended."""
    reader, writer = await opened(port)
    try:
        writer.write(data)
        async with asyncio.timeout(SECONDS):
            return await reader.readexactly(len(data))
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    finally:
        writer.close()


async def test_bytes_go_through_as_they_are() -> None:
    port, data = free_port(LEADER, STANDBY), bytes(range(256)) * 8192
    async with echoing(port), relaying("--x", Endpoint(STANDBY, port), lambda: LEADER):
        assert await asked(port) == b"a"
        reader, writer = await opened(port)
        writer.write(data)
        async with asyncio.timeout(SECONDS):
            assert await reader.readexactly(len(data)) == data
        writer.close()


async def test_without_a_leader_a_connection_ends_at_once() -> None:
    port, leader = free_port(LEADER, STANDBY), ""
    async with relaying("--x", Endpoint(STANDBY, port), lambda: leader):
        assert await asked(port) == b""
        leader = LEADER
        assert await asked(port) == b"", "nobody listens there yet"
        async with echoing(port):
            assert await asked(port) == b"a"


async def test_too_many_connections_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_CONNECTIONS", 2)
    port = free_port(LEADER, STANDBY)
    async with echoing(port), relaying("--x", Endpoint(STANDBY, port), lambda: LEADER):
        there = [await opened(port) for _ in range(2)]
        for reader, writer in there:
            writer.write(b"a")
            async with asyncio.timeout(SECONDS):
                assert await reader.readexactly(1) == b"a"
        assert await asked(port) == b""
        for _, writer in there:
            writer.close()
        async with asyncio.timeout(SECONDS):
            while await asked(port) != b"a":
                await asyncio.sleep(0.01)


async def test_all_ends_with_it_and_the_port_is_free() -> None:
    port = free_port(LEADER, STANDBY)
    async with echoing(port):
        async with relaying("--x", Endpoint(STANDBY, port), lambda: LEADER):
            reader, writer = await opened(port)
            writer.write(b"a")
            assert await reader.readexactly(1) == b"a"
            with pytest.raises(CannotStart, match="--x"):
                async with relaying("--x", Endpoint(STANDBY, port), lambda: LEADER):
                    pass
        async with asyncio.timeout(SECONDS):
            assert await reader.read() == b""
        writer.close()
        async with relaying("--x", Endpoint(STANDBY, port), lambda: LEADER):
            assert await asked(port) == b"a"


async def test_a_leader_that_does_not_accept_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay, "_CONNECT_SECONDS", 0.2)
    with socket.socket() as listening, ExitStack() as stack:
        port = free_port(LEADER, STANDBY)
        listening.bind((LEADER, port))
        listening.listen(0)
        # The kernel takes no third one, and the next one's SYN is not answered.
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        async with relaying("--x", Endpoint(STANDBY, port), lambda: LEADER):
            assert await asked(port) == b""
        (told,) = [one for one in caplog.records if one.message == "the leader is not reached"]
        assert told.fields == {"error": "it does not answer"}  # type: ignore[attr-defined]
