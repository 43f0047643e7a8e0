"""The rules of HTTP/2 and of gRPC that a client can break, and what comes of that; and what is answered here."""

import asyncio
import struct
import time
from collections.abc import Iterable
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from proxy.downstream.grpc.connection import GrpcConnection
from proxy.policy.refusal import NotServed
from proxy.policy.routes import HIDDEN_EXTENSIONS, SERVICE
from proxy.request.messages import INFER, MODEL_READY, STATISTICS, STREAM_INFER, framed, stream_error
from proxy.wire import protobuf
from proxy.wire.grpc_status import Status
from proxy.wire.h2 import frames, hpack, server
from proxy.wire.h2.frames import (  # fmt: skip
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
)
from tests.fakes.data_plane import GrpcPair, Wire, settle
from tests.fakes.grpc_peers import Both, Connect, request
from tests.fakes.h2_codecs import decoded

END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 1, 1, 4, 8, 32
HEAD = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", INFER.encode()),
    (b":authority", b"h"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
BLOCK = hpack.encode(HEAD)
OWN, GONE, IDLE = 1, 3, 9  # a stream that is open, one that was reset, one that was never begun


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frames.head(len(payload), kind, flags, stream) + payload


def u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", name, value))


FINE = ("fine", None)
BROKEN = ("connection", ErrorCode.PROTOCOL_ERROR)
SIZE = ("connection", ErrorCode.FRAME_SIZE_ERROR)
FLOW = ("connection", ErrorCode.FLOW_CONTROL_ERROR)
BAD = ("stream", ErrorCode.PROTOCOL_ERROR)

# RFC 9113, section 6, frame by frame.
RULES: dict[str, tuple[bytes, tuple[str, ErrorCode | None]]] = {
    "data on stream 0": (frame(DATA, 0, 0, b"x"), BROKEN),
    "data on an idle stream": (frame(DATA, 0, IDLE, b"x"), BROKEN),
    "padding as long as its frame": (frame(DATA, PADDED, OWN, b"\x04abc"), BROKEN),
    "padding but for its length": (frame(DATA, PADDED, OWN, b"\x03abc"), FINE),
    "padded without a length": (frame(DATA, PADDED, OWN), SIZE),
    "padding in a header block": (frame(HEADERS, PADDED | END_HEADERS, 5, b"\x02" + BLOCK + b"xx"), FINE),
    "too much padding in a header block": (frame(HEADERS, PADDED | END_HEADERS, 5, b"\xff" + BLOCK), BROKEN),
    "headers on stream 0": (frame(HEADERS, END_HEADERS, 0, BLOCK), BROKEN),
    "headers of a server's stream": (frame(HEADERS, END_HEADERS, 6, BLOCK), BROKEN),
    "headers with a priority": (frame(HEADERS, HAS_PRIORITY | END_HEADERS, 5, u32(1) + b"\x10" + BLOCK), FINE),
    "headers that depend on themselves": (frame(HEADERS, HAS_PRIORITY | END_HEADERS, 5, u32(5) + b"\x10" + BLOCK), BROKEN),
    "headers too short for a priority": (frame(HEADERS, HAS_PRIORITY | END_HEADERS, 5, u32(1)), SIZE),
    "a block in two frames": (frame(HEADERS, 0, 5, BLOCK[:9]) + frame(CONTINUATION, END_HEADERS, 5, BLOCK[9:]), FINE),
    "a block in three frames": (frame(HEADERS, 0, 5, b"") + frame(CONTINUATION, 0, 5, BLOCK[:9]) + frame(CONTINUATION, END_HEADERS, 5, BLOCK[9:]), FINE),
    "a block that goes on elsewhere": (frame(HEADERS, 0, 5, BLOCK[:9]) + frame(CONTINUATION, END_HEADERS, 7, BLOCK[9:]), BROKEN),
    "a block with something between": (frame(HEADERS, 0, 5, BLOCK[:9]) + frame(PING, 0, 0, bytes(8)), BROKEN),
    "a block with an unknown frame between": (frame(HEADERS, 0, 5, BLOCK[:9]) + frame(99, 0, 0, b"x"), BROKEN),
    "a continuation of nothing": (frame(CONTINUATION, END_HEADERS, OWN, BLOCK), BROKEN),
    "a block that cannot be read": (frame(HEADERS, END_HEADERS, 5, b"\x80"), ("connection", ErrorCode.COMPRESSION_ERROR)),
    "a stream that was left out": (frame(HEADERS, END_HEADERS, 9, BLOCK) + frame(HEADERS, END_HEADERS, 7, BLOCK), BROKEN),
    "headers again without an end": (frame(HEADERS, END_HEADERS, OWN, BLOCK), BAD),
    "trailers with a pseudo-header": (frame(HEADERS, END_HEADERS | END_STREAM, OWN, BLOCK), BAD),
    "priority": (frame(PRIORITY, 0, 5, u32(1) + b"\x10"), FINE),
    "priority of stream 0": (frame(PRIORITY, 0, 0, u32(1) + b"\x10"), BROKEN),
    "priority of another size": (frame(PRIORITY, 0, OWN, u32(1)), ("stream", ErrorCode.FRAME_SIZE_ERROR)),
    "priority on itself": (frame(PRIORITY, 0, OWN, u32(OWN) + b"\x10"), BAD),
    "a reset of an idle stream": (frame(RST_STREAM, 0, IDLE, u32(8)), BROKEN),
    "a reset of stream 0": (frame(RST_STREAM, 0, 0, u32(8)), BROKEN),
    "a reset of another size": (frame(RST_STREAM, 0, OWN, u32(8, 8)), SIZE),
    "a reset twice": (frame(RST_STREAM, 0, OWN, u32(8)) * 2, FINE),
    "settings on a stream": (frame(SETTINGS, 0, OWN), BROKEN),
    "settings of another size": (frame(SETTINGS, 0, 0, bytes(5)), SIZE),
    "an acknowledgement with settings": (frame(SETTINGS, ACK, 0, bytes(6)), SIZE),
    "an acknowledgement of nothing": (frame(SETTINGS, ACK, 0), FINE),
    "push as a number": (setting(2, 2), BROKEN),
    "push": (setting(2, 1), FINE),
    "the largest window": (setting(4, 2**31 - 1), FINE),
    "a larger window": (setting(4, 2**31), FLOW),
    "the smallest frames": (setting(5, 16_384), FINE),
    "smaller frames": (setting(5, 16_383), BROKEN),
    "the largest frames": (setting(5, 2**24 - 1), FINE),
    "larger frames": (setting(5, 2**24), BROKEN),
    "an unknown setting": (setting(99, 7), FINE),
    "a window that grows too large by settings": (frame(WINDOW_UPDATE, 0, OWN, u32(2**31 - 1 - 65_535)) + setting(4, 65_536), FLOW),
    "a promise": (frame(PUSH_PROMISE, END_HEADERS, OWN, u32(2) + BLOCK), BROKEN),
    "ping": (frame(PING, 0, 0, bytes(8)), FINE),
    "ping on a stream": (frame(PING, 0, OWN, bytes(8)), BROKEN),
    "ping of another size": (frame(PING, 0, 0, bytes(7)), SIZE),
    "goaway": (frame(GOAWAY, 0, 0, u32(0, 0) + b"bye"), FINE),
    "goaway on a stream": (frame(GOAWAY, 0, OWN, u32(0, 0)), BROKEN),
    "goaway of another size": (frame(GOAWAY, 0, 0, u32(0)), SIZE),
    "a window of stream 0 by nothing": (frame(WINDOW_UPDATE, 0, 0, u32(0)), BROKEN),
    "a window by nothing": (frame(WINDOW_UPDATE, 0, OWN, u32(0)), BAD),
    "a window of an idle stream": (frame(WINDOW_UPDATE, 0, IDLE, u32(1)), BROKEN),
    "a window of a stream that is over": (frame(WINDOW_UPDATE, 0, GONE, u32(1)), FINE),
    "a window of another size": (frame(WINDOW_UPDATE, 0, 0, u32(1, 1)), SIZE),
    "the largest window of a stream": (frame(WINDOW_UPDATE, 0, OWN, u32(2**31 - 1 - 65_535)), FINE),
    "a larger window of a stream": (frame(WINDOW_UPDATE, 0, OWN, u32(2**31 - 65_535)), ("stream", ErrorCode.FLOW_CONTROL_ERROR)),
    "the largest window of all": (frame(WINDOW_UPDATE, 0, 0, u32(2**31 - 1 - 65_535)), FINE),
    "a larger window of all": (frame(WINDOW_UPDATE, 0, 0, u32(2**31 - 65_535)), FLOW),
    "a reserved bit": (frame(WINDOW_UPDATE, 0, 0, u32(2**31 + 1)), FINE),
    "a frame of a kind that is not known": (frame(99, 255, IDLE, b"x" * 100), FINE),
    "a frame that is too long": (frames.head(frames.MAX_FRAME, DATA, 0, OWN), SIZE),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", [False, True])
async def test_what_breaks_a_rule_ends_the_stream_or_the_connection(
    connect: Connect, rule: str, cut: bool
) -> None:
    data, (what, code) = RULES[rule]
    both = connect()
    assert both.client.call() == OWN
    gone = both.client.call()
    both.client.h2.reset_stream(gone)
    both.exchange()
    for piece in [data[at : at + 1] for at in range(len(data))] if cut else [data]:
        if both.pair.to_client.open:
            both.pair.receive(piece)
    sent = list(frames_of(both.pair.to_client.take()))
    goaways = [payload for kind, _, payload in sent if kind == GOAWAY]
    resets = [(stream, payload) for kind, stream, payload in sent if kind == RST_STREAM]
    if what == "connection":
        assert [struct.unpack(">I", payload[4:8])[0] for payload in goaways] == [code]
        assert struct.unpack(">I", goaways[0][:4])[0] <= 9  # the last of its streams that was looked at
        assert not both.pair.to_client.open
        assert not both.pair.client.codec.streams
        return
    assert not goaways
    assert both.pair.to_client.open
    assert [(stream, struct.unpack(">I", payload)[0]) for stream, payload in resets] == (
        [(OWN, code)] if what == "stream" else []
    )
    both.pair.receive(frame(HEADERS, END_HEADERS, 21, BLOCK) + frame(DATA, 0, 21, framed(request())))
    assert len(both.pair.tritons) == 1  # the connection goes on


async def test_a_ping_comes_back_as_it_was(connect: Connect) -> None:
    both = connect()
    both.pair.receive(frame(PING, 0, 0, b"12345678") + frame(PING, ACK, 0, b"87654321"))
    assert both.pair.to_client.take() == frame(PING, ACK, 0, b"12345678")


async def test_calls_that_triton_will_not_take_as_it_goes_may_be_tried_again(connect: Connect) -> None:
    both = connect(limit=2, depth=0)
    streams = [both.client.call() for _ in range(2)]
    for stream in streams:
        both.client.send(stream, framed(request()), end=True)
    both.exchange()
    both.pair.tritons[0].data_received(frame(GOAWAY, 0, 0, u32(streams[0], 0)))
    both.client.exchange()
    assert both.client.status(streams[1]) == Status.UNAVAILABLE
    assert dict(both.client.headers[streams[1]])[b"grpc-message"] == b"Triton is going away"
    assert both.pair.running == 1
    both.triton.answer(streams[0], b"fine")
    both.exchange()
    assert both.client.status(streams[0]) == 0


@pytest.mark.parametrize("size", [10, 16_370, 16_384, 20_000, 40_000])
async def test_long_headers_arrive_in_as_many_frames_as_they_need(connect: Connect, size: int) -> None:
    both = connect()
    stream = both.client.call()
    both.client.send(stream, framed(request()), end=True)
    both.exchange()
    both.triton.h2.send_headers(
        both.triton.own(stream), [(":status", "200"), ("content-type", "application/grpc")]
    )
    text = "x" * size
    both.triton.h2.send_headers(
        both.triton.own(stream), [("grpc-status", "13"), ("grpc-message", text)], end_stream=True
    )
    both.exchange()
    assert both.client.status(stream) == 13
    assert dict(both.client.headers[stream])[b"grpc-message"].decode() == text
    assert not both.pair.client.codec.streams


def frames_of(data: bytes) -> Iterable[tuple[int, int, bytes]]:
    at = 0
    while at < len(data):
        high, low, kind, _, stream = frames.read_head(data, at)
        size = high << 8 | low
        yield kind, stream, data[at + 9 : at + 9 + size]
        at += 9 + size


@pytest.mark.parametrize(
    "begun",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r",
        frames.PREFACE + frame(PING, 0, 0, bytes(8)),
        frames.PREFACE + frames.SETTINGS_ACK,
        b"\x16\x03\x01",
    ],
)
async def test_another_protocol_is_refused_at_once(connect: Connect, begun: bytes) -> None:
    for cut in (False, True):
        downstream, out = connect().pair.downstream, Wire()
        client = GrpcConnection(downstream)
        client.connection_made(out)  # type: ignore[arg-type]
        out.take()
        for piece in [begun[at : at + 1] for at in range(len(begun))] if cut else [begun]:
            if out.open:
                client.data_received(piece)
        assert GOAWAY in [kind for kind, _, _ in frames_of(out.take())]
        assert not out.open


# RFC 9113, section 8, and grpc/doc/PROTOCOL-HTTP2.md: the heads of calls.


def without(name: bytes) -> list[tuple[bytes, bytes]]:
    return [header for header in HEAD if header[0] != name]


HEADS: dict[str, list[tuple[bytes, bytes]]] = {
    "no method": without(b":method"),
    "no scheme": without(b":scheme"),
    "no path": without(b":path"),
    "an empty path": [*without(b":path"), (b":path", b"")],
    "a pseudo-header twice": [(b":path", b"/"), *HEAD],
    "an unknown pseudo-header": [(b":status", b"200"), *HEAD],
    "a pseudo-header after others": [*HEAD[2:], *HEAD[:2]],
    "upper case": [*HEAD, (b"X-A", b"b")],
    "a name with a space": [*HEAD, (b"x a", b"b")],
    "no name": [*HEAD, (b"", b"b")],
    "a line end in a value": [*HEAD, (b"x-a", b"b\r\nc: d")],
    "NUL in a value": [*HEAD, (b"x-a", b"b\0")],
    "a space before a value": [*HEAD, (b"x-a", b" b")],
    "a tab behind a value": [*HEAD, (b"x-a", b"b\t")],
    "a hop": [*HEAD, (b"connection", b"x-a")],
    "te of another kind": [*without(b"te"), (b"te", b"gzip")],
    "two lengths": [*HEAD, (b"content-length", b"1"), (b"content-length", b"1")],
    "a length that is no number": [*HEAD, (b"content-length", b"+1")],
}


@pytest.mark.parametrize("head", HEADS)
async def test_a_head_that_is_none_ends_its_stream_alone(connect: Connect, head: str) -> None:
    both = connect()
    both.client.call()
    both.exchange()
    block = hpack.encode(HEADS[head])
    both.pair.receive(frame(HEADERS, END_HEADERS, 3, block))
    sent = list(frames_of(both.pair.to_client.take()))
    assert (RST_STREAM, 3, u32(ErrorCode.PROTOCOL_ERROR)) in sent
    assert both.pair.to_client.open
    assert list(both.pair.client.codec.streams) == [1]


@pytest.mark.parametrize("trailers", [[(b":path", b"/")], [(b"X", b"y")], [(b"x", b" y")], [(b"x", b"y")]])
async def test_trailers_of_a_client_end_its_call(
    connect: Connect, trailers: list[tuple[bytes, bytes]]
) -> None:
    both = connect()
    stream = both.client.call()
    both.client.send(stream, framed(request()))
    both.exchange()
    both.pair.receive(frame(HEADERS, END_HEADERS | END_STREAM, 1, hpack.encode(trailers)))
    both.exchange()
    if trailers == [(b"x", b"y")]:
        assert stream in both.triton.ended
        assert b"x" not in both.triton.calls[stream]
    else:
        assert both.client.resets == {stream: ErrorCode.PROTOCOL_ERROR}
        assert stream in both.triton.resets


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ([(b":method", b"GET"), *without(b":method")], 405),
        (without(b"content-type"), 415),
        ([*without(b"content-type"), (b"content-type", b"application/json")], 415),
        ([*HEAD, (b"content-type", b"application/grpc")], 415),
        ([*without(b"content-type"), (b"content-type", b"application/grpc+json")], 415),
    ],
)
async def test_what_is_no_grpc_call_is_refused_in_http(
    connect: Connect, head: list[tuple[bytes, bytes]], status: int
) -> None:
    both = connect()
    block = hpack.encode(sorted(head, key=lambda one: not one[0].startswith(b":")))
    both.pair.receive(frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, 0, 1, b"x" * 40_000))
    assert not both.pair.to_client.take().endswith(b"x")
    both.pair.receive(frame(DATA, END_STREAM, 1, b"x"))
    sent = list(frames_of(both.pair.to_client.take()))
    ((_, _, block),) = [one for one in sent if one[0] == HEADERS]
    headers = decoded(hpack.Decoder(allowed=0, list_limit=1000), block)
    assert headers == [(b":status", b"%d" % status), (b"content-type", b"text/plain")]
    assert b"application/grpc" in b"".join(payload for kind, _, payload in sent if kind == DATA)
    assert both.pair.replica.grpc.codes == {f"HTTP_{status}": 1}
    assert not both.pair.client.codec.streams
    assert not both.pair.tritons


@pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;x=y", "application/grpc ; x"])
async def test_what_is_a_grpc_call_in_other_words(connect: Connect, kind: str) -> None:
    both = connect()
    head = [*without(b"content-type"), (b"content-type", kind.encode())]
    both.pair.receive(frame(HEADERS, END_HEADERS, 1, hpack.encode(head)))
    both.pair.receive(frame(DATA, END_STREAM, 1, framed(request())))
    both.exchange()
    assert both.triton.calls[1][b"content-type"] == b"application/grpc"


@pytest.mark.parametrize("method", [INFER, STREAM_INFER])
async def test_a_deadline_is_kept_in_any_unit(connect: Connect, method: str) -> None:
    """Here: Triton goes on with what it has begun, and is sent no deadline."""
    both = connect()

    def ask(timeout: str) -> int:
        stream: int = both.client.call(method, grpc_timeout=timeout)
        both.client.send(stream, framed(request()), end=True)
        return stream

    soon = [ask(timeout) for timeout in ("50m", "50000u", "50000000n")]
    later = [ask(timeout) for timeout in ("2H", "3M", "5S", "5000m", "5000000u", "99999999u")]
    both.exchange()
    await asyncio.sleep(0.15)
    both.exchange()
    assert [both.client.status(stream) for stream in soon] == [Status.DEADLINE_EXCEEDED] * len(soon)
    assert [both.client.status(stream) for stream in later] == [None] * len(later)
    assert not any(b"grpc-timeout" in head for head in both.triton.calls.values())


@pytest.mark.parametrize("said", ["5", "S", "123456789S", "5s", "-5S", "5 S"])
async def test_a_deadline_that_cannot_be_read_is_refused(connect: Connect, said: str) -> None:
    both = connect()
    stream = both.client.call(grpc_timeout=said)
    both.exchange()
    assert both.client.status(stream) == Status.INTERNAL
    assert b"grpc-timeout" in dict(both.client.headers[stream])[b"grpc-message"]
    assert not both.pair.tritons


@pytest.mark.parametrize(
    ("length", "sent", "ends", "fits"),
    [
        (0, 0, False, True),
        (1, 0, True, False),
        (-1, 0, False, False),
        (-1, 0, True, False),
        (0, 0, True, True),
    ],
)
async def test_a_length_is_kept(connect: Connect, length: int, sent: int, ends: bool, fits: bool) -> None:
    both, message = connect(), framed(request())
    head = [*HEAD, (b"content-length", b"%d" % (len(message) + length))]
    both.pair.receive(frame(HEADERS, END_HEADERS, 1, hpack.encode(head)))
    both.pair.receive(frame(DATA, END_STREAM if ends else 0, 1, message))
    resets = [one for one in frames_of(both.pair.to_client.take()) if one[0] == RST_STREAM]
    assert resets == ([] if fits else [(RST_STREAM, 1, u32(ErrorCode.PROTOCOL_ERROR))])
    assert both.pair.to_client.open


@pytest.mark.parametrize(
    ("method", "sent", "status", "text"),
    [
        (INFER, b"", Status.INVALID_ARGUMENT, "needs one message"),
        (INFER, framed(request())[:-1], Status.INVALID_ARGUMENT, "ended inside a message"),
        (INFER, framed(request())[:3], Status.INVALID_ARGUMENT, "ended inside a message"),
        (INFER, b"\x02\0\0\0\0", Status.INVALID_ARGUMENT, "compressed flag is 2"),
        (INFER, b"\x01\0\0\0\x01x", Status.UNIMPLEMENTED, "gzip and deflate are taken"),
        (INFER, b"\0\xff\xff\xff\xff", Status.RESOURCE_EXHAUSTED, "may have 64 MiB (--max-request-bytes)"),
        (INFER, framed(b"\xff"), Status.INVALID_ARGUMENT, "unreadable request"),
        (INFER, framed(request("other")), Status.NOT_FOUND, "unknown model: 'other'"),
        (STATISTICS, framed(protobuf.encode_bytes(1, b"other")), Status.INVALID_ARGUMENT, "'other' is not available"),
        (f"/{SERVICE}/ModelConfig", framed(protobuf.encode_bytes(1, b"other")), Status.NOT_FOUND, "'other'"),
        # A name that is no text is never the own model's, whatever the method.
        (INFER, framed(protobuf.encode_bytes(1, b"\xff")), Status.NOT_FOUND, "unknown model"),
        (STATISTICS, framed(protobuf.encode_bytes(1, b"\xff")), Status.INVALID_ARGUMENT, "is not available"),
        (f"/{SERVICE}/ModelConfig", framed(protobuf.encode_bytes(1, b"\xff")), Status.NOT_FOUND, "unknown model"),
        (f"/{SERVICE}/ModelConfig", framed(b"\xff"), Status.INVALID_ARGUMENT, "unreadable"),
        (f"/{SERVICE}/ModelConfig", b"\0\0\x05\0\0", Status.RESOURCE_EXHAUSTED, "a request of"),
        (f"/{SERVICE}/LogSettings", framed(b""), Status.PERMISSION_DENIED, "beyond the model"),
        (f"/{SERVICE}/Other", framed(b""), Status.UNIMPLEMENTED, "unknown method"),
        (f"/{SERVICE}/RepositoryIndex", framed(b"\xff") , Status.INVALID_ARGUMENT, "unreadable"),
        ("/grpc.health.v1.Health/Check", framed(b"\xff"), Status.INVALID_ARGUMENT, "unreadable"),
        ("/grpc.health.v1.Health/Check", framed(protobuf.encode_bytes(1, b"x")), Status.NOT_FOUND, "unknown service"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_with_its_status(
    connect: Connect, method: str, sent: bytes, status: Status, text: str
) -> None:
    both = connect(limit=1, depth=0)
    both.pair.replica.triton_says("x")
    stream = both.client.call(method)
    both.client.send(stream, sent, end=True)
    both.exchange()
    await settle()
    both.exchange()
    assert both.client.status(stream) == status
    assert text in dict(both.client.headers[stream])[b"grpc-message"].decode()
    assert not both.triton.calls
    assert (both.pair.buffered_bytes, both.pair.running) == (0, 0)
    assert both.pair.replica.grpc.codes == {status.name: 1}
    assert not both.pair.client.codec.streams


async def test_a_unary_call_takes_one_message(connect: Connect) -> None:
    both = connect(limit=1, depth=0)
    stream = both.client.call()
    both.client.send(stream, framed(request()) * 2, end=True)
    both.exchange()
    assert both.client.status(stream) == Status.INVALID_ARGUMENT
    assert stream in both.triton.resets or stream not in both.triton.calls
    assert both.pair.running == 0


# What is answered here.


class Triton:
    """What the own model's Triton says of itself over REST."""

    def __init__(self, both: Both, answer: Any) -> None:
        self.answer = answer
        questions: Any = both.pair.downstream.common.questions
        questions.versions = questions.server_metadata = self.fetch

    async def fetch(self, *_: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def response_to(both: Both, method: str, message: bytes = b"") -> tuple[int | None, bytes]:
    stream = both.client.call(method)
    both.client.send(stream, framed(message), end=True)
    both.exchange()
    await settle()
    both.exchange()
    return both.client.status(stream), both.client.data.get(stream, b"")[5:]


async def test_readiness_is_answered_here(connect: Connect) -> None:
    both = connect()
    own = protobuf.encode_bytes(1, b"own")
    health, live, ready = "/grpc.health.v1.Health/Check", f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady"
    service = protobuf.encode_bytes(1, SERVICE.encode())
    assert [await response_to(both, one) for one in (live, ready)] == [(0, b"\x08\x01")] * 2
    assert [await response_to(both, health, one) for one in (b"", service)] == [(0, b"\x08\x01")] * 2
    assert await response_to(both, MODEL_READY, protobuf.encode_bytes(1, b"other")) == (0, b"")
    assert not both.pair.tritons
    both.pair.replica.closed = "it has ended Triton twice"
    assert [await response_to(both, one) for one in (live, ready)] == [(0, b"\x08\x01"), (0, b"")]
    assert [await response_to(both, health, one) for one in (b"", service)] == [(0, b"\x08\x02")] * 2
    assert await response_to(both, MODEL_READY, own) == (0, b"")
    assert not both.pair.tritons
    both.pair.replica.closed = None
    stream = both.client.call(MODEL_READY)
    both.client.send(stream, framed(own), end=True)
    both.exchange()
    assert both.triton.messages(stream) == [own]


async def test_the_index_and_the_server_are_answered_from_tritons_own(connect: Connect) -> None:
    both = connect()
    triton = Triton(both, ["1", "3"])
    index, server = f"/{SERVICE}/RepositoryIndex", f"/{SERVICE}/ServerMetadata"
    ready = pb.RepositoryIndexRequest(ready=True).SerializeToString()
    rows = pb.RepositoryIndexResponse()
    for version in "13":
        rows.models.add(name="own", version=version, state="READY")
    for asked in (b"", ready):
        status, answer = await response_to(both, index, asked)
        assert (status, pb.RepositoryIndexResponse.FromString(answer)) == (0, rows)
    shown = {"name": "triton", "version": "2.51", "extensions": ["binary", *sorted(HIDDEN_EXTENSIONS)]}
    triton.answer = shown
    status, answer = await response_to(both, server)
    expected = pb.ServerMetadataResponse(name="triton", version="2.51", extensions=["binary"])
    assert (status, pb.ServerMetadataResponse.FromString(answer)) == (0, expected)
    for error, code in ((NotServed("away"), Status.UNAVAILABLE), (KeyError("x"), Status.INTERNAL)):
        triton.answer = error
        assert await response_to(both, server) == (code, b"")
    both.pair.replica.triton_says("gone")
    status, answer = await response_to(both, index)
    (row,) = pb.RepositoryIndexResponse.FromString(answer).models
    assert (row.name, row.version, row.state) == ("own", "", "UNAVAILABLE")
    assert await response_to(both, index, ready) == (0, b"")
    assert both.pair.replica.grpc.codes == {"OK": 5, "UNAVAILABLE": 1, "INTERNAL": 1}


async def test_statistics_of_all_are_those_of_the_own_model(connect: Connect) -> None:
    both = connect()
    for asked in (b"", protobuf.encode_bytes(1, b"own")):
        stream = both.client.call(STATISTICS)
        both.client.send(stream, framed(asked), end=True)
        both.exchange()
        assert both.triton.messages(stream) == [protobuf.encode_bytes(1, b"own")]


async def test_a_watch_ends_with_its_client_or_the_proxy(connect: Connect) -> None:
    both = connect()
    streams = []
    for _ in range(2):
        streams.append(both.client.call("/grpc.health.v1.Health/Watch"))
        both.client.send(streams[-1], framed(b""), end=True)
    both.exchange()
    assert len(both.pair.downstream.watchers) == 2
    both.pair.client.tick(time.monotonic() + 100_000)  # it may rest for as long as it likes
    assert both.pair.to_client.open
    both.client.h2.reset_stream(streams[0])
    both.exchange()
    assert len(both.pair.downstream.watchers) == 1
    both.pair.client.ask_to_leave()
    both.pair.client.tick(time.monotonic() + 1.1)
    both.pair.end_turn()
    _, goaway, (kind, stream, block), *_ = frames_of(both.pair.to_client.take())
    assert (goaway[0], kind, stream) == (GOAWAY, HEADERS, streams[1])
    status = b"%d" % Status.UNAVAILABLE
    assert (b"grpc-status", status) in decoded(hpack.Decoder(allowed=0, list_limit=1000), block)
    assert not both.pair.downstream.watchers


async def test_a_stream_that_began_with_a_refusal_ends_with_a_whole_answer(connect: Connect) -> None:
    """Headers come once, though Triton says all of its part at once."""
    both = connect()
    for _ in range(2):  # from the second one on its blocks are known
        usual = both.client.call()
        both.client.send(usual, framed(request()), end=True)
        both.exchange()
        both.triton.answer(usual, b"fine")
        both.exchange()
    stream = both.client.call(STREAM_INFER)
    both.client.send(stream, framed(request("other")))
    both.client.send(stream, framed(request()), end=True)
    both.exchange()
    answer = pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id="7")).SerializeToString()
    both.triton.answer(stream, answer)
    both.exchange()
    assert both.client.status(stream) == 0
    refused = stream_error("Request for unknown model: 'other' is not found", b"")
    assert both.client.data[stream] == refused + framed(answer)
    assert both.pair.running == 0


async def test_a_refusal_in_a_stream_is_a_message_or_the_status_that_was_asked_for(connect: Connect) -> None:
    for as_status in (False, True):
        both = connect()
        stream = both.client.h2.get_next_available_stream_id()
        more = [(b"triton_grpc_error", b"true")] if as_status else []
        both.client.h2.send_headers(stream, [*HEAD[:2], (b":path", STREAM_INFER.encode()), *HEAD[3:], *more])
        both.client.send(stream, framed(request(id="7", shared_memory_region="r")))
        both.exchange()
        if as_status:
            assert both.client.status(stream) == Status.INVALID_ARGUMENT
            continue
        answer = pb.ModelStreamInferResponse.FromString(both.client.data[stream][5:])
        assert (answer.error_message, answer.infer_response.id) == ("shared memory is not available", "7")
        both.client.send(stream, framed(request()), end=True)
        both.exchange()
        assert both.triton.messages(stream) == [request()]
        both.triton.answer(stream, b"fine")
        both.exchange()
        assert both.client.status(stream) == 0


@pytest.mark.parametrize("cut", range(1, 14))
async def test_an_answer_in_a_stream_gives_its_slot_back_however_triton_cuts_it(
    connect: Connect, cut: int
) -> None:
    both = connect(limit=2, depth=0)
    stream = both.client.call(STREAM_INFER)
    both.client.send(stream, framed(request()) * 2)
    both.exchange()
    assert both.pair.running == 2
    both.triton.h2.send_headers(
        both.triton.own(stream), [(":status", "200"), ("content-type", "application/grpc")]
    )
    answers = framed(b"fine") * 2
    for piece in (answers[:cut], answers[cut:]):
        both.triton.h2.send_data(both.triton.own(stream), piece, pad_length=cut % 3 or None)
        both.exchange()
    assert both.client.data[stream] == answers
    assert both.pair.running == 0


# The end of a connection.


async def test_an_idle_client_is_disconnected(connect: Connect) -> None:
    quiet, now = connect(), time.monotonic()
    quiet.pair.client.tick(now + 3599)
    assert quiet.pair.to_client.open
    call = quiet.client.call()
    quiet.exchange()
    quiet.pair.client.tick(now + 200)  # with a call under way no client is idle
    quiet.client.h2.reset_stream(call)
    quiet.exchange()
    quiet.pair.client.tick(now + 3700)
    assert quiet.pair.to_client.open
    quiet.pair.client.tick(now + 3900)
    quiet.pair.end_turn()
    assert frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR, "draining") in quiet.pair.to_client.take()
    for second in range(3901, 3903):  # a call may be on its way
        assert quiet.pair.to_client.open
        quiet.pair.client.tick(now + second)
        quiet.pair.end_turn()
    assert not quiet.pair.to_client.open


async def test_a_client_that_does_not_begin_is_disconnected(connect: Connect) -> None:
    pair, now = GrpcPair(), time.monotonic()
    pair.receive(frames.PREFACE)
    pair.client.tick(now)
    pair.client.tick(now + 9)
    assert pair.to_client.open
    pair.client.tick(now + 11)
    assert not pair.to_client.open


async def test_more_streams_than_are_allowed_are_refused_unprocessed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STREAMS", 3)
    both = connect(limit=1, depth=100)
    for number in range(5):
        stream = 2 * number + 1
        data = frame(HEADERS, END_HEADERS, stream, BLOCK) + frame(DATA, END_STREAM, stream, framed(request()))
        both.pair.receive(data)
        if number == 0:
            both.exchange()
    sent = [one for one in frames_of(both.pair.to_client.take()) if one[0] == RST_STREAM]
    assert sent == [(RST_STREAM, stream, u32(ErrorCode.REFUSED_STREAM)) for stream in (7, 9)]
    assert len(both.pair.client.codec.streams) == 3


async def test_all_clients_end_with_the_front_end(connect: Connect) -> None:
    both = connect(limit=1, depth=1)
    for _ in range(2):
        stream = both.client.call()
        both.client.send(stream, framed(request()), end=True)
    asks = both.client.call(f"/{SERVICE}/ServerMetadata")
    never: Any = asyncio.Event()

    async def fetch() -> None:
        await never.wait()

    questions: Any = both.pair.downstream.common.questions
    questions.server_metadata = fetch
    both.client.send(asks, framed(b""), end=True)
    both.exchange()
    downstream = both.pair.downstream
    await settle()
    downstream.close()
    await asyncio.wait_for(downstream.common.close(), 5)
    both.pair.end_turn()
    assert not both.pair.to_client.open
    assert not both.pair.to_triton[0].open
    assert (both.pair.running, both.pair.waiting, both.pair.buffered_bytes) == (0, 0, 0)
