"""An event loop on which long waits cost no time: when nothing else is to be done, its clock leaps to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    def __init__(self, grace_seconds: float) -> None:
        super().__init__()
        self._grace, self.leapt, self.in_threads = grace_seconds, 0.0, 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= self._grace or self.in_threads:
            return super().select(timeout)
        ready = super().select(self._grace)
        if not ready:
            self.leapt += timeout - self._grace
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, grace_seconds: float) -> None:
        self._clock = _Selector(grace_seconds)
        super().__init__(self._clock)

    def run_in_executor(self, *work: Any) -> Any:
        """What a thread does is something that is to be done: a slow disk takes no time off the clock."""
        future = super().run_in_executor(*work)
        self._clock.in_threads += 1
        future.add_done_callback(self._thread_is_done)
        return future

    def _thread_is_done(self, _: object) -> None:
        self._clock.in_threads -= 1

    def time(self) -> float:
        return super().time() + self._clock.leapt


def run(work: Coroutine[Any, Any, T], *, grace_seconds: float = 0.0) -> T:
    """Run `work` on such a loop, for one hour of its clock at most. With sockets it needs a grace: what is on
    its way over the loopback interface must have arrived by then."""

    async def bounded() -> T:
        async with asyncio.timeout(3600):
            return await work

    with asyncio.Runner(loop_factory=lambda: _Loop(grace_seconds)) as runner:
        return runner.run(bounded())


def now() -> float:
    """The running loop's clock, in seconds."""
    return asyncio.get_running_loop().time()
