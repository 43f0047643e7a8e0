"""The answers to clients that cannot be served: 503, or UNAVAILABLE, each in its protocol's proper form.

This is all that the sidecar knows of HTTP. `RestRefusal` and `GrpcRefusal` are pure; `Refusing` gives one a connection.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final, Protocol

from proxy.wire.grpc_status import trailers_only, try_again
from proxy.wire.h2 import frames
from proxy.wire.preamble import Kind

RETRY_SECONDS: Final = 1
# For what decides: a request's head, a first call.
_HEAD_SECONDS: Final = 10.0
# For a client to hear that it is to go, while what it has sent by then is still answered.
_LEAVING_SECONDS: Final = 1.0
# For the answer to be taken, and what is still on its way to come.
_LINGER_SECONDS: Final = 2.0
_HEAD_BYTES: Final = 64 * 1024
_HEAD_END: Final = b"\r\n\r\n"
# Of HTTP/2 frames, in all: some hundred calls. Bodies have no more room than a connection's first window.
_FRAMES_BYTES: Final = 256 * 1024


class Refusal(Protocol):
    """`receive` tells what to send. `is_complete`: everything has been, the connection is to end. `is_leaving`: what is
    to be answered has been, and what is on its way still is, until `end`, which tells the last that is to be sent."""

    is_complete: bool
    is_leaving: bool

    def receive(self, data: bytes) -> bytes: ...

    def end(self) -> bytes: ...


class RestRefusal:
    """One answer, after the request's head. What follows it is of no interest."""

    def __init__(self, reason: str) -> None:
        self._reason, self._begun = reason, b""
        self.is_complete = self.is_leaving = False

    def receive(self, data: bytes) -> bytes:
        if self.is_complete:
            return b""
        self._begun += data
        if _HEAD_END in self._begun:
            return self.say(with_body=not self._begun.startswith(b"HEAD "))
        if len(self._begun) > _HEAD_BYTES:
            self.is_complete = True
            return _answer(
                b"431 Request Header Fields Too Large", f"the head is larger than {_HEAD_BYTES} bytes"
            )
        return b""

    def end(self) -> bytes:
        self.is_complete = True
        return b""

    def say(self, *, with_body: bool = True) -> bytes:
        """The answer, whether or not the request has been read."""
        self.is_complete = True
        retry = b"Retry-After: %d\r\n" % RETRY_SECONDS
        return _answer(b"503 Service Unavailable", self._reason, retry, with_body=with_body)


def _answer(status: bytes, message: str, more: bytes = b"", *, with_body: bool = True) -> bytes:
    body = json.dumps({"error": message}).encode()
    head = (
        b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%sConnection: close\r\n\r\n"
    )
    return head % (status, len(body), more) + (body if with_body else b"")


class GrpcRefusal:
    """A status for each call, and with the first a GOAWAY that leaves none out (RFC 9113, 6.8): later ones find a better
    connection, and those that the client has sent before it hears so are answered, too."""

    def __init__(self, reason: str) -> None:
        self._block = trailers_only(try_again(reason))
        self._begun, self._received = b"", 0
        self._has_preface = self.is_complete = self.is_leaving = False
        # The last call, and the one whose header block is not whole yet, with its flags.
        self._last = self._open = self._flags = 0

    def receive(self, data: bytes) -> bytes:
        if self.is_complete:
            return b""
        self._begun += data
        self._received += len(data)
        out = bytearray()
        try:
            if self._read_preface(out):
                self._read_frames(out)
        except frames.ConnectionFailed as error:
            self._end(out, error.code, str(error))
        if self._last and not (self.is_leaving or self.is_complete):
            self.is_leaving = True
            out += frames.goaway(frames.MAX_STREAM_ID, frames.ErrorCode.NO_ERROR, "no gateway")
        if self._received > _FRAMES_BYTES:
            self._end(out, frames.ErrorCode.ENHANCE_YOUR_CALM, "too much for a connection that is to end")
        return bytes(out)

    def end(self) -> bytes:
        out = bytearray()
        self._end(out, frames.ErrorCode.NO_ERROR, "no gateway")
        return bytes(out)

    def _end(self, out: bytearray, code: frames.ErrorCode, message: str) -> None:
        if not self.is_complete:
            out += frames.goaway(self._last, code, message)
        self.is_complete, self._begun = True, b""

    def _read_preface(self, out: bytearray) -> bool:
        if not self._has_preface:
            if self._begun[: len(frames.PREFACE)] != frames.PREFACE[: len(self._begun)]:
                raise frames.ConnectionFailed(frames.ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
            if len(self._begun) >= len(frames.PREFACE):
                self._begun = self._begun[len(frames.PREFACE) :]
                self._has_preface = True
                out += frames.settings({})
        return self._has_preface

    def _read_frames(self, out: bytearray) -> None:
        at = 0
        while len(self._begun) - at >= frames.HEAD_BYTES:
            high, low, kind, flags, stream = frames.read_head(self._begun, at)
            size = high << 8 | low
            if size > frames.DEFAULT_MAX_FRAME:
                raise frames.ConnectionFailed(frames.ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            start = at + frames.HEAD_BYTES
            if len(self._begun) < start + size:
                break
            at = start + size
            self._frame(out, kind, flags, stream & frames.MAX_STREAM_ID, self._begun[start:at])
        self._begun = self._begun[at:]

    def _frame(self, out: bytearray, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._open and (kind != frames.CONTINUATION or stream != self._open):
            raise frames.ConnectionFailed(frames.ErrorCode.PROTOCOL_ERROR, "a header block is cut")
        if kind == frames.SETTINGS and not flags & frames.ACK:
            out += frames.SETTINGS_ACK
        elif kind == frames.PING and not flags & frames.ACK:
            out += frames.ping_ack(payload[:8].ljust(8, b"\0"))
        elif kind == frames.HEADERS and stream > self._last:
            self._open, self._flags = stream, flags
        if self._open and flags & frames.END_HEADERS:
            self._refuse(out)

    def _refuse(self, out: bytearray) -> None:
        self._last, self._open = self._open, 0
        out += frames.headers(self._last, self._block, end_stream=True)
        if not self._flags & frames.END_STREAM:
            out += frames.reset(self._last, frames.ErrorCode.NO_ERROR)


class Refusing(asyncio.Protocol):
    """The connection of a client that is not served. `ended` is called once when it is gone."""

    def __init__(self, transport: asyncio.Transport, refusal: Refusal, ended: Any) -> None:
        self._transport, self._refusal, self._ended = transport, refusal, ended
        self._timer = asyncio.get_running_loop().call_later(_HEAD_SECONDS, transport.abort)
        transport.set_protocol(self)
        transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        refusal = self._refusal
        if refusal.is_complete:
            return
        was_leaving = refusal.is_leaving
        self.send(refusal.receive(data))
        if refusal.is_leaving and not (was_leaving or refusal.is_complete):
            self._in(_LEAVING_SECONDS, lambda: self.send(refusal.end()))

    def send(self, answer: bytes) -> None:
        transport = self._transport
        if answer:
            transport.write(answer)
        if self._refusal.is_complete:
            # Closed at once, with something unread, the connection would be reset and the answer lost.
            self._in(_LINGER_SECONDS, transport.abort)
            if transport.can_write_eof():
                transport.write_eof()

    def _in(self, seconds: float, do: Callable[[], object]) -> None:
        """Instead of what was to be done later."""
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, do)

    def eof_received(self) -> None:
        """There is nothing more to be said."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._ended()


def refuse(
    transport: asyncio.Transport,
    kind: Kind,
    reason: str,
    first: bytes,
    ended: Any,
    *,
    head_is_read: bool = False,
) -> None:
    """Answer a client that cannot be served. `head_is_read`: its request has gone to the gateway."""
    rest = RestRefusal(reason)
    refusing = Refusing(transport, rest if kind is Kind.REST else GrpcRefusal(reason), ended)
    if head_is_read:
        refusing.send(rest.say())
    else:
        refusing.data_received(first)
