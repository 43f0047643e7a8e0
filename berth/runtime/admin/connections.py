"""Which connections an admin port keeps: so many in all, and an address with many makes way for the others. Pure.

A connection is *slow* while it is the client's turn: it has not sent its whole head, or not read its answer. The others
await an answer, which comes within a bound, and are never closed. One address may have all the places that no other
requests; where none is left, the address with the most slow connections loses its oldest one. So a prober or a scraper,
which asks at once and reads its answer, finds a place however many others are slow.
"""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class Connections(Generic[C]):
    """At most `most`: before one more is added, `to_evict` is asked."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[C, str] = {}
        self._slow: dict[str, dict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[C]:
        """Those that are open now; they may close while they are looked at."""
        return iter(list(self._sources))

    @property
    def has_place(self) -> bool:
        return len(self._sources) < self._most

    def to_evict(self) -> C | None:
        """Which to close for one more; None where all await an answer."""
        slowest = max(self._slow.values(), key=len, default={})
        return next(iter(slowest), None)

    def add(self, connection: C, source: str) -> None:
        """It has sent nothing yet. `source`: the address that it comes from."""
        self._sources[connection] = source
        self._slow.setdefault(source, {})[connection] = None

    def awaits_answer(self, connection: C) -> None:
        """Its request is read."""
        self._forget_slow(connection)

    def answered(self, connection: C) -> None:
        """Its answer is there to be read."""
        source = self._sources.get(connection)
        if source is not None:
            self._slow.setdefault(source, {})[connection] = None

    def remove(self, connection: C) -> None:
        self._forget_slow(connection)
        self._sources.pop(connection, None)

    def _forget_slow(self, connection: C) -> None:
        source = self._sources.get(connection)
        mine = None if source is None else self._slow.get(source)
        if mine is not None and source is not None:
            mine.pop(connection, None)
            if not mine:
                del self._slow[source]
