"""How slowly a request may come, or its answer be taken, while others wait for what it has in Triton. Pure.

Triton has the beginning of the request and does nothing with that, or the rest of the answer; without a bound a few
clients that stop sending long requests, or reading long answers, keep a model from all others until their time is up.
"""

from typing import Final

# Before so much of it is here it waits for no slot.
BEGUN_BYTES: Final = 64 * 1024
# So long in all, and as much longer as what comes takes at this pace.
PATIENCE_SECONDS: Final = 10.0
BYTES_PER_SECOND: Final = 256 * 1024
# What a client that sends too slowly receives. One that reads too slowly would read that no sooner.
TOO_SLOW: Final = "the request came too slowly (below 256 KiB/s for 10 s) while others waited for its memory"


class MinimumRate:
    """Of one request, or of one answer. Look at it about every second."""

    __slots__ = ("_at", "_left_seconds", "_moved_bytes")

    def __init__(self, moved_bytes: int, now: float) -> None:
        self._moved_bytes, self._at, self._left_seconds = moved_bytes, now, PATIENCE_SECONDS

    def is_too_slow(self, moved_bytes: int, now: float, *, others_wait: bool) -> bool:
        """`moved_bytes`: what the client has sent, or taken, so far. `others_wait`: for it, and not it for us."""
        came, passed = moved_bytes - self._moved_bytes, now - self._at
        self._moved_bytes, self._at = moved_bytes, now
        left = self._left_seconds + came / BYTES_PER_SECOND - (passed if others_wait else 0.0)
        self._left_seconds = min(PATIENCE_SECONDS, left)
        return left < 0
