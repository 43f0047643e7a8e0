"""TLS that ends in the replica's pod: a client's connection is buffered as one request, and then joined to a pod.

All that is read of it before is its ClientHello (RFC 8446, 4.1.2): what does not begin with one starts no replica.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, cast

from proxy.activator.pod import Pod
from proxy.activator.pods import Pods
from proxy.activator.throttler import Throttler
from proxy.policy.refusal import Refusal
from proxy.request.admission import Admission
from proxy.request.budget import Budget
from proxy.transport.tcp import keep_alive
from proxy.transport.tunnel import Tunnel, Watermark

_HELLO_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 5.0
# A record of the handshake: its kind, version 3.x, its length; then a ClientHello.
_HEAD_BYTES: Final = 6
_RECORD_BYTES: Final = 16 * 1024
# A hello and what a client may send before it is answered (RFC 8446, 2.3); what goes beyond is read when it is joined.
_EARLY_BYTES: Final = 32 * 1024
_HANDSHAKE, _CLIENT_HELLO = 22, 1


class NotHello(Exception):
    """It is no TLS client."""


def whole_hello(data: bytes) -> bool:
    """Whether the first record is here. Raises NotHello."""
    if data[0] != _HANDSHAKE or (len(data) > 1 and data[1] != 3):
        raise NotHello
    if len(data) < _HEAD_BYTES:
        return False
    size = int.from_bytes(data[3:5])
    if data[5] != _CLIENT_HELLO or not 4 <= size <= _RECORD_BYTES:
        raise NotHello
    return len(data) >= 5 + size


class TlsTunnels:
    """All clients of one port."""

    def __init__(
        self,
        throttler: Throttler,
        pods: Pods,
        watermark: Watermark,
        room: Budget,
        port_of: Callable[[Pod], int],
    ) -> None:
        """`room`: connections of this model. `port_of`: of a pod."""
        self.throttler, self.pods, self.watermark = throttler, pods, watermark
        self.room, self.port_of = room, port_of
        self._clients: dict[TlsClient, None] = {}

    def connection(self) -> "TlsClient":
        return TlsClient(self)

    def __len__(self) -> int:
        return len(self._clients)

    def connected(self, client: "TlsClient") -> bool:
        if not self.room.take(1):
            silent = next((one for one in self._clients if one.is_silent), None)
            if silent is None:
                return False
            silent.leave()
            if not self.room.take(1):
                return False
        self._clients[client] = None
        return True

    def disconnected(self, client: "TlsClient") -> None:
        if client in self._clients:
            del self._clients[client]
            self.room.give(1)

    def tick(self, now: float) -> None:
        for client in list(self._clients):
            client.tick(now)

    def end_waiting(self) -> None:
        """No replica is to come for them."""
        for client in list(self._clients):
            if not client.is_tunnel:
                client.leave()

    def close(self) -> None:
        for client in list(self._clients):
            client.leave()


class TlsClient(asyncio.Protocol):
    """One client, until it is joined to a pod; then it only counts."""

    def __init__(self, tunnels: TlsTunnels) -> None:
        self._tunnels = tunnels
        self._transport: asyncio.Transport | None = None
        self._hello = b""
        self._since = time.monotonic()
        self._admission: Admission | None = None
        self._task: asyncio.Task[None] | None = None
        self._tunnel: Tunnel | None = None
        self._pod: Pod | None = None
        self._has_left = False

    @property
    def is_silent(self) -> bool:
        return self._admission is None and not self.is_tunnel

    @property
    def is_tunnel(self) -> bool:
        return self._tunnel is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        keep_alive(transport)
        if not self._tunnels.connected(self):
            self._has_left = True
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._has_left or self._transport is None:
            return
        self._hello += data
        if self._admission is not None:
            # It is read on, or its end would not be noticed; what it sends beside its hello is early data, or nothing.
            if len(self._hello) > _EARLY_BYTES:
                self._transport.pause_reading()
            return
        try:
            if whole_hello(self._hello):
                self._wait()
        except (NotHello, Refusal):  # there is no way to say so
            self.leave()

    def _wait(self) -> None:
        """Raises Refusal."""
        self._admission = self._tunnels.throttler.admit(time.monotonic(), self._granted)
        if self._admission.is_running:
            self._granted()

    def _granted(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._join())

    async def _join(self) -> None:
        tunnels, client = self._tunnels, self._transport
        while not self._has_left and client is not None:
            pod = tunnels.pods.pick()
            if pod is None:
                self._wait_again()
                return
            try:
                server, early = await self._connect(pod)
            except (OSError, TimeoutError):
                pod.could_not_be_reached()
                continue
            self._splice(client, server, early, pod)
            return

    def _wait_again(self) -> None:
        """Its pod has just gone, or none is to come."""
        self._release()
        try:
            if self._tunnels.pods.refusal is not None:
                self.leave()
            else:
                self._wait()
        except Refusal:
            self.leave()

    async def _connect(self, pod: Pod) -> tuple[asyncio.Transport, bytes]:
        """And what the pod has sent already. Raises OSError or TimeoutError."""
        async with asyncio.timeout(_CONNECT_SECONDS):
            transport, begun = await asyncio.get_running_loop().create_connection(
                _Begun, pod.endpoint.address, self._tunnels.port_of(pod)
            )
        if transport.is_closing():  # a client that is joined to it would wait for ever
            raise ConnectionResetError
        return transport, begun.early

    def _splice(self, client: asyncio.Transport, server: asyncio.Transport, early: bytes, pod: Pod) -> None:
        if self._has_left:
            server.abort()
            return
        self._pod = pod
        pod.tunnels += 1
        keep_alive(server)
        hello, self._hello = self._hello, b""
        server.write(hello)
        self._tunnel = Tunnel(
            client, server, self._tunnels.watermark, early=early, unanswered=None, ended=self.leave
        )
        self._release()

    def tick(self, now: float) -> None:
        admission = self._admission
        is_late = self.is_silent and now - self._since > _HELLO_SECONDS
        if is_late or (admission is not None and admission.is_overdue(now)):
            self.leave()

    def eof_received(self) -> None:
        """It has sent nothing that could be answered: it is closed."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()

    def leave(self) -> None:
        """End it at once."""
        if self._has_left:
            return
        self._has_left = True
        self._release()
        if self._task is not None and self._tunnel is None:
            self._task.cancel()
        if self._pod is not None:
            self._pod.tunnels -= 1
        if self._tunnel is not None:
            self._tunnel.abort()
        elif self._transport is not None:
            self._transport.abort()
        self._tunnels.disconnected(self)

    def _release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.release(time.monotonic())


class _Begun(asyncio.Protocol):
    """A pod's connection until it is joined."""

    def __init__(self) -> None:
        self.early = b""

    def data_received(self, data: bytes) -> None:
        self.early += data
