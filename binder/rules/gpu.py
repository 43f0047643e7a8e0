"""The memory rule: as many GPUs as are requested must each be there, healthy, known, and have the bytes free."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from berth.contract.quantity import format_bytes
from berth.contract.report import GpuReport
from binder.cache.column import Bools, Ints
from binder.cache.gpu_columns import ABSENT, NO_MODEL, SICK, USABLE
from binder.cache.table import NodeTable
from binder.cache.view import NodeView
from binder.pod.demand import Demand, Shape, product_key
from binder.rules.rule import UNBOUNDED, Context, Cure, NewNode, Reason, ShapeQuery, ShapeRule, Some


@dataclass(frozen=True, slots=True)
class _Lacking:
    """Where GPUs are missing by other things than memory. (rows, GPUs): those that are there, are of a product that will
    do, are sick; (rows): where as many as are requested could be used."""

    present: Bools
    wanted: Bools
    sick: Bools
    known: Bools


@dataclass(frozen=True, slots=True)
class GpuFit:
    """`after` (rows, GPUs): bytes free on each GPU with the pod on it; `fits`: which GPUs can take it; `short` (rows):
    where they are too few, None where nowhere; `lacking`: None where it is memory alone that is short."""

    after: NDArray[np.int64]
    fits: Bools
    short: Bools | None
    lacking: _Lacking | None


def gpu_fit(query: ShapeQuery) -> GpuFit:
    """Of every GPU of these nodes; found once for all rules that ask."""
    if not isinstance(query.shared, GpuFit):
        query.shared = _gpu_fit(query)
    return query.shared


def _gpu_fit(query: ShapeQuery) -> GpuFit:
    table, shape, rows = query.table, query.shape, query.rows
    condition, count = table.condition[rows], shape.gpu_count
    present = condition != ABSENT
    wanted = present & wanted_models(table, shape)[table.gpu_model[rows]] if shape.products else present
    usable = wanted & (condition == USABLE)
    after = table.free[rows] - shape.request_bytes
    fits = usable & (after >= 0)
    short = fits.sum(axis=1) < count
    if not short.any():
        return GpuFit(after, fits, None, None)
    known = usable.sum(axis=1) >= count
    if known.all():
        return GpuFit(after, fits, short, None)
    return GpuFit(after, fits, short, _Lacking(present, wanted, wanted & (condition == SICK), known))


def wanted_models(table: NodeTable, shape: Shape) -> Bools:
    """Which of the table's GPU models are of a product that the pod requests."""
    return np.array(
        [not shape.products or product in shape.products for product, _ in table.models], np.bool_
    )


class _GpuRule(ShapeRule):
    is_of_gpus = True

    def fails(self, query: ShapeQuery) -> Bools | None:
        fit = gpu_fit(query)
        return None if fit.lacking is None else self._among(fit.lacking, query.shape.gpu_count)

    def _among(self, lacking: _Lacking, count: int) -> Bools:
        """The rows that refuse so. Where GPUs are merely full, a later rule says so."""
        raise NotImplementedError


class NoGPU(_GpuRule):
    """The node has no GPU."""

    name = "NoGPU"
    cures = frozenset({Cure.NODE})
    new_node = NewNode.LARGER
    is_of_gpus = False

    def _among(self, lacking: _Lacking, count: int) -> Bools:
        none: Bools = ~lacking.present.any(axis=1)
        return none


class GPUProductMismatch(_GpuRule):
    """Too few of its GPUs are of a product that the pod requests."""

    name = "GPUProductMismatch"
    cures = frozenset({Cure.NODE})
    tells_for_all = True

    def _among(self, lacking: _Lacking, count: int) -> Bools:
        few: Bools = lacking.wanted.sum(axis=1) < np.minimum(count, lacking.present.sum(axis=1))
        return few

    def why(self, demand: Demand, view: NodeView) -> str:
        return ", ".join(sorted({gpu.product for gpu in view.gpus}))


class GPUCountInsufficient(_GpuRule):
    """It has fewer GPUs than the pod requests."""

    name = "GPUCountInsufficient"
    cures = frozenset({Cure.NODE})
    new_node = NewNode.LARGER
    tells_for_all = True

    def _among(self, lacking: _Lacking, count: int) -> Bools:
        few: Bools = lacking.present.sum(axis=1) < count
        return few

    def why(self, demand: Demand, view: NodeView) -> str:
        return f"{demand.shape.gpu_count} wanted, {len(view.gpus)} here"


class GPUUnhealthy(_GpuRule):
    """Too few of its GPUs can be used, because some are not healthy."""

    name = "GPUUnhealthy"
    cures = frozenset({Cure.REPORT})

    def _among(self, lacking: _Lacking, count: int) -> Bools:
        sick: Bools = ~lacking.known & lacking.sick.any(axis=1)
        return sick

    def why(self, demand: Demand, view: NodeView) -> str:
        return "; ".join(sorted({gpu.reason for gpu in view.gpus if not gpu.healthy and gpu.reason}))


class GPUFactsUnknown(_GpuRule):
    """It is unknown what is free on enough of its GPUs."""

    name = "GPUFactsUnknown"
    cures = frozenset({Cure.REPORT})

    def _among(self, lacking: _Lacking, count: int) -> Bools:
        return ~lacking.known


class GPUMemoryInsufficient(ShapeRule):
    """Too few of its GPUs have the bytes free."""

    name = "GPUMemoryInsufficient"
    cures = frozenset({Cure.POD_ENDS})
    new_node = NewNode.LARGER
    is_of_gpus = True

    def fails(self, query: ShapeQuery) -> Bools | None:
        return gpu_fit(query).short

    def reason(self, context: Context, demand: Demand, row: int) -> Reason:
        count = demand.shape.gpu_count
        short = demand.shape.request_bytes - int(_best_free(context.table, demand, np.array([row]))[0])
        which = "the best GPU" if count == 1 else f"one of the best {count} GPUs"
        return Reason(self.name, f"{format_bytes(short)} short on {which}", short)

    def nearest(self, context: Context, demand: Demand, rows: Some) -> int | None:
        return int(rows[_best_free(context.table, demand, rows).argmax()])

    def remedy(self, context: Context, demand: Demand) -> str:
        shape = demand.shape
        wanted = wanted_models(context.table, shape)
        sizes = (size for (_, size), is_wanted in zip(context.table.models, wanted, strict=True) if is_wanted)
        largest = max(sizes, default=0)
        if largest >= shape.request_bytes:
            return ""
        asked = f"{format_bytes(shape.request_bytes)} asked{' on each' * (shape.gpu_count > 1)}"
        return f"no GPU is large enough: {asked}, {format_bytes(largest)} on the largest when empty"

    def replicas_per_node(self, context: Context, demand: Demand) -> Ints | int:
        """By the sizes of the GPUs that are there. Replicas that each take `count` different GPUs: no more than
        floor(s / (count - j)), s the shares on all GPUs but the j that have the most of them, for each j < count."""
        table, shape = context.table, demand.shape
        sizes = np.array([size for _, size in table.models], np.int64)
        shares = (
            sizes // shape.request_bytes if shape.request_bytes else np.full(len(sizes), UNBOUNDED, np.int64)
        )
        shares = np.where(sizes > 0, np.minimum(shares, UNBOUNDED), UNBOUNDED)  # an unknown size may be any
        shares[~wanted_models(table, shape)] = shares[NO_MODEL] = 0
        on: Ints = shares[table.gpu_model]
        count = shape.gpu_count
        if count == 1:
            alone: Ints = on.sum(axis=1)
            return alone
        rest = np.sort(on, axis=1).cumsum(axis=1)[:, ::-1]
        if count > on.shape[1]:
            return np.zeros(len(on), np.int64)
        most: Ints = np.min([rest[:, j] // (count - j) for j in range(count)], axis=0)
        return most


def gpu_reason(demand: Demand, gpu: GpuReport, free: int | None) -> Reason | None:
    """Why one GPU on its own does not do. A pod that requests no memory still needs one that is healthy, known and not
    over its memory."""
    if demand.shape.products and product_key(gpu.product) not in demand.shape.products:
        wanted = ", ".join(demand.model.gpu_products)
        return Reason(GPUProductMismatch.name, f"{gpu.product} is not one of {wanted}")
    if not gpu.healthy:
        return Reason(GPUUnhealthy.name, gpu.reason)
    if free is None:
        return Reason(GPUFactsUnknown.name, gpu.reason)
    short = demand.shape.request_bytes - free
    return Reason(GPUMemoryInsufficient.name, f"{format_bytes(short)} short", short) if short > 0 else None


def _best_free(table: NodeTable, demand: Demand, rows: Some) -> Ints:
    """What is free on the GPU of each of these nodes that decides: with several requested, on the last of them."""
    count, free = demand.shape.gpu_count, table.free[rows]
    if count == 1:
        best: Ints = free.max(axis=1)
    else:
        best = np.sort(free, axis=1)[:, -count] if count <= free.shape[1] else np.full(len(free), -1)
    return best
