"""A port of a standby: a client that connects is connected to the leader.

Bytes go through as they are, so that TLS, and who may ask, are the leader's affair. It ends when this replica leads itself.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Final

from berth.contract.endpoint import Endpoint
from berth.runtime.logs import fields
from berth.runtime.process import starting

log = logging.getLogger(__name__)

# The aggregator and KEDA keep theirs; more connections are closed.
_CONNECTIONS: Final = 128
_CONNECT_SECONDS: Final = 2.0
_CHUNK_BYTES: Final = 64 * 1024


@asynccontextmanager
async def relaying(what: str, listen: Endpoint, leader: Callable[[], str]) -> AsyncIterator[int]:
    """While the block lasts; `leader`: its host, "" where none is known. Yields the port. Raises CannotStart."""
    relay = _Relay(listen.port, leader)
    with starting(what, listen):
        server = await asyncio.start_server(relay.connected, listen.host, listen.port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await relay.end()


class _Relay:
    def __init__(self, port: int, leader: Callable[[], str]) -> None:
        self._port, self._leader = port, leader
        self._open: set[asyncio.Task[None]] = set()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def end(self) -> None:
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one of both ends."""
        try:
            host = self._leader()
            if not host:
                return
            async with asyncio.timeout(_CONNECT_SECONDS):
                to_reader, to_writer = await asyncio.open_connection(host, self._port)
            try:
                await _first_end(_pump(reader, to_writer), _pump(to_reader, writer))
            finally:
                to_writer.close()
        except (OSError, TimeoutError) as error:
            log.warning("the leader is not reached", extra=fields(error=str(error) or "it does not answer"))
        finally:
            writer.close()


async def _first_end(*pumps: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.create_task(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
