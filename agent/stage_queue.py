"""Which pods may send files now: few at once, fair between namespaces, with a bounded queue."""

from contextlib import AbstractAsyncContextManager

from agent.fair_slots import FairSlots
from agent.limits import Busy, RateLimiter
from berth.contract.pod import PodRef

SLOTS = 8
PLACES = 64
# After this time a waiter gets Busy, so that its log can say what it waits for.
_WAIT_SECONDS = 30.0
_RETRY_SECONDS = 3.0
# A pod's streams, at once and a second in the long run: what is staged is loaded, and other models of its GPU
# wait for that.
STAGE_BURST, STAGE_RATE = 20.0, 0.5


class StageQueue:
    """SLOTS streams run at once, and one of a pod; PLACES wait."""

    def __init__(self, *, wait_seconds: float = _WAIT_SECONDS) -> None:
        self._slots = FairSlots(
            slots=SLOTS, places=PLACES, wait_seconds=wait_seconds, per_pod=1, busy=self._busy
        )
        self._rates = RateLimiter(rate=STAGE_RATE, burst=STAGE_BURST)

    def slot(self, ref: PodRef) -> AbstractAsyncContextManager[None]:
        """A slot for as long as the block lasts. Raises Busy."""
        if ref.uid in self._slots.pods():
            raise Busy(f"pod {ref} is staging already; one stream at a time", retry_seconds=_RETRY_SECONDS)
        self._slots.require_place(ref)
        if seconds := self._rates.take(ref.uid):
            raise Busy(f"pod {ref} stages too often; try again later", retry_seconds=seconds)
        return self._slots.slot(ref)

    @property
    def waiting(self) -> list[PodRef]:
        return self._slots.waiting

    def _busy(self) -> Busy:
        return Busy(
            f"the node is busy: it takes {len(self._slots.running)} models now and"
            f" {len(self._slots.waiting)} wait; try again",
            retry_seconds=_RETRY_SECONDS,
        )
