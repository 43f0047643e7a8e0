"""What a node must be and have for pods of one shape, over many nodes at once.

Each rule names the rows that fail it; a row's code is the first rule in `Kind`'s order that it fails,
0 where it fails none.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from berth.contract.report import CODE_BACKENDS, CodeRule
from binder.cache.table import ABSENT, SICK, USABLE, Bools, NodeTable, Rows, Service
from binder.pod.demand import Demand, Shape
from binder.pod.resources import PODS
from binder.rules.node_selection import (
    matches_affinity,
    matches_selector,
    tolerates_cordon,
    tolerates_taints,
)
from binder.rules.reasons import Kind

Codes = NDArray[np.int8]

FITS = 0
CODE: dict[Kind, int] = {kind: number for number, kind in enumerate(Kind, start=1)}
KIND: dict[int, Kind] = {number: kind for kind, number in CODE.items()}


def first_failing(
    rows: int, misfits: Iterable[tuple[Kind, Bools | None]], codes: Codes | None = None
) -> Codes:
    """The codes with these rules added: the earliest kind stands."""
    # One less each, in 8 bits without a sign: FITS is the largest then, and the earliest kind the least.
    worst = np.full(rows, 255, np.uint8) if codes is None else codes.view(np.uint8) - np.uint8(1)
    for kind, fails in misfits:
        if fails is not None:
            np.minimum(worst, np.uint8(CODE[kind] - 1), out=worst, where=fails)
    return (worst + np.uint8(1)).view(np.int8)


def standing_codes(table: NodeTable, shape: Shape, rows: Rows) -> Codes:
    """What only people change: labels, taints, cordon; and what the node serves."""
    selected = matches_selector(table, shape.node_selector, rows)
    affine = matches_affinity(table, shape.node_affinity, rows)
    return first_failing(
        len(table.name.codes[rows]),
        (
            (Kind.NODE_UNSCHEDULABLE, ~tolerates_cordon(table, shape.tolerations, rows)),
            (Kind.TAINT_NOT_TOLERATED, ~tolerates_taints(table, shape.tolerations, rows)),
            (Kind.NODE_SELECTOR, None if selected is None else ~selected),
            (Kind.NODE_AFFINITY, None if affine is None else ~affine),
        ),
        _service_codes(table, shape, rows),
    )


def affinity_mask(table: NodeTable, shape: Shape) -> Bools:
    """Nodes that the pod's selector and required affinity allow, whatever else is with them."""
    rows = table.all_rows
    masks = (
        matches_selector(table, shape.node_selector, rows),
        matches_affinity(table, shape.node_affinity, rows),
    )
    return np.logical_and.reduce([np.ones(len(table), np.bool_), *(m for m in masks if m is not None)])


def resource_misfits(table: NodeTable, shape: Shape, rows: Rows) -> list[tuple[Kind, Bools | None]]:
    """What Kubernetes counts: CPU, memory, pods, extended resources."""
    return [
        (Kind.TOO_MANY_PODS if name == PODS else Kind.RESOURCE, table.left(name)[rows] < asked)
        for name, asked in shape.amounts
        if asked > 0
    ]


def shape_codes(table: NodeTable, shape: Shape, rows: Rows) -> Codes:
    """For each of these rows the first rule that a pod of the shape fails, whoever it is."""
    standing = standing_codes(table, shape, rows)
    misfits = (*resource_misfits(table, shape, rows), *gpu_fit(table, shape, rows).misfits)
    return first_failing(len(standing), misfits, standing)


@dataclass(frozen=True, slots=True)
class GpuFit:
    """`after` (rows, GPUs): bytes free on each GPU with the pod on it; `fits`: which GPUs can take it."""

    after: NDArray[np.int64]
    fits: Bools
    misfits: Sequence[tuple[Kind, Bools | None]]


def gpu_fit(table: NodeTable, shape: Shape, rows: Rows) -> GpuFit:
    """The memory rule for every GPU of these nodes: as many as are asked for must each have the bytes."""
    condition, count = table.condition[rows], shape.gpu_count
    present = condition != ABSENT
    wanted = present & _products(table, shape, rows) if shape.products else present
    usable = wanted & (condition == USABLE)
    after = table.free[rows] - shape.request_bytes
    fits = usable & (after >= 0)
    short = fits.sum(axis=1) < count
    if not short.any():
        return GpuFit(after, fits, ())
    known = usable.sum(axis=1) >= count
    if known.all():
        return GpuFit(after, fits, ((Kind.GPU_MEMORY, short),))
    return GpuFit(
        after,
        fits,
        (
            (Kind.NO_GPU, ~present.any(axis=1)),
            (Kind.GPU_PRODUCT, wanted.sum(axis=1) < np.minimum(count, present.sum(axis=1))),
            (Kind.GPU_COUNT, present.sum(axis=1) < count),
            (Kind.GPU_UNHEALTHY, short & ~known & (wanted & (condition == SICK)).any(axis=1)),
            (Kind.GPU_UNKNOWN, short & ~known),
            (Kind.GPU_MEMORY, short),
        ),
    )


def _service_codes(table: NodeTable, shape: Shape, rows: Rows) -> Codes:
    needed = frozenset(shape.requirements)

    def code(service: Service | None) -> int:
        if service is None:
            return CODE[Kind.NO_REPORT]
        if service.trouble is not None:
            return CODE[service.trouble]
        if shape.server is not None and shape.server != service.server:
            return CODE[Kind.WRONG_SERVER]
        if not needed <= service.capabilities:
            return CODE[Kind.MISSING_CAPABILITIES]
        refused = service.code is CodeRule.NONE and not CODE_BACKENDS.isdisjoint(needed)
        return CODE[Kind.CODE_NOT_ALLOWED] if refused else FITS

    return table.service.map(rows, code, np.int8)


def code_misfits(table: NodeTable, demand: Demand) -> Iterator[tuple[Kind, Bools]]:
    """Nodes whose code rule keeps namespaces apart, and where the pod's would not be the only one beside
    code."""
    if not any(one is not None and one.code is CodeRule.NAMESPACE for one in table.service.values):
        return
    rows = table.all_rows
    apart = table.service.map(rows, lambda one: one is not None and one.code is CodeRule.NAMESPACE, np.bool_)
    if not apart.any():
        return
    own = (None, demand.model.ref.namespace)
    for kind, column in ((Kind.CODE_OF_ANOTHER, table.coders), (Kind.AMONG_OTHERS, table.tenants)):
        if kind is Kind.CODE_OF_ANOTHER or demand.has_code:
            fails = apart & ~column.is_one_of(own, rows)
            if fails.any():  # most often there is none, and then nothing has to be judged anew
                yield kind, fails


def wanted_models(table: NodeTable, shape: Shape) -> Bools:
    """Which of the table's GPU models are of a product that the pod asks for."""
    return np.array(
        [not shape.products or product in shape.products for product, _ in table.models], np.bool_
    )


def _products(table: NodeTable, shape: Shape, rows: Rows) -> Bools:
    return wanted_models(table, shape)[table.gpu_model[rows]]
