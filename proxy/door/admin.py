"""The door's admin port: one small answer a connection. Health, metrics, load; nothing that takes time.

aiohttp, which the other processes use for theirs, is more than all of the door.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from berth.contract.endpoint import Endpoint
from berth.runtime.process import starting
from proxy.door.listening import listening_sockets

_HEAD_BYTES: Final = 16 * 1024
_SECONDS: Final = 5.0
_MOST: Final = 64
_PHRASES: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_LINE = re.compile(rb"([A-Z]{1,20}) (/[!->@-~]*)(?:\?[!-~]*)? HTTP/1\.[01]\r\n")
_ACCEPT = re.compile(rb"\r\naccept:([^\r\n]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a route answers."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


# Given the Accept header.
Route = Callable[[str], Reply]


class AdminPort:
    """Serves `routes`, by path."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes = routes
        self._servers: list[asyncio.Server] = []
        # In the order in which they came: the first goes for one too many.
        self.guests: dict[_Guest, None] = {}

    async def start(self, listen: Endpoint) -> None:
        """Raises CannotStart when the port is taken."""
        with starting("--admin-listen", listen):
            self._servers = [
                await asyncio.get_running_loop().create_server(lambda: _Guest(self), sock=one)
                for one in listening_sockets(listen)
            ]

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        port: int = self._servers[0].sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for guest in list(self.guests):
            guest.leave()

    def make_room(self) -> None:
        if len(self.guests) >= _MOST:
            next(iter(self.guests)).leave()

    def answer(self, head: bytes) -> bytes:
        """The whole answer to a request's head, or what has come of one."""
        line = _LINE.match(head)
        if line is None:
            return _written(Reply(b"this is not a request of HTTP/1.1\n", status=400))
        method, path = line[1].decode(), line[2].decode()
        route = self._routes.get(path)
        if route is None:
            reply = Reply(f"there are {', '.join(self._routes)}\n".encode(), status=404)
        elif method not in {"GET", "HEAD"}:
            reply = Reply(b"GET is expected\n", status=405)
        else:
            accept = _ACCEPT.search(head)
            reply = route("" if accept is None else accept[1].decode("latin-1"))
        return _written(reply, with_body=method != "HEAD")


class _Guest(asyncio.Protocol):
    """One connection, of one request."""

    def __init__(self, port: AdminPort) -> None:
        self._port, self._head, self._is_answered = port, b"", False

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        self._port.make_room()
        self._port.guests[self] = None
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return
        self._head += data
        if b"\r\n\r\n" in self._head:
            self._say(self._port.answer(self._head))
        elif len(self._head) > _HEAD_BYTES:
            self._say(_written(Reply(b"the head is too large\n", status=431)))

    def _say(self, answer: bytes) -> None:
        self._is_answered = True
        self._transport.write(answer)
        self._transport.write_eof()  # closed with something unread, it would be reset

    def eof_received(self) -> None:
        """Whoever has ended has had the answer, or asks for none."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._port.guests.pop(self, None)

    def leave(self) -> None:
        self._transport.abort()
        self._port.guests.pop(self, None)


def _written(reply: Reply, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {reply.status} {_PHRASES[reply.status]}\r\n"
        f"Content-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (reply.body if with_body else b"")
