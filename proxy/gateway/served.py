"""One copy as one process serves it: its fronts, made when they are first asked for, its reports, its end."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from berth.contract.gateway import Copy
from proxy.codecs.preamble import Kind
from proxy.exchange.copy import ModelCopy
from proxy.gateway.orders import Sum
from proxy.gateway.reports import Report
from proxy.gateway.turns import CopyShare, FairTurns

# A door has one, and another while it notices that the first is gone.
_MOST_REPORTS = 8


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
MakeFront = Callable[[Kind, ModelCopy, Later], Front]


class Served:
    """`told`: as the agent has told it last."""

    def __init__(
        self,
        told: Copy,
        copy: ModelCopy,
        make_front: MakeFront,
        turns: FairTurns,
        wished: Callable[[], None],
    ) -> None:
        """`wished`: its door wishes to drain."""
        self.told, self.copy = told, copy
        self.share = CopyShare(copy)
        self._make_front, self._turns, self._wished = make_front, turns, wished
        self._fronts: dict[Kind, Front] = {}
        self._reports: list[Report] = []
        self.connections = 0
        self._told_sum: Sum | None = None
        # A copy whose door only says that it will leave is not ready, and serves whoever comes.
        self.will_leave = self.wishes_to_drain = self.is_draining = False
        self.is_drained = False

    def front(self, kind: Kind) -> Front:
        front = self._fronts.get(kind)
        if front is None:
            front = self._fronts[kind] = self._make_front(
                kind, self.copy, lambda do: self._turns.later(self.share, do)
            )
        return front

    # Reports.

    def report(self) -> Report:
        """One more connection for reports; the oldest goes where there are too many."""
        report = Report(self._wish, self._announce_leave, self._reports_lost, self.tell)
        self._reports.append(report)
        if len(self._reports) > _MOST_REPORTS:
            self._reports.pop(0).close()
        return report

    def _wish(self) -> None:
        self.wishes_to_drain = True
        self._wished()

    def _announce_leave(self) -> None:
        self.will_leave = True
        self.leave(True)
        self._wished()

    def leave(self, leaves: bool) -> None:
        """Whether its door has said, in any process, that it will leave."""
        if leaves and not self.copy.draining:
            self.copy.drain()
        elif not leaves and self.copy.draining and not (self.is_draining or self.will_leave):
            self.copy.serve_again()

    def _reports_lost(self, report: Report) -> None:
        if report in self._reports:
            self._reports.remove(report)
        if not self._reports and (self.wishes_to_drain or self.will_leave):
            self.wishes_to_drain = self.will_leave = False
            self.leave(False)
            self._wished()

    def tell(self, sum: Sum | None = None) -> None:
        """Tell the doors. `sum` is of all processes; without one, of this one or as told last."""
        self._told_sum = sum or self._told_sum
        sum = self._told_sum or self.sum
        for report in self._reports:
            report.tell(self.copy.not_ready(), sum)
            if self.is_drained:
                report.tell_drained()

    # Figures.

    @property
    def sum(self) -> Sum:
        figures = self.copy.figures()
        figures.busy_connections = self.busy_connections
        return Sum(figures, self.copy.load)

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
        """Nobody wishes any more that it be drained. The connections that are left were told that they end: they do."""
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
