"""A door's connection for reports: what its readiness and its figures are, and that it drain_requests to drain."""

import asyncio
import json
from collections.abc import Callable
from typing import Final, cast

from proxy.gateway.spec import ReplicaStats
from proxy.wire.report import DRAINED, says

# What a door says from one of our lines to the next, which come every second: a word or two. It takes no turns with
# the other copies' requests.
_MOST_SAID_BYTES: Final = 4096


class Report(asyncio.Protocol):
    """JSON lines. One that does not read them gets fewer, and never has more than a few waiting."""

    def __init__(
        self,
        wish: Callable[["Report"], None],
        leave: Callable[["Report"], None],
        lost: Callable[["Report"], None],
        ask: Callable[["Report"], None],
    ) -> None:
        """`wish`: the door wants to drain; `leave`: it will soon; `lost`: it has gone; `ask`: for a first line."""
        self._wish, self._leave, self._lost, self._ask = wish, leave, lost, ask
        self._transport: asyncio.Transport | None = None
        self._writable = True
        self._input, self._said_bytes = b"", 0
        self._drained_told = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._ask(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(self)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True

    def data_received(self, data: bytes) -> None:
        self._said_bytes += len(data)
        if self._said_bytes > _MOST_SAID_BYTES:
            self.close()
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        """What is not understood is left aside: a door may be newer."""
        if says(line, "leaving"):
            self._leave(self)
        elif says(line, "drain"):
            self._wish(self)

    def tell(self, not_ready: str | None, stats: ReplicaStats) -> None:
        self._said_bytes = len(self._input)
        self._say({"notReady": not_ready, **stats.to_json()})

    def tell_drained(self) -> None:
        if not self._drained_told and self._writable:
            self._drained_told = True
            self._write(DRAINED)

    def _say(self, said: dict[str, object]) -> None:
        self._write(json.dumps(said, separators=(",", ":")).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        if self._transport is not None and self._writable:
            self._transport.write(line)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
