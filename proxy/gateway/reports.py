"""The report connection of a pod's proxy: the replica's readiness and figures go out, its wish to drain comes in."""

import asyncio
from typing import Final, Protocol, cast

import msgspec

from proxy.gateway.spec import ReplicaStats
from proxy.wire.report import DRAINED, says

# What a pod's proxy may send from one of our lines to the next, which go out every second: a word or two. It takes no
# turns with the other replicas' requests.
_MOST_RECEIVED_BYTES: Final = 4096


class ReportHandler(Protocol):
    """Whose reports these are: `proxy.gateway.replica.ServedReplica`."""

    def report_opened(self, report: "ReportConnection") -> None:
        """It waits for its first line."""
        ...

    def report_asks_to_drain(self, report: "ReportConnection") -> None: ...

    def report_announces_leaving(self, report: "ReportConnection") -> None: ...

    def report_closed(self, report: "ReportConnection") -> None: ...


class ReportConnection(asyncio.Protocol):
    """JSON lines (`proxy.wire.report`). A peer that does not read them gets fewer, and never has more than a few waiting."""

    def __init__(self, handler: ReportHandler) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._writable = True
        self._input, self._received_bytes = b"", 0
        self._has_reported_drained = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._handler.report_opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._handler.report_closed(self)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > _MOST_RECEIVED_BYTES:
            self.close()
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        """A line that is not known is ignored: the pod's proxy may be newer."""
        if says(line, "leaving"):
            self._handler.report_announces_leaving(self)
        elif says(line, "drain"):
            self._handler.report_asks_to_drain(self)

    def publish(self, not_ready: str | None, stats: ReplicaStats) -> None:
        self._received_bytes = len(self._input)
        line = {"notReady": not_ready, "figures": stats.figures, "load": stats.load}
        self._write(msgspec.json.encode(line) + b"\n")

    def say_drained(self) -> None:
        if not self._has_reported_drained and self._writable:
            self._has_reported_drained = True
            self._write(DRAINED)

    def _write(self, line: bytes) -> None:
        if self._transport is not None and self._writable:
            self._transport.write(line)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
