"""The copies of a node as one process serves them: who comes with which ticket, and what becomes of them.

It does what it was told last (`Spec`), whole each time, and says what it sees (`Status`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from typing import Any, Final, Protocol

from berth.contract.gateway import ReplicaSpec
from berth.runtime.logs import fields
from proxy.gateway.connection_limits import ConnectionLimit, PendingConnections
from proxy.gateway.fair_reader import FairReader, FairReadScheduler
from proxy.gateway.handshake import Handshake, Handshakes
from proxy.gateway.registry import Registry
from proxy.gateway.replica import MakeFront, ServedReplica
from proxy.gateway.spec import ReplicaStats, Spec, Status
from proxy.request.replica import Replica
from proxy.wire.preamble import Kind, Preamble

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
# What has ended goes on so long at most: its pod has gone, and with it those who could ask.
ENDING_SECONDS: Final = 15.0

MakeCopy = Callable[[ReplicaSpec], Replica]


class Watch(Protocol):
    """`proxy.upstream.health.Upstream`, as far as it is needed here."""

    def poll(self) -> Coroutine[Any, Any, None]:
        """Ask Triton for ever whether it serves a copy's model."""
        ...

    def nudge(self) -> None:
        """Ask now."""
        ...


MakeWatch = Callable[[Replica], Watch]


class DataPlane:
    """Runs on the event loop alone."""

    def __init__(
        self,
        make_copy: MakeCopy,
        make_front: MakeFront,
        make_watch: MakeWatch,
        *,
        pending: PendingConnections[Handshake],
        most_connections: int,
    ) -> None:
        self._make_copy, self._make_front, self._make_watch = make_copy, make_front, make_watch
        # A pod's proxy asks to drain, as the next status says. Triton has died, with requests of these in it.
        self.changed: Callable[[], None] = lambda: None
        self.triton_crashed: Callable[[frozenset[str]], None] = lambda inside: None
        self.connection_limit = ConnectionLimit(most_connections)
        # That have closed.
        self.seconds = 0
        self.handshakes = Handshakes(self, pending)
        self._turns = FairReadScheduler()
        self._registry = Registry()
        self._by_ticket: dict[bytes, ServedReplica] = {}
        self._by_uid: dict[str, ServedReplica] = {}
        # Copies that are none any more, and when what is left of them is broken off.
        self._ending: dict[ServedReplica, float] = {}
        self._tasks: dict[ServedReplica, list[asyncio.Task[None]]] = {}
        self._watches: dict[ServedReplica, Watch] = {}
        self._ends = False

    def __iter__(self) -> Iterator[ServedReplica]:
        """All that there are, and those that have not come to their end."""
        return iter([*self._by_uid.values(), *self._ending])

    # Spec.

    def apply(self, orders: Spec) -> None:
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
        served = ServedReplica(
            copy, self._make_copy(copy), self._make_front, self._turns, lambda: self.changed()
        )
        self._by_uid[copy.pod_uid] = self._by_ticket[copy.ticket] = served
        watch = self._watches[served] = self._make_watch(served.copy)
        work = {"readiness": served.follow(), "triton": watch.poll()}
        self._tasks[served] = [
            asyncio.create_task(_guarded(one), name=f"{name} of {copy.pod_uid}") for name, one in work.items()
        ]

    def _end(self, served: ServedReplica, now: float) -> None:
        """From this step on nobody comes in with its ticket."""
        del self._by_ticket[served.told.ticket]
        served.drain()
        self._ending[served] = now + ENDING_SECONDS

    def _adjust(self, uid: str, served: ServedReplica, orders: Spec) -> None:
        served.copy.withheld, served.copy.closed = served.told.withheld, orders.held.get(uid)
        if uid in orders.draining or self._ends:
            served.drain()
        elif served.is_draining:
            served.serve_again()
        served.leave(uid in orders.leaving)
        if uid in orders.drained and not served.is_drained:
            served.is_drained = True
            served.tell()

    # Those who come.

    def route(self, preamble: Preamble) -> Callable[[], asyncio.Protocol] | None:
        served = self._by_ticket.get(preamble.ticket)
        if served is None:
            return None
        if preamble.kind is Kind.REPORT:
            return served.report if served.takes_report() and not self._ends else None
        if served.is_draining or not self.connection_limit.take(served.connections):
            served.copy.turned_away()
            return None
        served.connections += 1
        front = served.front(preamble.kind)
        return lambda: FairReader(front.connection(), served.share, self._turns, lambda: self._gone(served))

    def _gone(self, served: ServedReplica) -> None:
        served.connections -= 1
        self.connection_limit.give_back()

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

    def publish_stats(self, stats: Mapping[str, ReplicaStats]) -> None:
        """Every second. `stats`: of all processes."""
        for uid, served in self._by_uid.items():
            served.tell(stats.get(uid))

    # What it says.

    def status(self) -> Status:
        served = self._by_uid.items()
        return Status(
            stats={uid: one.stats for uid, one in served},
            idle=frozenset(uid for uid, one in served if one.is_draining and one.is_idle),
            drain_requests=frozenset(uid for uid, one in served if one.wishes_to_drain),
            leaving=frozenset(uid for uid, one in served if one.will_leave),
            rejected=dict(self.handshakes.rejected),
            connections=self.connection_limit.taken,
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
        self.handshakes.close()
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for served in self:
            self._close(served)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _close(self, served: ServedReplica) -> None:
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
