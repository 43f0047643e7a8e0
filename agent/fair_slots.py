"""Few at once, fair between namespaces, with a queue that has an end. No I/O; runs on the event loop alone."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import TypeVar

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef

T = TypeVar("T", bound=Hashable)


class _Holders:
    """Which pods hold some of `most` things, in the order in which they came; counted, so that each question costs
    the same however many they are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.refs: dict[asyncio.Event, PodRef] = {}
        self.pods: Counter[PodUid] = Counter()
        self._namespaces: Counter[str] = Counter()

    def has_share(self, namespace: str) -> bool:
        """One more, only while it holds fewer than are free."""
        return self._namespaces.get(namespace, 0) < self._most - len(self.refs)

    def add(self, granted: asyncio.Event, ref: PodRef) -> None:
        self.refs[granted] = ref
        self.pods[ref.uid] += 1
        self._namespaces[ref.namespace] += 1

    def remove(self, granted: asyncio.Event) -> None:
        """No harm where it is not there."""
        if (ref := self.refs.pop(granted, None)) is not None:
            _take_one(self.pods, ref.uid)
            _take_one(self._namespaces, ref.namespace)


class FairSlots:
    """`slots` run at once, and `per_pod` of a pod.

    A namespace may take one more only while it holds fewer than are free: alone it gets half of them, the next
    half of the rest, and one is there for each that comes until none is left. So a namespace that waits with
    nothing goes before those that hold some, and of those that may go the first that came. The same rule holds
    for the `places` of those that wait, each for `wait_seconds` at most. `busy` makes the error of who gets none.
    """

    def __init__(
        self, *, slots: int, places: int, wait_seconds: float, per_pod: int, busy: Callable[[], Exception]
    ) -> None:
        self._wait_seconds, self._per_pod, self._busy = wait_seconds, per_pod, busy
        self._running, self._waiting = _Holders(slots), _Holders(places)

    @property
    def running(self) -> list[PodRef]:
        return list(self._running.refs.values())

    @property
    def waiting(self) -> list[PodRef]:
        return list(self._waiting.refs.values())

    def pods(self) -> set[PodUid]:
        return {*self._running.pods, *self._waiting.pods}

    def require_place(self, ref: PodRef) -> None:
        """Raises what `busy` makes."""
        if not self._waiting.has_share(ref.namespace):
            raise self._busy()

    @asynccontextmanager
    async def slot(self, ref: PodRef) -> AsyncIterator[None]:
        """A slot for as long as the block lasts. Raises what `busy` makes."""
        self.require_place(ref)
        granted = asyncio.Event()
        self._waiting.add(granted, ref)
        self._grant()
        try:
            await self._until(granted)
            yield
        finally:
            self._leave(granted)

    async def _until(self, granted: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await granted.wait()
        except TimeoutError:
            self._leave(granted)
            raise self._busy() from None

    def _leave(self, granted: asyncio.Event) -> None:
        self._running.remove(granted)
        self._waiting.remove(granted)
        self._grant()

    def _grant(self) -> None:
        running, most = self._running, self._per_pod
        for granted, ref in list(self._waiting.refs.items()):
            if running.pods.get(ref.uid, 0) < most and running.has_share(ref.namespace):
                self._waiting.remove(granted)
                running.add(granted, ref)
                granted.set()


def _take_one(counted: Counter[T], key: T) -> None:
    counted[key] -= 1
    if not counted[key]:
        del counted[key]
