"""How long to wait before the next try."""

import random
from collections.abc import Callable


class Backoff:
    """Delays that start at `initial_seconds`, grow by `factor` and stop growing at `cap_seconds`.

    Each delay is spread by ± `jitter` of itself so that many callers do not retry in step.
    """

    def __init__(
        self,
        *,
        initial_seconds: float,
        cap_seconds: float,
        factor: float = 2.0,
        jitter: float = 0.1,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        self._initial, self._cap, self._factor = initial_seconds, cap_seconds, factor
        self._jitter, self._random_unit = jitter, random_unit
        self.failures = 0

    def next(self) -> float:
        """The delay in seconds after one more failure."""
        # The exponent is bounded so that a failure that lasts for days cannot overflow a float.
        delay = min(self._cap, self._initial * self._factor ** min(self.failures, 64))
        self.failures += 1
        return delay * (1 + self._jitter * (2 * self._random_unit() - 1))

    def reset(self) -> None:
        self.failures = 0
