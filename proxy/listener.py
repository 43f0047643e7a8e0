"""A port that clients connect to."""

import asyncio
import errno
import resource
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from berth.contract.endpoint import Endpoint
from berth.runtime.process import starting
from proxy.metrics import Traffic

_BACKLOG = 4096
_TLS_HANDSHAKE_SECONDS = 10.0
# Each client costs two descriptors, its own and the one towards Triton.
_DESCRIPTORS_KEPT, _DESCRIPTORS_EACH = 64, 2
_MOST_CLIENTS = 16_384


C = TypeVar("C", bound=asyncio.Protocol)


class Listener(Generic[C]):
    """One listening port and the clients that are connected to it."""

    def __init__(self, make: Callable[[], C], traffic: Traffic, *, what: str) -> None:
        self._make, self._traffic, self._what = make, traffic, what
        self._connections: set[C] = set()
        self._server: asyncio.Server | None = None
        # Half of them for each protocol.
        self._most = min(_MOST_CLIENTS, (allow_descriptors() - _DESCRIPTORS_KEPT) // (2 * _DESCRIPTORS_EACH))

    def __iter__(self) -> Iterator[C]:
        """The clients that are connected now; they may go while they are looked at."""
        return iter(list(self._connections))

    async def start(
        self, listen: Endpoint, *, tls: ssl.SSLContext | None = None, share_port: bool = False
    ) -> None:
        """Raises CannotStart when the port is taken."""
        loop = asyncio.get_running_loop()
        with starting(self._what, listen):
            self._server = await loop.create_server(
                self._make,
                listen.host,
                listen.port,
                backlog=_BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else _TLS_HANDSHAKE_SECONDS,
                reuse_port=share_port or None,
            )

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        if self._server is None or not self._server.sockets:
            raise OSError(errno.ENOTCONN, "not listening")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

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

    async def stop(self) -> None:
        """Close the port; connections that are there stay."""
        if self._server is not None:
            self._server.close()
            self._server = None


def allow_descriptors() -> int:
    """Raise the process's limit on descriptors as far as it may go; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
