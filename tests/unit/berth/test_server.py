"""An admin port: its thread, and clients at it."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry, Counter

from berth.contract.endpoint import Endpoint
from berth.runtime.admin import AdminServer, CachedPage, Format, Page, Reply, server
from berth.runtime.admin import loop_calls as calls
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.admin.server import CONNECTION_SECONDS, MOST_CONNECTIONS
from berth.runtime.errors import CannotStart
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


def connections_of(admin: AdminServer) -> int:
    assert admin._thread is not None
    return len(admin._thread.connections)


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
        await until(lambda: connections_of(admin) == 0)


async def test_those_that_are_owed_an_answer_have_it_however_many_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "CALL_SECONDS", 1.0)
    monkeypatch.setattr(server, "CONNECTION_SECONDS", 20.0)
    async with serving() as admin:
        port, answers, done = admin.port, list[bytes](), threading.Event()

        def scene() -> None:
            with (
                many(server.MOST_CONNECTIONS, lambda: connect(port, STRANGER, ASK % b"/livez")) as first,
                many(20, lambda: connect(port, KUBELET)),
            ):
                answers.extend(read_all(one) for one in first)
            done.set()

        asker = threading.Thread(target=scene)
        asker.start()
        assert done.wait(60)  # as a loop does that hangs: none has its answer before the others have come
        asker.join()
    assert [one[:13] for one in answers] == [b"HTTP/1.1 503 "] * server.MOST_CONNECTIONS


async def test_there_are_never_more_connections_than_places() -> None:
    async with serving() as admin:
        port, seen = admin.port, list[int]()

        def scene() -> None:
            with many(100, lambda: connect(port, STRANGER, b"G")):
                assert get(port) == (200, b"ok\n")
                seen.append(connections_of(admin))

        await asyncio.to_thread(scene)
        assert server.MOST_CONNECTIONS // 2 < seen[0] <= server.MOST_CONNECTIONS == 64


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
    """TimedOut, slow to ask, slow to take it. The last one has begun to read when it is ended."""
    left, leave = list[object](), server._Connection.leave

    def seen(connection: server._Connection) -> None:
        left.append(connection)
        leave(connection)

    monkeypatch.setattr(server, "CONNECTION_SECONDS", 0.2)
    monkeypatch.setattr(server._Connection, "leave", seen)
    async with serving(large=large_page()) as admin:
        port = admin.port
        stranger = await asyncio.to_thread(connect, port, STRANGER, said)
        await until(lambda: left)
        assert len(await asyncio.to_thread(read_all, stranger)) < len(LARGE)


async def test_a_head_that_is_too_large_is_reported() -> None:
    async with serving() as admin:
        port = admin.port

        def scene() -> bytes:
            return read_all(connect(port, STRANGER, b"GET /livez HTTP/1.1\r\nX: " + b"a" * 17_000))

        assert (await asyncio.to_thread(scene)).startswith(b"HTTP/1.1 431 ")


async def test_a_loop_that_hangs_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prober must hear of it from the process itself, and afterwards that it goes on."""
    monkeypatch.setattr(calls, "CALL_SECONDS", 0.2)
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


async def test_it_ends_while_connections_are_there() -> None:
    async with serving() as admin:
        port = admin.port
        stranger = await asyncio.to_thread(connect, port, STRANGER, b"GET")
        await until(lambda: connections_of(admin) == 1)
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


READY = b"GET /page HTTP/1.1\r\n\r\n"


AT = 100.0


class Stage:
    """A thread that does not run: the test takes its steps. Its loop does what it was told when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = AT, list[Callable[[], None]]()
        loop: Any = SimpleNamespace(
            call_soon_threadsafe=lambda do, *args: self.calls.append(lambda: do(*args))
        )
        monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.thread = server._AdminThread([], {"/page": lambda _: Reply(LARGE)}, loop)
        self.sockets: list[socket.socket] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.sockets += [ours, theirs]
        return ours, theirs

    def connection(self) -> tuple[server._Connection, socket.socket]:
        ours, theirs = self.pair()
        connection = server._Connection(self.thread, ours)
        self.thread._add(connection, "a")
        return connection, theirs

    def is_there_at(self, connection: server._Connection, now: float) -> bool:
        self.now = now
        self.thread._send_late_away(now)
        return connection in list(self.thread.connections)

    def answer(self) -> None:
        self.thread._calls.step()
        for call in self.calls:
            call()
        self.thread._calls.step()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    one = Stage(monkeypatch)
    yield one
    one.thread._close()
    os.close(one.thread._wakeup)
    for each in one.sockets:
        each.close()


def test_a_connection_has_its_time_again_to_take_its_answer(stage: Stage) -> None:
    connection, peer = stage.connection()
    stage.now = AT + CONNECTION_SECONDS - 1
    peer.sendall(READY)
    connection.read()
    stage.answer()
    assert stage.is_there_at(connection, AT + 2 * CONNECTION_SECONDS - 1.1)
    assert not stage.is_there_at(connection, AT + 2 * CONNECTION_SECONDS - 1)


def test_a_connection_that_says_its_head_late_is_not_sent_away_while_it_is_owed_its_answer(
    stage: Stage,
) -> None:
    """The time for its head ran on while a busy process had yet to answer."""
    connection, peer = stage.connection()
    stage.now = AT + CONNECTION_SECONDS - 0.1
    peer.sendall(READY)
    connection.read()
    assert stage.is_there_at(connection, AT + CONNECTION_SECONDS + 3)
    stage.answer()
    assert peer.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
    assert stage.is_there_at(connection, AT + 2 * CONNECTION_SECONDS + 2.9)
    assert not stage.is_there_at(connection, AT + 2 * CONNECTION_SECONDS + 3)


def test_an_answer_has_an_end_and_its_connection_may_still_say_something(stage: Stage) -> None:
    """Closed with something unread, the connection would be reset, and the answer lost."""
    connection, peer = stage.connection()
    peer.sendall(b"POST /page HTTP/1.1\r\n\r\n")
    connection.read()
    assert peer.recv(1000).startswith(b"HTTP/1.1 405 ")
    assert peer.recv(1000) == b""
    peer.sendall(b"more")
    connection._read_rest()
    assert stage.is_there_at(connection, AT)
    peer.close()
    connection._read_rest()
    assert not stage.is_there_at(connection, AT)


def test_those_that_come_in_a_crowd_wait_for_who_is_there_every_few(stage: Stage) -> None:
    came: list[socket.socket] = []

    def accept() -> tuple[socket.socket, tuple[str, int]]:
        if len(came) == 2 * MOST_CONNECTIONS:
            raise BlockingIOError
        ours, theirs = stage.pair()
        came.append(theirs)
        return ours, ("a", 1)

    listening: Any = SimpleNamespace(accept=accept)
    stage.thread._accept(listening)
    assert len(came) == len(stage.thread.connections) == 16


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_the_admin_port_tells_metrics_in_the_form_that_is_requested() -> None:
    registry = CollectorRegistry()
    Counter("berth_things", "t", registry=registry).inc()
    admin = AdminServer(
        Endpoint("127.0.0.1", 0),
        not_ready=lambda: None,
        pages={"/metrics": metrics_page(registry), "/mine": lambda _: Reply(b"mine")},
    )
    async with admin, ClientSession(f"http://127.0.0.1:{admin.port}") as session:
        for accept, kind in (
            ("", "text/plain"),
            ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
        ):
            async with session.get("/metrics", headers={"Accept": accept}) as answer:
                assert answer.headers["Content-Type"].startswith(kind)
                assert ("# EOF" in await answer.text()) == (kind == "application/openmetrics-text")
        for path, text in (("/mine", "mine"), ("/livez", "ok\n"), ("/readyz", "ok\n")):
            async with session.get(path) as answer:
                assert (answer.status, await answer.text()) == (200, text)


async def test_the_admin_port_is_free_again_when_it_ends() -> None:
    for _ in range(2):
        admin = AdminServer(Endpoint("127.0.0.1", 0), not_ready=lambda: None)
        async with admin:
            port = admin.port
        with pytest.raises(OSError, match="onnect"):
            await asyncio.open_connection("127.0.0.1", port)


async def test_admin_port() -> None:
    reason: list[str | None] = ["not synced"]
    stuck: list[str | None] = [None]
    registry = CollectorRegistry()
    Counter("berth_things", "t", registry=registry).inc()
    admin = AdminServer(
        Endpoint("127.0.0.1", 0),
        not_ready=lambda: reason[0],
        not_alive=lambda: stuck[0],
        pages={"/metrics": metrics_page(registry)},
    )
    async with admin, ClientSession(f"http://127.0.0.1:{admin.port}") as session:
        async with session.get("/readyz") as answer:
            assert (answer.status, await answer.text()) == (503, "not synced\n")
        reason[0] = None
        for path in ("/readyz", "/livez"):
            async with session.get(path) as answer:
                assert answer.status == 200
        stuck[0] = "hangs"
        async with session.get("/livez") as answer:
            assert (answer.status, await answer.text()) == (503, "hangs\n")
        async with session.get("/metrics") as answer:
            assert "berth_things_total 1.0" in await answer.text()


async def test_a_taken_port_is_cannot_start_and_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Endpoint("127.0.0.1", taken.getsockname()[1])
        admin = AdminServer(listen, not_ready=lambda: None)
        with pytest.raises(CannotStart, match=f"--admin-listen: cannot listen on {listen}"):
            async with admin:
                pass
