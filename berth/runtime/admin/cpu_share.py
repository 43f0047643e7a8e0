"""The share of the processor that the admin thread takes, whatever is requested. Pure.

Python runs one thread at a time: while this one works, the loop that serves requests waits. So it works for
about a millisecond, and rests for three times as long.
"""

from typing import Final

PIECE_SECONDS: Final = 0.001
_REST: Final = 3
_MOST_SECONDS: Final = 0.05


class CpuShare:
    """`used`: the thread's own time, of whatever beginning."""

    def __init__(self, used: float) -> None:
        self._rested_at = used

    def has_time(self, used: float) -> bool:
        return used - self._rested_at < PIECE_SECONDS

    def rest_seconds(self, used: float) -> float:
        """How long to rest now; 0.0 where there is time left."""
        if self.has_time(used):
            return 0.0
        worked, self._rested_at = used - self._rested_at, used
        return min(_REST * worked, _MOST_SECONDS)
