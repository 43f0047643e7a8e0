"""Who is served next where many share one process: deficit round robin by bytes and calls. Pure.

What has come for a replica is served at once while the replica has credit left in this turn of the loop; what
comes after that waits, and is served in the next turns, a quantum of each replica's in turn. So a turn is short
whatever one replica's clients send, and what they have to wait for is their own. How many connections bring it
makes no difference. While no model exceeds its quantum nothing ever waits.

M. Shreedhar, G. Varghese: Efficient Fair Queuing using Deficit Round-Robin, SIGCOMM 1995; here what a piece
costs is known only once it has been served, so that a credit may become negative.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

# What a call costs beside its bytes, which is about how many nanoseconds one takes; and what a replica may take in one
# turn: four calls are under a millisecond.
# Another replica's request waits for two turns, its own and its answer's; shorter ones would cost more than they help.
CALL_COST: Final = 64 * 1024
QUANTUM: Final = 4 * CALL_COST

T = TypeVar("T", bound=Hashable)


class Share(Generic[T]):
    """One replica's part. `waiting`: what has come for it and is not served yet, in order; each waits there once."""

    __slots__ = ("credit", "is_queued", "is_touched", "waiting")

    def __init__(self) -> None:
        self.credit = QUANTUM
        self.waiting: OrderedDict[T, None] = OrderedDict()
        self.is_touched = self.is_queued = False

    @property
    def may_go_on(self) -> bool:
        """Whether what comes now is served at once."""
        return self.credit > 0 and not self.waiting


class DeficitRoundRobin(Generic[T]):
    """The replicas of one process. After what has been served call `spend`; once in a turn call `next_turn`."""

    def __init__(self) -> None:
        # Those whose credit is not whole.
        self._touched: list[Share[T]] = []
        # Those for whom something waits, in the order in which they are served.
        self._queue: deque[Share[T]] = deque()

    @property
    def has_waiting(self) -> bool:
        """Whether there must be a next turn."""
        return bool(self._queue)

    def spend(self, share: Share[T], cost: int) -> None:
        share.credit -= cost
        if not share.is_touched:
            share.is_touched = True
            self._touched.append(share)

    def wait(self, share: Share[T], item: T) -> None:
        """It is served in one of the next turns. It must not wait already."""
        share.waiting[item] = None
        if not share.is_queued:
            share.is_queued = True
            self._queue.append(share)

    def drop(self, share: Share[T], item: T) -> None:
        """It is not to be served any more."""
        share.waiting.pop(item, None)

    def next_turn(self, serve: Callable[[T], int]) -> None:
        """Give every replica its quantum and serve what waits, as far as the quanta go.

        `serve` returns what it cost. Who is still in debt waits for its next quantum; where all who wait
        are, nothing is gained by that, and all get as many quanta as bring one of them out of it.
        """
        self._refill()
        for _ in range(len(self._queue)):
            share = self._queue.popleft()
            while share.waiting and share.credit > 0:
                self.spend(share, serve(share.waiting.popitem(last=False)[0]))
            share.is_queued = bool(share.waiting)
            if share.is_queued:
                self._queue.append(share)

    def _refill(self) -> None:
        rounds = 1
        if self._queue:
            rounds = max(1, 1 + -max(share.credit for share in self._queue) // QUANTUM)
        touched, self._touched = self._touched, []
        for share in touched:
            share.credit = min(QUANTUM, share.credit + rounds * QUANTUM)
            share.is_touched = share.credit < QUANTUM
            if share.is_touched:
                self._touched.append(share)
