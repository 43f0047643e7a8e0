"""The node gateway as the sidecar knows it: its endpoint, the pod's ticket, and its last report of the replica."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from berth.contract.endpoint import Endpoint
from proxy.request.traffic import Figures
from proxy.transport.tcp import reset
from proxy.wire.preamble import ACCEPTED, Kind, Preamble
from proxy.wire.report import read_report

# For the connection and the answer of the gateway that it accepts it, each time.
ASK_SECONDS: Final = 2.0
# Clients that come all at once go in file: the gateway has room for so many of a node's that it does not know yet.
_ASKING: Final = 64
_FILE_SECONDS: Final = 5.0
# The gateway reports every second.
STALE_SECONDS: Final = 3.0


class NoGateway(Exception):
    """A connection cannot be served now; the message says why."""


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """`ticket`: a secret, never logged."""

    endpoint: Endpoint
    ticket: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """What the gateway has reported of the replica, and when."""

    at: float
    not_ready: str | None
    figures: Figures


class NodeGateway:
    """Runs on the event loop alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._access: GatewayAccess | None = None
        self._changed = asyncio.Event()
        # Why the model is not to be used, in the agent's words.
        self.withheld: str | None = None
        self.status: GatewayStatus | None = None
        # Why there is no status, as far as it is known.
        self.failure = "it has not been asked yet"
        self._file = asyncio.Semaphore(_ASKING)

    @property
    def access(self) -> GatewayAccess | None:
        return self._access

    @access.setter
    def access(self, access: GatewayAccess | None) -> None:
        if access != self._access:
            self._access = access
            self._changed.set()
            self._changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Set when it is elsewhere, or has another ticket. Take it before looking."""
        return self._changed

    def require(self) -> GatewayAccess:
        """Raises NoGateway."""
        if self._access is None:
            raise NoGateway("the agent has not named the node's gateway yet")
        return self._access

    def record(self, line: bytes) -> bool:
        """Take a line of the REPORT connection; False for one that is no report."""
        status = _read_status(line, self._clock())
        if status is not None:
            self.status = status
        return status is not None

    def fresh_status(self) -> GatewayStatus | None:
        """The last report, unless it is too old."""
        status = self.status
        return None if status is None or self._clock() - status.at > STALE_SECONDS else status

    def not_ready(self) -> str | None:
        """Why no request should come, or None."""
        if self.withheld is not None:
            return self.withheld
        if self._access is None:
            return "the agent has not named the node's gateway yet"
        status = self.fresh_status()
        return f"no gateway: {self.failure}" if status is None else status.not_ready

    async def connect(self, kind: Kind, first: bytes) -> tuple[asyncio.Transport, bytes]:
        """A connection that the gateway has taken, with `first` sent: its transport, which does not read, and
        what it has said since. Raises NoGateway."""
        self.require()
        try:
            async with asyncio.timeout(_FILE_SECONDS):
                await self._file.acquire()
        except TimeoutError:
            raise NoGateway("the node's gateway is busy") from None
        try:
            return await self._connect(kind, first)
        finally:
            self._file.release()

    async def _connect(self, kind: Kind, first: bytes) -> tuple[asyncio.Transport, bytes]:
        """Raises NoGateway."""
        access = self.require()
        handshake = ClientHandshake(Preamble(kind, access.ticket).to_bytes() + first, self._why_refused)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                endpoint = access.endpoint
                await asyncio.get_running_loop().create_connection(
                    lambda: handshake, endpoint.host, endpoint.port
                )
                early = await handshake.taken
            return handshake.give(), early
        except TimeoutError:
            raise NoGateway("the node's gateway does not answer") from None
        except OSError as error:
            raise NoGateway("the node's gateway cannot be reached") from error
        finally:
            handshake.leave()

    def _why_refused(self) -> str:
        """A connection that it does not accept gets no answer, but its report says how the replica is."""
        status = self.fresh_status()
        if status is None or status.not_ready is None:
            return "the node's gateway does not accept this pod's ticket"
        return f"the node's gateway takes nothing new for this model: {status.not_ready}"


class ClientHandshake(asyncio.Protocol):
    """A connection until the gateway takes it."""

    def __init__(self, greeting: bytes, why_refused: Callable[[], str]) -> None:
        self._greeting, self._why_refused = greeting, why_refused
        self._transport: asyncio.Transport | None = None
        # With what the gateway has said since.
        self.taken: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or self.taken.done():
            return
        if data[:1] != ACCEPTED:
            self._refused()
            return
        transport.pause_reading()
        self.taken.set_result(data[1:])

    def connection_lost(self, exc: Exception | None) -> None:
        self._refused()

    def _refused(self) -> None:
        if not self.taken.done():
            self.taken.set_exception(NoGateway(self._why_refused()))

    def give(self) -> asyncio.Transport:
        """It was taken, and is the caller's from now on."""
        transport, self._transport = self._transport, None
        assert transport is not None
        return transport

    def leave(self) -> None:
        """End it, unless it was given away."""
        if self._transport is not None:
            reset(self._transport)  # it may have taken the client's first bytes for a request
        self.taken.cancel()


def _read_status(line: bytes, now: float) -> GatewayStatus | None:
    report = read_report(line)
    try:
        return (
            None
            if report is None
            else GatewayStatus(now, report.not_ready, Figures.from_json(dict(report.figures)))
        )
    except (KeyError, TypeError):
        return None
