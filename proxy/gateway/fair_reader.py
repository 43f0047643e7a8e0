"""Fair turns between the replicas of a process, at their sockets: what arrives for one that has had its part of this
turn of the loop is kept back until one of the next. A connection is not read as soon as more comes on it: to stop
reading and begin again are calls of the system's, and a client that waits for its answer sends nothing meanwhile.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from proxy.request.fairness import CALL_COST, DeficitRoundRobin, Share

# What may be kept back in all, of each replica no more than is then free. What comes beyond is served at once, for it
# has been read and lies in memory anyhow; but its connection waits for its replica's turn before it is read again.
_KEPT_BYTES: Final = 32 * 1024 * 1024


class Load(Protocol):
    """What a replica has cost so far."""

    @property
    def calls(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...


# Serves what waits, and returns what it cost.
Serve = Callable[[], int]


class ReplicaShare(Share[Serve]):
    """One replica's part."""

    __slots__ = ("_calls", "_load", "_sent_bytes", "kept_bytes")

    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load, self.kept_bytes = load, 0
        self._calls, self._sent_bytes = load.calls, load.sent_bytes

    def cost(self, size: int, took_ns: int) -> int:
        """What a piece of so many bytes has cost, with whatever else there was since the last.

        A call and the time that it usually takes cost the same: what takes longer costs as much as that.
        """
        load = self._load
        calls, sent = load.calls, load.sent_bytes
        size += sent - self._sent_bytes
        size += CALL_COST * (calls - self._calls) or CALL_COST
        self._calls, self._sent_bytes = calls, sent
        return size if size > took_ns else took_ns


class FairReadScheduler:
    """Of all replicas of the process."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self._turns: DeficitRoundRobin[Serve] = DeficitRoundRobin()
        # To be called with what a share's piece has cost; where no credit is left after that, `want_turn`.
        self.spend = self._turns.spend
        self._is_due = False
        self._kept_bytes = 0

    def has_room(self, share: ReplicaShare) -> bool:
        return share.kept_bytes < _KEPT_BYTES - self._kept_bytes

    def later(self, share: ReplicaShare, do: Callable[[], None]) -> None:
        """In one of the replica's next turns."""

        def serve() -> int:
            began = self.clock()
            do()
            return share.cost(0, self.clock() - began)

        self._turns.wait(share, serve)
        self.want_turn()

    def keep_back(self, share: ReplicaShare, serve: Serve, size: int) -> None:
        """So many bytes wait for `serve`, which calls `took`."""
        self.took(share, -size)
        self._turns.wait(share, serve)
        self.want_turn()

    def took(self, share: ReplicaShare, size: int) -> None:
        self._kept_bytes -= size
        share.kept_bytes -= size

    def drop(self, share: ReplicaShare, serve: Serve, size: int) -> None:
        self.took(share, size)
        self._turns.drop(share, serve)

    def want_turn(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        self._turns.next_turn(lambda serve: serve())
        if self._turns.has_waiting:
            self.want_turn()


class ReadGate:
    """The transport as the inner protocol sees it: the protocol and the scheduler may each stop its reading.

    Everything else is the transport's own, looked up once.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._stopped = self._suspended = False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.transport, name)
        if callable(value):
            setattr(self, name, value)
        return value

    def pause_reading(self) -> None:
        self._stopped = True
        self._regulate()

    def resume_reading(self) -> None:
        self._stopped = False
        self._regulate()

    def suspend(self, suspended: bool) -> None:
        self._suspended = suspended
        self._regulate()

    def _regulate(self) -> None:
        if self.transport.is_closing():
            return
        if self._stopped or self._suspended:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()


class FairReader(asyncio.Protocol):
    """Wraps a connection's own protocol, and passes on at once what does not have to wait."""

    def __init__(
        self, inner: asyncio.Protocol, share: ReplicaShare, turns: FairReadScheduler, gone: Callable[[], None]
    ) -> None:
        self._inner, self._share, self._turns, self._gone = inner, share, turns, gone
        self._kept = b""
        # It has a place in the replica's queue.
        self._waits = self._is_suspended = self._has_ended = False
        self._gate: ReadGate | None = None
        # As the loop calls them; nothing stands between.
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._gate = ReadGate(cast(asyncio.Transport, transport))  # uvloop's is none by inheritance
        self._inner.connection_made(cast(asyncio.Transport, self._gate))

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_queue()
        self._kept = b""
        self._inner.connection_lost(exc)
        self._gone()

    def eof_received(self) -> bool | None:
        if not self._kept:
            return self._inner.eof_received()
        self._has_ended = True  # which is passed on after what is kept
        return True

    def data_received(self, data: bytes) -> None:
        share, turns = self._share, self._turns
        if share.credit > 0 and not share.waiting:
            turns.spend(share, self._serve(data))
            if share.credit <= 0:
                turns.want_turn()
        elif self._kept:
            self._suspend()
            self._wait(self._kept + data)
        elif turns.has_room(share):
            self._wait(data)
        else:
            self._suspend()
            self._wait(b"")  # it wants a turn
            turns.spend(share, self._serve(data))

    def _serve(self, data: bytes) -> int:
        """Returns what it cost."""
        clock = self._turns.clock
        began = clock()
        self._inner.data_received(data)
        return self._share.cost(len(data), clock() - began)

    def _wait(self, data: bytes) -> None:
        """For the replica's turn, with this."""
        self._leave_queue()
        self._kept, self._waits = data, True
        self._turns.keep_back(self._share, self._serve_kept, len(data))

    def _suspend(self) -> None:
        """Nothing more is read until the replica's turn."""
        self._is_suspended = True
        if self._gate is not None:
            self._gate.suspend(True)

    def _leave_queue(self) -> None:
        if self._waits:
            self._waits = False
            self._turns.drop(self._share, self._serve_kept, len(self._kept))

    def _serve_kept(self) -> int:
        """Its turn has come; returns what it cost."""
        data, self._kept, self._waits = self._kept, b"", False
        self._turns.took(self._share, len(data))
        cost = self._serve(data) if data else 0
        gate = self._gate
        if gate is not None and self._is_suspended:
            self._is_suspended = False
            gate.suspend(False)
        if gate is not None and self._has_ended and not self._inner.eof_received():
            gate.transport.close()
        return cost
