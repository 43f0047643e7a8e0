"""The copies of a node as one process serves them: who comes with which ticket, and what becomes of them.

It does what it was told last (`Orders`), whole each time, and says what it sees (`Word`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from typing import Any, Final, Protocol

from berth.contract.gateway import ReplicaSpec
from berth.runtime.logs import fields
from proxy.gateway.doorstep import Arrival, Doorstep
from proxy.gateway.orders import Orders, Sum, Word
from proxy.gateway.places import Arrivals, Places
from proxy.gateway.registry import Registry
from proxy.gateway.served import MakeFront, Served
from proxy.gateway.turns import FairTurns, TakesTurns
from proxy.request.replica import ModelCopy
from proxy.wire.preamble import Kind, Preamble

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
# What has ended goes on so long at most: its pod has gone, and with it those who could ask.
ENDING_SECONDS: Final = 15.0

MakeCopy = Callable[[ReplicaSpec], ModelCopy]


class Watch(Protocol):
    """`proxy.upstream.health.Upstream`, as far as it is needed here."""

    def poll(self) -> Coroutine[Any, Any, None]:
        """Ask Triton for ever whether it serves a copy's model."""
        ...

    def nudge(self) -> None:
        """Ask now."""
        ...


MakeWatch = Callable[[ModelCopy], Watch]


class Node:
    """Runs on the event loop alone."""

    def __init__(
        self,
        make_copy: MakeCopy,
        make_front: MakeFront,
        make_watch: MakeWatch,
        *,
        arrivals: Arrivals[Arrival],
        most_connections: int,
    ) -> None:
        self._make_copy, self._make_front, self._make_watch = make_copy, make_front, make_watch
        # A door wishes to drain, as the next word says. Triton has died, with requests of these in it.
        self.wished: Callable[[], None] = lambda: None
        self.triton_died: Callable[[frozenset[str]], None] = lambda inside: None
        self.places = Places(most_connections)
        # That have closed.
        self.seconds = 0
        self.doorstep = Doorstep(self, arrivals)
        self._turns = FairTurns()
        self._registry = Registry()
        self._by_ticket: dict[bytes, Served] = {}
        self._by_uid: dict[str, Served] = {}
        # Copies that are none any more, and when what is left of them is broken off.
        self._ending: dict[Served, float] = {}
        self._tasks: dict[Served, list[asyncio.Task[None]]] = {}
        self._watches: dict[Served, Watch] = {}
        self._ends = False

    def __iter__(self) -> Iterator[Served]:
        """All that there are, and those that have not come to their end."""
        return iter([*self._by_uid.values(), *self._ending])

    # Orders.

    def obey(self, orders: Orders) -> None:
        changes = self._registry.apply(orders.copies)
        now = time.monotonic()
        for copy in changes.ended:
            self._end(self._by_uid.pop(copy.pod_uid), now)
        for copy in changes.new:
            self._begin(copy)
        for copy in changes.changed:
            served = self._by_uid[copy.pod_uid]
            if copy.loaded is not served.told.loaded:
                self._watches[served].nudge()  # or whoever waits for it would wait for the next look
            served.told = copy
            served.copy.set_limits(copy.limits)
        for uid, served in self._by_uid.items():
            self._adjust(uid, served, orders)

    def _begin(self, copy: ReplicaSpec) -> None:
        served = Served(copy, self._make_copy(copy), self._make_front, self._turns, lambda: self.wished())
        self._by_uid[copy.pod_uid] = self._by_ticket[copy.ticket] = served
        watch = self._watches[served] = self._make_watch(served.copy)
        work = {"readiness": served.follow(), "triton": watch.poll()}
        self._tasks[served] = [
            asyncio.create_task(_guarded(one), name=f"{name} of {copy.pod_uid}") for name, one in work.items()
        ]

    def _end(self, served: Served, now: float) -> None:
        """From this step on nobody comes in with its ticket."""
        del self._by_ticket[served.told.ticket]
        served.drain()
        self._ending[served] = now + ENDING_SECONDS

    def _adjust(self, uid: str, served: Served, orders: Orders) -> None:
        served.copy.withheld, served.copy.held = served.told.withheld, orders.held.get(uid)
        if uid in orders.draining or self._ends:
            served.drain()
        elif served.is_draining:
            served.serve_again()
        served.leave(uid in orders.leaving)
        if uid in orders.drained and not served.is_drained:
            served.is_drained = True
            served.tell()

    # Those who come.

    def welcome(self, preamble: Preamble) -> Callable[[], asyncio.Protocol] | None:
        served = self._by_ticket.get(preamble.ticket)
        if served is None:
            return None
        if preamble.kind is Kind.REPORT:
            return served.report if served.takes_report() and not self._ends else None
        if served.is_draining or not self.places.take(served.connections):
            served.copy.turned_away()
            return None
        served.connections += 1
        front = served.front(preamble.kind)
        return lambda: TakesTurns(front.connection(), served.share, self._turns, lambda: self._gone(served))

    def _gone(self, served: Served) -> None:
        served.connections -= 1
        self.places.give_back()

    # Time.

    def tick(self, now: float) -> None:
        """Every second: end what has waited too long."""
        for served in self:
            served.tick(now)
        self.seconds += 1
        for served, until in list(self._ending.items()):
            idle = served.is_idle
            if idle or now > until:
                del self._ending[served]
                self._close(served)
                if not idle:
                    log.warning(
                        "a copy that has ended was broken off", extra=fields(pod_uid=served.told.pod_uid)
                    )

    def tell_doors(self, sums: Mapping[str, Sum]) -> None:
        """Every second. `sums`: of all processes."""
        for uid, served in self._by_uid.items():
            served.tell(sums.get(uid))

    # What it says.

    def word(self) -> Word:
        served = self._by_uid.items()
        return Word(
            sums={uid: one.sum for uid, one in served},
            idle=frozenset(uid for uid, one in served if one.is_draining and one.is_idle),
            wishes=frozenset(uid for uid, one in served if one.wishes_to_drain),
            leaving=frozenset(uid for uid, one in served if one.will_leave),
            turned_away=dict(self.doorstep.turned_away),
            connections=self.places.taken,
        )

    def inside(self) -> frozenset[str]:
        """The copies that have requests in Triton now."""
        return frozenset(
            served.told.pod_uid
            for served in self
            if served.copy.admissions.running or served.copy.questions.running
        )

    def uids_of(self, copies: Collection[object]) -> frozenset[str]:
        return frozenset(served.told.pod_uid for served in self if served.copy in copies)

    # The end.

    def drain_all(self) -> None:
        """Nobody comes in any more; what is under way goes on to its end."""
        self._ends = True
        for served in self._by_uid.values():
            served.drain()

    @property
    def is_idle(self) -> bool:
        return all(served.is_idle for served in self)

    async def close(self) -> None:
        self.doorstep.close()
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for served in self:
            self._close(served)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _close(self, served: Served) -> None:
        del self._watches[served]
        for task in self._tasks.pop(served):
            task.cancel()
        served.close()


async def _guarded(work: Coroutine[Any, Any, None]) -> None:
    """One copy's defect is no other's end."""
    try:
        await work
    except Exception as error:
        log.error("a copy is no longer looked after", exc_info=error)
