"""The limit on requests inside Triton: so many run, so many wait in order, the rest is turned away.

REST and gRPC share one breaker. A slot is handed over by its releaser to the one that has waited
longest, in the same step, so nobody overtakes. Modelled on Knative's pkg/queue/breaker.go, which is
not strictly FIFO.
"""

import asyncio
import os
from collections import OrderedDict
from typing import Protocol

from proxy.exchange.load import LoadMeter

QUEUE_FULL = "pending request queue full"


class QueueFull(Exception):
    """As many wait as may; try again later."""

    def __init__(self) -> None:
        super().__init__(QUEUE_FULL)


class Waiter(Protocol):
    """Who asks for a slot. Must be hashable."""

    def granted(self) -> None:
        """The slot is there. Must not raise."""
        ...


class Breaker:
    """`enter`, then `leave` once for each slot that was had; `cancel` instead, while still waiting."""

    def __init__(self, meter: LoadMeter, *, limit: int, queue_depth: int) -> None:
        """`limit` 0: everything runs at once, and is still counted."""
        self._meter, self._limit, self._depth = meter, limit, queue_depth
        self._waiting: OrderedDict[Waiter, None] = OrderedDict()
        # Only while somebody waits for nothing to be there.
        self._idle: asyncio.Event | None = None
        self.running = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, waiter: Waiter, now: float) -> bool:
        """True: it has a slot. False: it waits, and `granted` tells. Raises QueueFull at once.

        Waiting counts as concurrency. `now`: on the meter's clock.
        """
        if self.enter_at_once(now):
            return True
        if not self._take_place():
            self._meter.refused()
            raise QueueFull
        self._waiting[waiter] = None
        self._meter.enter(now)
        self._watch(True)
        return False

    def enter_at_once(self, now: float) -> bool:
        """Take a slot if one is free and nobody waits for it."""
        if self._waiting or not self._take():
            return False
        self.running += 1
        self._meter.enter(now)
        return True

    def leave(self, now: float) -> None:
        """Give a slot back, to the next in the queue."""
        self._meter.leave(now)
        self.running -= 1
        self._give()
        if self._waiting:
            self.hand_out()
        else:
            self._look_idle()

    def cancel(self, waiter: Waiter, now: float) -> None:
        """It waits no more and leaves no trace."""
        del self._waiting[waiter]
        if not self._waiting:
            self._watch(False)
        self._give_place()
        self._meter.leave(now)
        self._look_idle()

    def hand_out(self) -> None:
        """Give free slots to those who wait."""
        while self._waiting and self._take():
            waiter, _ = self._waiting.popitem(last=False)
            if not self._waiting:
                self._watch(False)
            self._give_place()
            self.running += 1
            waiter.granted()

    async def idle(self) -> None:
        """Return when nothing runs and nothing waits. For one caller at a time."""
        while self.running or self._waiting:
            self._idle = asyncio.Event()
            await self._idle.wait()
        self._idle = None

    def _take(self) -> bool:
        return not self._limit or self.running < self._limit

    def _give(self) -> None:
        """`running` has told already."""

    def _take_place(self) -> bool:
        return len(self._waiting) < self._depth

    def _give_place(self) -> None:
        """The length of the queue has told already."""

    def _watch(self, waiting: bool) -> None:
        """Whether anybody waits for what another process may give."""

    def _look_idle(self) -> None:
        if self._idle is not None and not self.running and not self._waiting:
            self._idle.set()


class SharedBreaker(Breaker):
    """One process' part of a limit that several share: two counters in the kernel (eventfd(2), EFD_SEMAPHORE).

    Among the requests of one process nobody overtakes; between processes the kernel's order decides.
    """

    def __init__(self, meter: LoadMeter, slots: int, places: int) -> None:
        """Descriptors of the free slots and of the free places in the queue, as `shared_limit` makes them."""
        super().__init__(meter, limit=0, queue_depth=0)
        self._slots, self._places = slots, places
        self._watching = False

    def _take(self) -> bool:
        return _decrement(self._slots)

    def _give(self) -> None:
        os.eventfd_write(self._slots, 1)

    def _take_place(self) -> bool:
        return _decrement(self._places)

    def _give_place(self) -> None:
        os.eventfd_write(self._places, 1)

    def _watch(self, waiting: bool) -> None:
        loop = asyncio.get_running_loop()
        if waiting and not self._watching:
            loop.add_reader(self._slots, self.hand_out)
        elif self._watching and not waiting:
            loop.remove_reader(self._slots)
        self._watching = waiting


def shared_limit(limit: int, queue_depth: int) -> tuple[int, int]:
    """Descriptors to give to every process."""
    flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
    return os.eventfd(limit, flags), os.eventfd(queue_depth, flags)


def _decrement(descriptor: int) -> bool:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return False
    return True
