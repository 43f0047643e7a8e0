"""The admin port's thread: connections in, answers out, nothing that blocks."""

import asyncio
import logging
import os
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from berth.contract.endpoint import Endpoint
from berth.runtime.admin.connections import Connections
from berth.runtime.admin.cpu_share import CpuShare
from berth.runtime.admin.http import HEAD_BYTES, Reply, Request, read_head, text
from berth.runtime.admin.loop_calls import LoopCalls
from berth.runtime.admin.pages import Cache, CachedPage, Jobs, Page, excuse
from berth.runtime.listening import listening_sockets
from berth.runtime.process import starting

log = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 64
# For a whole head, and again for the answer to be taken.
CONNECTION_SECONDS: Final = 5.0
# Connections that are taken before others have their turn; those that wait for it; after no descriptor was left.
_AT_ONCE: Final = 16
_BACKLOG: Final = 1024
_PAUSE_SECONDS: Final = 0.2
_READ_BYTES: Final = HEAD_BYTES + 4
# What the system keeps of an answer for one that does not take it; it doubles the number.
_SEND_BUFFER_BYTES: Final = 128 * 1024
_END_SECONDS: Final = 5.0

Check = Callable[[], str | None]


class AdminServer:
    """Serves health and `pages`, from a thread of its own. A page's key is its path; one that ends in a slash is for all
    that is below it.

    `not_ready()` returns the reason, or None when ready; `not_alive()` a reason that only a restart mends, or None. Both
    are asked on the loop that entered this; where that does not answer, neither is the process ready nor alive.
    """

    def __init__(
        self,
        listen: Endpoint,
        *,
        not_ready: Check,
        not_alive: Check = lambda: None,
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        self._listen = listen
        self._pages: dict[str, Page] = {
            "/livez": lambda _: _health(not_alive()),
            "/readyz": lambda _: _health(not_ready()),
            **(pages or {}),
        }
        self._listening: list[socket.socket] = []
        self._thread: _AdminThread | None = None

    async def __aenter__(self) -> "AdminServer":
        """Raises CannotStart when the port is taken."""
        with starting("--admin-listen", self._listen):
            self._listening = listening_sockets(self._listen, backlog=_BACKLOG)
        for one in self._listening:  # those that it accepts have it from it
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._thread = _AdminThread(self._listening, self._pages, asyncio.get_running_loop())
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """The port is free afterwards; open connections get no answer any more."""
        if self._thread is not None:
            self._thread.end()

    @property
    def port(self) -> int:
        """The port in use, also when 0 was requested."""
        port: int = self._listening[0].getsockname()[1]
        return port


def _health(failure: str | None) -> Reply:
    return text("ok") if failure is None else text(failure, 503)


class _AdminThread(threading.Thread):
    """Everything of the port but what is asked of the process's loop."""

    def __init__(
        self, listening: list[socket.socket], pages: Mapping[str, Page], loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(name="admin", daemon=True)
        self._listening, self._pages = listening, pages
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ends = False
        self._jobs = Jobs()
        self._calls = LoopCalls(loop, self._wake)
        self._caches = {
            path: Cache(page, self._calls, self._jobs)
            for path, page in pages.items()
            if isinstance(page, CachedPage)
        }
        self.connections: Connections[_Connection] = Connections(MOST_CONNECTIONS)
        # When they are sent away, soonest first: each has the same time for each part.
        self._deadlines: OrderedDict[_Connection, float] = OrderedDict()
        # No connection is accepted before this; 0.0: before there is a place.
        self._deaf_until: float | None = None

    # For the process's loop.

    def end(self) -> None:
        self._ends = True
        self._wake()
        self.join(_END_SECONDS)
        wakeup, self._wakeup = self._wakeup, -1
        os.close(wakeup)

    def _wake(self) -> None:
        if self._wakeup >= 0:  # the loop may come to a call after the end
            os.eventfd_write(self._wakeup, 1)

    # The thread.

    def run(self) -> None:
        try:
            self._selector.register(self._wakeup, selectors.EVENT_READ, self._woken)
            self._listen()
            share = CpuShare(time.thread_time())
            while not self._ends:
                self._turn(share)
        except Exception as error:  # without it probes fail, so the kubelet restarts the process
            log.critical("the admin port has failed", exc_info=error)
        finally:
            self._close()

    def _turn(self, share: CpuShare) -> None:
        for key, _ in self._selector.select(self._patience()):
            key.data()
        self._calls.step()
        while self._jobs and share.has_time(time.thread_time()):
            self._jobs.step()
        self._send_late_away(time.monotonic())
        rest = share.rest_seconds(time.thread_time())
        if rest:
            time.sleep(rest)

    def _patience(self) -> float | None:
        """How long nothing is to be done unless something comes."""
        if self._jobs:
            return 0.0
        times = [self._calls.next_step(), next(iter(self._deadlines.values()), None), self._deaf_until]
        soonest = min((one for one in times if one), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    def _woken(self) -> None:
        os.eventfd_read(self._wakeup)

    def _close(self) -> None:
        for connection in self.connections:
            connection.leave()
        for one in self._listening:
            one.close()
        self._selector.close()

    # New connections.

    def _listen(self) -> None:
        self._deaf_until = None
        for one in self._listening:
            self._selector.register(one, selectors.EVENT_READ, partial(self._accept, one))

    def _be_deaf(self, until: float) -> None:
        self._deaf_until = until
        for one in self._listening:
            self._selector.unregister(one)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if self._deaf_until is not None:
                return
            slow = None if self.connections.has_place else self.connections.to_evict()
            if slow is not None:
                slow.leave()
            if (
                not self.connections.has_place
            ):  # all are owed an answer, which comes soon: the next one waits for that
                self._be_deaf(0.0)
                return
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # no descriptor is left, or no memory
                self._be_deaf(time.monotonic() + _PAUSE_SECONDS)
                return
            self._add(_Connection(self, sock), str(address[0]))

    def _add(self, connection: "_Connection", source: str) -> None:
        self.connections.add(connection, source)
        self.wait_for(connection)
        connection.read()  # most have asked already

    def _send_late_away(self, now: float) -> None:
        while self._deadlines:
            connection, until = next(iter(self._deadlines.items()))
            if until > now:
                break
            connection.leave()
        if self._deaf_until is not None and self._deaf_until <= now and self._has_place:
            self._listen()

    @property
    def _has_place(self) -> bool:
        return self.connections.has_place or self.connections.to_evict() is not None

    # For connections.

    def wait_for(self, connection: "_Connection") -> None:
        """It has so long from now."""
        self._deadlines[connection] = time.monotonic() + CONNECTION_SECONDS
        self._deadlines.move_to_end(connection)

    def watch(self, connection: "_Connection", events: int, do: Callable[[], None]) -> None:
        """`events`: of the selector; 0 is none."""
        if events and connection.events:
            self._selector.modify(connection.socket, events, do)
        elif events:
            self._selector.register(connection.socket, events, do)
        elif connection.events:
            self._selector.unregister(connection.socket)
        connection.events = events

    def answer(self, connection: "_Connection", request: Request) -> None:
        """`say` comes once, within a bound."""
        self.connections.awaits_answer(connection)
        self._deadlines.pop(connection, None)  # it is our turn now
        path = self._key_of(request.path)
        if path is None:
            connection.say(text(f"there are {', '.join(self._pages)}", 404))
        elif path in self._caches:
            self._caches[path].answer(request, connection.say)
        else:
            page = self._pages[path]
            assert not isinstance(page, CachedPage)
            self._calls.ask(lambda: page(request), lambda answer: connection.say(_reply(answer)))

    def _key_of(self, path: str) -> str | None:
        if path in self._pages:
            return path
        above = (key for key in self._pages if key.endswith("/") and path.startswith(key))
        return max(above, key=len, default=None)

    def answered(self, connection: "_Connection") -> None:
        self.connections.answered(connection)
        self.wait_for(connection)

    def forget(self, connection: "_Connection") -> None:
        self.connections.remove(connection)
        self._deadlines.pop(connection, None)


def _reply(answer: Any) -> Reply:
    return answer if isinstance(answer, Reply) else excuse(answer)


class _Connection:
    """One connection, of one request."""

    def __init__(self, thread: _AdminThread, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._thread, self.socket = thread, sock
        # What the thread heeds of it.
        self.events = 0
        self._received = b""
        self._with_body = True
        # Views: however many do not take it, an answer is there once.
        self._unsent: list[memoryview] = []
        self._is_gone = False

    def read(self) -> None:
        """More of the head."""
        try:
            received = self.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            self._thread.watch(self, selectors.EVENT_READ, self.read)
            return
        except OSError:
            self.leave()
            return
        self._received += received
        head = read_head(self._received)
        if isinstance(head, Request):
            self._with_body = head.with_body
            self._thread.watch(self, 0, self.read)
            self._thread.answer(self, head)
        elif isinstance(head, Reply):
            self.say(head)
        elif received:
            self._thread.watch(self, selectors.EVENT_READ, self.read)
        else:
            self.leave()

    def say(self, reply: Reply) -> None:
        if self._is_gone:
            return
        self._received = b""
        self._unsent = [memoryview(reply.head())]
        if self._with_body and reply.body:
            self._unsent.append(memoryview(reply.body))
        self._thread.answered(self)
        self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._sent(self.socket.sendmsg(self._unsent))
            self.socket.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            self._thread.watch(self, selectors.EVENT_WRITE, self._send)
        except OSError:
            self.leave()
        else:  # closed with something unread, it would be reset, and the answer lost
            self._thread.watch(self, selectors.EVENT_READ, self._read_rest)

    def _sent(self, count: int) -> None:
        unsent = self._unsent
        while unsent and count >= len(unsent[0]):
            count -= len(unsent.pop(0))
        if count:
            unsent[0] = unsent[0][count:]

    def _read_rest(self) -> None:
        try:
            if self.socket.recv(_READ_BYTES):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self.leave()

    def leave(self) -> None:
        """End it at once."""
        if not self._is_gone:
            self._is_gone = True
            self._unsent = []
            self._thread.watch(self, 0, self.read)
            self._thread.forget(self)
            self.socket.close()
