"""What answers at once in Triton's place, over both protocols, whatever is asked, once it has read all of it.

    python -m bench.proxy.constant HOST:PORT SOCKET

An answer is small, or a MiB where the request says `big`.
"""

import asyncio
import sys
from typing import Any

import uvloop

from proxy.request.grpc_head import CallKind, CallPolicy, DroppedPolicy
from proxy.request.messages import PREFIX_BYTES, framed
from proxy.transport.h2_connection import H2Connection
from proxy.transport.write_batch import WriteBatch
from proxy.wire import protobuf
from proxy.wire.grpc_status import OK_TRAILERS_BLOCK, RESPONSE_BLOCK
from proxy.wire.h2.events import Call, Data, Event, Headers, Trailers
from proxy.wire.h2.fields import FieldReader
from proxy.wire.h2.server import ServerCodec
from proxy.wire.h2.stream import Stream

_BIG_VALUES = b",".join([b"1"] * (512 * 1024))
_LENGTH = b"content-length: "


class Rest(asyncio.Protocol):
    """One request at a time, as the gateway asks."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._head[:end].lower()
            at = head.find(_LENGTH)
            length = int(head[at + len(_LENGTH) :].split(b"\r\n")[0]) if at >= 0 else 0
            self._left = length + end + 4 - len(self._head)
        if not self._left:
            request, self._head = self._head, b""
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        name = request.split(b" ", 2)[1].split(b"/")[3:4] or [b""]
        values = _BIG_VALUES if b'"big"' in request[:2000] else b"1,2,3"
        body = (
            b'{"model_name":"%b","model_version":"1","outputs":[{"name":"OUT","datatype":"UINT8","shape":[3],'
            b'"data":[%b]}]}'
        ) % (name[0], values)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


class Grpc(H2Connection[ServerCodec[CallKind, None]]):
    """Each answer names the model that the request names."""

    def __init__(self, turn: WriteBatch, heads: FieldReader[CallKind], trailers: FieldReader[None]) -> None:
        super().__init__(turn)
        self.codec = ServerCodec(heads, trailers, wake=self.wake)

    def on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Call):
                self._answer(event.stream, bytes(event.data))
            elif isinstance(event, Headers):
                event.stream.owner = bytearray()
            elif isinstance(event, Data):
                if len(event.stream.owner) < 4096:
                    event.stream.owner += event.data
                event.release()
                if event.end:
                    self._answer(event.stream, bytes(event.stream.owner))
            elif isinstance(event, Trailers):
                self._answer(event.stream, bytes(event.stream.owner))

    def _answer(self, stream: Stream, request: bytes) -> None:
        try:
            name = protobuf.model_name(request[PREFIX_BYTES:])
        except protobuf.BadMessage:  # of a long one this is the beginning
            name = next(protobuf.fields(request[PREFIX_BYTES:])).content or b""
        answer = protobuf.encode_bytes(1, name) + protobuf.encode_bytes(2, b"1")
        self.codec.send_answer(stream, RESPONSE_BLOCK, framed(answer), OK_TRAILERS_BLOCK)

    def on_lost(self, streams: list[Stream], reason: str) -> None: ...


async def main(address: str, path: str) -> None:
    loop, turn = asyncio.get_running_loop(), WriteBatch()
    host, _, port = address.rpartition(":")
    heads: FieldReader[CallKind] = FieldReader(CallPolicy())
    trailers: FieldReader[None] = FieldReader(DroppedPolicy(), is_trailers=True)
    await loop.create_server(Rest, host, int(port), backlog=4096)
    server = await loop.create_unix_server(lambda: Grpc(turn, heads, trailers), path)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
