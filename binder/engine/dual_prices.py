"""What the cluster's GPUs are worth, learned from what pods have requested. Pure.

A node is worth the least of what its GPUs, its CPU and its memory could still serve, in GPUs of mean
size:

    Φ(node) = min( Σ_gpu value(free), cpu_free / κ_cpu, memory_free / κ_memory )

κ is what pods ask per GPU, at most what the median GPU of the cluster has: a GPU that no CPU is left
for is stranded, and so is the reverse. `value` is `cutting_stock`'s. A scarce kind of GPU has a price
ρ besides: the share of what is asked that only it and its like can serve, over its share of the
cluster. The idea generalises fragmentation gradient descent (Weng et al., "Beware of Fragmentation",
USENIX ATC'23); docs/decisions/0008 has its figures.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from binder.cache.column import Bools
from binder.cache.gpu_columns import USABLE
from binder.cache.table import Floats, NodeTable
from binder.engine.cutting_stock import CELLS, remainder_values
from binder.pod.demand import Shape
from binder.rules.gpu import wanted_models
from binder.rules.node_selection import selected_nodes

_UNITS = ("cpu", "memory")
# Each costs the event loop a look at all nodes at worst, when it is time to learn.
_MOST_SHAPES = 1024
_FIRST_RENEWAL, _DOUBLED_UNTIL, _THEN_EVERY = 25, 800, 1600


@dataclass(frozen=True, slots=True)
class Prices:
    """One GPU model a row. `values` (models, CELLS + 1): worth of what is left; `cells_per_byte`;
    `scarcity`: ρ; `per_gpu`: κ of cpu (milli-cores) and memory (bytes); `mean_bytes`: one GPU."""

    values: Floats
    cells_per_byte: Floats
    scarcity: Floats
    per_gpu: Mapping[str, float]
    mean_bytes: float

    def value(self, gpu_model: NDArray[np.int32], free: NDArray[np.int64]) -> Floats:
        """Worth of GPUs with so many free bytes. A remainder is rounded down to a cell."""
        cells = free * self.cells_per_byte.take(gpu_model) + 1e-6
        cell = np.minimum(np.maximum(cells, 0.0), CELLS).astype(np.int32)
        return self.values.take(gpu_model * (CELLS + 1) + cell)

    def share(self, gpu_model: NDArray[np.int32], free: Floats) -> Floats:
        """Free bytes as a share of the GPU."""
        share: Floats = free * self.cells_per_byte[gpu_model] / CELLS
        return share


@dataclass(frozen=True, slots=True)
class Request:
    """Pods of one shape: how many, and the GPU models that they may be on."""

    count: int
    request_bytes: int
    gpu_count: int
    amounts: Mapping[str, int]
    allowed: Bools


@dataclass(frozen=True, slots=True)
class PricingProblem:
    """Supply and demand at one moment, free of the table that they were read from.

    `supply`: healthy GPUs of each model; `most_per_gpu`: what the median GPU has of each unit.
    """

    bytes: NDArray[np.int64]
    supply: NDArray[np.int64]
    most_per_gpu: Mapping[str, float]
    requests: Sequence[Request]


class DemandHistory:
    """The shapes that have come, and when it is time to learn from them again."""

    def __init__(self) -> None:
        # In the order in which they came last.
        self._shapes: dict[Shape, int] = {}
        self._seen, self._next = 0, _FIRST_RENEWAL
        self._outdated = False

    def note(self, shape: Shape) -> bool:
        """One more pod. True when prices should be renewed."""
        self._shapes[shape] = self._shapes.pop(shape, 0) + 1
        self._seen += 1
        if len(self._shapes) > _MOST_SHAPES:
            self._forget_half()
        due, self._outdated = self._outdated or self._seen >= self._next, False
        if self._seen >= self._next:
            self._next += self._next if self._next < _DOUBLED_UNTIL else _THEN_EVERY
        return due

    def outdate(self) -> None:
        """The supply has changed: prices should be renewed at the next arrival."""
        self._outdated = True

    def _forget_half(self) -> None:
        """What was requested long ago fades: the half of the shapes that has not come for longest goes, and
        half of what is known of the others."""
        lasting = list(self._shapes.items())[len(self._shapes) // 2 :]
        self._shapes = {shape: (count + 1) // 2 for shape, count in lasting}

    def pricing_problem(self, table: NodeTable) -> PricingProblem:
        """What `price` needs. Cheap enough for the event loop."""
        sizes, usable = _sizes(table), table.condition == USABLE
        supply = np.bincount(table.gpu_model[usable], minlength=len(sizes))
        allowed = _Allowed(table, sizes, usable)
        requests = [
            Request(n, s.request_bytes, s.gpu_count, dict(s.amounts), allowed.models(s))
            for s, n in self._shapes.items()
        ]
        return PricingProblem(sizes, supply, _most_per_gpu(table, sizes, usable), requests)


def price(problem: PricingProblem) -> Prices:
    """Learn. Some tenths of a second for a cluster of several GPU models."""
    total = float(problem.bytes.astype(float) @ problem.supply)
    mean = total / max(1, int(problem.supply.sum())) or 1.0
    tables = {int(size): _values(problem, int(size), mean) for size in np.unique(problem.bytes)}
    per_byte = _cells_per_byte(problem.bytes)
    values = np.array([tables[int(size)] for size in problem.bytes]).reshape(-1, CELLS + 1)
    return Prices(values, per_byte, _scarcity(problem, total), _per_gpu(problem, mean), mean)


def extended(prices: Prices, table: NodeTable) -> Prices:
    """The same with the GPU models that have come since: worth what others of their size are, or the share
    that is left of them. No pod is known to need just these."""
    sizes, known = _sizes(table), len(prices.scarcity)
    share = np.linspace(0.0, 1.0, CELLS + 1)
    by_size = dict(zip(sizes[:known].tolist(), prices.values, strict=True))
    new = sizes[known:].tolist()
    return replace(
        prices,
        values=np.vstack([prices.values, *(by_size.get(s, share * s / prices.mean_bytes) for s in new)]),
        cells_per_byte=_cells_per_byte(sizes),
        scarcity=np.append(prices.scarcity, np.zeros(len(new))),
    )


def _sizes(table: NodeTable) -> NDArray[np.int64]:
    """Bytes of a GPU of each model."""
    return np.array([size for _, size in table.models], np.int64)


def _cells_per_byte(sizes: NDArray[np.int64]) -> Floats:
    return np.divide(CELLS, sizes, out=np.zeros(len(sizes)), where=sizes > 0)


def _values(problem: PricingProblem, size: int, mean: float) -> Floats:
    if size <= 0:
        return np.zeros(CELLS + 1)
    demand: Counter[int] = Counter()
    for request in problem.requests:
        if 0 < request.request_bytes <= size:
            demand[-(-request.request_bytes * CELLS // size)] += request.count * request.gpu_count
    return remainder_values(demand) * (size / mean)


def _per_gpu(problem: PricingProblem, mean: float) -> dict[str, float]:
    """κ. A unit that no pod requests strands nothing: 0."""
    with_gpu = [request for request in problem.requests if request.request_bytes]
    gpus = sum(request.count * request.gpu_count * request.request_bytes for request in with_gpu) / mean
    if not gpus:
        return dict(problem.most_per_gpu)
    asked = {unit: sum(a.count * a.amounts.get(unit, 0) for a in with_gpu) / gpus for unit in _UNITS}
    return {unit: min(asked[unit], problem.most_per_gpu[unit]) for unit in _UNITS}


def _scarcity(problem: PricingProblem, total: float) -> Floats:
    """Pour what can go to some models only onto these, always onto the one that has least so far."""
    share = problem.bytes.astype(float) * problem.supply / (total or 1.0)
    level = np.zeros(len(share))
    offered = float(sum(a.count * a.gpu_count * a.request_bytes for a in problem.requests)) or 1.0
    there = share > 0
    picky = [a for a in problem.requests if a.allowed[there].any() and not a.allowed[there].all()]
    for request in sorted(picky, key=lambda a: int(a.allowed.sum())):
        amount = request.count * request.gpu_count * request.request_bytes / offered
        _pour(amount, level, share, request.allowed & there)
    return level


def _pour(amount: float, level: Floats, share: Floats, allowed: Bools) -> None:
    """Raise the lowest levels until the amount is spent."""
    models = np.flatnonzero(allowed)
    order = models[np.argsort(level[models])]
    width, filled = 0.0, 0.0
    for position, model in enumerate(order):
        width += share[model]
        filled += share[model] * level[model]
        top = (amount + filled) / width
        if position + 1 == len(order) or top <= level[order[position + 1]]:
            level[order[: position + 1]] = top
            return


class _Allowed:
    """Which GPU models pods may be on. Looks at the nodes once for all pods with the same rules."""

    def __init__(self, table: NodeTable, sizes: NDArray[np.int64], usable: Bools) -> None:
        self._table, self._sizes, self._usable = table, sizes, usable
        self._reachable: dict[str, Bools] = {}

    def models(self, shape: Shape) -> Bools:
        allowed: Bools = (self._sizes >= shape.request_bytes) & wanted_models(self._table, shape)
        if not shape.node_selector and not shape.node_affinity:
            return allowed
        if shape.rules not in self._reachable:
            self._reachable[shape.rules] = self._on_nodes_of(shape)
        return allowed & self._reachable[shape.rules]

    def _on_nodes_of(self, shape: Shape) -> Bools:
        reachable = np.zeros(len(self._sizes), np.bool_)
        nodes = selected_nodes(self._table, shape)
        reachable[self._table.gpu_model[self._usable & nodes[:, None]]] = True
        return reachable


def _most_per_gpu(table: NodeTable, sizes: NDArray[np.int64], usable: Bools) -> dict[str, float]:
    """The median over the cluster's GPU bytes of what a node has per GPU of mean size."""
    total = np.where(usable, sizes[table.gpu_model], 0).astype(float).sum(axis=1)
    rows = total > 0
    if not rows.any():
        return dict.fromkeys(_UNITS, 0.0)
    mean = total.sum() / usable.sum()
    return {unit: _median(table.allocatable(unit)[rows] * mean / total[rows], total[rows]) for unit in _UNITS}


def _median(figures: Floats, weights: Floats) -> float:
    order = np.argsort(figures)
    reached = np.cumsum(weights[order])
    return float(figures[order][np.searchsorted(reached, reached[-1] / 2)])
