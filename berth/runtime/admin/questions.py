"""What the admin thread asks of the process's own loop: few batches a second, and one at a time.

All that wait are asked in one call of the loop's, so that what strangers ask costs it no more than that; nothing is
piled up on a loop that hangs. Every question has an answer or is silent within a bound.
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
# Less than the seconds that a kubelet gives a probe in deploy/.
SILENT_SECONDS: Final = 4.0

Take = Callable[[], Any]


class Silent:
    """In place of an answer: the loop has given none in time."""


class Failed:
    """In place of an answer: the question has raised, as the log says."""


class _Question:
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


class Questions:
    """Used by the admin thread alone, but for what it calls on the loop. `answered` wakes the thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answered: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop, self._answered, self._clock = loop, answered, clock
        self._waiting: list[_Question] = []
        self._asked: list[_Question] = []
        self._done: deque[None] = deque()
        self._next_batch = 0.0

    def ask(self, take: Take, then: Callable[[Any], None]) -> None:
        """`take` is called on the loop, and `then` on this thread with what it returns, `Silent` or `Failed`."""
        self._waiting.append(_Question(take, then, self._clock() + SILENT_SECONDS))

    def step(self) -> None:
        """Hand out the answers that are there, give up what is late, ask what waits."""
        now = self._clock()
        if self._done:
            self._done.clear()
            asked, self._asked = self._asked, []
            for question in asked:
                question.end(question.result)
        for question in (*self._asked, *self._waiting):
            if question.deadline <= now:
                question.end(Silent)
        self._waiting = [question for question in self._waiting if question.then is not None]
        if self._waiting and not self._asked and now >= self._next_batch:
            self._ask(now)

    def _ask(self, now: float) -> None:
        self._asked, self._waiting = self._waiting, []
        self._next_batch = now + BATCH_SECONDS
        try:
            self._loop.call_soon_threadsafe(self._answer, self._asked)
        except RuntimeError:  # it is closed
            for question in self._asked:
                question.end(Silent)
            self._asked = []

    def _answer(self, asked: list[_Question]) -> None:
        """On the loop."""
        for question in asked:
            try:
                question.result = question.take()
            except Exception as error:  # one page's defect is no other's, nor the process's
                question.result = Failed
                log.error("a page of the admin port failed", exc_info=error)
        self._done.append(None)
        self._answered()

    def next_step(self) -> float | None:
        """When `step` has something to do unless it is woken before; None: not at all."""
        times = [
            question.deadline for question in (*self._asked, *self._waiting) if question.then is not None
        ]
        if self._waiting and not self._asked:
            times.append(self._next_batch)
        return min(times, default=None)
