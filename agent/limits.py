"""How much of the agent one caller may take. No I/O; runs on the event loop alone."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef

# A pod's loader and proxy have three calls open together; those of a container that was killed are seen to be
# over only later.
OPEN_CALLS = 8
# Calls a second in the long run. Both retry with pauses that grow to seconds.
CALL_RATE, CALL_BURST = 2.0, 40.0
_MOST_CALLERS = 4096  # whose rates are kept: more pods than a node ever has at once


class Busy(Exception):
    """Not now. The same call will be taken later, not before `retry_seconds`."""

    def __init__(self, message: str, *, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class Rates:
    """A token bucket for each key: `burst` at once, `rate` a second in the long run."""

    def __init__(
        self,
        *,
        rate: float,
        burst: float,
        most: int = _MOST_CALLERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._burst, self._most, self._clock = rate, burst, most, clock
        # Tokens, and when that was; the least recently used first, which is the fullest or nearly so.
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable, *, cost: float = 1.0) -> float:
        """0 if it is taken. Otherwise the seconds after which it could be; nothing is taken then."""
        now = self._clock()
        had, at = self._buckets.pop(key, (self._burst, now))
        have = min(self._burst, had + (now - at) * self._rate)
        short = cost - have
        self._buckets[key] = (have if short > 0 else have - cost, now)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return max(0.0, short) / self._rate


class Callers:
    """Each pod's calls: how many are open, and how often it makes one."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: Counter[PodUid] = Counter()
        self._rates = Rates(rate=CALL_RATE, burst=CALL_BURST, clock=clock)

    @contextmanager
    def call(self, ref: PodRef, *, cost: float) -> Iterator[None]:
        """One call, for as long as the block lasts. Raises Busy."""
        if seconds := self._rates.take(ref.uid, cost=cost):
            raise Busy(f"pod {ref} calls too often; try again later", retry_seconds=seconds)
        if self._open[ref.uid] >= OPEN_CALLS:
            raise Busy(f"pod {ref} has {OPEN_CALLS} calls open already; close some", retry_seconds=5.0)
        self._open[ref.uid] += 1
        try:
            yield
        finally:
            self._open[ref.uid] -= 1
            if not self._open[ref.uid]:
                del self._open[ref.uid]


class Patience:
    """How long a sender may keep us waiting: `seconds` in all, of which what it sends earns some back.

    So one that falls silent is given up, and one that trickles, too; whatever time our own disk takes
    is not counted against it. A stream thus ends within its size / `bytes_per_second` + `seconds`.
    """

    def __init__(self, *, seconds: float, bytes_per_second: float) -> None:
        self._most = self.left_seconds = seconds
        self._rate = bytes_per_second

    def waited(self, seconds: float, *, then_came_bytes: int) -> None:
        left = self.left_seconds - seconds + then_came_bytes / self._rate
        self.left_seconds = min(self._most, left)
