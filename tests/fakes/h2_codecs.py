"""Codecs to talk to: readers with a simple policy, and what events tell, however they were cut."""

from collections.abc import Iterable, Sequence
from typing import Any

from proxy.wire.h2 import frames, hpack
from proxy.wire.h2.client import ClientCodec
from proxy.wire.h2.codec import H2Codec
from proxy.wire.h2.events import (
    Data,
    Ended,
    Event,
    GoAway,
    Headers,
    Reset,
    Trailers,
    WholeAnswer,
    WholeRequest,
)
from proxy.wire.h2.fields import FieldReader, Fields, Rule, split
from proxy.wire.h2.frames import Setting
from proxy.wire.h2.server import ServerCodec

Kind = tuple[hpack.Header, ...]

HEAD: tuple[hpack.Header, ...] = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.Service/Call"),
    (b":authority", b"here"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)
OK = hpack.encode([(b":status", b"200"), (b"content-type", b"application/grpc")])
DONE = hpack.encode([(b"grpc-status", b"0")])

_RULES = {
    b"te": Rule.DROP,
    b"content-type": Rule.TELL,
    b"grpc-status": Rule.TELL,
    b"grpc-timeout": Rule.VALUE,
    b"grpc-message": Rule.VALUE,
    b"berth-key": Rule.DROP,
}


class Plain:
    """Tells what it is told."""

    def rule(self, name: bytes) -> Rule:
        return _RULES.get(name, Rule.FORWARD)

    def kind(self, by_stream: Sequence[hpack.Header]) -> Kind:
        return tuple(by_stream)


def request_reader() -> FieldReader[Kind]:
    return FieldReader(Plain())


def answer_reader() -> FieldReader[Kind]:
    return FieldReader(Plain(), is_answer=True)


def trailer_reader() -> FieldReader[Kind]:
    return FieldReader(Plain(), is_trailers=True)


def head(*more: hpack.Header) -> bytes:
    return hpack.encode([*HEAD, *more])


class Woken:
    """Counts how often it was called between two looks at it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def server() -> ServerCodec[Kind, Kind]:
    return ServerCodec(request_reader(), trailer_reader(), wake=Woken())


def client() -> ClientCodec[Kind, Kind]:
    return ClientCodec(answer_reader(), trailer_reader(), wake=Woken())


def decoded(decoder: hpack.Decoder, block: bytes) -> list[hpack.Header]:
    """All fields of a block."""
    return [(field.name, field.value) for field in split(decoder.plain(block))]


def output(codec: H2Codec[Any, Any]) -> bytes:
    """All that it has to say."""
    out = b""
    while codec.has_output:
        out += b"".join(codec.take_output())
    return out


INTRODUCTION = frames.PREFACE + frames.settings({}) + frames.SETTINGS_ACK


def introduced(**settings: int) -> ServerCodec[Kind, Kind]:
    """A server whose client has taken its settings, and keeps no table."""
    codec = server()
    output(codec)
    ours = frames.settings({Setting[name.upper()]: value for name, value in settings.items()})
    codec.receive(frames.PREFACE + ours + frames.SETTINGS_ACK)
    codec.receive(frames.headers(1, hpack.NO_TABLE + head(), end_stream=True))
    codec.reset(codec.streams[1], frames.ErrorCode.CANCEL)
    output(codec)
    return codec


def said(fields: Fields[Any]) -> tuple[Any, ...]:
    return (fields.kind, fields.forwarded, fields.list_bytes, fields.values, fields.length)


def by_stream(events: Iterable[Event]) -> dict[int, list[Any]]:
    """What each stream was told, the same for one event as for its parts; 0: the connection."""
    streams: dict[int, list[Any]] = {}

    def tell(id: int, *what: Any) -> None:
        streams.setdefault(id, []).append(what)

    def content(id: int, data: Any) -> None:
        before = streams.setdefault(id, [])
        if len(data) and before and before[-1][0] == "data":
            before[-1] = ("data", before[-1][1] + bytes(data))
        elif len(data):
            before.append(("data", bytes(data)))

    for event in events:
        match event:
            case WholeRequest():
                tell(event.stream.id, "head", *said(event.fields))
                content(event.stream.id, event.data)
                tell(event.stream.id, "end")
            case WholeAnswer():
                tell(event.stream.id, "head", *said(event.fields))
                content(event.stream.id, event.data)
                tell(event.stream.id, "trailers", *said(event.trailers))
                tell(event.stream.id, "end")
            case Headers():
                tell(event.stream.id, "head", *said(event.fields))
                if event.end:
                    tell(event.stream.id, "end")
            case Data():
                content(event.stream.id, event.data)
                if event.end:
                    tell(event.stream.id, "end")
            case Trailers():
                tell(event.stream.id, "trailers", *said(event.fields))
                tell(event.stream.id, "end")
            case Reset():
                tell(event.stream.id, "reset", event.code, event.was_refused)
            case GoAway():
                tell(0, "goaway", event.last_stream, event.code, event.message)
            case Ended():
                tell(0, "ended", event.code, event.message, sorted(one.id for one in event.streams))
    return streams
