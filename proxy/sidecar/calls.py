"""Calls of gRPC (grpc/doc/PROTOCOL-HTTP2.md), each over a connection of its own: all that the agent's API needs.

One call, one connection: nothing is shared, so nothing has to be scheduled, and what ends the one ends the
other. The peer is the node's agent; what it says is believed, but never waited for without a bound.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from berth.contract.endpoint import Endpoint
from proxy.wire.grpc_status import Status
from proxy.wire.h2 import frames
from proxy.wire.h2.fields import split
from proxy.wire.h2.frames import Setting
from proxy.wire.h2.hpack import Decoder, Header, HeaderListTooLarge, HpackError, encode

_CONNECT_SECONDS: Final = 5.0
# A peer that says nothing is asked whether it is there, and has as long again to answer.
_QUIET_SECONDS: Final = 20.0
_MESSAGE_BYTES: Final = 64 * 1024
_BLOCK_BYTES: Final = 32 * 1024
_LONGEST_PAUSE_SECONDS: Final = 60.0
_STREAM: Final = 1
_SECRET: Final = frozenset({b"authorization"})
# Each message is a length-prefixed one: a byte that says whether it is packed, and its size.
_PREFIX = struct.Struct(">BI")


class CallFailed(Exception):
    """A call has ended without success. `status`: the peer's, or UNAVAILABLE where it said none.

    `retry_seconds`: the peer asks not to be called before.
    """

    def __init__(self, status: Status, message: str, retry_seconds: float = 0.0) -> None:
        super().__init__(f"{message} ({status.name})")
        self.status, self.retry_seconds = status, retry_seconds


async def unary(
    peer: Endpoint, path: str, message: bytes, metadata: Sequence[Header], *, timeout_seconds: float
) -> bytes:
    """The one message of the answer. Raises CallFailed."""
    answer = None
    try:
        async with asyncio.timeout(timeout_seconds):
            async for message_of_answer in stream(peer, path, message, metadata):
                answer = message_of_answer
    except TimeoutError:
        raise CallFailed(Status.DEADLINE_EXCEEDED, f"no answer within {timeout_seconds:g} s") from None
    if answer is None:
        raise CallFailed(Status.INTERNAL, "an answer without a message")
    return answer


async def stream(
    peer: Endpoint, path: str, message: bytes, metadata: Sequence[Header]
) -> AsyncIterator[bytes]:
    """The messages of the answer as they come. Raises CallFailed."""
    head = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", str(peer).encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *metadata,
    ]
    try:
        async with _connected(peer) as (reader, writer):
            call = _Call(reader, writer)
            call.begin(head, message)
            while (answer := await call.message()) is not None:
                yield answer
    except TimeoutError:
        raise CallFailed(Status.UNAVAILABLE, f"{peer} does not answer") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        reason = getattr(error, "strerror", None) or "the connection has ended"
        raise CallFailed(Status.UNAVAILABLE, f"{peer}: {reason}") from error
    except (frames.ConnectionFailed, HpackError, HeaderListTooLarge) as error:
        raise CallFailed(Status.INTERNAL, f"{peer}: {error}") from error


@asynccontextmanager
async def _connected(peer: Endpoint) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(_CONNECT_SECONDS):
        reader, writer = await asyncio.open_connection(peer.host, peer.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


class _Call:
    """The one stream of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = Decoder(allowed=0, list_limit=_BLOCK_BYTES)
        self._data = b""
        self._is_over = False

    def begin(self, head: Sequence[Header], message: bytes) -> None:
        data = _PREFIX.pack(0, len(message)) + message
        self._writer.writelines(
            [
                frames.PREFACE,
                frames.settings({Setting.HEADER_TABLE_SIZE: 0, Setting.ENABLE_PUSH: 0}),
                frames.headers(_STREAM, encode(head, secret=_SECRET), end_stream=False),
                frames.head(len(data), frames.DATA, frames.END_STREAM, _STREAM) + data,
            ]
        )

    async def message(self) -> bytes | None:
        """The next message; None after the last. Raises CallFailed and what reading raises."""
        while True:
            taken = self._take()
            if taken is not None or self._is_over:
                return taken
            await self._frame()

    def _take(self) -> bytes | None:
        """Raises CallFailed."""
        if len(self._data) < _PREFIX.size:
            return None
        packed, size = _PREFIX.unpack_from(self._data)
        if packed or size > _MESSAGE_BYTES:
            raise CallFailed(Status.INTERNAL, f"a message of {size} bytes, packed: {packed}")
        end = _PREFIX.size + size
        if len(self._data) < end:
            return None
        taken, self._data = self._data[_PREFIX.size : end], self._data[end:]
        return taken

    async def _frame(self) -> None:
        kind, flags, payload = await self._read()
        if kind == frames.SETTINGS and not flags & frames.ACK:
            self._writer.write(frames.SETTINGS_ACK)
        elif kind == frames.SETTINGS:
            self._decoder.acknowledged()
        elif kind == frames.PING and not flags & frames.ACK:
            self._writer.write(frames.ping_ack(payload))
        elif kind == frames.DATA:
            self._take_data(flags, payload)
        elif kind == frames.HEADERS:
            self._take_headers(flags, await self._block(flags, payload))
        elif kind == frames.RST_STREAM:
            raise CallFailed(Status.UNAVAILABLE, f"the call was reset ({int.from_bytes(payload)})")
        elif kind == frames.GOAWAY and int.from_bytes(payload[:4]) < _STREAM:
            raise CallFailed(Status.UNAVAILABLE, "the call was not taken")

    async def _read(self) -> tuple[int, int, bytes]:
        """One frame; one end that keeps quiet for long is asked whether it is there. Raises TimeoutError."""
        try:
            async with asyncio.timeout(_QUIET_SECONDS):
                head = await self._reader.readexactly(frames.HEAD_BYTES)
        except TimeoutError:  # nothing was taken: a head comes whole or not at all
            self._writer.write(frames.head(8, frames.PING, 0, 0) + bytes(8))
            async with asyncio.timeout(_QUIET_SECONDS):
                head = await self._reader.readexactly(frames.HEAD_BYTES)
        high, low, kind, flags, _ = frames.read_head(head)
        size = high << 8 | low
        if size > frames.DEFAULT_MAX_FRAME:
            raise frames.ConnectionFailed(frames.ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
        async with asyncio.timeout(_QUIET_SECONDS):
            return kind, flags, await self._reader.readexactly(size)

    def _take_data(self, flags: int, payload: bytes) -> None:
        if payload:
            credit = len(payload)
            self._writer.write(frames.window_update(0, credit) + frames.window_update(_STREAM, credit))
        self._data += _content(flags, payload)
        if flags & frames.END_STREAM:
            raise CallFailed(Status.INTERNAL, "an answer without a status")

    async def _block(self, flags: int, payload: bytes) -> bytes:
        block = _content(flags, payload)
        if flags & frames.HAS_PRIORITY:
            block = block[5:]
        while not flags & frames.END_HEADERS:
            kind, flags, payload = await self._read()
            block += payload
            if kind != frames.CONTINUATION or len(block) > _BLOCK_BYTES:
                raise frames.ConnectionFailed(frames.ErrorCode.PROTOCOL_ERROR, "a header block is cut")
        return block

    def _take_headers(self, flags: int, block: bytes) -> None:
        """Raises CallFailed for a status other than OK."""
        found = {field.name: field.value for field in split(self._decoder.plain(block))}
        http = found.get(b":status", b"200")
        if not flags & frames.END_STREAM:
            if http != b"200":
                raise CallFailed(Status.UNAVAILABLE, f"HTTP status {http.decode()}")
            return
        self._is_over = True
        status = _status(found.get(b"grpc-status", b""))
        if status is not Status.OK:
            message = _unquoted(found.get(b"grpc-message", b"")) or status.name
            raise CallFailed(status, message, _pause(found.get(b"grpc-retry-pushback-ms", b"")))


def _content(flags: int, payload: bytes) -> bytes:
    if not flags & frames.PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise frames.ConnectionFailed(frames.ErrorCode.PROTOCOL_ERROR, "more padding than there is")
    return payload[1 : len(payload) - payload[0]]


def _unquoted(text: bytes) -> str:
    from urllib.parse import unquote_to_bytes  # only for refusals

    return unquote_to_bytes(text).decode(errors="replace")


def _status(text: bytes) -> Status:
    with suppress(ValueError):
        return Status(int(text))
    return Status.UNKNOWN


def _pause(text: bytes) -> float:
    with suppress(ValueError):
        return max(0.0, min(int(text) / 1000, _LONGEST_PAUSE_SECONDS))
    return 0.0
