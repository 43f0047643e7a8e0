"""One port of one model: which clients may connect. A client that may not is refused before anything is read of it.

The address of a pod that has just started becomes known a moment later than the pod can connect: by its kubelet, the API
server and the scaler. So a client that may not connect, or not yet, is left pending for a while, unread, and then refused.
While no scaler is connected an address cannot become known: the client stays pending until the next scaler has had time
to send it.
"""

import asyncio
import asyncio.trsock
import logging
import math
import socket
import sys
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar, cast

from berth.runtime.logs import fields
from proxy.downstream.listener import Clients
from proxy.request.budget import Budget
from proxy.request.traffic import Traffic

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
# How long an address may take to become known: a kubelet looks at its pods once a second, and it and others may be busy.
# And the pauses between two looks.
_UNKNOWN_SECONDS: Final = 5.0
# While no scaler is connected: the longest Lease of one that died, the longest pause before the next is dialled, and the
# time that it takes to send all addresses.
_DISCONNECTED_SECONDS: Final = 45.0
_FIRST_LOOK, _LAST_LOOK = 0.02, 0.2
# Pending clients of all models, and of one address.
MOST_PENDING: Final = 1024
_PENDING_EACH: Final = 64
# Linux' TCP_ESTABLISHED, of the first byte of `struct tcp_info`.
_ESTABLISHED: Final = 1


class PendingClients:
    """How many clients of unknown addresses there are, of all models. They have no more room than this: they cost known
    clients nothing."""

    def __init__(
        self,
        most: int = MOST_PENDING,
        most_each: int = _PENDING_EACH,
        *,
        connected_for: Callable[[], float | None] = lambda: math.inf,
    ) -> None:
        """`connected_for`: for how many seconds a scaler has sent addresses without a break; None: none does now."""
        self._most, self._most_each, self._connected_for = most, most_each, connected_for
        self._pending: Counter[str] = Counter()
        self._all = 0

    def __len__(self) -> int:
        return self._all

    def enter(self, address: str) -> bool:
        if self._all >= self._most or self._pending[address] >= self._most_each:
            return False
        self._pending[address] += 1
        self._all += 1
        return True

    def is_overdue(self, seconds: float) -> bool:
        """Of a client that came so long ago."""
        connected = self._connected_for()
        known = 0.0 if connected is None else min(connected, seconds)
        return known >= _UNKNOWN_SECONDS or seconds >= _DISCONNECTED_SECONDS

    def leave(self, address: str) -> None:
        self._all -= 1
        self._pending[address] -= 1
        if not self._pending[address]:
            del self._pending[address]


class Port:
    """`number`: the port that is open, 0: none."""

    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        is_allowed: Callable[[str], bool],
        pending_clients: PendingClients,
    ) -> None:
        """`make`: a client's protocol. `is_allowed`: by the client's address."""
        self.make, self.is_allowed, self.pending_clients = make, is_allowed, pending_clients
        # Clients of unknown addresses, until they are let in or refused.
        self.pending: set[_PendingClient] = set()
        self._let_in: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.number = self._wanted = self._logged_taken = 0
        self.refused = 0

    async def open(self, host: str, number: int) -> None:
        """Nothing changes where it is open already. 0: none. One that is taken stays closed: `number` says so."""
        if self._wanted == number and self.number == number:
            return
        self.close()
        self._wanted = number
        if not number:
            return
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: _NewConnection(self), host, number, backlog=_BACKLOG
            )
        except OSError as error:
            if number != self._logged_taken:
                log.warning("a model's port is taken", extra=fields(port=number, error=error))
            self._logged_taken = number
            return
        if self._wanted != number or self.number:  # another call has come meanwhile
            server.close()
            return
        self._server, self.number, self._logged_taken = server, number, 0

    def close(self) -> None:
        """No new clients, and pending ones are refused; those that are connected stay."""
        for client in list(self.pending):
            client.refuse()
        server, self._server, self.number, self._wanted = self._server, None, 0, 0
        if server is not None:
            server.close()

    @property
    def is_wanted(self) -> bool:
        return self._wanted != 0

    def add_pending(self, address: str, sock: asyncio.trsock.TransportSocket) -> None:
        """A descriptor of its own keeps the connection, whatever becomes of the one it came with; where there is no room, none
        does."""
        if not self.pending_clients.enter(address):
            self.refused += 1
            return
        try:
            kept = sock.dup()
        except OSError:  # no descriptor is left
            self.pending_clients.leave(address)
            self.refused += 1
            return
        self.pending.add(_PendingClient(self, address, kept))

    def let_in(self, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(sock))
        self._let_in.add(task)
        task.add_done_callback(self._let_in.discard)

    async def _connect(self, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: _NewConnection(self), sock)
        except OSError:  # it has gone
            sock.close()


class _NewConnection(asyncio.Protocol):
    """A client, in the moment in which its address is looked at."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        address = "" if peer is None else str(peer[0])
        if not self._port.is_wanted:  # it has closed since
            self._port.refused += 1
        elif self._port.is_allowed(address):
            client = self._port.make()
            cast(asyncio.Transport, transport).set_protocol(client)
            client.connection_made(transport)
            return
        else:
            self._port.add_pending(address, transport.get_extra_info("socket"))
        cast(asyncio.Transport, transport).abort()


class _PendingClient:
    """A client whose address is not known, or not yet, as a bare socket: a transport would read of it, and uvloop's does even
    after `pause_reading`."""

    def __init__(self, port: Port, address: str, sock: socket.socket) -> None:
        self._port, self._address, self._sock = port, address, sock
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._look_later(_FIRST_LOOK)

    def refuse(self) -> None:
        self._leave()
        self._port.refused += 1
        self._sock.close()

    def _look_later(self, pause: float) -> None:
        self._next = self._loop.call_later(pause, self._look, min(2 * pause, _LAST_LOOK))

    def _look(self, pause: float) -> None:
        if _has_gone(self._sock):
            self._leave()
            self._sock.close()
        elif self._port.is_allowed(self._address):
            self._leave()
            self._port.let_in(self._sock)
        elif self._port.pending_clients.is_overdue(self._loop.time() - self._since):
            self.refuse()
        else:
            self._look_later(pause)

    def _leave(self) -> None:
        self._next.cancel()
        self._port.pending.discard(self)
        self._port.pending_clients.leave(self._address)


def _has_gone(sock: socket.socket) -> bool:
    """Whether the client has ended its side: unread, nothing else tells."""
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != _ESTABLISHED


class Busy(Protocol):
    """A client's connection."""

    @property
    def is_busy(self) -> bool: ...


C = TypeVar("C", bound=Busy)


class BoundedClients(Clients[C], Generic[C]):
    """Clients of one model: where there is no room, a new one takes the place of one of the same model that has nothing under
    way."""

    def __init__(self, traffic: Traffic, room: Budget, end: Callable[[C], None]) -> None:
        """`room`: connections of this model, a part of all models'."""
        super().__init__(traffic)
        # Those that wait have no second connection, and all models share what there is.
        self._most = sys.maxsize
        self._room, self._end = room, end

    def connected(self, connection: C) -> bool:
        if not self._room.take(1) and not (self._ended_an_idle_one() and self._room.take(1)):
            return False
        if super().connected(connection):
            return True
        self._room.give(1)
        return False

    def disconnected(self, connection: C) -> None:
        if connection in self._connections:
            self._room.give(1)
        super().disconnected(connection)

    def _ended_an_idle_one(self) -> bool:
        idle = next((one for one in self._connections if not one.is_busy), None)
        if idle is None:
            return False
        self.disconnected(idle)
        self._end(idle)
        return True
