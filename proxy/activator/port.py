"""One port of one model: who may connect. Whoever may not is refused before anything is read of it.

The address of a pod that has just started is told a moment later than the pod can connect: by its kubelet, the API server
and the scaler. So whoever may not, or not yet, is left waiting for a while, unread, and then refused.
"""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar, cast

from berth.runtime.logs import fields
from proxy.exchange.budget import Budget
from proxy.exchange.traffic import Traffic
from proxy.fronts.listener import Clients

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
# How long one waits for its address to be told: a kubelet looks at its pods once a second, and it and others may be
# busy. And the pauses between two looks.
_STRANGER_SECONDS: Final = 5.0
_FIRST_LOOK, _LAST_LOOK = 0.02, 0.2
# Who wait so, of all models, and of one address.
_STRANGERS, _STRANGERS_EACH = 1024, 64


class Doorstep:
    """Where those wait whose address is not known, of all models. Strangers have no more room than this: it costs those
    who are known nothing."""

    def __init__(self, most: int = _STRANGERS, most_each: int = _STRANGERS_EACH) -> None:
        self._most, self._most_each = most, most_each
        self._waiting: Counter[str] = Counter()
        self._all = 0

    def __len__(self) -> int:
        return self._all

    def enter(self, address: str) -> bool:
        if self._all >= self._most or self._waiting[address] >= self._most_each:
            return False
        self._waiting[address] += 1
        self._all += 1
        return True

    def leave(self, address: str) -> None:
        self._all -= 1
        self._waiting[address] -= 1
        if not self._waiting[address]:
            del self._waiting[address]


class Port:
    """`number`: the port that is open, 0: none."""

    def __init__(
        self, make: Callable[[], asyncio.BaseProtocol], is_allowed: Callable[[str], bool], doorstep: Doorstep
    ) -> None:
        """`make`: a client's protocol. `is_allowed`: by the client's address."""
        self.make, self.is_allowed, self.doorstep = make, is_allowed, doorstep
        # Strangers, until they are let in or refused.
        self.waiting: set[_Arrival] = set()
        self._server: asyncio.Server | None = None
        self.number = self._wanted = self._told_taken = 0
        self.refused = 0

    async def open(self, host: str, number: int) -> None:
        """As it is already, if it is. 0: none. One that is taken stays closed: `number` tells."""
        if self._wanted == number and self.number == number:
            return
        self.close()
        self._wanted = number
        if not number:
            return
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: _Arrival(self), host, number, backlog=_BACKLOG
            )
        except OSError as error:
            if number != self._told_taken:
                log.warning("a model's port is taken", extra=fields(port=number, error=error))
            self._told_taken = number
            return
        if self._wanted != number or self.number:  # another word has come meanwhile
            server.close()
            return
        self._server, self.number, self._told_taken = server, number, 0

    def close(self) -> None:
        """Nobody new, and none of those who wait to be let in; who is there stays."""
        for arrival in list(self.waiting):
            arrival.refuse()
        server, self._server, self.number, self._wanted = self._server, None, 0, 0
        if server is not None:
            server.close()


class _Arrival(asyncio.Protocol):
    """A client until its source has been looked at."""

    _transport: asyncio.Transport

    def __init__(self, port: Port) -> None:
        self._port = port
        self._address = ""
        self._next: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._address = "" if peer is None else str(peer[0])
        if self._port.is_allowed(self._address):
            self._admit()
        elif self._port.doorstep.enter(self._address):
            self._port.waiting.add(self)
            # Not at once: uvloop begins to read after this call, whatever was said in it.
            self._next = asyncio.get_running_loop().call_soon(self._wait)
        else:
            self.refuse()

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()

    def refuse(self) -> None:
        self._leave()
        self._port.refused += 1
        self._transport.abort()

    def _wait(self) -> None:
        self._transport.pause_reading()
        loop = asyncio.get_running_loop()
        self._look_later(loop, _FIRST_LOOK, loop.time() + _STRANGER_SECONDS)

    def _look_later(self, loop: asyncio.AbstractEventLoop, pause: float, until: float) -> None:
        self._next = loop.call_later(pause, self._look, loop, min(2 * pause, _LAST_LOOK), until)

    def _look(self, loop: asyncio.AbstractEventLoop, pause: float, until: float) -> None:
        if self._port.is_allowed(self._address):
            self._leave()
            self._admit()
            if not self._transport.is_closing():
                self._transport.resume_reading()
        elif loop.time() < until:
            self._look_later(loop, pause, until)
        else:
            self.refuse()

    def _leave(self) -> None:
        """The doorstep, if it is there."""
        waited, self._next = self._next, None
        if waited is not None:
            waited.cancel()
            self._port.waiting.discard(self)
            self._port.doorstep.leave(self._address)

    def _admit(self) -> None:
        client = self._port.make()
        self._transport.set_protocol(client)
        client.connection_made(self._transport)


class Idler(Protocol):
    """A client's connection."""

    @property
    def is_busy(self) -> bool: ...


C = TypeVar("C", bound=Idler)


class BoundedClients(Clients[C], Generic[C]):
    """Clients of one model: a newcomer for whom there is no room takes the place of one that has nothing under way,
    of its own model."""

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
