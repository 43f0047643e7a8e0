"""Few at once, fair between namespaces, with a queue that has an end. No I/O; runs on the event loop alone."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef


class _Waiter:
    def __init__(self, ref: PodRef) -> None:
        self.ref = ref
        self.granted = asyncio.Event()


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
        self._slots, self._places, self._wait_seconds = slots, places, wait_seconds
        self._per_pod, self._busy = per_pod, busy
        self._running: list[_Waiter] = []
        self._waiting: list[_Waiter] = []

    @property
    def running(self) -> list[PodRef]:
        return [one.ref for one in self._running]

    @property
    def waiting(self) -> list[PodRef]:
        return [one.ref for one in self._waiting]

    def pods(self) -> set[PodUid]:
        return {ref.uid for ref in (*self.running, *self.waiting)}

    def require_place(self, ref: PodRef) -> None:
        """Raises what `busy` makes."""
        if not _is_fair(ref.namespace, self._waiting, self._places):
            raise self._busy()

    @asynccontextmanager
    async def slot(self, ref: PodRef) -> AsyncIterator[None]:
        """A slot for as long as the block lasts. Raises what `busy` makes."""
        self.require_place(ref)
        waiter = _Waiter(ref)
        self._waiting.append(waiter)
        self._grant()
        try:
            await self._until_granted(waiter)
            yield
        finally:
            self._leave(waiter)

    async def _until_granted(self, waiter: _Waiter) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiter.granted.wait()
        except TimeoutError:
            self._leave(waiter)
            raise self._busy() from None

    def _leave(self, waiter: _Waiter) -> None:
        for those in (self._running, self._waiting):
            if waiter in those:
                those.remove(waiter)
        self._grant()

    def _grant(self) -> None:
        for waiter in list(self._waiting):
            pods = Counter(one.ref.uid for one in self._running)
            if pods[waiter.ref.uid] < self._per_pod and _is_fair(
                waiter.ref.namespace, self._running, self._slots
            ):
                self._waiting.remove(waiter)
                self._running.append(waiter)
                waiter.granted.set()


def _is_fair(namespace: str, taken: Sequence[_Waiter], most: int) -> bool:
    return sum(one.ref.namespace == namespace for one in taken) < most - len(taken)
