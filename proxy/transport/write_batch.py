"""Writing once per turn of the loop, however many events of the turn have something to say."""

import asyncio
from collections.abc import Callable


class WriteBatch:
    """What is to be done before the loop waits again, in the order of the asking."""

    def __init__(self) -> None:
        self._todo: list[Callable[[], None]] = []
        # Read once: Python 3.11 asks the system for its process each time, to tell.
        self._loop: asyncio.AbstractEventLoop | None = None

    def then(self, do: Callable[[], None]) -> None:
        """`do` must not raise. What is added while the turn ends belongs to the next."""
        if not self._todo:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self.end)
        self._todo.append(do)

    def end(self) -> None:
        todo, self._todo = self._todo, []
        for do in todo:
            do()
