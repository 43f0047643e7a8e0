"""One copy as one process serves it: its fronts, made when they are first asked for, its reports, its end."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from berth.contract.gateway import ReplicaSpec
from proxy.gateway.fair_reader import FairReadScheduler, ReplicaShare
from proxy.gateway.reports import Report
from proxy.gateway.spec import ReplicaStats
from proxy.request.replica import Replica
from proxy.wire.preamble import Kind

# A door has one, and another while it notices that the first is gone.
_MOST_REPORTS = 8
# Each is told a line at once, and takes no turns with the other copies' requests.
_MOST_REPORTS_A_SECOND = 32


class Front(Protocol):
    """One protocol's connections of one copy."""

    def connection(self) -> asyncio.Protocol: ...

    @property
    def busy_connections(self) -> int: ...

    def tick(self, now: float) -> None: ...

    def readiness_changed(self) -> None: ...

    def stop_accepting(self) -> None:
        """Tell all who are there to go, as they finish; nobody new comes."""
        ...

    def close(self) -> None: ...


# Does something in one of the copy's next turns.
Later = Callable[[Callable[[], None]], None]
MakeFront = Callable[[Kind, Replica, Later], Front]


class ServedReplica:
    """`told`: as the agent has told it last."""

    def __init__(
        self,
        told: ReplicaSpec,
        copy: Replica,
        make_front: MakeFront,
        turns: FairReadScheduler,
        changed: Callable[[], None],
    ) -> None:
        """`changed`: its door drain_requests to drain."""
        self.told, self.copy = told, copy
        self.share = ReplicaShare(copy)
        self._make_front, self._turns, self._wished = make_front, turns, changed
        self._fronts: dict[Kind, Front] = {}
        self._reports: list[Report] = []
        self._reports_lately = 0
        self.connections = 0
        self._told_stats: ReplicaStats | None = None
        # A copy whose door only says that it will leave is not ready, and serves whoever comes. What a door has
        # said holds while it is there: its container may be started anew, in the same pod.
        self._leaving: set[Report] = set()
        self._wishing: set[Report] = set()
        # It has said so to any process.
        self._is_leaving = False
        self.is_draining = self.is_drained = False

    def front(self, kind: Kind) -> Front:
        front = self._fronts.get(kind)
        if front is None:
            front = self._fronts[kind] = self._make_front(
                kind, self.copy, lambda do: self._turns.later(self.share, do)
            )
        return front

    # Reports.

    def takes_report(self) -> bool:
        """Whether one more connection for reports is none too many in this second."""
        self._reports_lately += 1
        return self._reports_lately <= _MOST_REPORTS_A_SECOND

    def report(self) -> Report:
        """One more connection for reports; the oldest goes where there are too many."""
        report = Report(self._wish, self._announce_leave, self._reports_lost, self._tell)
        self._reports.append(report)
        if len(self._reports) > _MOST_REPORTS:
            self._reports.pop(0).close()
        return report

    @property
    def wishes_to_drain(self) -> bool:
        return bool(self._wishing)

    @property
    def will_leave(self) -> bool:
        return bool(self._leaving)

    def _wish(self, report: Report) -> None:
        self._wishing.add(report)
        self._wished()

    def _announce_leave(self, report: Report) -> None:
        self._leaving.add(report)
        self._look_at_leaving()
        self._wished()

    def leave(self, leaves: bool) -> None:
        """Whether its door has said, to any process, that it will leave."""
        self._is_leaving = leaves
        self._look_at_leaving()

    def _look_at_leaving(self) -> None:
        leaves = self._is_leaving or self.will_leave
        if leaves and not self.copy.draining:
            self.copy.drain()
        elif self.copy.draining and not (leaves or self.is_draining or self._wishing):
            self.copy.serve_again()

    def _reports_lost(self, report: Report) -> None:
        if report in self._reports:
            self._reports.remove(report)
        if report in self._wishing or report in self._leaving:
            self._wishing.discard(report)
            self._leaving.discard(report)
            self._wished()
        self._look_at_leaving()

    def tell(self, stats: ReplicaStats | None = None) -> None:
        """Tell the doors. `sum` is of all processes; without one, of this one or as told last."""
        self._told_stats = stats or self._told_stats
        self._tell(*self._reports)

    def _tell(self, *reports: Report) -> None:
        stats = self._told_stats or self.stats
        for report in reports:
            report.tell(self.copy.not_ready(), stats)
            if self.is_drained:
                report.tell_drained()

    # Figures.

    @property
    def stats(self) -> ReplicaStats:
        figures = self.copy.figures()
        figures.busy_connections = self.busy_connections
        return ReplicaStats(figures, self.copy.load)

    @property
    def busy_connections(self) -> int:
        return sum(front.busy_connections for front in self._fronts.values())

    @property
    def is_idle(self) -> bool:
        """Nothing of it is in Triton or waits, and every answer has been delivered."""
        admissions = self.copy.admissions
        return not (admissions.running or admissions.waiting or self.busy_connections)

    # Life.

    def tick(self, now: float) -> None:
        """Every second."""
        self._reports_lately = 0
        self.copy.tick(now)
        for front in self._fronts.values():
            front.tick(now)

    async def follow(self) -> None:
        """Pass every change of readiness on, for ever."""
        while True:
            change = self.copy.next_change()
            for front in self._fronts.values():
                front.readiness_changed()
            self.tell()
            await change.wait()

    def drain(self) -> None:
        """Take nothing new; what is under way goes on to its end."""
        if not self.is_draining:
            self.is_draining = True
            self.copy.drain()
            for front in self._fronts.values():
                front.stop_accepting()

    def serve_again(self) -> None:
        """Nobody drain_requests any more that it be drained. The connections that are left were told that they end: they do."""
        self.is_draining = self.is_drained = False
        fronts, self._fronts = self._fronts, {}
        for front in fronts.values():
            front.close()
        self.copy.serve_again()

    def close(self) -> None:
        for front in self._fronts.values():
            front.close()
        for report in self._reports[:]:
            report.close()
        self.copy.admissions.close()
