"""The admin port as strangers find it (data-plane D1): over real sockets, while others want something too."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import pytest

from berth.contract.endpoint import Endpoint
from berth.runtime.admin import AdminServer, CachedPage, Format, Page, Reply, questions, server
from tests.fakes.eventually import until

ANYWHERE = Endpoint("0.0.0.0", 0)
STRANGER, KUBELET = "127.0.0.2", "127.0.0.3"
LARGE = bytes(8 * 1024**2)
ASK = b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n"


def connect(port: int, source: str, said: bytes = b"") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))
    one.sendall(said)
    return one


def read_all(one: socket.socket) -> bytes:
    """To the end, or to the reset."""
    found = b""
    with one, contextlib.suppress(ConnectionError):
        while piece := one.recv(1024**2):
            found += piece
    return found


def get(port: int, path: str = "/livez", source: str = KUBELET) -> tuple[int, bytes]:
    head, _, body = read_all(connect(port, source, ASK % path.encode())).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@asynccontextmanager
async def serving(**pages: Page) -> AsyncIterator[AdminServer]:
    admin = AdminServer(
        ANYWHERE, not_ready=lambda: None, pages={f"/{name}": page for name, page in pages.items()}
    )
    async with admin:
        yield admin


def large_page() -> CachedPage[bytes]:
    return CachedPage(lambda: LARGE, [Format("", "a/b", lambda taken: iter([taken]))])


@contextmanager
def many(count: int, make: Callable[[], socket.socket]) -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            made.append(make())
        yield made
    finally:
        for one in made:
            one.close()


def guests_of(admin: AdminServer) -> int:
    assert admin._thread is not None
    return len(admin._thread.guests)


async def test_a_stranger_that_holds_connections_keeps_no_prober_out() -> None:
    """Half heads: the first ones go for those that come."""
    async with serving() as admin:
        port = admin.port

        def scene() -> None:
            with many(200, lambda: connect(port, STRANGER, b"GET /livez HTTP/1.1\r\n")) as strangers:
                assert get(port) == (200, b"ok\n")
                assert read_all(strangers[0]) == b""
                strangers[-1].sendall(b"\r\n")
                assert strangers[-1].recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
                assert get(port, source=STRANGER) == (200, b"ok\n")

        await asyncio.to_thread(scene)
        await until(lambda: guests_of(admin) == 0)


async def test_those_that_are_owed_an_answer_have_it_however_many_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(server, "GUEST_SECONDS", 20.0)
    async with serving() as admin:
        port, answers, done = admin.port, list[bytes](), threading.Event()

        def scene() -> None:
            with (
                many(server.MOST_GUESTS, lambda: connect(port, STRANGER, ASK % b"/livez")) as first,
                many(20, lambda: connect(port, KUBELET)),
            ):
                answers.extend(read_all(one) for one in first)
            done.set()

        asker = threading.Thread(target=scene)
        asker.start()
        assert done.wait(60)  # as a loop does that hangs: none has its answer before the others have come
        asker.join()
    assert [one[:13] for one in answers] == [b"HTTP/1.1 503 "] * server.MOST_GUESTS


async def test_there_are_never_more_guests_than_places() -> None:
    async with serving() as admin:
        port, seen = admin.port, list[int]()

        def scene() -> None:
            with many(100, lambda: connect(port, STRANGER, b"G")):
                assert get(port) == (200, b"ok\n")
                seen.append(guests_of(admin))

        await asyncio.to_thread(scene)
        assert server.MOST_GUESTS // 2 < seen[0] <= server.MOST_GUESTS == 64


async def test_those_that_do_not_read_keep_nobody_out_and_the_answer_is_there_once() -> None:
    async with serving(large=large_page()) as admin:
        port = admin.port
        assert await asyncio.to_thread(get, port, "/large") == (200, LARGE)

        def scene() -> None:
            with many(100, lambda: connect(port, STRANGER, ASK % b"/large")) as strangers:
                assert get(port) == (200, b"ok\n")
                assert get(port, "/large") == (200, LARGE)
                # What lies in the system's buffers is far from the whole.
                assert len(read_all(strangers[0])) < len(LARGE) / 2

        await asyncio.to_thread(scene)


@pytest.mark.parametrize("said", [b"", b"GET /livez HT", ASK % b"/large"])
async def test_whoever_takes_too_long_is_sent_away(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent, slow to ask, slow to take it. The last one has begun to read when it is ended."""
    left, leave = list[object](), server._Guest.leave

    def seen(guest: server._Guest) -> None:
        left.append(guest)
        leave(guest)

    monkeypatch.setattr(server, "GUEST_SECONDS", 0.2)
    monkeypatch.setattr(server._Guest, "leave", seen)
    async with serving(large=large_page()) as admin:
        port = admin.port
        stranger = await asyncio.to_thread(connect, port, STRANGER, said)
        await until(lambda: left)
        assert len(await asyncio.to_thread(read_all, stranger)) < len(LARGE)


async def test_a_head_that_is_too_large_is_told_so() -> None:
    async with serving() as admin:
        port = admin.port

        def scene() -> bytes:
            return read_all(connect(port, STRANGER, b"GET /livez HTTP/1.1\r\nX: " + b"a" * 17_000))

        assert (await asyncio.to_thread(scene)).startswith(b"HTTP/1.1 431 ")


async def test_a_loop_that_hangs_is_told_of_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prober must hear of it from the process itself, and afterwards that it goes on."""
    monkeypatch.setattr(questions, "SILENT_SECONDS", 0.2)
    async with serving() as admin:
        port, answers, done = admin.port, list[tuple[int, bytes]](), threading.Event()

        def ask() -> None:
            answers.extend((get(port), get(port, "/readyz"), get(port, "/nope")))
            done.set()

        asker = threading.Thread(target=ask)
        asker.start()
        assert done.wait(20)  # as a loop does that hangs
        asker.join()
        assert [status for status, _ in answers] == [503, 503, 404]
        assert b"busy with something else" in answers[0][1]
        assert await asyncio.to_thread(get, port) == (200, b"ok\n")


async def test_what_costs_is_written_away_from_the_loop() -> None:
    threads: dict[str, int] = {}

    def take() -> bytes:
        threads["take"] = threading.get_ident()
        return b"1"

    def write(taken: bytes) -> Iterator[bytes]:
        threads["write"] = threading.get_ident()
        yield taken

    async with serving(page=CachedPage(take, [Format("", "a/b", write)])) as admin:
        assert await asyncio.to_thread(get, admin.port, "/page") == (200, b"1")
    assert threads["take"] == threading.get_ident()
    assert threads["write"] != threading.get_ident()


async def test_the_thread_rests_while_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as long as it has worked: the loop that serves has the rest."""
    rests: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, thread_time=time.thread_time, sleep=rests.append)
    monkeypatch.setattr(server, "time", clock)

    def write(_: bytes) -> Iterator[bytes]:
        for _ in range(5):
            began = time.thread_time()
            while time.thread_time() < began + 0.004:
                pass
            yield b"x"

    async with serving(page=CachedPage(lambda: b"", [Format("", "a/b", write)])) as admin:
        assert await asyncio.to_thread(get, admin.port, "/page") == (200, b"xxxxx")
    assert len([seconds for seconds in rests if seconds >= 0.012]) >= 5


async def test_pages_below_a_path_and_pages_that_there_are_not() -> None:
    pages: dict[str, Page] = {
        "/models/": lambda request: Reply(request.path.encode()),
        "/models/own": lambda _: Reply(b"own"),
    }
    async with AdminServer(ANYWHERE, not_ready=lambda: "no", pages=pages) as admin:
        found = [
            await asyncio.to_thread(get, admin.port, path)
            for path in ("/models/a/b", "/models/own", "/models", "/readyz")
        ]
    there = b"there are /livez, /readyz, /models/, /models/own\n"
    assert found == [(200, b"/models/a/b"), (200, b"own"), (404, there), (503, b"no\n")]


async def test_a_page_that_fails_is_its_own_harm(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> Reply:
        raise ValueError("no")

    async with serving(bad=fail) as admin:
        assert (await asyncio.to_thread(get, admin.port, "/bad"))[0] == 500
        assert await asyncio.to_thread(get, admin.port) == (200, b"ok\n")
    assert "a page of the admin port failed" in caplog.text


async def test_head_has_no_body_and_what_is_sent_ahead_loses_no_answer() -> None:
    async with serving() as admin:
        port = admin.port

        def scene() -> list[bytes]:
            head = read_all(connect(port, KUBELET, b"HEAD /livez HTTP/1.1\r\n\r\n"))
            ahead = read_all(connect(port, KUBELET, b"POST /livez HTTP/1.1\r\n\r\n" + bytes(200_000)))
            return [head, ahead]

        head, ahead = await asyncio.to_thread(scene)
        assert head.endswith(b"Content-Length: 3\r\nConnection: close\r\n\r\n")
        assert ahead.startswith(b"HTTP/1.1 405 ")
        assert ahead.endswith(b"GET is expected\n")


async def test_it_ends_while_guests_are_there() -> None:
    async with serving() as admin:
        port = admin.port
        stranger = await asyncio.to_thread(connect, port, STRANGER, b"GET")
        await until(lambda: guests_of(admin) == 1)
    assert await asyncio.to_thread(read_all, stranger) == b""
    with pytest.raises(ConnectionError):
        await asyncio.to_thread(connect, port, STRANGER)


async def test_without_descriptors_it_waits_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, fails = socket.socket.accept, [3]

    def refuse(one: socket.socket) -> tuple[socket.socket, object]:
        if fails[0]:
            fails[0] -= 1
            raise OSError(24, "Too many open files")
        return accept(one)

    monkeypatch.setattr(server, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(socket.socket, "accept", refuse)
    async with serving() as admin:
        assert await asyncio.to_thread(get, admin.port) == (200, b"ok\n")
    assert fails == [0]
