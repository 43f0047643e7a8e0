"""How much of something may be done by now: so much a second, and some of it saved up. Pure; the clock is injected."""

from collections.abc import Callable


class TokenBucket:
    """`most`: what is saved up at the beginning, and at most."""

    def __init__(self, *, per_second: float, most: int, clock: Callable[[], float]) -> None:
        self._per_second, self._most, self._clock = per_second, most, clock
        self._left, self._since = float(most), clock()

    def left(self) -> int:
        """How much may be done now; never less than 0."""
        now = self._clock()
        self._left = min(float(self._most), self._left + (now - self._since) * self._per_second)
        self._since = now
        return max(0, int(self._left))

    def spend(self, amount: int) -> None:
        """So much was done. More than was left is paid back first."""
        self._left -= amount
