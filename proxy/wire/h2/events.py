"""What an HTTP/2 peer has done, as `receive` tells it. Values, and one duty: a `Data` is to be released.

The usual request is one event (`WholeRequest`), and so is the usual answer (`WholeAnswer`). Either may come in parts
instead, as its bytes happened to be cut: `WholeRequest` says what `Headers` and a last `Data` would have said, and
`WholeAnswer` what `Headers`, `Data` and `Trailers` would.
"""

from typing import Any, Final, Protocol

from proxy.wire.h2.fields import Fields
from proxy.wire.h2.frames import ErrorCode
from proxy.wire.h2.sending import Buffer as Buffer
from proxy.wire.h2.stream import Stream


class Owned(Protocol):
    """Bytes that the window counts: their holder calls `release` once it is done with them."""

    def release(self) -> None:
        """The bytes are written or dropped. To say it again changes nothing."""


class WholeRequest:
    """Server: a whole request of one header block and one DATA frame that ends it.

    Nothing is to be released: no more can come on this stream, and its connection has its credit.
    """

    __slots__ = ("data", "fields", "stream")

    def __init__(self, stream: Stream, fields: Fields[Any], data: Buffer) -> None:
        self.stream, self.fields, self.data = stream, fields, data


class WholeAnswer:
    """Client: a whole answer of one header block, one DATA frame and trailers; the stream is over.

    Only for requests that have been sent to their end. Nothing is to be released.
    """

    __slots__ = ("data", "fields", "stream", "trailers")

    def __init__(self, stream: Stream, fields: Fields[Any], data: Buffer, trailers: Fields[Any]) -> None:
        self.stream, self.fields, self.data, self.trailers = stream, fields, data, trailers


class Headers:
    """The first block of a request (server: `stream` is new) or of an answer (client).

    `end`: nothing follows. An answer that ends at once, such as gRPC's Trailers-Only, is this.
    """

    __slots__ = ("end", "fields", "stream")

    def __init__(self, stream: Stream, fields: Fields[Any], end: bool) -> None:
        self.stream, self.fields, self.end = stream, fields, end


class Data:
    """Content of a stream, never empty unless `end`. An `Owned`: its sender may send as much again when
    this is released, so hand it on with the bytes (`send_data(..., owned=data)`) or release it."""

    __slots__ = ("_owed", "data", "end", "stream")

    def __init__(self, stream: Stream, data: Buffer, end: bool) -> None:
        self.stream, self.data, self.end = stream, data, end
        self._owed = len(data)

    def release(self) -> None:
        owed, self._owed = self._owed, 0
        if owed:
            self.stream.released(owed)


class Trailers:
    """The block that ends a stream after its content."""

    __slots__ = ("fields", "stream")

    def __init__(self, stream: Stream, fields: Fields[Any]) -> None:
        self.stream, self.fields = stream, fields


class Reset:
    """A stream is over before its end: the peer has reset it, or broke a rule of it and got a reset.

    What was still to be sent on it has been dropped and released. `message` is empty for a peer's reset.
    `was_refused`: the peer has not begun with it, so that it may be asked of another (GOAWAY,
    REFUSED_STREAM).
    """

    __slots__ = ("code", "message", "stream", "was_refused")

    def __init__(self, stream: Stream, code: int, message: str = "", *, was_refused: bool = False) -> None:
        self.stream, self.code, self.message, self.was_refused = stream, code, message, was_refused


class PeerSettings:
    """The peer has sent its settings, perhaps anew: see `peer_max_streams` and `peer_header_list`."""

    __slots__ = ()


class GoAway:
    """The peer takes no new streams. A `Reset` for each stream above `last_stream` follows."""

    __slots__ = ("code", "last_stream", "message")

    def __init__(self, last_stream: int, code: int, message: bytes) -> None:
        self.last_stream, self.code, self.message = last_stream, code, message


class Ended:
    """The connection is over, the peer has broken the protocol: write what `take_output` has, and close.

    `streams`: all that had not ended. What was still to be sent on them has been dropped and released.
    Comes at most once, and nothing comes after it.
    """

    __slots__ = ("code", "message", "streams")

    def __init__(self, code: ErrorCode, message: str, streams: list[Stream]) -> None:
        self.code, self.message, self.streams = code, message, streams


Event = WholeRequest | WholeAnswer | Headers | Data | Trailers | Reset | PeerSettings | GoAway | Ended
PEER_SETTINGS: Final = PeerSettings()
