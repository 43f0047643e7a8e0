"""As much of HTTP/1.1 as an admin port needs: one GET or HEAD a connection (RFC 9112). Pure."""

import re
from dataclasses import dataclass
from typing import Final

HEAD_BYTES: Final = 16 * 1024
_PHRASES: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_LINE: Final = re.compile(rb"([A-Z]{1,20}) (/[!->@-~]*)(?:\?[!-~]*)? HTTP/1\.[01]\r\n")
_ACCEPT: Final = re.compile(rb"\r\naccept:([^\r\n]*)", re.IGNORECASE)
_END: Final = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Request:
    """`accept`: the header's value, "" without one."""

    path: str
    accept: str = ""
    with_body: bool = True


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200

    def head(self) -> bytes:
        return (
            f"HTTP/1.1 {self.status} {_PHRASES[self.status]}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()


def text(said: str, status: int = 200) -> Reply:
    return Reply(f"{said}\n".encode(), status=status)


def read_head(received: bytes) -> Request | Reply | None:
    """The request, or what is wrong with it; None where its head is not whole yet."""
    end = received.find(_END)
    if end > HEAD_BYTES or (end < 0 and len(received) > HEAD_BYTES):
        return text(f"the head is too large: {HEAD_BYTES} bytes at most are taken", 431)
    if end < 0:
        return None
    line = _LINE.match(received)
    if line is None:
        return text("this is not a request of HTTP/1.1", 400)
    if line[1] not in (b"GET", b"HEAD"):
        return text("GET is expected", 405)
    accept = _ACCEPT.search(received, 0, end)
    return Request(
        line[2].decode(),
        "" if accept is None else accept[1].decode("latin-1").strip(),
        with_body=line[1] == b"GET",
    )
