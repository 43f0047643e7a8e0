"""One replica as one process serves it: its downstream connections, its report connections, its end."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from berth.contract.gateway import ReplicaSpec
from berth.runtime.tasks import wait_until_set
from proxy.gateway.fair_reader import FairReadScheduler, ReplicaShare
from proxy.gateway.reports import ReportConnection
from proxy.gateway.spec import Events, ReplicaStats
from proxy.request.replica import Replica
from proxy.wire.preamble import Kind

log = logging.getLogger(__name__)

# A pod's proxy has one, and another while it notices that the first is gone.
_MOST_REPORTS: Final = 8
# Each gets a line at once, outside the fair turns with the other replicas' requests.
_MOST_REPORTS_A_SECOND: Final = 32
# Clients that watch readiness get it again in this time, though no change has been announced.
_WATCH_SECONDS: Final = 60.0


class Downstream(Protocol):
    """The clients of one replica and one protocol."""

    def connection(self) -> asyncio.Protocol: ...

    @property
    def busy_connections(self) -> int: ...

    def tick(self, now: float) -> None: ...

    def readiness_changed(self) -> None: ...

    def stop_accepting(self) -> None:
        """Tell the connected clients to go, as they finish; no new ones come."""
        ...

    def close(self) -> None: ...


class Poller(Protocol):
    """`proxy.upstream.health.Upstream`, as far as it is needed here."""

    def poll(self) -> Coroutine[Any, Any, None]:
        """Ask Triton for ever whether it serves the replica's model."""
        ...

    def nudge(self) -> None:
        """Ask now."""
        ...


# Does something in one of the replica's next turns.
Later = Callable[[Callable[[], None]], None]
MakeDownstream = Callable[[Kind, Replica, Later | None], Downstream]


class ServedReplica:
    """`spec`: as the agent has listed it last."""

    def __init__(
        self,
        spec: ReplicaSpec,
        replica: Replica,
        make_downstream: MakeDownstream,
        poller: Poller,
        events: Events,
        scheduler: FairReadScheduler | None = None,
    ) -> None:
        """`scheduler`: shares the process' time among replicas, where there are several."""
        self.spec, self.replica = spec, replica
        self.share = ReplicaShare(replica)
        self._make_downstream, self._poller, self._events = make_downstream, poller, events
        self._scheduler = scheduler
        self._downstreams: dict[Kind, Downstream] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._reports: list[ReportConnection] = []
        self._reports_lately = 0
        self.connections = 0
        self._published: ReplicaStats | None = None
        # A pod's proxy that only says that it will end makes the replica unready; it is served all the same. What it says
        # holds while its connection lasts: its container may be started again in the same pod.
        self._leaving: set[ReportConnection] = set()
        self._asking_to_drain: set[ReportConnection] = set()
        # It has said so to any process.
        self._is_leaving = False
        self.is_draining = self._is_drained = False

    def start(self) -> None:
        work = {"readiness": self._follow_readiness(), "triton": self._poller.poll()}
        self._tasks = [
            asyncio.create_task(_guarded(one), name=f"{name} of {self.spec.pod_uid}")
            for name, one in work.items()
        ]

    def change(self, spec: ReplicaSpec) -> None:
        """The same replica, with other limits or another state."""
        if spec.loaded is not self.spec.loaded:
            self._poller.nudge()  # else its clients wait for the next poll
        self.spec = spec
        self.replica.set_limits(spec.limits)

    def downstream(self, kind: Kind) -> Downstream:
        found = self._downstreams.get(kind)
        if found is None:
            later = self._later if self._scheduler is not None else None
            found = self._downstreams[kind] = self._make_downstream(kind, self.replica, later)
        return found

    def _later(self, do: Callable[[], None]) -> None:
        assert self._scheduler is not None
        self._scheduler.later(self.share, do)

    # Report connections.

    def takes_report(self) -> bool:
        """Whether one more report connection is allowed in this second."""
        self._reports_lately += 1
        return self._reports_lately <= _MOST_REPORTS_A_SECOND

    def report(self) -> ReportConnection:
        """One more report connection; the oldest is closed where there are too many."""
        report = ReportConnection(self)
        self._reports.append(report)
        if len(self._reports) > _MOST_REPORTS:
            self._reports.pop(0).close()
        return report

    @property
    def asks_to_drain(self) -> bool:
        return bool(self._asking_to_drain)

    @property
    def announces_leaving(self) -> bool:
        return bool(self._leaving)

    def report_opened(self, report: ReportConnection) -> None:
        self._publish(report)

    def report_asks_to_drain(self, report: ReportConnection) -> None:
        self._asking_to_drain.add(report)
        self._events.changed()

    def report_announces_leaving(self, report: ReportConnection) -> None:
        self._leaving.add(report)
        self._update_leaving()
        self._events.changed()

    def report_closed(self, report: ReportConnection) -> None:
        if report in self._reports:
            self._reports.remove(report)
        if report in self._asking_to_drain or report in self._leaving:
            self._asking_to_drain.discard(report)
            self._leaving.discard(report)
            self._events.changed()
        self._update_leaving()

    def publish(self, stats: ReplicaStats | None = None) -> None:
        """To the pod's proxy. `stats`: of all processes; without them those published last, or this process' own."""
        self._published = stats or self._published
        self._publish(*self._reports)

    def _publish(self, *reports: ReportConnection) -> None:
        stats = self._published or self.stats
        for report in reports:
            report.publish(self.replica.not_ready(), stats)
            if self._is_drained:
                report.say_drained()

    # What the control plane wants.

    def eject(self, reason: str | None) -> None:
        """Whether, and why, its requests do not go to Triton. What the agent withholds is withheld anyhow."""
        self.replica.withheld, self.replica.closed = self.spec.withheld, reason

    def set_draining(self, drains: bool) -> None:
        """True: take nothing new; requests that are under way go on to their end."""
        if drains and not self.is_draining:
            self.is_draining = True
            self.replica.drain()
            for one in self._downstreams.values():
                one.stop_accepting()
        elif self.is_draining and not drains:
            self._resume()

    def _resume(self) -> None:
        """The connections that are left have had a GOAWAY: they end."""
        self.is_draining = self._is_drained = False
        downstreams, self._downstreams = self._downstreams, {}
        for one in downstreams.values():
            one.close()
        self.replica.serve_again()

    def set_leaving(self, leaves: bool) -> None:
        """Whether its pod's proxy has said, to any process, that it will end."""
        self._is_leaving = leaves
        self._update_leaving()

    def _update_leaving(self) -> None:
        leaves = self._is_leaving or self.announces_leaving
        if leaves and not self.replica.draining:
            self.replica.drain()
        elif self.replica.draining and not (leaves or self.is_draining or self._asking_to_drain):
            self.replica.serve_again()

    def mark_drained(self) -> None:
        """Nothing of it is left in any process, or its time for that is up."""
        if not self._is_drained:
            self._is_drained = True
            self.publish()

    # What is seen.

    @property
    def stats(self) -> ReplicaStats:
        figures = self.replica.figures()
        figures.busy_connections = self.busy_connections
        return ReplicaStats(figures, self.replica.load)

    @property
    def busy_connections(self) -> int:
        return sum(one.busy_connections for one in self._downstreams.values())

    @property
    def is_idle(self) -> bool:
        """Nothing of it is in Triton or waits, and every answer has been delivered."""
        admissions = self.replica.admissions
        return not (admissions.running or admissions.waiting or self.busy_connections)

    # Life.

    def tick(self, now: float) -> None:
        """Called every second."""
        self._reports_lately = 0
        self.replica.tick(now)
        for one in self._downstreams.values():
            one.tick(now)

    async def _follow_readiness(self) -> None:
        """Pass every change of readiness on, for ever."""
        while True:
            change = self.replica.next_change()
            for one in self._downstreams.values():
                one.readiness_changed()
            self.publish()
            self._events.readiness_changed()
            await wait_until_set(change, timeout_seconds=_WATCH_SECONDS)

    def close(self) -> None:
        """Break off what is left."""
        for task in self._tasks:
            task.cancel()
        for one in self._downstreams.values():
            one.close()
        for report in self._reports[:]:
            report.close()
        self.replica.admissions.close()

    async def ended(self) -> None:
        """Return when a part of its work has ended, which only a defect makes it do."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _guarded(work: Coroutine[Any, Any, None]) -> None:
    """A defect in one replica's work does not end another's."""
    try:
        await work
    except Exception as error:
        log.error("a replica is no longer looked after", exc_info=error)
