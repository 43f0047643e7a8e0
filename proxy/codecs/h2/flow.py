"""The ledger of one stream: what its peer may still send, what is here, what it will be given back.

    receive_left + owed + held == window

`receive_left`: what the peer may send. `held`: came, and is somebody's (see `events.Data`). `owed`: was
released, and is told to the peer once it is worth a frame. A stream's own window is given back as its bytes
are used; the connection's at once, so that no stream can use up what its neighbours need.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxy.codecs.h2.codec import H2Codec
    from proxy.codecs.h2.events import Owned


class Stream:
    """One stream of one connection. `owner` is free for whoever uses it; the rest belongs to the codec."""

    __slots__ = (
        "held",
        "codec",
        "id",
        "is_closed",
        "length",
        "local_done",
        "owed",
        "owner",
        "queue",
        "receive_left",
        "received",
        "remote_done",
        "send_window",
        "window",
    )
