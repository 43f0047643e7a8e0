"""An admin port's guests and their time (data-plane D1): the thread's own steps, with a clock that the test sets."""

import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from berth.runtime.admin import Reply, server
from berth.runtime.admin.server import GUEST_SECONDS, MOST_GUESTS

ASK = b"GET /page HTTP/1.1\r\n\r\n"
LARGE = bytes(8 * 1024**2)
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

    def guest(self) -> tuple[server._Guest, socket.socket]:
        ours, theirs = self.pair()
        guest = server._Guest(self.thread, ours)
        self.thread._welcome(guest, "a")
        return guest, theirs

    def is_there_at(self, guest: server._Guest, now: float) -> bool:
        self.now = now
        self.thread._send_late_away(now)
        return guest in list(self.thread.guests)

    def answer(self) -> None:
        self.thread._questions.step()
        for call in self.calls:
            call()
        self.thread._questions.step()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    one = Stage(monkeypatch)
    yield one
    one.thread._close()
    os.close(one.thread._bell)
    for each in one.sockets:
        each.close()


def test_a_guest_has_its_time_again_to_take_its_answer(stage: Stage) -> None:
    guest, peer = stage.guest()
    stage.now = AT + GUEST_SECONDS - 1
    peer.sendall(ASK)
    guest.read()
    stage.answer()
    assert stage.is_there_at(guest, AT + 2 * GUEST_SECONDS - 1.1)
    assert not stage.is_there_at(guest, AT + 2 * GUEST_SECONDS - 1)


def test_a_guest_that_says_its_head_late_is_not_sent_away_while_it_is_owed_its_answer(stage: Stage) -> None:
    """The time for its head ran on while a busy process had yet to answer."""
    guest, peer = stage.guest()
    stage.now = AT + GUEST_SECONDS - 0.1
    peer.sendall(ASK)
    guest.read()
    assert stage.is_there_at(guest, AT + GUEST_SECONDS + 3)
    stage.answer()
    assert peer.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
    assert stage.is_there_at(guest, AT + 2 * GUEST_SECONDS + 2.9)
    assert not stage.is_there_at(guest, AT + 2 * GUEST_SECONDS + 3)


def test_an_answer_has_an_end_and_its_guest_may_still_say_something(stage: Stage) -> None:
    """Closed with something unread, the connection would be reset, and the answer lost."""
    guest, peer = stage.guest()
    peer.sendall(b"POST /page HTTP/1.1\r\n\r\n")
    guest.read()
    assert peer.recv(1000).startswith(b"HTTP/1.1 405 ")
    assert peer.recv(1000) == b""
    peer.sendall(b"more")
    guest._read_rest()
    assert stage.is_there_at(guest, AT)
    peer.close()
    guest._read_rest()
    assert not stage.is_there_at(guest, AT)


def test_those_that_come_in_a_crowd_wait_for_who_is_there_every_few(stage: Stage) -> None:
    came: list[socket.socket] = []

    def accept() -> tuple[socket.socket, tuple[str, int]]:
        if len(came) == 2 * MOST_GUESTS:
            raise BlockingIOError
        ours, theirs = stage.pair()
        came.append(theirs)
        return ours, ("a", 1)

    listening: Any = SimpleNamespace(accept=accept)
    stage.thread._accept(listening)
    assert len(came) == len(stage.thread.guests) == 16
