"""Calls of the admin thread to the process's own loop: few batches a second, and one at a time.

All that wait are made in one callback of the loop, so that requests cost it no more than that; nothing piles up on a
loop that hangs. Every call ends within a bound: with a result, `Failed` or `TimedOut`.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

log = logging.getLogger(__name__)

# Between the beginnings of two batches. A probe waits for it at worst.
BATCH_SECONDS: Final = 0.02
# The longest that a call takes: less than the seconds that a kubelet gives a probe in deploy/.
CALL_SECONDS: Final = 4.0

Take = Callable[[], Any]


class TimedOut:
    """In place of a result: the loop has given none in time."""


class Failed:
    """In place of a result: the call has raised, as the log says."""


class _Call:
    """One, until it has been answered."""

    __slots__ = ("deadline", "result", "take", "then")

    def __init__(self, take: Take, then: Callable[[Any], None], deadline: float) -> None:
        self.take, self.deadline = take, deadline
        self.then: Callable[[Any], None] | None = then
        self.result: Any = None

    def end(self, result: Any) -> None:
        then, self.then = self.then, None
        if then is not None:
            then(result)


class LoopCalls:
    """Used by the admin thread alone, but for what it calls on the loop. `answered` notifies the thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answered: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop, self._answered, self._clock = loop, answered, clock
        self._waiting: list[_Call] = []
        self._made: list[_Call] = []
        self._done: deque[None] = deque()
        self._next_batch = 0.0

    def ask(self, take: Take, then: Callable[[Any], None]) -> None:
        """`take` is called on the loop, and `then` on this thread with what it returns, `TimedOut` or `Failed`."""
        self._waiting.append(_Call(take, then, self._clock() + CALL_SECONDS))

    def step(self) -> None:
        """Hand out the results that are there, end what is late, make the calls that wait."""
        now = self._clock()
        if self._done:
            self._done.clear()
            made, self._made = self._made, []
            for call in made:
                call.end(call.result)
        for call in (*self._made, *self._waiting):
            if call.deadline <= now:
                call.end(TimedOut)
        self._waiting = [call for call in self._waiting if call.then is not None]
        if self._waiting and not self._made and now >= self._next_batch:
            self._ask(now)

    def _ask(self, now: float) -> None:
        self._made, self._waiting = self._waiting, []
        self._next_batch = now + BATCH_SECONDS
        try:
            self._loop.call_soon_threadsafe(self._answer, self._made)
        except RuntimeError:  # it is closed
            for call in self._made:
                call.end(TimedOut)
            self._made = []

    def _answer(self, made: list[_Call]) -> None:
        """On the loop."""
        for call in made:
            try:
                call.result = call.take()
            except Exception as error:  # one page's defect is no other's, nor the process's
                call.result = Failed
                log.error("a page of the admin port failed", exc_info=error)
        self._done.append(None)
        self._answered()

    def next_step(self) -> float | None:
        """When `step` has something to do unless it is notified before; None: not at all."""
        times = [call.deadline for call in (*self._made, *self._waiting) if call.then is not None]
        if self._waiting and not self._made:
            times.append(self._next_batch)
        return min(times, default=None)
