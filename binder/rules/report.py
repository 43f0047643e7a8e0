"""What a node's report says beside its GPUs, and whether it can be gone by."""

from typing import Any

from binder.cache.column import Bools
from binder.cache.table import Fact
from binder.cache.view import NodeView, ReportState, Service
from binder.pod.demand import Demand
from binder.rules.rule import Context, Cure, PairRule, ShapeQuery, ShapeRule

# None of a row that is no node.
SERVICE = Fact(lambda view: view.facts.service)


class _ServiceRule(ShapeRule):
    cures = frozenset({Cure.NODE})
    moves = True
    lasts = True

    def fails(self, query: ShapeQuery) -> Bools | None:
        return query.table.fact(SERVICE).where(query.rows, self._refusing(query))

    def _refusing(self, query: ShapeQuery) -> Any:
        """Service or None → bool."""
        raise NotImplementedError


class NoNodeReport(_ServiceRule):
    """No agent has reported of the node."""

    name = "NoNodeReport"

    def _refusing(self, query: ShapeQuery) -> Any:
        return lambda service: service is None or service.state is ReportState.MISSING


class UnreadableNodeReport(_ServiceRule):
    """The report is of a version that this binder does not read, or damaged."""

    name = "UnreadableNodeReport"
    tells_for_all = True

    def _refusing(self, query: ShapeQuery) -> Any:
        return lambda service: service is not None and service.state is ReportState.UNREADABLE

    def why(self, demand: Demand, view: NodeView) -> str:
        return view.facts.report_error


class TritonNotReady(_ServiceRule):
    """It comes back."""

    name = "TritonNotReady"
    lasts = False

    def _refusing(self, query: ShapeQuery) -> Any:
        return lambda service: service is not None and service.state is ReportState.TRITON_NOT_READY


class WrongServer(_ServiceRule):
    """The node serves with another server than the pod requests."""

    name = "WrongServer"

    def _refusing(self, query: ShapeQuery) -> Any:
        wanted = query.shape.server
        return lambda service: is_ready(service) and wanted not in (None, service.server)

    def why(self, demand: Demand, view: NodeView) -> str:
        report = view.facts.report
        return f"{demand.shape.server} wanted, {'' if report is None else report.server} is here"


class MissingCapabilities(_ServiceRule):
    """The node's Triton lacks a backend that the pod requires."""

    name = "MissingCapabilities"
    tells_for_all = True

    def _refusing(self, query: ShapeQuery) -> Any:
        needed = frozenset(query.shape.requirements)
        return lambda service: is_ready(service) and not needed <= service.capabilities

    def why(self, demand: Demand, view: NodeView) -> str:
        report = view.facts.report
        here = () if report is None else report.capabilities
        return ",".join(sorted(set(demand.shape.requirements) - set(here)))


class StaleNodeFacts(PairRule):
    """The agent's heartbeat is too old for its report to be gone by."""

    name = "StaleNodeFacts"
    cures = frozenset({Cure.REPORT})

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        stale: Bools = context.table.deadline <= context.facts.clock()
        return stale if stale.any() else None

    def why(self, demand: Demand, view: NodeView) -> str:
        report = view.facts.report
        return "no heartbeat" if report is None else f"no heartbeat; last report of {report.observed_at}"


def is_ready(service: Service | None) -> bool:
    """What it says can be gone by."""
    return service is not None and service.state is ReportState.READY
