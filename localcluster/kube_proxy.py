"""In kube-proxy's place: a connection to a Service's address goes to one of its endpoints.

The endpoint sees the client's own address, and a connection stays where it went until one of both ends closes it.
Where a Service has no endpoint there is no listener, so that a client is refused at once. What is otherwise than with
kube-proxy: an endpoint that refuses is a connection reset for the client, because it has been accepted by then.
"""

import asyncio
import logging
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from berth.contract.endpoint import Endpoint
from berth.runtime.logs import fields
from berth.runtime.tasks import repeat
from localcluster.services import ServicePort, Services

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 60.0
_CONNECT_SECONDS = 5.0
_BACKLOG = 4096
# linux/in.h; the port is chosen when it connects, so that one client may have as many as it has targets.
_IP_BIND_ADDRESS_NO_PORT = 24
# Which endpoint is chance, whatever seed a test gives its own.
_chance = random.SystemRandom()


class KubeProxy:
    """Runs until cancelled."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._listening: dict[ServicePort, tuple[Endpoint, asyncio.Server]] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        try:
            changed = self._services.changed
            await repeat(self._step, name="kube-proxy", interval_seconds=_AGAIN_SECONDS, wake=changed)
        finally:
            for _, server in self._listening.values():
                server.close()
            for task in self._connecting:
                task.cancel()

    async def _step(self) -> None:
        """Listen for each port that has an endpoint, and for no other."""
        wanted = {of: at for of, at in self._services.ports().items() if self._services.backends(of)}
        for of, (at, server) in list(self._listening.items()):
            if wanted.get(of) != at:
                server.close()
                del self._listening[of]
        for of in wanted.keys() - self._listening.keys():
            try:
                self._listening[of] = wanted[of], await self._listen(of, wanted[of])
            except OSError as error:
                log.warning(
                    "cannot listen", extra=fields(service=of.service, address=wanted[of], error=error)
                )

    async def _listen(self, of: ServicePort, at: Endpoint) -> asyncio.Server:
        def accepted() -> _End:
            return _End(lambda client: self._accepted(of, client))

        loop = asyncio.get_running_loop()
        return await loop.create_server(accepted, at.host, at.port, backlog=_BACKLOG)

    def _accepted(self, of: ServicePort, client: "_End") -> None:
        connecting = asyncio.create_task(self._connect(of, client))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def _connect(self, of: ServicePort, client: "_End") -> None:
        targets = self._services.backends(of)
        if not targets:
            _reset(client.transport)
            return
        source = client.transport.get_extra_info("peername")[0]
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await _joined(client, source, _chance.choice(targets))
        except (OSError, TimeoutError):
            _reset(client.transport)


async def _joined(client: "_End", source: str, target: Endpoint) -> None:
    loop = asyncio.get_running_loop()
    outgoing = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        outgoing.setblocking(False)
        outgoing.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        outgoing.bind((source, 0))
        await loop.sock_connect(outgoing, (target.host, target.port))
        _, far = await loop.create_connection(lambda: _End(lambda _: None), sock=outgoing)
    except BaseException:
        outgoing.close()
        raise
    client.other, far.other = far, client
    if client.transport.is_closing():
        _reset(far.transport)
    for end in (client, far):
        end.transport.resume_reading()


def _reset(transport: asyncio.Transport) -> None:
    """End a connection so that the other side sees no orderly end (socket(7), SO_LINGER)."""
    with suppress(OSError):
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _End(asyncio.Protocol):
    """One end of a connection; what it receives goes to the other. It reads nothing until it has another."""

    transport: asyncio.Transport

    def __init__(self, made: Callable[["_End"], None]) -> None:
        self._made = made
        self.other: _End | None = None
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()
        self._made(self)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        self.ended = True
        if self.other is not None:
            with suppress(OSError):
                self.other.transport.write_eof()
            if self.other.ended:
                self.transport.close()
                self.other.transport.close()
        return True

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is None:
            return
        if exc is None:
            self.other.transport.close()
        else:
            _reset(self.other.transport)
