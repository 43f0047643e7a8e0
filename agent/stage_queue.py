"""Which pods may send files now: few at once, fair between namespaces, with a bounded queue."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agent.limits import Busy, RateLimiter
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef

SLOTS = 8
PLACES = 64
# After this time a waiter gets Busy, so that its log can say what it waits for.
_WAIT_SECONDS = 30.0
_RETRY_SECONDS = 3.0
# A pod's streams, at once and a second in the long run: what is staged is loaded, and other models of its GPU
# wait for that.
STAGE_BURST, STAGE_RATE = 20.0, 0.5


class _Waiter:
    def __init__(self, ref: PodRef) -> None:
        self.ref = ref
        self.granted = asyncio.Event()


class StageQueue:
    """SLOTS streams run at once, and one of a pod.

    A namespace may take one more only while it holds fewer than are free: alone it gets half of them, the next
    half of the rest, and one is there for each that comes until none is left. So a namespace that waits with
    nothing goes before those that hold some, and of those that may go the first that came. The same rule holds
    for the places in the queue.
    """

    def __init__(
        self, *, slots: int = SLOTS, places: int = PLACES, wait_seconds: float = _WAIT_SECONDS
    ) -> None:
        self._slots, self._places, self._wait_seconds = slots, places, wait_seconds
        self._rates = RateLimiter(rate=STAGE_RATE, burst=STAGE_BURST)
        self._running: list[_Waiter] = []
        self._waiting: list[_Waiter] = []

    @asynccontextmanager
    async def slot(self, ref: PodRef) -> AsyncIterator[None]:
        """A slot for as long as the block lasts. Raises Busy."""
        waiter = self._joined(ref)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiter.granted.wait()
        except TimeoutError:
            self._leave(waiter)
            raise self._busy() from None
        except BaseException:
            self._leave(waiter)
            raise
        try:
            yield
        finally:
            self._leave(waiter)

    def _joined(self, ref: PodRef) -> _Waiter:
        if ref.uid in self._pods():
            raise Busy(f"pod {ref} is staging already; one stream at a time", retry_seconds=_RETRY_SECONDS)
        if not self._is_fair(ref.namespace, self._waiting, self._places):
            raise self._busy()
        if seconds := self._rates.take(ref.uid):
            raise Busy(f"pod {ref} stages too often; try again later", retry_seconds=seconds)
        waiter = _Waiter(ref)
        self._waiting.append(waiter)
        self._grant()
        return waiter

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._running:
            self._running.remove(waiter)
        else:
            self._waiting.remove(waiter)
        self._grant()

    def _grant(self) -> None:
        for waiter in list(self._waiting):
            if self._is_fair(waiter.ref.namespace, self._running, self._slots):
                self._waiting.remove(waiter)
                self._running.append(waiter)
                waiter.granted.set()

    @staticmethod
    def _is_fair(namespace: str, taken: list[_Waiter], most: int) -> bool:
        return sum(one.ref.namespace == namespace for one in taken) < most - len(taken)

    def _pods(self) -> set[PodUid]:
        return {one.ref.uid for one in (*self._running, *self._waiting)}

    def _busy(self) -> Busy:
        return Busy(
            f"the node is busy: it takes {len(self._running)} models now and {len(self._waiting)} wait;"
            " try again",
            retry_seconds=_RETRY_SECONDS,
        )
