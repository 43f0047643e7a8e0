"""Many deadlines, few of which ever pass: to set one and to take it back costs next to nothing."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

# How late a deadline may be noticed. Clients keep their own time; ours only tells them why.
STEP_SECONDS: Final = 0.02


class Due(Protocol):
    """Must be hashable by identity."""

    def too_late(self) -> None:
        """The deadline has passed. Must not raise."""
        ...


class Deadlines:
    """One timer for all, while there are any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: dict[int, set[Due]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, deadline: float, due: Due) -> int:
        """`deadline`: on the clock. Returns what `unset` wants to know."""
        step = int(deadline / STEP_SECONDS) + 1
        waiting = self._steps.get(step)
        if waiting is None:
            self._steps[step] = {due}
        else:
            waiting.add(due)
        if self._timer is None:
            self._wait()
        return step

    def unset(self, step: int, due: Due) -> None:
        waiting = self._steps.get(step)
        if waiting is not None:
            waiting.discard(due)
            if not waiting:
                del self._steps[step]

    def look(self, now: float) -> None:
        """End what is late."""
        late = [step for step in self._steps if step * STEP_SECONDS <= now]
        for step in sorted(late):
            for due in list(self._steps.pop(step, ())):
                due.too_late()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(STEP_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.look(self._clock())
        if self._steps:
            self._wait()
