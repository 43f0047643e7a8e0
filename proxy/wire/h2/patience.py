"""How many frames that move no request forward a peer may send: in proportion to what it is sent."""

from math import inf
from typing import Final

from proxy.wire.h2.frames import ConnectionFailed, ErrorCode

# So many at once, and so many more each second.
PATIENCE: Final = 4_000
PER_SECOND: Final = 2_000
# All streams of a connection may be given up at once, though nothing was ever sent on them.
RESET_COST: Final = 3
# A window that changes moves those of all streams: so many of them cost as much as a frame.
STREAMS_PER_COST: Final = 50
# Data that we send is answered with windows, and measured with pings: so many a frame (as Envoy has it),
# and one more for so many bytes (Go's x/net/http2 tells of 4 KiB, once for the stream and once for all).
ANSWERS_PER_FRAME: Final = 10
BYTES_PER_ANSWER_LOG2: Final = 9


class Patience:
    """One connection's. `left` grows by what is useful, `answers` by what we send: both by those who see it."""

    __slots__ = ("_most", "answers", "left")

    def __init__(self, *, is_endless: bool) -> None:
        """`is_endless`: the peer is one of us, and may say what it likes as often as it likes."""
        self._most: float = inf if is_endless else PATIENCE
        self.left, self.answers = self._most, inf if is_endless else 0

    def spend(self, cost: int = 1) -> None:
        """Raises ConnectionFailed."""
        self.left -= cost
        if self.left < 0:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")

    def spend_answer(self) -> None:
        """A frame that may be an answer to data of ours."""
        if self.answers > 0:
            self.answers -= 1
        else:
            self.spend()

    def calm_down(self) -> None:
        """A second has passed."""
        self.left = min(self._most, self.left + PER_SECOND)
