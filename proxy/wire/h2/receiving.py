"""The receiving half of a connection in parts: what is not whole yet, what may still come, and what was reset."""

from collections import OrderedDict
from typing import Final

from proxy.wire.h2.frames import HEAD_BYTES
from proxy.wire.h2.stream import FIRST_WINDOW, WIDEST_WINDOW, Stream

CONNECTION_WINDOW: Final = 2 * 1024 * 1024
# What has come on a connection is given back once it is so much.
CREDIT_BYTES: Final = CONNECTION_WINDOW // 2
# What streams of one connection may have beyond their first windows, all together.
WIDER_BYTES = 12 * 1024 * 1024
# Streams that were reset: what one end still says of them was on its way, or is said twice (Triton does).
_REMEMBERED_RESETS = 1_000
# Instead of what may be on its way: the peer itself has reset the stream.
RESET_BY_PEER: Final = -1
# A connection that has not said a word of HTTP/2, or stopped in the middle of a header block.
_PATIENT_SECONDS = 10.0


class Unread:
    """What could not be read yet, and how much is wanted before it is looked at again."""

    __slots__ = ("need", "parts", "size")

    def __init__(self, need: int) -> None:
        self.parts: list[bytes] = []
        self.size, self.need = 0, need

    def put_together(self, data: bytes) -> bytes:
        """What came before with what has come; nothing while it is not enough."""
        if data:
            self.parts.append(data)
        self.size += len(data)
        if self.size < self.need:
            return b""
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        self.size = 0
        return data

    def keep(self, data: bytes) -> None:
        self.parts.append(data)
        self.size = len(data)

    @property
    def head(self) -> bytes:
        """The beginning of a frame that has begun."""
        return b"".join(self.parts)[:HEAD_BYTES]


class LongFrame:
    """A DATA frame that is handed on as it comes. `left`: bytes still to come; `stream`: None, of a closed stream."""

    __slots__ = ("flags", "left", "stream")

    def __init__(self, left: int, flags: int, stream: Stream | None) -> None:
        self.left, self.flags, self.stream = left, flags, stream


class ReceiveWindow:
    """What the peer may send on the connection, and how far its streams' windows may still grow."""

    __slots__ = ("owed", "wider_left")

    def __init__(self) -> None:
        self.owed, self.wider_left = 0, WIDER_BYTES

    @property
    def left(self) -> int:
        return CONNECTION_WINDOW - self.owed

    def widening(self, stream: Stream) -> int:
        """By how much the window of a stream may grow that is being drained."""
        more = min(stream.window, WIDEST_WINDOW - stream.window, self.wider_left)
        self.wider_left -= more
        return more

    def narrow(self, stream: Stream) -> None:
        """A stream is over whose window had grown."""
        self.wider_left += stream.window - FIRST_WINDOW


class ResetStreams:
    """Streams that were reset, and how much data for each may have been on its way."""

    __slots__ = ("_forgotten", "_on_their_way")

    def __init__(self) -> None:
        self._on_their_way: OrderedDict[int, int] = OrderedDict()
        self._forgotten = 0

    def remember(self, id: int, on_its_way: int) -> None:
        self._on_their_way[id] = on_its_way
        if len(self._on_their_way) > _REMEMBERED_RESETS:
            forgotten, _ = self._on_their_way.popitem(last=False)
            self._forgotten = max(self._forgotten, forgotten)

    def may_hold(self, id: int) -> bool:
        """Whether it was reset, as far as is known."""
        return id in self._on_their_way or id <= self._forgotten

    def was_by_peer(self, id: int) -> bool:
        return self._on_their_way.get(id, 0) == RESET_BY_PEER

    def takes(self, id: int, size: int) -> bool:
        """Whether so much of what comes for it was on its way already."""
        on_its_way = self._on_their_way.get(id, 0)
        if not 0 < size <= on_its_way:
            return False
        self._on_their_way[id] = on_its_way - size
        return True


class Stall:
    """Whether a peer stands still where it owes the next word."""

    __slots__ = ("_at", "_since")

    def __init__(self) -> None:
        self._at, self._since = 0, 0.0

    def is_too_long(self, at: int, now: float) -> bool:
        """`at`: where it stands, 0: nowhere. Ask every second."""
        if not at or at != self._at:
            self._at, self._since = at, now
            return False
        return now - self._since > _PATIENT_SECONDS
