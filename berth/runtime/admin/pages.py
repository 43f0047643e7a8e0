"""What an admin port shows: short answers from the process's own loop, and pages that cost, kept for a while."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from berth.runtime.admin.http import Reply, Request, text
from berth.runtime.admin.loop_calls import CALL_SECONDS, Failed, LoopCalls, TimedOut

log = logging.getLogger(__name__)

# A page that costs is taken anew when it is older than this.
FRESH_SECONDS: Final = 1.0
# Or when there is news, but not sooner than after this.
NEWS_SECONDS: Final = 0.1
# What a page took of the loop it may take again after so many times as long: 5 % of the loop's time at most.
_REST: Final = 20

T = TypeVar("T")

# Runs on the process's own loop, once for each request: it must be as short as one of the loop's callbacks.
Answer = Callable[[Request], Reply]


@dataclass(frozen=True, slots=True)
class Format(Generic[T]):
    """One way to write what was taken, for those whose Accept has `wanted` in it.

    `write` runs on the admin thread, in pieces of at most a millisecond or so; it must touch nothing that changes.
    """

    wanted: str
    content_type: str
    write: Callable[[T], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class CachedPage(Generic[T]):
    """A page that is made once a second at most, however often it is requested.

    `take` runs on the process's own loop: a copy of what is to be written, or a Reply in its place. `formats`: the
    last one is for clients that accept none of the others. `news`: a number, read on the admin thread, that is another
    as soon as what was taken is not the newest that there is.
    """

    take: Callable[[], T | Reply]
    formats: Sequence[Format[T]]
    news: Callable[[], int] = lambda: 0

    def format_for(self, accept: str) -> int:
        last = len(self.formats) - 1
        return next((at for at, one in enumerate(self.formats[:last]) if one.wanted in accept), last)


Page = Answer | CachedPage[Any]
Then = Callable[[Reply], None]


@dataclass(frozen=True, slots=True)
class _Taken:
    what: Any
    news: int
    at: float
    took_seconds: float

    def is_good(self, news: int, now: float) -> bool:
        age, rest = now - self.at, _REST * self.took_seconds
        return age < max(FRESH_SECONDS if news == self.news else NEWS_SECONDS, rest)


class Cache:
    """One expensive page: its last content, and the requests that wait for the next. On the admin thread."""

    def __init__(
        self,
        page: CachedPage[Any],
        calls: LoopCalls,
        jobs: "Jobs",
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        """`used`: the processor time of the thread that requests it. By the clock, a process that is kept from it
        would show old content for as long again as that, times `_REST`."""
        self._page, self._calls, self._jobs, self._clock = page, calls, jobs, clock
        self._used = used
        self._taken: _Taken | None = None
        self._is_taking = False
        self._written: dict[int, Reply] = {}
        # By format: the requests that wait for what is being written, or for what is being taken.
        self._readers: dict[int, list[Then]] = {}
        self._waiting: list[tuple[int, Then]] = []

    def answer(self, request: Request, then: Then) -> None:
        at = self._page.format_for(request.accept)
        taken = self._taken
        if taken is not None and taken.is_good(self._page.news(), self._clock()):
            self._give(at, then)
            return
        self._waiting.append((at, then))
        if not self._is_taking:
            self._is_taking = True
            self._calls.ask(self._take, self._took)

    def _take(self) -> _Taken:
        """On the process's loop."""
        news, began = self._page.news(), self._used()
        what = self._page.take()
        return _Taken(what, news, self._clock(), self._used() - began)

    def _took(self, taken: _Taken | type[TimedOut] | type[Failed]) -> None:
        self._is_taking = False
        waiting, self._waiting = self._waiting, []
        if not isinstance(taken, _Taken):
            for _, then in waiting:
                then(excuse(taken))
            return
        self._taken, self._written = taken, {}
        for at, then in waiting:
            self._give(at, then)

    def _give(self, at: int, then: Then) -> None:
        """What was taken last, in this format."""
        assert self._taken is not None
        if isinstance(self._taken.what, Reply):
            then(self._taken.what)
        elif at in self._written:
            then(self._written[at])
        elif at in self._readers:
            self._readers[at].append(then)
        else:
            self._readers[at] = [then]
            self._jobs.add(self._write(at, self._taken))

    def _write(self, at: int, taken: _Taken) -> Iterator[None]:
        one, pieces = self._page.formats[at], []
        reply = excuse(Failed)
        try:
            for piece in one.write(taken.what):
                pieces.append(piece)
                yield
            reply = Reply(b"".join(pieces), one.content_type)
        except Exception as error:  # one page's defect is no other's
            log.error("a page of the admin port failed", exc_info=error)
        if taken is self._taken:
            self._written[at] = reply
        for then in self._readers.pop(at):
            then(reply)


def excuse(why: type[TimedOut] | type[Failed]) -> Reply:
    if why is TimedOut:
        return text(f"the process has been busy with something else for {CALL_SECONDS:g} s", 503)
    return text("this page has failed, as the process's log says", 500)


class Jobs:
    """What is written in pieces, a piece of each in turn."""

    def __init__(self) -> None:
        self._jobs: deque[Iterator[None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: Iterator[None]) -> None:
        self._jobs.append(job)

    def step(self) -> None:
        """The next piece."""
        if self._jobs:
            job = self._jobs.popleft()
            for _ in job:
                self._jobs.append(job)
                return
