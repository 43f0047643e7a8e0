"""Reasons in words, for events, conditions, `berth why` and `berth would-fit`: how many nodes refuse for
each reason, how near the nearest came, and what would make the pod fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from berth.contract.quantity import format_bytes
from berth.contract.report import CODE_BACKENDS, GpuReport
from binder.cache.table import Ints, NodeTable
from binder.cache.view import NodeView
from binder.engine.decision import Decider, Refusal
from binder.pod.demand import Demand, product_key
from binder.pod.resources import PODS
from binder.rules.filters import CODE, FITS, KIND
from binder.rules.node_selection import untolerated_taint
from binder.rules.reasons import Kind, Reason

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
            None if codes[row] == FITS else reason(decider, demand, row, KIND[int(codes[row])]),
            tuple(_gpu_verdict(demand, table.view(row), gpu) for gpu in table.view(row).gpus),
        )
        for _, row in sorted(table.row_of.items())
    ]


def summary(decider: Decider, demand: Demand, refusal: Refusal) -> str:
    """`0/5 nodes: 3 GPUMemoryInsufficient (1.2 GiB short on the best GPU), 1 TaintNotTolerated (…)`."""
    table = decider.table
    nodes = len(table.row_of)
    if refusal.because is not None:
        return f"0/{nodes} nodes: {sentence(refusal.because)}"
    counts = refusal.counts(table)
    if not counts:
        return "0/0 nodes: there is no node"
    parts = [
        f"{count} {kind.value}{_nearest(decider, demand, refusal, kind)}"
        for kind, count in counts.most_common()
    ]
    return f"0/{nodes} nodes: {', '.join(parts)}"


def sentence(reason: Reason) -> str:
    """One reason with its detail."""
    return f"{reason.kind.value}: {reason.detail}" if reason.detail else reason.kind.value


def reason(decider: Decider, demand: Demand, row: int, kind: Kind) -> Reason:
    """Why one node refuses, with what would be right."""
    view = decider.table.view(row)
    if kind is Kind.GPU_MEMORY:
        short = demand.shape.request_bytes - int(_best_free(decider.table, demand, np.array([row]))[0])
        return Reason(kind, f"{format_bytes(short)} short on {_the_gpu(demand)}", short)
    because = decider.because(demand)
    if because is not None and because.kind is kind:
        return because
    detail = _DETAILS.get(kind)
    return Reason(kind, "" if detail is None else detail(demand, view)[:_DETAIL_LIMIT])


def _nearest(decider: Decider, demand: Demand, refusal: Refusal, kind: Kind) -> str:
    """How near the nearest node came, in brackets."""
    table = decider.table
    rows = np.flatnonzero((refusal.codes == CODE[kind]) & table.live)
    if kind is Kind.GPU_MEMORY:
        row = rows[_best_free(table, demand, rows).argmax()]
    elif kind is Kind.RESOURCE:
        row = rows[_resource_shortage(table, demand)[rows].argmin()]
    elif kind in _TOLD:
        row = rows[0]
    else:
        return ""
    detail = reason(decider, demand, int(row), kind).detail
    return f" ({detail})" if detail else ""


def _best_free(table: NodeTable, demand: Demand, rows: NDArray[np.intp]) -> Ints:
    """What is free on the GPU of each of these nodes that decides: with several asked for, on the last of them."""
    count, free = demand.shape.gpu_count, table.free[rows]
    if count == 1:
        best: Ints = free.max(axis=1)
    else:
        best = np.sort(free, axis=1)[:, -count] if count <= free.shape[1] else np.full(len(free), -1)
    return best


def _resource_shortage(table: NodeTable, demand: Demand) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The largest part of a request that is missing on each node."""
    missing = [
        np.maximum(0, asked - table.left(name)) / asked for name, asked in demand.shape.amounts if asked > 0
    ]
    return np.max([*missing, np.zeros(len(table))], axis=0)


def _the_gpu(demand: Demand) -> str:
    count = demand.shape.gpu_count
    return "the best GPU" if count == 1 else f"one of the best {count} GPUs"


def _gpu_verdict(demand: Demand, view: NodeView, gpu: GpuReport) -> GpuVerdict:
    free = view.free_on(gpu)
    return GpuVerdict(gpu, free, _gpu_reason(demand, gpu, free))


def _gpu_reason(demand: Demand, gpu: GpuReport, free: int | None) -> Reason | None:
    """A pod that asks for no memory still needs a GPU that is healthy, known and not over its memory."""
    if demand.shape.products and product_key(gpu.product) not in demand.shape.products:
        return Reason(Kind.GPU_PRODUCT, f"{gpu.product} is not one of {', '.join(demand.model.gpu_products)}")
    if not gpu.healthy:
        return Reason(Kind.GPU_UNHEALTHY, gpu.reason)
    if free is None:
        return Reason(Kind.GPU_UNKNOWN, gpu.reason)
    short = demand.shape.request_bytes - free
    return Reason(Kind.GPU_MEMORY, f"{format_bytes(short)} short", short) if short > 0 else None


def _taint(demand: Demand, view: NodeView) -> str:
    taints = [(t["key"], t.get("value") or "", t.get("effect") or "") for t in view.facts.taints]
    found = untolerated_taint(taints, demand.shape.tolerations)
    if found is None:
        return ""
    key, value, effect = found
    return f"{key}{'=' if value else ''}{value}:{effect}"


def _selector(demand: Demand, _: NodeView) -> str:
    return ",".join(f"{k}={v}" for k, v in sorted(demand.shape.node_selector.items()))


def _resource(demand: Demand, view: NodeView) -> str:
    for name, asked in demand.shape.amounts:
        if name != PODS and asked > max(0, view.left_of(name)):
            return f"{name}: {asked} asked, {max(0, view.left_of(name))} left"
    return ""


def _stale(_: Demand, view: NodeView) -> str:
    report = view.facts.report
    return "no heartbeat" if report is None else f"no heartbeat; last report of {report.observed_at}"


def _server(demand: Demand, view: NodeView) -> str:
    report = view.facts.report
    return f"{demand.shape.server} wanted, {'' if report is None else report.server} is here"


def _capabilities(demand: Demand, view: NodeView) -> str:
    report = view.facts.report
    here = () if report is None else report.capabilities
    return ",".join(sorted(set(demand.shape.requirements) - set(here)))


def _code(demand: Demand) -> str:
    return ",".join(sorted(CODE_BACKENDS.intersection(demand.shape.requirements)))


def _model(demand: Demand, view: NodeView) -> str:
    return f"id {demand.model.model_id}"


def _ports(demand: Demand, view: NodeView) -> str:
    taken = {(protocol, port) for _, protocol, port in view.host_ports}
    return ", ".join(
        f"{protocol} {port}" for _, protocol, port in sorted(demand.host_ports) if (protocol, port) in taken
    )


def _unhealthy(_: Demand, view: NodeView) -> str:
    return "; ".join(sorted({gpu.reason for gpu in view.gpus if not gpu.healthy and gpu.reason}))


_DETAILS: Mapping[Kind, Callable[[Demand, NodeView], str]] = {
    Kind.TAINT_NOT_TOLERATED: _taint,
    Kind.NODE_SELECTOR: _selector,
    Kind.UNREADABLE_REPORT: lambda _, view: view.facts.report_error,
    Kind.WRONG_SERVER: _server,
    Kind.MISSING_CAPABILITIES: _capabilities,
    Kind.CODE_NOT_ALLOWED: lambda demand, _: f"{_code(demand)} is code, and the node takes none",
    Kind.CODE_OF_ANOTHER: lambda demand, _: (
        f"it holds a model with code, and takes models of that one's namespace only; the pod's is"
        f" {demand.model.ref.namespace}"
    ),
    Kind.AMONG_OTHERS: lambda demand, _: f"{_code(demand)} is code, and the node holds models of others",
    Kind.STALE: _stale,
    Kind.MODEL_ON_NODE: _model,
    Kind.HOST_PORT: _ports,
    Kind.RESOURCE: _resource,
    Kind.TOO_MANY_PODS: lambda _, view: f"{view.used.get(PODS, 0)} pods are on the node",
    Kind.GPU_PRODUCT: lambda _, view: ", ".join(sorted({gpu.product for gpu in view.gpus})),
    Kind.GPU_COUNT: lambda demand, view: f"{demand.shape.gpu_count} wanted, {len(view.gpus)} here",
    Kind.GPU_UNHEALTHY: _unhealthy,
}
# Kinds whose detail is likely the same for all nodes, or says what to change.
_TOLD = frozenset(
    {
        Kind.TAINT_NOT_TOLERATED,
        Kind.MISSING_CAPABILITIES,
        Kind.CODE_NOT_ALLOWED,
        Kind.UNREADABLE_REPORT,
        Kind.GPU_COUNT,
        Kind.GPU_PRODUCT,
    }
)
