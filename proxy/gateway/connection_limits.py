"""How many connections there may be: so many in all, and a replica that has many leaves room for the others. Pure.

A replica gets a further connection while it has fewer than are free: one that takes all it can get ends with half of
them, two with a third each, and there are always as many free as the greediest has (dynamic thresholds,
A. K. Choudhury, E. L. Hahne, IEEE/ACM Trans. Networking 6(2), 1998).
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

# Of those that have not shown a ticket yet.
MOST_PENDING: Final = 1024

A = TypeVar("A", bound=Hashable)


class ConnectionLimit:
    """Of one process."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0

    def take(self, has: int) -> bool:
        """Whether one that has so many gets one more."""
        if has >= self.most - self.taken:
            return False
        self.taken += 1
        return True

    def give_back(self) -> None:
        self.taken -= 1


class PendingConnections(Generic[A]):
    """Connections whose replica is not known yet, by the address that they come from, oldest first.

    One address may have all the room that no other uses: the clients of a pod may well connect all at once.
    """

    def __init__(self, *, most: int = MOST_PENDING) -> None:
        self._most = most
        self._all: OrderedDict[A, tuple[str, float]] = OrderedDict()
        self._by_source: dict[str, OrderedDict[A, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, handshake: A, source: str, now: float) -> A | None:
        """One more; returns the one that has to go for it, which is not among them any more.

        Where there are too many it is the oldest from the address that has the most.
        """
        self._all[handshake] = (source, now)
        self._by_source.setdefault(source, OrderedDict())[handshake] = None
        if len(self._all) <= self._most:
            return None
        largest = max(self._by_source.values(), key=len)
        oldest = next(iter(largest))
        self.remove(oldest)
        return oldest

    def remove(self, handshake: A) -> None:
        known = self._all.pop(handshake, None)
        if known is None:
            return
        source = known[0]
        mine = self._by_source[source]
        del mine[handshake]
        if not mine:
            del self._by_source[source]

    def late(self, before: float) -> list[A]:
        """Those that came before this time, which are not among them any more."""
        found = []
        while self._all:
            handshake, (_, came) = next(iter(self._all.items()))
            if came >= before:
                break
            self.remove(handshake)
            found.append(handshake)
        return found
