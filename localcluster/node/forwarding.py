"""Ways from the owner's loopback to addresses inside a node's network, for clients that take no ready socket."""

import asyncio
from contextlib import suppress

from localcluster.node.namespaces import Namespaces

_CHUNK_BYTES = 256 * 1024


class Forwarder:
    """Use as an async context manager, inside that of the node."""

    def __init__(self, node: Namespaces) -> None:
        self._node = node
        self._open: dict[tuple[str, int], str] = {}
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Forwarder":
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def to(self, host: str, port: int) -> str:
        """HOST:PORT outside; a connection to it goes to the target inside, or is closed at once."""
        if (host, port) not in self._open:

            def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                connection = asyncio.create_task(self._carry(reader, writer, host, port))
                self._connections.add(connection)
                connection.add_done_callback(self._connections.discard)

            server = await asyncio.start_server(accepted, "127.0.0.1", 0)
            self._servers.append(server)
            self._open[host, port] = "{}:{}".format(*server.sockets[0].getsockname())
        return self._open[host, port]

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        try:
            inside = await self._node.connect(host, port)
        except OSError:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(sock=inside)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            writer.close()
            far_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the sender has no more. A connection that breaks breaks for both."""
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()
    except OSError:
        writer.transport.abort()
