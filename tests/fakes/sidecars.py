"""A pod's sidecar in front of the gateway, as small as can be: a port whose connections begin with a preamble."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from proxy.wire.preamble import ACCEPTED, Kind, Preamble


class Refused(Exception):
    """The gateway has closed without a word."""


async def connect(
    port: int, ticket: bytes, kind: Kind, *, host: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that the gateway has accepted. Raises Refused."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(Preamble(kind, ticket).to_bytes())
    try:
        async with asyncio.timeout(10):
            answer = await reader.read(1)
    except ConnectionError:
        answer = b""
    if answer != ACCEPTED:
        writer.close()
        raise Refused
    return reader, writer


@asynccontextmanager
async def sidecar(port: int, ticket: bytes, kind: Kind) -> AsyncIterator[str]:
    """HOST:PORT whose clients are the gateway's, under a ticket."""
    tasks: set[asyncio.Task[None]] = set()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            there = await connect(port, ticket, kind)
        except Refused:
            writer.close()
            return
        try:
            await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))
        finally:
            for one in (writer, there[1]):
                one.close()

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(256 * 1024):
            writer.write(data)
            await writer.drain()
    except ConnectionError:  # of either side: the other hears of it
        writer.transport.abort()
        return
    with suppress(OSError):
        writer.write_eof()


class Reports:
    """A connection for reports."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            line = await self._reader.readline()
        if not line:
            raise Refused
        said: dict[str, Any] = json.loads(line)
        return said

    def ask_to_drain(self) -> None:
        self.writer.write(b'{"drain": true}\n')


@asynccontextmanager
async def reports(port: int, ticket: bytes) -> AsyncIterator[Reports]:
    reader, writer = await connect(port, ticket, Kind.REPORT)
    try:
        yield Reports(reader, writer)
    finally:
        writer.close()
