"""The ledger of one stream: what its peer may still send, what is here, what it will be given back.

    receive_left + owed + held == window

`receive_left`: what the peer may send. `held`: came, and has an owner (see `events.Data`). `owed`: was
released, and is sent to the peer once it is worth a frame. A stream's own window is given back as its bytes
are used; the connection's at once, so that no stream can use up what its neighbours need.
"""

from collections import deque
from typing import Any, Final, Protocol

# What a peer may have on its way to us for a stream: until it is first read, and at most, as its
# window grows while it is drained. A first frame always fits, which the usual call relies on.
FIRST_WINDOW: Final = 128 * 1024
WIDEST_WINDOW: Final = 512 * 1024


class Connection(Protocol):
    """What a stream asks of its connection."""

    def widening(self, stream: "Stream") -> int:
        """By how much the window of a stream may grow that is being drained."""
        ...

    def open_window(self, id: int, size: int) -> None:
        """Let the peer send so many bytes more."""
        ...


class Stream:
    """One stream of one connection. `owner` is free for the user; the rest belongs to the codec."""

    # Most streams never need more than these.
    window = receive_left = FIRST_WINDOW
    owed = held = received = 0
    begun = local_done = remote_done = is_closed = takes_turns = False
    length: int | None = None
    owner: Any = None
    # What waits to be sent: bytes, whether they are a header block, whether they end the stream, and whose
    # they are. Content comes first: blocks that nothing waits before are never put here.
    queue: "deque[tuple[Any, bool, bool, Any]] | None" = None

    def __init__(self, connection: Connection, id: int, send_window: int) -> None:
        self._connection, self.id, self.send_window = connection, id, send_window

    def arrived(self, size: int) -> None:
        """So many bytes have come and have an owner now."""
        self.receive_left -= size
        self.held += size

    def released(self, size: int) -> None:
        """So many bytes that came are used or dropped: their sender may send as many more."""
        self.held -= size
        self.owed += size
        if self.owed >= self.window // 2 and not self.remote_done and not self.is_closed:
            self.window += self._connection.widening(self)
            size, self.owed = self.window - self.receive_left - self.held, 0
            self.receive_left += size
            self._connection.open_window(self.id, size)
