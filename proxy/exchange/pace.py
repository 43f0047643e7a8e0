"""How slowly a request may come to its end while others wait for the memory that it has in Triton. Pure.

Triton has the beginning of it and does nothing with that; without a bound a few clients that stop sending long
requests keep a model from all others until their time is up.
"""

from typing import Final

# Before so much of it is here it asks for no slot.
BEGUN_BYTES: Final = 64 * 1024
# So long in all, and as much longer as what comes takes at this pace.
PATIENCE_SECONDS: Final = 10.0
BYTES_PER_SECOND: Final = 256 * 1024
TOO_SLOW: Final = "the request came too slowly (below 256 KiB/s for 10 s) while others waited for its memory"


class Pace:
    """Of one request. Look at it about every second."""

    __slots__ = ("_at", "_left_seconds", "_received_bytes")

    def __init__(self, received_bytes: int, now: float) -> None:
        self._received_bytes, self._at, self._left_seconds = received_bytes, now, PATIENCE_SECONDS

    def is_too_slow(self, received_bytes: int, now: float, *, others_wait: bool) -> bool:
        """`others_wait`: for it, and not it for us."""
        came, passed = received_bytes - self._received_bytes, now - self._at
        self._received_bytes, self._at = received_bytes, now
        left = self._left_seconds + came / BYTES_PER_SECOND - (passed if others_wait else 0.0)
        self._left_seconds = min(PATIENCE_SECONDS, left)
        return left < 0
