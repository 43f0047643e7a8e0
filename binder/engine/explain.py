"""Reasons in words, for events, conditions, `berth why` and `berth would-fit`: how many nodes refuse for
each reason, how near the nearest came, and what would make the pod fit."""

from dataclasses import dataclass, replace

import numpy as np

from berth.contract.report import GpuReport
from binder.cache.view import NodeView
from binder.engine.decision import Decider, Refusal
from binder.pod.demand import Demand
from binder.rules.gpu import gpu_reason
from binder.rules.registry import FITS
from binder.rules.rule import Reason

_DETAIL_LIMIT = 200


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """One GPU for one pod; `free_bytes` None where it is not known."""

    gpu: GpuReport
    free_bytes: int | None
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """One node for one pod; `reason` None where it fits."""

    view: NodeView
    reason: Reason | None
    gpus: tuple[GpuVerdict, ...]


def verdicts(decider: Decider, demand: Demand) -> list[NodeVerdict]:
    """Every node, by name."""
    codes, table = decider.codes(demand), decider.table
    return [
        NodeVerdict(
            table.view(row),
            None
            if codes[row] == FITS
            else reason(decider, demand, row, decider.rules.rule(int(codes[row])).name),
            tuple(_gpu_verdict(demand, table.view(row), gpu) for gpu in table.view(row).gpus),
        )
        for _, row in sorted(table.row_of.items())
    ]


def summary(decider: Decider, demand: Demand, refusal: Refusal) -> str:
    """How many nodes refuse for each reason, and how near the nearest came: `0/5 nodes: 3 REASON (detail), 1 REASON`."""
    table = decider.table
    nodes = len(table.row_of)
    if refusal.because is not None:
        return f"0/{nodes} nodes: {sentence(refusal.because)}"
    counts = refusal.counts(decider)
    if not counts:
        return "0/0 nodes: there is no node"
    parts = [
        f"{count} {name}{_nearest(decider, demand, refusal, name)}" for name, count in counts.most_common()
    ]
    return f"0/{nodes} nodes: {', '.join(parts)}"


def sentence(reason: Reason) -> str:
    """One reason with its detail."""
    return f"{reason.rule}: {reason.detail}" if reason.detail else reason.rule


def reason(decider: Decider, demand: Demand, row: int, name: str) -> Reason:
    """Why one node refuses, with what would be right."""
    rule = decider.rules.named(name)
    because = decider.because(demand)
    if because is not None and because.rule == name:
        return because
    found = rule.reason(decider.context, demand, row)
    return replace(found, detail=found.detail[:_DETAIL_LIMIT])


def _nearest(decider: Decider, demand: Demand, refusal: Refusal, name: str) -> str:
    """How near the nearest node came, in brackets."""
    code = decider.rules.codes[name]
    rows = np.flatnonzero((refusal.codes == code) & decider.table.live)
    row = decider.rules.rule(code).nearest(decider.context, demand, rows)
    detail = "" if row is None else reason(decider, demand, row, name).detail
    return f" ({detail})" if detail else ""


def _gpu_verdict(demand: Demand, view: NodeView, gpu: GpuReport) -> GpuVerdict:
    free = view.free_on(gpu)
    return GpuVerdict(gpu, free, gpu_reason(demand, gpu, free))
