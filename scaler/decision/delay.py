"""The largest of the decisions of a while, so that a smaller one counts only once it has lasted.

Source: knative.dev/serving v0.49.1, pkg/autoscaler/aggregation/max.
"""

from collections import deque
from typing import Final

# Knative decides every two seconds, and its slots are as long.
SLOT_SECONDS: Final = 2


class DelayWindow:
    """Values in slots of two seconds: those that may yet be the largest, in descending order."""

    __slots__ = ("_maxima", "_slots")

    def __init__(self, seconds: int) -> None:
        self._slots = -(-seconds // SLOT_SECONDS)
        # Clocks that go back would let it grow: Knative ends there, here the oldest is forgotten.
        self._maxima: deque[tuple[int, int]] = deque(maxlen=self._slots)

    def largest_with(self, second: int, value: int) -> int:
        """Record the decision of this second and give the largest of the window."""
        slot = second // SLOT_SECONDS if second >= 0 else -(-second // SLOT_SECONDS)
        maxima = self._maxima
        while maxima and value >= maxima[-1][1]:
            maxima.pop()
        while maxima and slot - maxima[0][0] >= self._slots:
            maxima.popleft()
        if maxima and maxima[-1][0] == slot:
            value = max(value, maxima.pop()[1])
        maxima.append((slot, value))
        return maxima[0][1]
