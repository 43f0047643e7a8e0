"""The limit on requests inside Triton: so many run, so many wait in order, the rest is turned away.

REST and gRPC share one breaker. A slot is handed over by its releaser to the one that has waited
longest, in the same step, so nobody overtakes. Modelled on Knative's pkg/queue/breaker.go, which is
not strictly FIFO.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.load import LoadMeter

QUEUE_FULL = "pending request queue full"


class QueueFull(Exception):
    """As many wait as may; try again later."""

    def __init__(self) -> None:
        super().__init__(QUEUE_FULL)


class Breaker:
    """`limit` 0: everything runs at once, and is still counted."""

    def __init__(self, *, limit: int, queue_depth: int, meter: LoadMeter) -> None:
        self._limit, self._depth, self._meter = limit, queue_depth, meter
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one slot for a block. Raises QueueFull at once; waiting counts as concurrency."""
        if self._limit and self.running >= self._limit and len(self._waiting) >= self._depth:
            raise QueueFull
        self._meter.enter()
        self._idle.clear()
        try:
            await self._acquire()
            try:
                yield
            finally:
                self._release()
        finally:
            self._meter.leave()
            if not self.running and not self._waiting:
                self._idle.set()

    async def idle(self) -> None:
        """Return when nothing runs and nothing waits."""
        await self._idle.wait()

    async def _acquire(self) -> None:
        if not self._limit or self.running < self._limit:
            self.running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # the slot had been handed over already: pass it on
            elif turn in self._waiting:  # a release in between has taken it out
                self._waiting.remove(turn)
            raise

    def _release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # `running` stays: the slot has only changed hands
                return
        self.running -= 1
