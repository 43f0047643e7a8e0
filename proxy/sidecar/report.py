"""The REPORT connection: the gateway reports the replica's status, the sidecar asks it to drain the replica."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from proxy.sidecar.gateway import ASK_SECONDS, STALE_SECONDS, GatewayAccess, NodeGateway
from proxy.wire.preamble import ACCEPTED, Kind, Preamble
from proxy.wire.report import DRAIN, LEAVING, LINE_BYTES, says

log = logging.getLogger(__name__)

# A gateway that restarts is to be found again within a second.
_PAUSE_SECONDS: Final = 0.5


class _Broken(Exception):
    """The connection is of no use any more; the message says why."""


class ReportClient:
    """Keeps one connection to wherever the gateway is."""

    def __init__(self, gateway: NodeGateway) -> None:
        self._gateway = gateway
        self._writer: asyncio.StreamWriter | None = None
        # What has been sent, which a new connection gets again.
        self._sent: list[bytes] = []
        self._drained = asyncio.Event()

    async def follow(self) -> None:
        """Read reports for ever; the last one grows stale while none comes."""
        backoff, logged = Backoff(initial_seconds=0.05, cap_seconds=_PAUSE_SECONDS), ""
        while True:
            change = self._gateway.next_change()
            access = self._gateway.access
            if access is None:
                await change.wait()
                continue
            try:
                await self._until_changed(access, change, backoff)
                logged = ""
            except (_Broken, OSError) as error:
                self._gateway.failure = _reason(error)
                level = logging.DEBUG if logged == self._gateway.failure else logging.WARNING
                logged = self._gateway.failure
                log.log(level, "no gateway", extra=fields(endpoint=access.endpoint, reason=logged))
                await asyncio.sleep(backoff.next())

    async def _until_changed(self, access: GatewayAccess, change: asyncio.Event, backoff: Backoff) -> None:
        """Returns when the gateway is elsewhere, or has another ticket. Raises _Broken or OSError."""
        listening = asyncio.ensure_future(self._listen(access, backoff))
        changing = asyncio.ensure_future(change.wait())
        try:
            await asyncio.wait({listening, changing}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()
        finally:
            for task in (listening, changing):
                task.cancel()
            await asyncio.gather(listening, changing, return_exceptions=True)

    async def _listen(self, access: GatewayAccess, backoff: Backoff) -> None:
        reader, writer = await _connected(access)
        self._drained.clear()  # what was said on another connection was about what was there then
        try:
            for line in self._sent:
                writer.write(line)
            self._writer = writer
            while True:
                self._take(await _line(reader))
                backoff.reset()
        finally:
            self._writer = None
            writer.transport.abort()

    def _take(self, line: bytes) -> None:
        was = self._gateway.not_ready()
        if self._gateway.record(line):
            now = self._gateway.not_ready()
            if (was is None) != (now is None):
                log.info("model ready" if now is None else "model not ready", extra=fields(reason=now or "-"))
        elif says(line, "drained"):
            self._drained.set()

    def leave(self) -> None:
        """Tell that the pod is ending: not ready, but everything is served as before."""
        self._send(LEAVING)

    async def drain(self, is_waited: Callable[[], bool]) -> None:
        """Have the gateway take nothing new for the replica; returns when nothing of it is left there, or that is not
        known. `is_waited`: whether a client still has a connection there; a gateway may be silent for a while."""
        self._send(DRAIN)
        while self._gateway.fresh_status() is not None or is_waited():
            if await wait_until_set(self._drained, timeout_seconds=1.0):
                return

    def _send(self, line: bytes) -> None:
        self._sent.append(line)
        if self._writer is not None:
            self._writer.write(line)


async def _connected(access: GatewayAccess) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises _Broken or OSError."""
    endpoint = access.endpoint
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(ASK_SECONDS):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=LINE_BYTES)
            writer.write(Preamble(Kind.REPORT, access.ticket).to_bytes())
            answer = await reader.read(1)
    except BaseException as error:
        if writer is not None:
            writer.transport.abort()
        if isinstance(error, TimeoutError):
            raise _Broken("it does not answer") from None
        raise
    if answer != ACCEPTED:
        writer.transport.abort()
        raise _Broken("it does not accept this pod's ticket")
    return reader, writer


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Raises _Broken or OSError."""
    try:
        async with asyncio.timeout(STALE_SECONDS):
            line = await reader.readline()
    except TimeoutError:
        raise _Broken(f"it has said nothing for {STALE_SECONDS:g} s") from None
    except ValueError:
        raise _Broken(f"it says lines of more than {LINE_BYTES} bytes") from None
    if not line.endswith(b"\n"):
        raise _Broken("it has ended the connection")
    return line


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionResetError):
        return "it does not accept this pod's ticket, or has ended"
    if isinstance(error, OSError):
        return f"it cannot be reached ({error.strerror or type(error).__name__})"
    return str(error)
