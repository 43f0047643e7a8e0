"""Admissions as the gRPC front end still asks for them: slots that are counted, not owned."""

from typing import Protocol

from proxy.exchange.admission import QUEUE_FULL, Admission, Admissions
from proxy.exchange.refusal import Refusal


class QueueFull(Exception):
    """As many wait as may; try again later."""

    def __init__(self) -> None:
        super().__init__(QUEUE_FULL)


class Waiter(Protocol):
    """Who asks for a slot. Must be hashable."""

    def granted(self) -> None: ...


class Breaker:
    """`enter`, then `leave` once for each slot that was had; `cancel` instead, while still waiting."""

    def __init__(self, admissions: Admissions) -> None:
        self.admissions = admissions
        self._running: list[Admission] = []
        self._waiting: dict[Waiter, Admission] = {}

    @property
    def running(self) -> int:
        return self.admissions.running

    @property
    def waiting(self) -> int:
        return self.admissions.waiting

    def enter(self, waiter: Waiter, now: float) -> bool:
        def granted() -> None:
            self._running.append(self._waiting.pop(waiter))
            waiter.granted()

        try:
            admission = self.admissions.admit(now, granted)
        except Refusal as error:
            raise QueueFull from error
        if admission.is_waiting:
            self._waiting[waiter] = admission
            return False
        self._running.append(admission)
        return True

    def enter_at_once(self, now: float) -> bool:
        admission = self.admissions.admit_at_once(now)
        if admission is not None:
            self._running.append(admission)
        return admission is not None

    def leave(self, now: float) -> None:
        self._running.pop().release(now)

    def cancel(self, waiter: Waiter, now: float) -> None:
        self._waiting.pop(waiter).release(now)
