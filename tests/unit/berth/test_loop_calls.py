"""The admin thread's calls to the loop."""

from collections.abc import Callable
from typing import Any

import pytest

from berth.runtime.admin.loop_calls import BATCH_SECONDS, CALL_SECONDS, Failed, LoopCalls, TimedOut


class Loop:
    """Calls what it was told when it is told to."""

    def __init__(self) -> None:
        self.now, self.callbacks, self.rings = 100.0, list[Callable[[], None]](), 0
        self.is_closed = False

    def call_soon_threadsafe(self, do: Callable[..., None], *args: Any) -> None:
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        self.callbacks.append(lambda: do(*args))

    def work(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()

    def ring(self) -> None:
        self.rings += 1

    def calls(self) -> LoopCalls:
        loop: Any = self
        return LoopCalls(loop, self.ring, clock=lambda: self.now)


def test_what_waits_is_asked_together_and_seldom() -> None:
    loop = Loop()
    calls, heard = loop.calls(), list[Any]()
    for number in range(50):
        calls.ask(lambda number=number: number, heard.append)
    calls.step()
    assert len(loop.callbacks) == 1
    calls.ask(lambda: "later", heard.append)
    calls.step()
    assert len(loop.callbacks) == 1  # one at a time
    loop.work()
    assert (loop.rings, heard) == (1, [])  # told on the thread alone
    calls.step()
    assert heard == list(range(50))
    assert loop.callbacks == []  # it is too soon
    assert calls.next_step() == 100.0 + BATCH_SECONDS
    loop.now += BATCH_SECONDS
    calls.step()
    loop.work()
    calls.step()
    assert heard[-1] == "later"
    assert calls.next_step() is None


def test_a_loop_that_hangs_is_silent_and_is_asked_no_more() -> None:
    loop = Loop()
    calls, heard = loop.calls(), list[Any]()
    calls.ask(lambda: 1, heard.append)
    calls.step()
    loop.now += 1
    calls.ask(lambda: 2, heard.append)
    calls.step()
    assert calls.next_step() == 100.0 + CALL_SECONDS
    loop.now = 100.0 + CALL_SECONDS
    calls.step()
    assert heard == [TimedOut]
    loop.now += 1
    calls.step()
    assert heard == [TimedOut, TimedOut]
    calls.ask(lambda: 3, heard.append)
    calls.step()
    assert len(loop.callbacks) == 1  # nothing is piled up
    loop.work()
    calls.step()  # what comes too late is told to nobody
    loop.work()
    calls.step()
    assert heard == [TimedOut, TimedOut, 3]


def test_a_question_that_fails_and_a_loop_that_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    calls, heard = loop.calls(), list[Any]()
    calls.ask(lambda: 1 / 0, heard.append)
    calls.ask(lambda: 2, heard.append)
    calls.step()
    loop.work()
    calls.step()
    assert heard == [Failed, 2]
    assert "a page of the admin port failed" in caplog.text
    loop.now, loop.is_closed = loop.now + 1, True
    calls.ask(lambda: 3, heard.append)
    calls.step()
    assert heard[2:] == [TimedOut]
