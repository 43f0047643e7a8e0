"""Clients at the gateway itself, behind a preamble: one that asks and waits, and many kinds that flood."""

import asyncio
import random
import socket
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from bench.proxy.node import COPIES
from proxy.request.grpc_head import AnswerKind, AnswerPolicy
from proxy.request.messages import INFER, framed
from proxy.transport.h2_connection import H2Connection
from proxy.transport.write_batch import WriteBatch
from proxy.wire import protobuf
from proxy.wire.h2 import hpack
from proxy.wire.h2.client import ClientCodec
from proxy.wire.h2.events import Answer, Data, Event, Headers, Reset, Trailers
from proxy.wire.h2.fields import FieldReader
from proxy.wire.h2.stream import Stream
from proxy.wire.preamble import ACCEPTED, Kind, Preamble

MIB = 1024 * 1024
_SMALL = b'{"inputs":[{"name":"IN","shape":[3],"datatype":"UINT8","data":[1,2,3]}]}'
_HEAD = b"POST /v2/models/mine/infer HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b"


def request_of(body: bytes = _SMALL, headers: bytes = b"") -> bytes:
    return _HEAD % (headers, len(body), body)


def json_of(size: int, value: bytes = b"1") -> bytes:
    """A body of about so many bytes."""
    count = size // (len(value) + 1)
    data = b",".join([value] * count)
    return b'{"inputs":[{"name":"IN","shape":[%d],"datatype":"UINT8","data":[%b]}]}' % (count, data)


def binary_of(size: int) -> bytes:
    head = (
        b'{"inputs":[{"name":"IN","shape":[%d],"datatype":"UINT8","parameters":{"binary_data_size":%d}}]}'
    ) % (size, size)
    return request_of(head + bytes(size), b"Inference-Header-Content-Length: %d\r\n" % len(head))


def message_of(_: str = "", size: int = 3) -> bytes:
    shape = protobuf.encode_bytes(3, protobuf.encode_varint(size))
    tensor = protobuf.encode_bytes(1, b"IN") + protobuf.encode_bytes(2, b"UINT8") + shape
    message = protobuf.encode_bytes(1, b"mine") + protobuf.encode_bytes(5, tensor)
    return framed(message + protobuf.encode_bytes(7, bytes(size)))


def block_of(path: bytes = INFER.encode(), *more: tuple[bytes, bytes]) -> bytes:
    return hpack.encode(
        [
            *((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")),
            *((b"te", b"trailers"), (b"content-type", b"application/grpc"), *more),
        ]
    )


class RestCaller(asyncio.Protocol):
    """One request after the other, or so many at once."""

    def __init__(self, uid: str) -> None:
        self._preamble = Preamble(Kind.REST, COPIES[uid].ticket).to_bytes()
        self._answered = asyncio.Event()
        self._left, self._head = 0, b""
        self.answers = 0
        self.transport: Any = None

    async def connected(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, host, port)
        await self._answered.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport.write(self._preamble)

    def connection_lost(self, exc: Exception | None) -> None:
        self._answered.set()

    def data_received(self, data: bytes) -> None:
        if not self.answers and data[:1] == ACCEPTED:
            data = data[1:]
            self._answered.set()
        if data and self._left:
            self._left -= len(data)
        elif data:
            self._head += data
            while self._head:
                end = self._head.find(b"\r\n\r\n")
                if end < 0:
                    return
                length = int(
                    self._head[:end].lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0
                )
                whole = end + 4 + length
                if len(self._head) < whole:
                    self._left, self._head = whole - len(self._head), b""
                    return
                self._head = self._head[whole:]
                self._one()
            return
        if data and not self._left:
            self._one()

    def _one(self) -> None:
        self.answers += 1
        self._answered.set()

    async def call(self, request: bytes) -> None:
        self._answered.clear()
        self.transport.write(request)
        await self._answered.wait()

    def close(self) -> None:
        self.transport.abort()


class GrpcCaller(H2Connection[ClientCodec[AnswerKind, AnswerKind]]):
    """`on_answer` is called for each call that has ended."""

    def __init__(self, uid: str) -> None:
        super().__init__(WriteBatch())
        policy = AnswerPolicy()
        heads: FieldReader[AnswerKind] = FieldReader(policy, is_answer=True)
        trailers: FieldReader[AnswerKind] = FieldReader(policy, is_trailers=True)
        self.codec = ClientCodec(heads, trailers, wake=self.wake)
        self._preamble = Preamble(Kind.GRPC, COPIES[uid].ticket).to_bytes()
        self._waits: asyncio.Event | None = asyncio.Event()
        self._answered = asyncio.Event()
        self.on_answer: Callable[[], None] = self._answered.set
        self.answers = 0

    async def connected(self, host: str, port: int) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, host, port)
        assert self._waits is not None
        await self._waits.wait()
        self._waits = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(self._preamble)  # type: ignore[attr-defined]
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._waits is not None and not self._waits.is_set():
            data = data[len(ACCEPTED) :]
            self._waits.set()
        super().data_received(data)

    def on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Data):
                event.release()
            elif isinstance(event, (Answer, Trailers, Reset)) or (isinstance(event, Headers) and event.end):
                self.answers += 1
                self.on_answer()

    def on_lost(self, streams: list[Stream], reason: str) -> None:
        print("lost:", reason, flush=True)

    def start(self, message: bytes, block: bytes = block_of()) -> None:
        self.codec.send_call(block, message)

    async def call(self, message: bytes) -> None:
        self._answered.clear()
        self.start(message)
        await self._answered.wait()

    def close(self) -> None:
        self.abort("done")


class Flooding:
    """What all kinds share: where, and how much came of it."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.callers: list[RestCaller | GrpcCaller] = []
        self.ended = 0

    @property
    def answers(self) -> int:
        return self.ended + sum(one.answers for one in self.callers)

    async def rest(self) -> RestCaller:
        caller = RestCaller("flood")
        await caller.connected(self.host, self.port)
        self.callers.append(caller)
        return caller

    async def grpc(self) -> GrpcCaller:
        caller = GrpcCaller("flood")
        await caller.connected(self.host, self.port)
        self.callers.append(caller)
        return caller


Flood = Callable[[Flooding], Awaitable[None]]


async def flooded(flood: Flood, host: str, port: int) -> None:
    """Until it is killed."""
    flooding = Flooding(host, port)
    await flood(flooding)
    while True:
        before = flooding.answers
        await asyncio.sleep(1)
        print(flooding.answers - before, "requests/s of the flood", flush=True)


def _rest(connections: int, request: Callable[[], bytes], *, at_once: int = 1) -> Flood:
    async def run(flooding: Flooding) -> None:
        sent = request()
        for _ in range(connections):
            caller = await flooding.rest()
            caller._one = lambda caller=caller: _again(caller, sent)  # type: ignore[method-assign, misc]
            caller.transport.write(sent * at_once)

    return run


def _again(caller: RestCaller, sent: bytes) -> None:
    caller.answers += 1
    caller.transport.write(sent)


def _grpc(
    connections: int, at_once: int, *, message: Callable[[], bytes] = message_of, path: bytes = INFER.encode(),
    is_unique: bool = False,
) -> Flood:  # fmt: skip
    async def run(flooding: Flooding) -> None:
        sent, block = message(), block_of(path)
        for _ in range(connections):
            caller = await flooding.grpc()

            def start(caller: GrpcCaller = caller) -> None:
                trace = (
                    b"traceparent",
                    b"00-%032x-%016x-01" % (random.getrandbits(128), random.getrandbits(64)),
                )
                caller.start(sent, block_of(path, trace) if is_unique else block)

            caller.on_answer = start
            for _ in range(at_once):
                start()

    return run


async def _connects(flooding: Flooding) -> None:
    """A new connection for each request, 64 at once."""
    request = request_of()

    async def again() -> None:
        while True:
            caller = RestCaller("flood")
            await caller.connected(flooding.host, flooding.port)
            await caller.call(request)
            caller.close()
            flooding.ended += 1

    tasks = [asyncio.create_task(again()) for _ in range(64)]
    flooding.callers += []
    flooding.tasks = tasks  # type: ignore[attr-defined]


async def _unread(flooding: Flooding) -> None:
    """200 clients that ask for a MiB again and again and read it slowly."""
    request = request_of(_SMALL[:-1] + b',"id":"big"}')

    async def slowly(caller: RestCaller) -> None:
        caller.transport.write(request * 1000)
        while True:
            caller.transport.pause_reading()
            await asyncio.sleep(0.2)
            caller.transport.resume_reading()
            await asyncio.sleep(0)

    flooding.tasks = [asyncio.create_task(slowly(await flooding.rest())) for _ in range(200)]  # type: ignore[attr-defined]


def _frames(one: bytes, per_second: int, connections: int = 64) -> Flood:
    """HTTP/2 frames that ask for nothing."""

    async def run(flooding: Flooding) -> None:
        async def again(caller: GrpcCaller) -> None:
            while not caller.is_closed:
                assert caller.transport is not None
                caller.transport.write(one * (per_second // 10))
                await asyncio.sleep(0.1)

        flooding.tasks = [  # type: ignore[attr-defined]
            asyncio.create_task(again(await flooding.grpc())) for _ in range(connections)
        ]

    return run


def _pipelined(one: bytes, connections: int = 16) -> Flood:
    """Requests that are answered at once, as many as go into a segment."""

    async def run(flooding: Flooding) -> None:
        count = 64 * 1024 // len(one)
        for _ in range(connections):
            caller = await flooding.rest()

            def on_one(caller: RestCaller = caller) -> None:
                caller.answers += 1
                if caller.answers % count == 0:
                    caller.transport.write(one * count)

            caller._one = on_one  # type: ignore[method-assign]
            caller.transport.write(one * count * 2)

    return run


_PING = b"\x00\x00\x08\x06\x00" + bytes(12)
_EMPTY_SETTINGS = b"\x00\x00\x00\x04\x00" + bytes(4)
_LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
_FOREIGN = b"GET /v2/models/other/ready HTTP/1.1\r\nHost: x\r\n\r\n"
_SERVER_LIVE = b"/inference.GRPCInferenceService/ServerLive"
FLOODS: dict[str, Flood] = {
    "rest": _rest(64, request_of, at_once=16),
    "rest-many": _rest(1000, request_of),
    "live": _pipelined(_LIVE),
    "foreign": _pipelined(_FOREIGN),
    "connects": _connects,
    "slow": _unread,
    "json-60k": _rest(64, lambda: request_of(json_of(60_000))),
    "json-900k": _rest(16, lambda: request_of(json_of(900_000))),
    "json-16m": _rest(4, lambda: request_of(json_of(16 * MIB - 1000))),
    "gzip-16m": _rest(
        4, lambda: request_of(zlib.compress(json_of(16 * MIB - 1000), 9), b"Content-Encoding: deflate\r\n")
    ),
    "tensors": _rest(8, lambda: binary_of(8 * MIB)),
    "grpc-1x900": _grpc(1, 900),
    "grpc-1x900-unique": _grpc(1, 900, is_unique=True),
    "grpc-64x12": _grpc(64, 12),
    "grpc-live": _grpc(4, 900, message=lambda: framed(b""), path=_SERVER_LIVE),
    "grpc-unknown": _grpc(4, 900, message=lambda: framed(b""), path=b"/inference.GRPCInferenceService/No"),
    "grpc-tensors": _grpc(4, 2, message=lambda: message_of(size=8 * MIB)),
    "grpc-pings": _frames(_PING, 1900),
    "grpc-settings": _frames(_EMPTY_SETTINGS, 1900),
}
