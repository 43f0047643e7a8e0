"""One of the pod's ports: who may connect, and each client's way to the gateway or to a refusal."""

import asyncio
import errno
import resource
import socket
import ssl
import sys
from collections import OrderedDict
from typing import Any, Final

from berth.contract.endpoint import Endpoint
from berth.runtime.listening import listening_sockets
from berth.runtime.process import starting
from proxy.sidecar.gateway import NodeGateway, NoGateway
from proxy.sidecar.unavailable import refuse
from proxy.transport.tcp import keep_alive
from proxy.transport.tunnel import Tunnel, Watermark
from proxy.wire.preamble import Kind

# So many are taken before others have their turn.
_AT_ONCE = 64
_TLS_HANDSHAKE_SECONDS = 10.0
# For what is still to be delivered when a connection is closed.
_TLS_SHUTDOWN_SECONDS = 300.0
# A client that says nothing; one of gRPC begins by itself.
_SILENT_SECONDS: Final = {Kind.REST: 300.0, Kind.GRPC: 10.0}
# Of its first bytes so many are read before there is a connection to the gateway.
_FIRST_BYTES = 4096
# Each client costs two descriptors, its own and the one towards the gateway; there are two ports.
_DESCRIPTORS_KEPT, _DESCRIPTORS_EACH = 64, 2
_MOST_CLIENTS = 8192
# After the system had no descriptor left.
_PAUSE_SECONDS = 0.2


def most_clients() -> int:
    """Of one port. Raises the process' limit on descriptors as far as it may go."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    return min(_MOST_CLIENTS, (limit - _DESCRIPTORS_KEPT) // (2 * _DESCRIPTORS_EACH))


class Port:
    """Accepts by itself, because a client counts from its first packet and not from its TLS handshake's end."""

    def __init__(
        self, kind: Kind, gateway: NodeGateway, watermark: Watermark, *, most: int, what: str
    ) -> None:
        self.kind, self.gateway, self.watermark = kind, gateway, watermark
        # Connections are made with this from now on.
        self.tls: ssl.SSLContext | None = None
        self.piece = memoryview(bytearray(_FIRST_BYTES))
        self._most, self._what = most, what
        self._clients: set[_Client] = set()
        self._silent: OrderedDict[_Client, None] = OrderedDict()
        self._listening: list[socket.socket] = []
        self._none_left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._clients)

    def start(self, listen: Endpoint) -> None:
        """Raises CannotStart when the port is taken."""
        loop = asyncio.get_running_loop()
        with starting(self._what, listen):
            self._listening = listening_sockets(listen)
        for listening in self._listening:
            loop.add_reader(listening, self._accept, listening)

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        if not self._listening:
            raise OSError(errno.ENOTCONN, "not listening")
        port: int = self._listening[0].getsockname()[1]
        return port

    def stop(self) -> None:
        """Take no new client; those that are connected stay."""
        listening, self._listening = self._listening, []
        for one in listening:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        for client in list(self._silent):
            client.leave()  # it has asked for nothing

    async def idle(self) -> None:
        """Return when no client is connected."""
        while self._clients:
            self._none_left.clear()
            await self._none_left.wait()

    def close(self) -> None:
        self.stop()
        for client in list(self._clients):
            client.leave()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                one, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                self._pause(listening)
                return
            if len(self._clients) >= self._most:
                self._make_room()
            if len(self._clients) >= self._most:
                one.close()
                continue
            client = _Client(self)
            self._clients.add(client)
            self._silent[client] = None
            client.open(one, self.tls)

    def _make_room(self) -> None:
        """Who has come first and not said anything goes for who comes now."""
        if self._silent:
            next(iter(self._silent)).leave()

    def _pause(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        loop.call_later(_PAUSE_SECONDS, self._go_on, listening)

    def _go_on(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def spoke(self, client: "_Client") -> None:
        self._silent.pop(client, None)

    def left(self, client: "_Client") -> None:
        self._silent.pop(client, None)
        self._clients.discard(client)
        if not self._clients:
            self._none_left.set()


class _Client(asyncio.BufferedProtocol):
    """One client until it is joined to the gateway or refused; then it only counts."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._first = b""
        self._has_left = False
        self._timer = asyncio.get_running_loop().call_later(_SILENT_SECONDS[port.kind], self.leave)

    def open(self, one: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Take the accepted connection, with the TLS handshake if there is to be one."""
        one.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._open(one, tls))

    async def _open(self, one: socket.socket, tls: ssl.SSLContext | None) -> None:
        more: dict[str, Any] = {}
        if tls is not None:
            more = {
                "ssl": tls,
                "ssl_handshake_timeout": _TLS_HANDSHAKE_SECONDS,
                "ssl_shutdown_timeout": _TLS_SHUTDOWN_SECONDS,
            }
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, one, **more)
        except (OSError, RuntimeError):  # no handshake, or gone already
            self._leave()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        keep_alive(transport)
        if self._has_left:
            transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._port.piece

    def buffer_updated(self, nbytes: int) -> None:
        transport = self._transport
        if transport is None:
            return
        is_first, self._first = not self._first, self._first + bytes(self._port.piece[:nbytes])
        if is_first:
            self._timer.cancel()
            self._port.spoke(self)
            transport.pause_reading()
            self._task = asyncio.get_running_loop().create_task(self._ask(transport))

    async def _ask(self, transport: asyncio.Transport) -> None:
        """Cancelled when the client leaves; `connect` then resets what has the client's first bytes."""
        port, first = self._port, self._first
        try:
            gateway, early = await port.gateway.connect(port.kind, first)
        except NoGateway as error:
            refuse(transport, port.kind, str(error), self._first, self._leave)
            return
        if len(self._first) > len(first):  # TLS had more of it already
            gateway.write(self._first[len(first) :])
        self._first = b""
        # gRPC's server speaks first: what ends before its first word cannot be told from what is not HTTP/2.
        unanswered = self._unanswered if port.kind is Kind.REST and not early else None
        Tunnel(transport, gateway, port.watermark, early=early, unanswered=unanswered, ended=self._leave)

    def _unanswered(self) -> None:
        if self._transport is not None:
            reason = "the node's gateway has ended the connection"
            refuse(self._transport, self._port.kind, reason, b"", self._leave, head_is_read=True)

    def eof_received(self) -> None:
        """It has said nothing: it is closed."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def leave(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()
        self._leave()

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._timer.cancel()
            if self._task is not None:
                self._task.cancel()
            self._port.left(self)
