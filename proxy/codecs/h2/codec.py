"""One HTTP/2 connection (RFC 9113) without its socket: bytes in, events out; verbs in, bytes out.

    for event in codec.receive(data): ...
    codec.send_answer(event.stream, head, message, trailers)
    while codec.has_output and transport_has_room:
        transport.writelines(codec.take_output())

Nothing here raises for what a peer does. A broken rule of a stream ends that stream (`Reset`), a broken
rule of the connection ends it (`Ended`, with GOAWAY in the output).

Sending: headers and small data go out in the order of the calls. Data that has no room (the stream's
window, the connection's, or what one `take_output` hands out) waits in its stream's queue, and those that
wait take turns, a frame each. Headers and trailers of a stream never overtake its data.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from proxy.codecs.h2.events import Buffer, Event, Owned
from proxy.codecs.h2.fields import FieldReader
from proxy.codecs.h2.flow import Stream
from proxy.codecs.h2.frames import ErrorCode

H = TypeVar("H")
T = TypeVar("T")


class CannotOpen(Exception):
    """No stream can be opened on this connection now; the message says why."""


class H2Codec(Generic[H, T]):
    """What both ends share. `heads` and `trailers` read the blocks that the peer sends."""

    def __init__(self, heads: FieldReader[H], trailers: FieldReader[T], *, wake: Callable[[], None]) -> None:
        """`wake` is called when there is output after there was none, whoever caused it: a verb, `receive`,
        or the release of a `Data`. It must do no more than remember that; it is not called again before
        `take_output`."""

    streams: dict[int, Stream]
    is_closed: bool
    # What the peer allows, as it told last.
    peer_max_streams: int
    peer_header_list: int

    # In and out.

    def receive(self, data: bytes) -> list[Event]:
        """Whatever came. After the end: nothing, silently."""

    def tick(self, now: float) -> list[Event]:
        """Called about every second: a peer's patience budget grows again; a handshake or a header block
        that has stood still for 10 s ends the connection."""

    @property
    def has_output(self) -> bool:
        """Whether `take_output` has something."""

    def take_output(self) -> list[Buffer]:
        """What is to be written next, at most some 256 KiB of data; often one piece.

        Call it only when the transport has room, and again while it has and `has_output` holds. An owned
        piece is released by this call once its last byte is handed out."""

    def lost(self) -> list[Stream]:
        """The transport is gone: drops and releases everything; the streams that had not ended."""

    # Verbs for both ends. On a stream that is over they do nothing, but release what they were given.

    def send_headers(self, stream: Stream, block: bytes, *, end: bool = False) -> None:
        """A block that touches no table (`hpack.encode`, `Fields.forwarded`): an answer's head, trailers."""

    def send_data(
        self, stream: Stream, data: Buffer, *, end: bool = False, owned: Owned | None = None
    ) -> None:
        """`owned.release()` is called exactly once: when the last byte is handed to the transport, or when
        it is dropped because the stream or the connection ends."""

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """RST_STREAM; what waits on it is dropped and released. No `Reset` follows."""

    def ping(self, payload: bytes = bytes(8)) -> None: ...

    def go_away(self, message: str = "") -> None:
        """GOAWAY with NO_ERROR: new streams of the peer are refused, those there are go on."""

    def fail(self, code: ErrorCode, message: str) -> Event | None:
        """GOAWAY and the end, from our side: the `Ended` event; None if it has ended before."""


class ServerCodec(H2Codec[H, T]):
    """Towards a client."""

    def send_answer(
        self, stream: Stream, head: bytes, data: Buffer, trailers: bytes, *, owned: Owned | None = None
    ) -> None:
        """A whole answer at once. The stream is reset with NO_ERROR if the request has not ended."""


class ClientCodec(H2Codec[H, T]):
    """Towards a server."""

    @property
    def can_open(self) -> bool:
        """Whether another stream may be opened now (the peer's limit, GOAWAY, the end, the ids)."""

    @property
    def is_usable(self) -> bool:
        """False when no stream will ever be opened again: a new connection is needed."""

    def open(self, block: bytes, *, end: bool = False) -> Stream:
        """Send a request's head. Raises CannotOpen."""

    def send_call(self, block: bytes, data: Buffer, *, owned: Owned | None = None) -> Stream:
        """A whole request at once, head and content. Raises CannotOpen."""


def is_settled(stream: Stream) -> bool:
    """Whether everything that was sent on a stream has been handed out."""
    raise NotImplementedError


__all__ = ["Any", "CannotOpen", "ClientCodec", "H2Codec", "ServerCodec", "is_settled"]
