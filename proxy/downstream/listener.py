"""A port that clients connect to."""

import asyncio
import errno
import os
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from berth.contract.endpoint import Endpoint
from berth.runtime.process import starting
from proxy.request.traffic import Traffic

_BACKLOG = 4096
_TLS_HANDSHAKE_SECONDS = 10.0
# For what is still to be delivered when a connection is closed. Who takes nothing is ended before, by its own rules.
_TLS_SHUTDOWN_SECONDS = 300.0
# Each client costs two descriptors, its own and the one towards Triton.
_DESCRIPTORS_KEPT, _DESCRIPTORS_EACH = 64, 2
_MOST_CLIENTS = 16_384


C = TypeVar("C")


class Clients(Generic[C]):
    """Who is connected now, of one protocol of one replica."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._connections: set[C] = set()
        # Half of them for each protocol.
        self._most = min(_MOST_CLIENTS, (allow_descriptors() - _DESCRIPTORS_KEPT) // (2 * _DESCRIPTORS_EACH))

    def __iter__(self) -> Iterator[C]:
        """They may go while they are looked at."""
        return iter(list(self._connections))

    def __len__(self) -> int:
        return len(self._connections)

    def connected(self, connection: C) -> bool:
        """Count a client that has connected; False if there are too many."""
        if len(self._connections) >= self._most:
            return False
        self._connections.add(connection)
        self._traffic.connections = len(self._connections)
        return True

    def disconnected(self, connection: C) -> None:
        self._connections.discard(connection)
        self._traffic.connections = len(self._connections)


class Listener:
    """One listening port."""

    def __init__(self, make: Callable[[], asyncio.BaseProtocol], *, what: str) -> None:
        """`make`: a connection's protocol. `what`: the option that tells the port."""
        self._make, self._what = make, what
        self._servers: list[asyncio.Server] = []

    async def start(
        self,
        listen: Endpoint,
        *,
        tls: ssl.SSLContext | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        """Raises CannotStart when the port is taken. `sockets`: bound there already."""
        loop = asyncio.get_running_loop()
        where: list[dict[str, Any]] = [{"sock": one} for one in sockets]
        with starting(self._what, listen):
            self._servers = [
                await loop.create_server(self._make, **one, backlog=_BACKLOG, **_tls(tls))
                for one in where or [{"host": listen.host, "port": listen.port}]
            ]

    async def renew(self, tls: ssl.SSLContext) -> None:
        """Serve new connections with another context, on the same sockets: no connection is rejected meanwhile."""
        loop, old = asyncio.get_running_loop(), self._servers
        sockets = [listening for server in old for listening in server.sockets]
        self._servers = [
            await loop.create_server(
                self._make, sock=socket.socket(fileno=os.dup(one.fileno())), backlog=_BACKLOG, **_tls(tls)
            )
            for one in sockets
        ]
        for server in old:
            server.close()

    @property
    def port(self) -> int:
        """The port in use, also when 0 was requested."""
        if not self._servers or not self._servers[0].sockets:
            raise OSError(errno.ENOTCONN, "not listening")
        port: int = self._servers[0].sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close the port; connections that are there stay."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()


def _tls(context: ssl.SSLContext | None) -> dict[str, Any]:
    if context is None:
        return {}
    return {
        "ssl": context,
        "ssl_handshake_timeout": _TLS_HANDSHAKE_SECONDS,
        "ssl_shutdown_timeout": _TLS_SHUTDOWN_SECONDS,
    }


def allow_descriptors() -> int:
    """Raise the process's limit on descriptors as far as it may go; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
