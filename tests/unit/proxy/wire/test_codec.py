"""The rules of RFC 9113 at both ends of a connection, and what a peer may ask of our patience."""

import random
import struct
import time
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest

from proxy.wire.h2 import frames, hpack
from proxy.wire.h2.client import CannotOpen, ClientCodec
from proxy.wire.h2.events import Data, Ended, GoAway, Headers, PeerSettings, Reset, WholeAnswer, WholeRequest
from proxy.wire.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Setting,
)
from proxy.wire.h2.sending import MAX_FRAME
from proxy.wire.h2.server import MAX_STREAMS, ServerCodec
from tests.fakes.h2_codecs import (
    DONE,
    HEAD,
    INTRODUCTION,
    OK,
    by_stream,
    client,
    head,
    introduced,
    output,
    server,
)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frames.head(len(payload), kind, flags, stream) + payload


def u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def ended(events: list[Any]) -> Ended | None:
    return next((event for event in events if isinstance(event, Ended)), None)


# What was cut anyhow says the same.


def calls(rng: random.Random) -> bytes:
    """What a client may say, all of it in order."""
    out = bytearray(INTRODUCTION + frames.headers(1, hpack.NO_TABLE + head(), end_stream=True))
    for number in range(rng.randrange(1, 12)):
        stream = 3 + 2 * number
        block = head((b"traceparent", b"%d" % rng.randrange(10**9))) if rng.random() < 0.5 else head()
        size = rng.choice([0, 5, 5, 300, 40_000, 100_000])
        match rng.randrange(8):
            case 0:
                out += frames.headers(stream, block, end_stream=True)
            case 1:
                out += frames.headers(stream, block, end_stream=False, max_frame=20)
                out += frame(DATA, END_STREAM | PADDED, stream, b"\x05" + b"x" * (size % 60_000) + bytes(5))
            case 2:
                out += frames.headers(stream, block, end_stream=False)
                out += frame(DATA, 0, stream, b"x" * size) + frame(DATA, END_STREAM, stream)
            case 3:
                out += frames.headers(stream, block, end_stream=False)
                out += frame(DATA, 0, stream, b"x" * size)
                out += frames.headers(stream, hpack.encode([(b"a", b"b")]), end_stream=True)
            case 4:
                out += frames.headers(stream, block, end_stream=False) + frames.reset(
                    stream, ErrorCode.CANCEL
                )
            case 5:
                wrong = hpack.encode([(b"content-length", b"7")])
                out += frames.headers(stream, block + wrong, end_stream=False)
                out += frame(DATA, END_STREAM, stream, b"x" * size)
            case _:
                out += frames.headers(stream, block, end_stream=False) + frame(
                    DATA, END_STREAM, stream, b"x" * size
                )
        if rng.random() < 0.2:
            out += frame(PING, 0, 0, bytes(8))
    return bytes(out)


def read(
    codec: ServerCodec[Any, Any] | ClientCodec[Any, Any], pieces: list[bytes], most: int = 1_000_000
) -> dict[int, list[Any]]:
    events = []
    for piece in pieces:
        events += codec.receive(piece, most)
        while codec.has_more:
            events += codec.receive(b"", most)
    return by_stream(events)


@pytest.mark.parametrize("seed", range(150))
def test_however_it_is_cut_it_says_the_same(seed: int) -> None:
    rng = random.Random(seed)
    said = calls(rng)
    if seed % 3 == 0:  # and what is wrong is wrong in the same way
        damaged = bytearray(said)
        for _ in range(rng.randrange(1, 3)):
            damaged[rng.randrange(24, len(damaged))] ^= 1 << rng.randrange(8)
        said = bytes(damaged)
    whole = read(server(), [said])
    cuts = sorted(rng.randrange(len(said)) for _ in range(rng.choice([1, 3, 30])))
    pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    assert read(server(), pieces) == whole
    assert read(server(), [said], rng.choice([1, 2, 7])) == whole, (
        "so does what is taken a few frames at a time"
    )
    assert read(server(), pieces, rng.choice([1, 2, 7])) == whole


def test_a_call_cut_at_any_byte_says_the_same() -> None:
    said = frames.headers(3, head((b"a", b"b")), end_stream=False) + frame(DATA, END_STREAM, 3, b"content")
    events = introduced().receive(said)
    assert [type(event) for event in events] == [WholeRequest]
    for cut in range(1, len(said)):
        assert read(introduced(), [said[:cut], said[cut:]]) == by_stream(events)


def crowd(rng: random.Random) -> bytes:
    """What many calls at once may say: the content of each comes some time after its head."""
    out = bytearray(INTRODUCTION + frames.headers(1, hpack.NO_TABLE + head(), end_stream=True))
    rest: list[list[bytes]] = []
    stream = 3
    while stream < 30 or rest:
        if stream < 30 and rng.random() < 0.6:
            length, trace = (b"content-length", b"5"), (b"traceparent", b"%d" % stream)
            block = rng.choice([head(), head(), head(), head(length), head(trace)])
            out += frames.headers(stream, block, end_stream=rng.random() < 0.1)
            end = [frame(DATA, END_STREAM, stream, b"x" * rng.choice([0, 5, 5, 5, 300, 70_000]))]
            ways = [end] * 6 + [
                [frame(DATA, 0, stream, b"y"), *end],
                [frames.reset(stream, ErrorCode.CANCEL)],
                [frames.headers(stream, hpack.encode([(b"a", b"b")]), end_stream=True)],
                [frame(WINDOW_UPDATE, 0, stream, u32(0))],
                [*end, *end],
            ]
            rest.append(list(rng.choice(ways)))
            stream += 2
        elif rest:
            left = rng.choice(rest)
            out += left.pop(0)
            rest = [one for one in rest if one]
        if rng.random() < 0.2:
            out += rng.choice([frame(PING, 0, 0, bytes(8)), frame(WINDOW_UPDATE, 0, 0, u32(9))])
    return bytes(out)


@pytest.mark.parametrize("seed", range(150))
def test_a_crowd_of_calls_says_the_same_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    said = crowd(rng)
    whole = read(server(), [said])
    cuts = sorted(rng.randrange(len(said)) for _ in range(rng.choice([1, 3, 30, 300])))
    pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    assert read(server(), pieces) == whole


def test_calls_whose_heads_all_come_first_are_one_event_each() -> None:
    said = b"".join(frames.headers(stream, head(), end_stream=False) for stream in (3, 5, 7))
    said += frame(WINDOW_UPDATE, 0, 0, u32(9)) + frame(PING, 0, 0, bytes(8))
    said += b"".join(frame(DATA, END_STREAM, stream, b"content") for stream in (5, 3, 7))
    events = introduced().receive(said)
    assert [event.stream.id for event in events if isinstance(event, WholeRequest)] == [5, 3, 7]
    assert len(events) == 3


def test_heads_are_reported_before_what_ends_the_connection() -> None:
    said = frames.headers(3, head(), end_stream=False) + frame(WINDOW_UPDATE, 0, 0, u32(0))
    assert [type(event) for event in introduced().receive(said)] == [Headers, Ended]


def asked() -> ClientCodec[Any, Any]:
    """A client that has asked something, of a server that keeps no table."""
    codec = client()
    codec.send_call(head(), b"ask")
    codec.receive(frames.settings({}) + frames.SETTINGS_ACK)
    codec.receive(frames.headers(1, hpack.NO_TABLE + OK, end_stream=True))
    codec.send_call(head(), b"ask")
    output(codec)
    return codec


def test_an_answer_cut_at_any_byte_says_the_same() -> None:
    said = frames.headers(3, OK, end_stream=False) + frame(DATA, 0, 3, b"content")
    said += frames.headers(3, DONE, end_stream=True)
    events = asked().receive(said)
    assert [type(event) for event in events] == [WholeAnswer]
    for cut in range(1, len(said)):
        codec = asked()
        assert read(codec, [said[:cut], said[cut:]]) == by_stream(events)
        assert not codec.streams


def test_a_long_frame_is_handed_on_as_it_comes() -> None:
    codec = introduced()
    codec.receive(frames.headers(3, head(), end_stream=False))
    said = frame(DATA, END_STREAM, 3, b"x" * 100_000)
    events = codec.receive(said[:50_000])
    assert [len(event.data) for event in events if isinstance(event, Data)] == [50_000 - 9]
    assert not events[-1].end  # type: ignore[union-attr]
    last = codec.receive(said[50_000:] + frames.headers(5, head(), end_stream=True))
    assert isinstance(last[0], Data)
    assert (len(last[0].data), last[0].end) == (50_009, True)
    assert isinstance(last[1], Headers)


def test_a_long_frame_of_a_stream_that_was_reset_meanwhile_is_nobodys() -> None:
    codec = introduced()
    codec.receive(frames.headers(3, head(), end_stream=False))
    said = frame(DATA, END_STREAM, 3, b"x" * 100_000)
    codec.receive(said[:50_000])
    codec.reset(codec.streams[3], ErrorCode.CANCEL)
    assert codec.receive(said[50_000:]) == []
    assert not codec.is_closed
    assert [type(event) for event in codec.receive(frames.headers(5, head(), end_stream=True))] == [Headers]


# What ends the connection, and with what.

BLOCK = head()
FATAL: dict[str, tuple[bytes, ErrorCode]] = {
    "a frame that is too long": (frames.head(MAX_FRAME + 1, DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    "DATA on 0": (frame(DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA of an idle stream": (frame(DATA, 0, 3, b"x"), ErrorCode.PROTOCOL_ERROR),
    "HEADERS on 0": (frames.headers(0, BLOCK, end_stream=True), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of an even stream": (frames.headers(4, BLOCK, end_stream=True), ErrorCode.PROTOCOL_ERROR),
    "HEADERS back": (
        frames.headers(9, BLOCK, end_stream=True) + frames.headers(5, BLOCK, end_stream=True),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "padding alone": (frame(HEADERS, END_HEADERS | PADDED, 3, b"\x05abc"), ErrorCode.PROTOCOL_ERROR),
    "no padding length": (frame(DATA, PADDED, 1), ErrorCode.FRAME_SIZE_ERROR),
    "no priority": (frame(HEADERS, END_HEADERS | HAS_PRIORITY, 3, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "priority of itself": (
        frame(HEADERS, END_HEADERS | HAS_PRIORITY, 3, u32(3) + b"\0" + BLOCK),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a block interrupted": (
        frame(HEADERS, 0, 3, BLOCK) + frame(PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a block interrupted by a call": (
        frame(HEADERS, 0, 3, BLOCK) + frames.headers(3, BLOCK, end_stream=False) + frame(DATA, 1, 3, b"x"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "CONTINUATION of nothing": (frame(CONTINUATION, END_HEADERS, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "CONTINUATION of another": (
        frame(HEADERS, 0, 3, BLOCK) + frame(CONTINUATION, END_HEADERS, 5),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a block that is too long": (frame(HEADERS, 4, 3, bytes(70_000)), ErrorCode.FRAME_SIZE_ERROR),
    "a block that grows": (
        frame(HEADERS, 0, 3, bytes(60_000)) + frame(CONTINUATION, 0, 3, bytes(60_000)),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a block that cannot be read": (frames.headers(3, b"\xbe", end_stream=True), ErrorCode.COMPRESSION_ERROR),
    "trailers that cannot be read": (
        frames.headers(3, BLOCK, end_stream=False) + frames.headers(3, b"\xbe", end_stream=True),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a table again": (frames.headers(3, b"\x3f\x01" + BLOCK, end_stream=True), ErrorCode.COMPRESSION_ERROR),
    "PRIORITY on 0": (frame(PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM on 0": (frame(RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM idle": (frame(RST_STREAM, 0, 3, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM size": (frame(RST_STREAM, 0, 1, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS on a stream": (frame(SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "SETTINGS size": (frame(SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS ACK size": (frame(SETTINGS, ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
    "ENABLE_PUSH": (frames.settings({Setting.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
    "a window": (frames.settings({Setting.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
    "a frame size": (frames.settings({Setting.MAX_FRAME_SIZE: 100}), ErrorCode.PROTOCOL_ERROR),
    "PUSH_PROMISE": (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "PING on a stream": (frame(PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "PING size": (frame(PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "GOAWAY on a stream": (frame(GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "GOAWAY size": (frame(GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE size": (frame(WINDOW_UPDATE, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of 0": (frame(WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE idle": (frame(WINDOW_UPDATE, 0, 3, u32(1)), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE too far": (frame(WINDOW_UPDATE, 0, 0, u32(2**31 - 1)), ErrorCode.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize("what", sorted(FATAL))
def test_a_broken_rule_of_the_connection_ends_it(what: str) -> None:
    said, code = FATAL[what]
    codec = introduced()
    events = codec.receive(said + frames.headers(99, BLOCK, end_stream=True))
    assert isinstance(events[-1], Ended)
    assert (events[-1].code, codec.is_closed) == (code, True)
    assert not any(isinstance(event, WholeRequest) for event in events), (
        "nothing is taken from behind the error"
    )
    out = output(codec)
    at = out.rindex(events[-1].message.encode()) - 17
    assert out[at + 3] == GOAWAY
    assert struct.unpack_from(">II", out, at + 9)[1] == code
    assert codec.receive(frames.headers(101, BLOCK, end_stream=True)) == []


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", b"\x16\x03\x01", frames.PREFACE + bytes(9)],
)
def test_what_is_no_http2_is_reported(said: bytes) -> None:
    for pieces in ([said], [said[:1], said[1:]]):
        codec = server()
        event = next(e for piece in pieces if (e := ended(codec.receive(piece))) is not None)
        assert event.code is ErrorCode.PROTOCOL_ERROR


# What ends a stream alone.

STREAM_ONLY: dict[str, tuple[bytes, ErrorCode]] = {
    "malformed": (frames.headers(3, hpack.encode(HEAD[:2]), end_stream=True), ErrorCode.PROTOCOL_ERROR),
    "a list that is too long": (
        frames.headers(
            3, BLOCK + b"".join(hpack.encode([(b"a", b"")]) for _ in range(3000)), end_stream=True
        ),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "DATA after its end": (
        frames.headers(3, BLOCK, end_stream=True) + frame(DATA, 0, 3, b"x"),
        ErrorCode.STREAM_CLOSED,
    ),
    "HEADERS after its end": (
        frames.headers(3, BLOCK, end_stream=True) + frames.headers(3, BLOCK, end_stream=True),
        ErrorCode.STREAM_CLOSED,
    ),
    "a second head": (
        frames.headers(3, BLOCK, end_stream=False) + frames.headers(3, BLOCK, end_stream=False),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "trailers with a path": (
        frames.headers(3, BLOCK, end_stream=False) + frames.headers(3, BLOCK, end_stream=True),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "more than its window": (
        frames.headers(3, BLOCK, end_stream=False) + frame(DATA, 0, 3, bytes(100_000)) * 2,
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "more than its length": (
        frames.headers(3, head((b"content-length", b"3")), end_stream=False) + frame(DATA, 0, 3, b"four"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "less than its length": (
        frames.headers(3, head((b"content-length", b"3")), end_stream=False) + frame(DATA, 1, 3, b"2."),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "trailers before its length": (
        frames.headers(3, head((b"content-length", b"3")), end_stream=False)
        + frames.headers(3, DONE, end_stream=True),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "no content, but a length": (
        frames.headers(3, head((b"content-length", b"3")), end_stream=True),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window of 0": (
        frames.headers(3, BLOCK, end_stream=False) + frame(WINDOW_UPDATE, 0, 3, u32(0)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a window too far": (
        frames.headers(3, BLOCK, end_stream=False) + frame(WINDOW_UPDATE, 0, 3, u32(2**31 - 1)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "priority of itself": (
        frames.headers(3, BLOCK, end_stream=False) + frame(PRIORITY, 0, 3, u32(3) + b"\0"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "priority of the wrong size": (
        frames.headers(3, BLOCK, end_stream=False) + frame(PRIORITY, 0, 3, bytes(4)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
}


@pytest.mark.parametrize("what", sorted(STREAM_ONLY))
def test_a_broken_rule_of_a_stream_ends_that_stream(what: str) -> None:
    said, code = STREAM_ONLY[what]
    codec = introduced()
    before = codec.receive(said)
    assert not codec.is_closed
    assert 3 not in codec.streams
    assert frames.reset(3, code) in output(codec)
    known = [event for event in before if isinstance(event, Headers)]
    resets = [event for event in before if isinstance(event, Reset)]
    assert len(resets) == len(known), "whoever heard of a stream hears of its end"
    after = codec.receive(frames.headers(5, BLOCK, end_stream=False) + frame(DATA, END_STREAM, 5, b"x"))
    assert [type(event) for event in after] == [WholeRequest]


def test_frames_of_kinds_that_nobody_knows_are_ignored() -> None:
    assert introduced().receive(frame(77, 0xFF, 3, b"what") + frame(12, 0, 0)) == []


def test_more_streams_than_there_may_be_are_refused() -> None:
    codec = introduced()
    for number in range(MAX_STREAMS + 2):
        codec.receive(
            frames.headers(3 + 2 * number, BLOCK, end_stream=False) + frame(DATA, 1, 3 + 2 * number, b"x")
        )
    assert len(codec.streams) == MAX_STREAMS
    assert output(codec).endswith(frames.reset(5 + 2 * MAX_STREAMS, ErrorCode.REFUSED_STREAM))


def test_a_codec_that_goes_away_takes_no_more_and_ends_what_it_has() -> None:
    codec = introduced()
    codec.receive(frames.headers(3, BLOCK, end_stream=True))
    codec.go_away("draining")
    assert frames.goaway(3, ErrorCode.NO_ERROR, "draining") in output(codec)
    assert codec.receive(frames.headers(5, BLOCK, end_stream=False) + frame(DATA, END_STREAM, 5, b"x")) == []
    assert frames.reset(5, ErrorCode.REFUSED_STREAM) in output(codec)
    codec.send_answer(codec.streams[3], OK, b"x", DONE)
    assert not codec.streams


def test_an_answer_ends_a_request_that_had_not_ended() -> None:
    codec = introduced()
    codec.receive(frames.headers(3, BLOCK, end_stream=False))
    codec.send_headers(codec.streams[3], OK + DONE, end=True)
    assert output(codec).endswith(frames.reset(3, ErrorCode.NO_ERROR))
    assert codec.receive(frame(DATA, 0, 3, b"x" * 1000)) == []
    assert not codec.is_closed


# The server that we ask.


def test_a_request_is_sent_in_one_piece() -> None:
    codec = asked()
    stream = codec.send_call(head(), b"content")
    assert output(codec) == frames.headers(5, head(), end_stream=False) + frame(
        DATA, END_STREAM, 5, b"content"
    )
    assert stream.local_done


def test_what_the_server_says_of_streams_that_are_over_is_ignored() -> None:
    codec = asked()
    other = codec.send_call(head(), b"other")
    end = frames.headers(3, OK + DONE, end_stream=True)
    assert [type(event) for event in codec.receive(end * 7 + frame(DATA, 0, 3, b"x"))] == [Headers]
    assert codec.receive((frames.reset(3, ErrorCode.NO_ERROR) + end) * 7) == []
    assert not codec.is_closed
    said = frames.headers(5, OK, end_stream=False) + frame(DATA, 0, 5, b"x")
    events = codec.receive(said + frames.headers(5, DONE, end_stream=True))
    assert isinstance(events[0], WholeAnswer)
    assert events[0].stream is other


def test_a_goaway_tells_which_streams_may_be_asked_elsewhere() -> None:
    codec = asked()
    begun, fresh = codec.streams[3], codec.send_call(head(), b"x")
    events = codec.receive(frames.goaway(3, ErrorCode.NO_ERROR, "going"))
    assert isinstance(events[0], GoAway)
    assert isinstance(events[1], Reset)
    assert (events[1].stream, events[1].was_refused) == (fresh, True)
    assert list(codec.streams.values()) == [begun]
    assert not codec.is_usable
    with pytest.raises(CannotOpen):
        codec.open(head())
    codec.receive(frames.headers(3, OK + DONE, end_stream=True))
    assert not codec.streams


def test_no_more_streams_are_opened_than_the_server_takes() -> None:
    codec = client()
    events = codec.receive(
        frames.settings({Setting.MAX_CONCURRENT_STREAMS: 2, Setting.MAX_HEADER_LIST_SIZE: 77})
    )
    assert isinstance(events[0], PeerSettings)
    assert codec.peer_header_list == 77
    first = codec.open(head())
    codec.open(head())
    assert not codec.can_open
    assert codec.is_usable
    with pytest.raises(CannotOpen):
        codec.send_call(head(), b"x")
    codec.reset(first, ErrorCode.CANCEL)
    codec.send_call(head(), b"x")


@pytest.mark.parametrize("when", ["before its head", "after its head"])
def test_an_answer_that_breaks_a_rule_ends_its_call_alone(when: str) -> None:
    codec = asked()
    codec.send_call(head(), b"x")
    if when == "after its head":
        codec.receive(frames.headers(3, OK, end_stream=False))
        events = codec.receive(frames.headers(3, OK, end_stream=False))
    else:
        events = codec.receive(frame(DATA, 0, 3, b"x"))
    assert isinstance(events[0], Reset)
    assert not codec.is_closed
    assert list(codec.streams) == [5]


def test_a_client_asks_its_server_nothing_of_patience() -> None:
    codec = asked()
    for _ in range(20):
        assert codec.receive(frame(PING, 0, 0, bytes(8)) * 1000) == []
        codec.take_output()


def test_a_request_whose_answer_came_early_is_stopped() -> None:
    codec = asked()
    stream = codec.open(head())
    codec.send_data(stream, b"x" * 10**6)
    codec.take_output()
    codec.receive(frames.headers(5, OK + DONE, end_stream=True))
    assert output(codec).endswith(frames.reset(5, ErrorCode.NO_ERROR))
    assert stream.is_closed


# Patience.

FLOODS = {
    "pings": frame(PING, 0, 0, bytes(8)),
    "settings": frames.settings({Setting.INITIAL_WINDOW_SIZE: 70_000}),
    "acks": frames.SETTINGS_ACK,
    "windows": frames.window_update(0, 1),
    "priorities": frame(PRIORITY, 0, 1, bytes(5)),
    "resets": frames.reset(1, ErrorCode.CANCEL),
    "data of a stream that was reset": frame(DATA, 0, 1),
    "goaways": frames.goaway(0, ErrorCode.NO_ERROR),
}


@pytest.mark.parametrize("what", sorted(FLOODS))
def test_a_flood_ends_the_connection(what: str) -> None:
    event = ended(introduced().receive(FLOODS[what] * 10_000))
    assert event is not None
    assert event.code is ErrorCode.ENHANCE_YOUR_CALM


def test_a_little_of_a_flood_each_second_is_borne() -> None:
    codec = introduced()
    for second in range(20):
        assert codec.tick(float(second)) == []
        assert codec.receive(FLOODS["pings"] * 1900) == []
        codec.take_output()


def test_rapid_reset_ends_the_connection_and_calls_that_are_given_up_do_not() -> None:
    codec = introduced()
    for number in range(2000):
        stream = 3 + 2 * number
        said = frames.headers(stream, BLOCK, end_stream=False)
        codec.receive(said + frame(DATA, END_STREAM, stream, b"x") + frames.reset(stream, ErrorCode.CANCEL))
    assert not codec.is_closed
    codec = introduced()
    for number in range(4000):
        stream = 3 + 2 * number
        codec.receive(
            frames.headers(stream, BLOCK, end_stream=False) + frames.reset(stream, ErrorCode.CANCEL)
        )
    assert codec.is_closed


def test_continuations_without_end_are_a_flood() -> None:
    codec = introduced()
    event = ended(codec.receive(frame(HEADERS, 0, 3, BLOCK) + frame(CONTINUATION, 0, 3) * 5000))
    assert event is not None
    assert event.code is ErrorCode.ENHANCE_YOUR_CALM


def test_windows_that_answer_what_we_send_are_no_flood() -> None:
    codec = introduced(initial_window_size=2**31 - 1)
    codec.receive(frames.headers(3, BLOCK, end_stream=True) + frames.window_update(0, 2**30))
    stream = codec.streams[3]
    codec.send_headers(stream, OK)
    for _ in range(2000):
        codec.send_data(stream, b"x" * 16_384)
        output(codec)
        said = frames.window_update(0, 4096) + frames.window_update(3, 4096) + frame(PING, 0, 0, bytes(8))
        assert codec.receive(said * 4) == []
    assert ended(codec.receive(frames.window_update(0, 1) * 100_000)) is not None


def test_many_settings_with_many_streams_cost_little() -> None:
    codec = introduced()
    for number in range(MAX_STREAMS - 1):
        codec.receive(frames.headers(3 + 2 * number, BLOCK, end_stream=True))
    setting = struct.pack(">HI", Setting.INITIAL_WINDOW_SIZE, 70_000) + struct.pack(
        ">HI", Setting.INITIAL_WINDOW_SIZE, 80_000
    )
    began = time.process_time()
    while not codec.is_closed:
        codec.receive(frame(SETTINGS, 0, 0, setting * 1500))
    assert time.process_time() - began < 0.5


def test_the_last_window_of_a_settings_frame_counts() -> None:
    codec = introduced()
    codec.receive(frames.headers(3, BLOCK, end_stream=True))
    payload = b"".join(struct.pack(">HI", Setting.INITIAL_WINDOW_SIZE, size) for size in (2**31 - 1, 0, 1234))
    codec.receive(frame(SETTINGS, 0, 0, payload))
    assert codec.streams[3].send_window == 1234


# Time.


def test_who_says_nothing_is_let_go() -> None:
    for said in (b"", frames.PREFACE, frames.PREFACE + b"\0\0"):
        codec = server()
        codec.receive(said)
        assert codec.tick(100.0) == codec.tick(109.0) == []
        (event,) = codec.tick(110.1)
        assert isinstance(event, Ended)
        assert event.code is ErrorCode.SETTINGS_TIMEOUT
        assert codec.tick(111.0) == []


@pytest.mark.parametrize("cut", ["frames", "bytes"])
def test_a_header_block_without_its_end_is_not_waited_for(cut: str) -> None:
    codec = introduced()
    codec.receive(
        frame(HEADERS, 0, 3, BLOCK) if cut == "frames" else frames.headers(3, BLOCK, end_stream=True)[:-1]
    )
    assert codec.tick(0.0) == []
    if cut == "frames":
        codec.receive(frame(CONTINUATION, 0, 3, b""))
    assert codec.tick(9.0) == []
    (event,) = codec.tick(10.1)
    assert isinstance(event, Ended)
    assert event.code is ErrorCode.PROTOCOL_ERROR


def test_content_that_comes_slowly_is_waited_for() -> None:
    codec = introduced()
    said = frames.headers(3, BLOCK, end_stream=False) + frame(DATA, END_STREAM, 3, b"x" * 100_000)
    for second in range(100):
        assert codec.tick(float(second)) == []
        codec.receive(said[second * 1000 : second * 1000 + 1000])
    assert codec.tick(101.0) == []


# Another implementation as the peer.


def h2_peer(*, is_client: bool) -> h2.connection.H2Connection:
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=is_client, header_encoding=None))
    peer.initiate_connection()
    return peer


@pytest.mark.parametrize("seed", range(30))
def test_a_client_of_another_make_is_answered(seed: int) -> None:
    rng = random.Random(seed)
    peer, codec = h2_peer(is_client=True), server()
    asked: dict[int, bytes] = {}
    todo: dict[int, bytes] = {}
    read: dict[int, bytes] = {}
    answered: dict[int, bytes] = {}
    sizes = [0, 3, 20_000, 300_000]
    for _ in range(2000):
        if len(asked) < 30:
            stream = peer.get_next_available_stream_id()
            peer.send_headers(stream, [*HEAD, (b"x", b"%d" % rng.randrange(3)), (b"y", b"%d" % stream)])
            asked[stream] = todo[stream] = bytes(rng.choices(range(256), k=rng.choice(sizes) // 100)) * 100
        for stream, rest in list(todo.items()):
            room = min(peer.local_flow_control_window(stream), rng.choice([1, 16_384]), len(rest))
            peer.send_data(stream, rest[: max(0, room)], end_stream=room >= len(rest))
            todo[stream] = rest[max(0, room) :]
            if room >= len(rest):
                del todo[stream]
        said = peer.data_to_send()
        while said:
            size = rng.choice([1, 100, 100_000]) if len(said) < 5000 else 100_000
            for event in codec.receive(said[:size]):
                match event:
                    case WholeRequest():
                        codec.send_answer(event.stream, OK, event.data or b"-", DONE)
                    case Headers():
                        read[event.stream.id] = b""
                        assert not event.end
                    case Data():
                        read[event.stream.id] += event.data
                        event.release()
                        if event.end:
                            codec.send_answer(event.stream, OK, read[event.stream.id] or b"-", DONE)
                    case Ended():
                        raise AssertionError(event.message)
            said = said[size:]
        while codec.has_output:
            for answer in peer.receive_data(b"".join(codec.take_output())):
                match answer:
                    case h2.events.DataReceived():
                        answered[answer.stream_id] = answered.get(answer.stream_id, b"") + answer.data
                        peer.acknowledge_received_data(answer.flow_controlled_length, answer.stream_id)
                    case h2.events.StreamEnded():
                        assert (
                            answered[answer.stream_id] == asked[answer.stream_id]
                            or answered[answer.stream_id] == b"-"
                        )
                        answered[-answer.stream_id] = b""
        if sum(id < 0 for id in answered) == 30:
            break
    assert sum(id < 0 for id in answered) == 30
    assert not codec.streams
    assert peer.outbound_flow_control_window == codec.receive_left


@pytest.mark.parametrize("seed", range(30))
def test_a_server_of_another_make_is_asked(seed: int) -> None:
    rng = random.Random(seed)
    peer, codec = h2_peer(is_client=False), client()
    asked, read, answers = {}, dict[int, bytes](), dict[int, bytes]()
    done: set[int] = set()
    to_say: dict[int, bytes] = {}
    for _ in range(2000):
        if len(asked) < 30:
            content = bytes(rng.choices(range(256), k=rng.choice([0, 3, 200]))) * rng.choice([1, 1000])
            asked[codec.send_call(head((b"a", b"%d" % len(asked))), content).id] = content
        while codec.has_output:
            for event in peer.receive_data(b"".join(codec.take_output())):
                match event:
                    case h2.events.RequestReceived():
                        read[event.stream_id] = b""
                    case h2.events.DataReceived():
                        read[event.stream_id] += event.data
                        peer.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    case h2.events.StreamEnded():
                        assert read[event.stream_id] == asked[event.stream_id]
                        peer.send_headers(
                            event.stream_id, [(b":status", b"200"), (b"x", b"%d" % rng.randrange(3))]
                        )
                        to_say[event.stream_id] = read[event.stream_id] + b"!"
        for stream, rest in list(to_say.items()):
            room = max(0, min(peer.local_flow_control_window(stream), 16_384, len(rest)))
            peer.send_data(stream, rest[:room])
            to_say[stream] = rest[room:]
            if room == len(rest):
                peer.send_headers(stream, [(b"grpc-status", b"0")], end_stream=True)
                del to_say[stream]
        for what in codec.receive(peer.data_to_send()):
            match what:
                case WholeAnswer():
                    answers[what.stream.id] = bytes(what.data)
                    done.add(what.stream.id)
                case Headers():
                    answers[what.stream.id] = b""
                case Data():
                    answers[what.stream.id] += what.data
                    what.release()
                case Ended() | Reset():
                    raise AssertionError(what.message)
                case PeerSettings() | GoAway():
                    pass
                case _:
                    done.add(what.stream.id)
        if len(done) == 30:
            break
    assert answers == {id: content + b"!" for id, content in asked.items()}
    assert not codec.streams


def test_a_long_block_of_headers_is_as_much_as_many_calls() -> None:
    """A thousand fields take as long as hundreds of usual heads."""
    codec = introduced()
    block = head(*((b"x%d" % number, b"") for number in range(1000)))
    streams = [frames.headers(stream, block, end_stream=True) for stream in range(3, 23, 2)]
    assert len(codec.receive(b"".join(streams), 8)) == 1
    for _ in range(9):
        assert codec.has_more
        assert len(codec.receive(b"", 8)) == 1
    assert not codec.has_more
