"""Who may stay connected to an admin port: so many in all, and whoever has many leaves room for the others. Pure.

A guest is *slow* while it is its own turn: it has not said its whole head, or not taken its answer. The others are
owed an answer, which comes within a bound, and are never sent away. One address may have all the places that
nobody else asks for; where none is left, the address with the most slow guests gives up its first one. So a
prober or a scraper, which asks at once and takes its answer, finds a place however many others dawdle.
"""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

G = TypeVar("G", bound=Hashable)


class Guests(Generic[G]):
    """At most `most`; whoever adds one more asks `first_to_go` first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[G, str] = {}
        self._slow: dict[str, dict[G, None]] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[G]:
        """Those that are there now; they may go while they are looked at."""
        return iter(list(self._sources))

    @property
    def has_room(self) -> bool:
        return len(self._sources) < self._most

    def first_to_go(self) -> G | None:
        """Who goes for one more; None where all are owed an answer."""
        crowd = max(self._slow.values(), key=len, default={})
        return next(iter(crowd), None)

    def add(self, guest: G, source: str) -> None:
        """It has said nothing yet. `source`: the address that it comes from."""
        self._sources[guest] = source
        self._slow.setdefault(source, {})[guest] = None

    def owe(self, guest: G) -> None:
        """It has asked, and waits."""
        self._forget_slow(guest)

    def answered(self, guest: G) -> None:
        """It has its answer to take now."""
        source = self._sources.get(guest)
        if source is not None:
            self._slow.setdefault(source, {})[guest] = None

    def remove(self, guest: G) -> None:
        self._forget_slow(guest)
        self._sources.pop(guest, None)

    def _forget_slow(self, guest: G) -> None:
        source = self._sources.get(guest)
        mine = None if source is None else self._slow.get(source)
        if mine is not None and source is not None:
            mine.pop(guest, None)
            if not mine:
                del self._slow[source]
