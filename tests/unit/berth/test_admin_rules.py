"""The admin port's rules (data-plane D1), without a socket: who may stay, what is asked of the loop, what is kept."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics

from berth.runtime.admin import CachedPage, Format, Reply, Request
from berth.runtime.admin.guests import Guests
from berth.runtime.admin.http import HEAD_BYTES, read_head
from berth.runtime.admin.pace import PIECE_SECONDS, Pace
from berth.runtime.admin.pages import FRESH_SECONDS, NEWS_SECONDS, Cache, Jobs
from berth.runtime.admin.prometheus import OPENMETRICS, metrics_page, openmetrics_text, plain_text
from berth.runtime.admin.questions import BATCH_SECONDS, SILENT_SECONDS, Failed, Questions, Silent

# Heads


@pytest.mark.parametrize(
    ("head", "read"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: h\r\n\r\n", Request("/livez")),
        (b"GET /livez?verbose=1 HTTP/1.0\r\n\r\n", Request("/livez")),
        (b"HEAD /livez HTTP/1.1\r\n\r\n", Request("/livez", with_body=False)),
        (b"GET /s HTTP/1.1\r\nACCEPT: text/plain\r\n\r\n", Request("/s", "text/plain")),
        (b"GET /s HTTP/1.1\r\n\r\naccept: x\r\n", Request("/s")),
        (b"GET /s HTTP/1.1\r\n" + b"a" * (HEAD_BYTES - 17) + b"\r\n\r\n", Request("/s")),
        (b"GET /s HTTP/1.1\r\n", None),
        (b"a" * HEAD_BYTES, None),
        (b"", None),
        (b"a" * (HEAD_BYTES + 1), 431),
        (b"GET /s HTTP/1.1\r\n" + b"a" * (HEAD_BYTES - 16) + b"\r\n\r\n", 431),
        (b"POST /livez HTTP/1.1\r\n\r\n", 405),
        (b"GET livez HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (b"GET /livez HTTP/2.0\r\n\r\n", 400),
    ],
)
def test_a_head_is_read_or_what_is_wrong_with_it_is_told(head: bytes, read: object) -> None:
    found = read_head(head)
    assert (found.status if isinstance(found, Reply) else found) == read


# Guests


def test_whoever_has_most_guests_that_dawdle_gives_up_its_first() -> None:
    guests: Guests[str] = Guests(4)
    for name, source in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("b3", "b")):
        assert guests.has_room
        guests.add(name, source)
    assert not guests.has_room
    assert guests.first_to_go() == "b1"
    guests.owe("b1")  # it has said what it wants
    assert guests.first_to_go() == "b2"
    guests.remove("b2")
    guests.owe("b3")
    assert guests.first_to_go() == "a1"
    guests.owe("a1")
    assert guests.first_to_go() is None
    guests.answered("b1")  # it does not take it
    assert guests.first_to_go() == "b1"
    for name in ("a1", "b1", "b3", "b3"):
        guests.remove(name)
    guests.answered("b1")  # it has gone
    assert (len(guests), list(guests), guests.first_to_go()) == (0, [], None)


# Pace


def test_the_thread_works_a_moment_and_rests_for_three() -> None:
    pace = Pace(10.0)
    assert pace.has_time(10.0 + PIECE_SECONDS / 2)
    assert pace.rest_seconds(10.0 + PIECE_SECONDS / 2) == 0.0
    assert not pace.has_time(10.002)
    assert pace.rest_seconds(10.002) == pytest.approx(0.006)
    assert pace.rest_seconds(10.002) == 0.0
    assert pace.rest_seconds(20.0) == 0.05  # others wait for it


# What is asked of the loop


class Loop:
    """Calls what it was told when it is told to."""

    def __init__(self) -> None:
        self.now, self.calls, self.rings = 100.0, list[Callable[[], None]](), 0
        self.is_closed = False

    def call_soon_threadsafe(self, do: Callable[..., None], *args: Any) -> None:
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(lambda: do(*args))

    def work(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()

    def ring(self) -> None:
        self.rings += 1

    def questions(self) -> Questions:
        loop: Any = self
        return Questions(loop, self.ring, clock=lambda: self.now)


def test_what_waits_is_asked_together_and_seldom() -> None:
    loop = Loop()
    questions, heard = loop.questions(), list[Any]()
    for number in range(50):
        questions.ask(lambda number=number: number, heard.append)
    questions.step()
    assert len(loop.calls) == 1
    questions.ask(lambda: "later", heard.append)
    questions.step()
    assert len(loop.calls) == 1  # one at a time
    loop.work()
    assert (loop.rings, heard) == (1, [])  # told on the thread alone
    questions.step()
    assert heard == list(range(50))
    assert loop.calls == []  # it is too soon
    assert questions.next_step() == 100.0 + BATCH_SECONDS
    loop.now += BATCH_SECONDS
    questions.step()
    loop.work()
    questions.step()
    assert heard[-1] == "later"
    assert questions.next_step() is None


def test_a_loop_that_hangs_is_silent_and_is_asked_no_more() -> None:
    loop = Loop()
    questions, heard = loop.questions(), list[Any]()
    questions.ask(lambda: 1, heard.append)
    questions.step()
    loop.now += 1
    questions.ask(lambda: 2, heard.append)
    questions.step()
    assert questions.next_step() == 100.0 + SILENT_SECONDS
    loop.now = 100.0 + SILENT_SECONDS
    questions.step()
    assert heard == [Silent]
    loop.now += 1
    questions.step()
    assert heard == [Silent, Silent]
    questions.ask(lambda: 3, heard.append)
    questions.step()
    assert len(loop.calls) == 1  # nothing is piled up
    loop.work()
    questions.step()  # what comes too late is told to nobody
    loop.work()
    questions.step()
    assert heard == [Silent, Silent, 3]


def test_a_question_that_fails_and_a_loop_that_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    questions, heard = loop.questions(), list[Any]()
    questions.ask(lambda: 1 / 0, heard.append)
    questions.ask(lambda: 2, heard.append)
    questions.step()
    loop.work()
    questions.step()
    assert heard == [Failed, 2]
    assert "a page of the admin port failed" in caplog.text
    loop.now, loop.is_closed = loop.now + 1, True
    questions.ask(lambda: 3, heard.append)
    questions.step()
    assert heard[2:] == [Silent]


# Pages that cost


class Costly:
    """A page in two formats, of three pieces; counts what is done for it."""

    def __init__(self) -> None:
        self.loop, self.jobs = Loop(), Jobs()
        self.taken = self.written = self.news = 0
        # Of the loop's own time, and of the clock's beside it.
        self.takes_seconds = self.waits_seconds = self.used = 0.0
        self.instead: Reply | None = None
        self.questions = self.loop.questions()
        page = CachedPage(
            self.take, [Format("x", "a/x", self.write), Format("", "a/b", self.write)], news=lambda: self.news
        )
        self.cache = Cache(
            page, self.questions, self.jobs, clock=lambda: self.loop.now, used=lambda: self.used
        )

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
        self.questions.step()
        self.loop.work()
        self.questions.step()
        while self.jobs:
            self.jobs.step()

    def get(self, accept: str = "") -> bytes:
        heard = self.ask(accept)
        self.turn()
        assert len(heard) == 1
        return heard[0].body


def test_a_page_is_taken_and_written_once_a_second_however_often_it_is_asked_for() -> None:
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


def test_news_are_told_sooner() -> None:
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
    page.questions.step()
    page.loop.work()
    page.questions.step()
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
    page.questions.step()
    page.loop.work()
    page.questions.step()
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
        page.questions,
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
    page.questions.step()
    page.loop.now += SILENT_SECONDS
    page.questions.step()
    assert heard[0].status == 503
    assert heard[0].body == b"the process has been busy with something else for 4 s\n"


# Prometheus' pages


def large_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("things", "with\ntwo lines", ("a",), registry=registry).labels("x").inc()
    Histogram("seconds", "h", registry=registry).observe(1)
    Info("build", "i", registry=registry).info({"version": "1"})
    Gauge("nothing", "none", ("a",), registry=registry)

    class Large:
        def collect(self) -> Iterator[Any]:
            many = CounterMetricFamily("many", "m", labels=("number",))
            times = HistogramMetricFamily("times", "t", labels=("number",))
            for number in range(250):
                many.add_metric([str(number)], number)
                times.add_metric([str(number)], [("1.0", 1), ("+Inf", 2)], 3.0)
            yield from (many, times)

    large: Any = Large()
    registry.register(large)
    return registry


def test_what_is_written_in_pieces_is_what_the_library_writes() -> None:
    registry = large_registry()
    metrics = list(registry.collect())
    plain, opened = list(plain_text(metrics)), list(openmetrics_text(metrics))
    assert b"".join(plain) == generate_latest(registry)
    assert b"".join(opened) == openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
    assert max(piece.count(b"\n") for piece in plain) <= 102


def test_parts_of_a_metric_that_follow_each_other_have_one_head() -> None:
    registry = large_registry()
    (many, *_) = [metric for metric in registry.collect() if metric.name == "many"]
    assert b"".join(plain_text([many, many])).count(b"# TYPE many_total counter\n") == 1
    assert b"".join(plain_text([many, many])).count(b'many_total{number="7"} 7.0\n') == 2


def test_which_version_is_written_is_not_taken_from_the_request() -> None:
    page = metrics_page(CollectorRegistry())
    assert page.format_for(f"{OPENMETRICS};version=9.9.9x,*/*") == 0
    assert page.formats[0].content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    for accept in ("", "text/plain;version=1.0.0;escaping=dots", "*/*"):
        assert (
            page.formats[page.format_for(accept)].content_type == "text/plain; version=0.0.4; charset=utf-8"
        )


def test_nothing_here_needs_a_loop() -> None:
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
