"""Pages that are made once a second at most."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from berth.runtime.admin import CachedPage, Format, Reply, Request
from berth.runtime.admin.loop_calls import BATCH_SECONDS, CALL_SECONDS, LoopCalls
from berth.runtime.admin.pages import FRESH_SECONDS, NEWS_SECONDS, Cache, Jobs


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


class Costly:
    """A page in two formats, of three pieces; counts what is done for it."""

    def __init__(self) -> None:
        self.loop, self.jobs = Loop(), Jobs()
        self.taken = self.written = self.news = 0
        # Of the loop's own time, and of the clock's beside it.
        self.takes_seconds = self.waits_seconds = self.used = 0.0
        self.instead: Reply | None = None
        self.calls = self.loop.calls()
        page = CachedPage(
            self.take, [Format("x", "a/x", self.write), Format("", "a/b", self.write)], news=lambda: self.news
        )
        self.cache = Cache(page, self.calls, self.jobs, clock=lambda: self.loop.now, used=lambda: self.used)

    def take(self) -> int | Reply:
        self.taken += 1
        self.used += self.takes_seconds
        self.loop.now += self.takes_seconds + self.waits_seconds
        return self.instead or self.taken

    def write(self, taken: int) -> Iterator[bytes]:
        self.written += 1
        for _ in range(3):
            yield str(taken).encode()

    def ask(self, accept: str = "") -> list[Reply]:
        heard: list[Reply] = []
        self.cache.answer(Request("/", accept), heard.append)
        return heard

    def turn(self) -> None:
        """Everything that is to be done."""
        self.loop.now += BATCH_SECONDS
        self.calls.step()
        self.loop.work()
        self.calls.step()
        while self.jobs:
            self.jobs.step()

    def get(self, accept: str = "") -> bytes:
        heard = self.ask(accept)
        self.turn()
        assert len(heard) == 1
        return heard[0].body


def test_a_page_is_taken_and_written_once_a_second_however_often_it_is_requested() -> None:
    page = Costly()
    asked = [page.ask() for _ in range(100)]
    page.turn()
    assert [one[0].body for one in asked] == [b"111"] * 100
    assert (page.taken, page.written) == (1, 1)
    for _ in range(100):
        assert page.ask()[0].body == b"111"
    assert page.get("text/x") == b"111"  # another format of what was taken
    assert (page.taken, page.written) == (1, 2)
    page.loop.now += FRESH_SECONDS
    assert page.get() == b"222"
    assert page.get("x") == b"222"


def test_news_are_reported_sooner() -> None:
    page = Costly()
    page.get()
    page.news += 1
    assert page.get() == b"111"
    page.loop.now += NEWS_SECONDS
    assert page.get() == b"222"
    page.loop.now += NEWS_SECONDS
    assert page.get() == b"222"


def test_what_takes_long_is_taken_seldom() -> None:
    page = Costly()
    page.takes_seconds = 0.5
    page.get()
    page.news += 1
    page.loop.now += 9
    assert page.get() == b"111"
    page.loop.now += 1
    assert page.get() == b"222"


def test_a_loop_that_is_kept_from_the_processor_tells_the_newest_all_the_same() -> None:
    """Data-plane D1: held up for 0.2 s while it was taken, a scaler's figures would be four seconds old."""
    page = Costly()
    page.waits_seconds = 0.2
    assert page.get() == b"111"
    page.news += 1
    page.loop.now += 2 * NEWS_SECONDS
    assert page.get() == b"222"


def test_whoever_asks_while_it_is_written_gets_it_too() -> None:
    page = Costly()
    first = page.ask()
    page.calls.step()
    page.loop.work()
    page.calls.step()
    page.jobs.step()
    second = page.ask()
    assert (first, second) == ([], [])
    page.turn()
    assert [one[0].body for one in (first, second)] == [b"111"] * 2
    assert page.written == 1


def test_what_was_written_of_something_old_is_not_kept_for_what_was_taken_since() -> None:
    """A slow page's readers get what they waited for; whoever asks afterwards gets the newest."""
    page = Costly()
    page.ask()
    page.calls.step()
    page.loop.work()
    page.calls.step()
    page.jobs.step()  # it has begun
    page.loop.now += FRESH_SECONDS
    page.ask("x")  # takes it anew
    page.turn()
    assert page.taken == 2
    assert page.get() == b"222"


def test_a_reply_in_place_of_what_is_taken_is_the_page() -> None:
    page = Costly()
    page.instead = Reply(b"unknown", status=503)
    assert page.get() == b"unknown"
    assert page.written == 0


def test_a_page_that_fails_says_so_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    page = Costly()
    fails, page.write = True, page.write  # type: ignore[method-assign]

    def write(taken: int) -> Iterator[bytes]:
        yield b"begun"
        if fails:
            raise ValueError("no")

    page.cache = Cache(
        CachedPage(page.take, [Format("", "a/b", write)]),
        page.calls,
        page.jobs,
        clock=lambda: page.loop.now,
    )
    heard = page.ask()
    page.turn()
    assert (heard[0].status, b"failed" in heard[0].body) == (500, True)
    assert "a page of the admin port failed" in caplog.text
    fails = False
    page.loop.now += FRESH_SECONDS
    assert page.get() == b"begun"


def test_a_page_of_a_loop_that_hangs_says_so() -> None:
    page = Costly()
    heard = page.ask()
    page.calls.step()
    page.loop.now += CALL_SECONDS
    page.calls.step()
    assert heard[0].status == 503
    assert heard[0].body == b"the process has been busy with something else for 4 s\n"
