"""Which of the GPUs that fit is the best one. A strategy gives figures; the larger wins.

Equal figures are decided by a fixed order, never by chance: ties that are broken at random leave every
node half full (4 points of the allocated share on the openb trace).
"""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from berth.contract.quantity import MOST
from binder.cache.column import Bools, Ints, Rows
from binder.cache.gpu_columns import USABLE
from binder.cache.table import Floats, NodeTable
from binder.engine.dual_prices import DemandHistory, Prices, extended, price
from binder.pod.demand import Shape

STRATEGIES = ("least-fragmentation", "binpack", "spread", "random")
# Differences below this are noise of floating point, and must not break a tie.
_DECIMALS = 7
# How much the share that is left of the chosen GPU counts against it, in GPUs. Learned worths come in steps,
# so that many places are worth the same: without this the first of them is taken, and remainders gather.
_BEST_FIT = 0.3
# What it is worth not to wait for a load, in GPUs. If no request waits for the pod it is more than best fit and less than
# to break up a GPU that is worth more as a whole: a wait is over in a while, and where a pod is lasts. If one does, it is more
# than any one GPU.
_LOAD_COST, _AWAITED_LOAD_COST = 0.1, 1.0


class Strategy(Protocol):
    """`version` grows when figures given before are no longer valid."""

    version: int

    def gains(self, table: NodeTable, shape: Shape, rows: Rows, after: Ints) -> Floats:
        """(rows, GPUs): what putting one share of the pod on each GPU does. `after`: bytes free then."""

    def load_cost(self, *, awaited: bool) -> float:
        """How much one load that the pod's own would wait for counts against a GPU. `awaited`: requests may wait
        for the pod."""

    def score(self, table: NodeTable, shape: Shape, rows: Rows, gain: Floats, left: Floats) -> Floats:
        """(rows): what putting the whole pod on a node does. `gain` and `left`: the gain of each node's best GPUs, and
        the bytes that stay free on them, each together."""


class Simple:
    """A strategy that looks at nothing but the memory left on the GPU."""

    def __init__(self, figure: Callable[[Ints], Floats]) -> None:
        self.version, self._figure = 0, figure

    def gains(self, table: NodeTable, shape: Shape, rows: Rows, after: Ints) -> Floats:
        return self._figure(after)

    def load_cost(self, *, awaited: bool) -> float:
        return 0.0

    def score(self, table: NodeTable, shape: Shape, rows: Rows, gain: Floats, left: Floats) -> Floats:
        return gain


class LeastFragmentation:
    """The node whose worth (`dual_prices`) falls least. Learns from what is requested."""

    def __init__(self) -> None:
        self.version = 0
        self.demand_history = DemandHistory()
        self._prices: Prices | None = None
        self._worths: WeakKeyDictionary[NodeTable, _Worths] = WeakKeyDictionary()

    def learn(self, prices: Prices) -> None:
        """Decide by these from now on."""
        self._prices = prices
        self.version += 1

    def gains(self, table: NodeTable, shape: Shape, rows: Rows, after: Ints) -> Floats:
        prices = self._current(table)
        gains: Floats = prices.value(table.gpu_model[rows], after) - self._of(table, prices).gpus[rows]
        return gains

    def load_cost(self, *, awaited: bool) -> float:
        return _AWAITED_LOAD_COST if awaited else _LOAD_COST

    def score(self, table: NodeTable, shape: Shape, rows: Rows, gain: Floats, left: Floats) -> Floats:
        prices, asked = self._current(table), dict(shape.amounts)
        worths = self._of(table, prices)
        after = worths.filled[rows] + gain
        for unit, per_gpu in prices.per_gpu.items():
            if per_gpu > 0:
                after = np.minimum(after, (table.left(unit)[rows] - asked.get(unit, 0)) / per_gpu)
        gpus = shape.gpu_count * shape.request_bytes / prices.mean_bytes
        model = table.gpu_model[rows, 0]
        rare, unfilled = prices.scarcity.take(model) * gpus, _BEST_FIT * prices.share(model, left)
        score: Floats = (after - worths.nodes[rows] - rare - unfilled).round(_DECIMALS)
        return score

    def _of(self, table: NodeTable, prices: Prices) -> "_Worths":
        worths = self._worths.get(table)
        if worths is None or not worths.follow(table, prices):
            worths = self._worths[table] = _Worths(table, prices)
        return worths

    def _current(self, table: NodeTable) -> Prices:
        """Prices for every GPU model there is; of a model that is new, by what is known. To learn takes too
        long for a decision."""
        if self._prices is None:
            self.learn(price(DemandHistory().pricing_problem(table)))
        elif len(self._prices.scarcity) < len(table.models):
            self.learn(extended(self._prices, table))
            self.demand_history.outdate()
        assert self._prices is not None
        return self._prices


class _Worths:
    """What everything is worth as it is, for any pod: kept, and found anew only where nodes changed.

    `gpus` (rows, GPUs); `filled` (rows): of the usable ones together; `nodes` (rows): Φ.
    """

    def __init__(self, table: NodeTable, prices: Prices) -> None:
        self._prices, self._clock = prices, table.clock
        rows, width = table.free.shape
        self.gpus, self.filled, self.nodes = np.empty((rows, width)), np.empty(rows), np.empty(rows)
        self._weigh(table, table.all_rows)

    def follow(self, table: NodeTable, prices: Prices) -> bool:
        """False if it must be made anew."""
        if prices is not self._prices or self.gpus.shape != table.free.shape:
            return False
        if table.clock != self._clock:
            self._weigh(table, table.changed_since(self._clock))
            self._clock = table.clock
        return True

    def _weigh(self, table: NodeTable, rows: Rows) -> None:
        gpus = self._prices.value(table.gpu_model[rows], table.free[rows])
        filled = nodes = np.where(table.condition[rows] == USABLE, gpus, 0.0).sum(axis=1)
        for unit, per_gpu in self._prices.per_gpu.items():
            if per_gpu > 0:
                nodes = np.minimum(nodes, table.left(unit)[rows] / per_gpu)
        self.gpus[rows], self.filled[rows], self.nodes[rows] = gpus, filled, nodes


def make_strategy(name: str, random: np.random.Generator) -> Strategy:
    """By its name in `--strategy`."""
    match name:
        case "least-fragmentation":
            return LeastFragmentation()
        case "binpack":
            return Simple(lambda after: -after.astype(float))
        case "spread":
            return Simple(lambda after: after.astype(float))
        case "random":
            return Simple(lambda after: random.random(after.shape))
    raise ValueError(name)


def waits(table: NodeTable, strategy: Strategy, rows: Rows, *, awaited: bool) -> Floats | None:
    """(rows, GPUs): what the loads count that one on this GPU would wait for; None where there are none."""
    loads, cost = table.loads[rows], strategy.load_cost(awaited=awaited)
    return cost * loads if cost and loads.any() else None


def best_waiting(
    gains: Floats, fits: Bools, after: Ints, count: int, cost: Floats
) -> tuple[Floats, Floats, Floats]:
    """As `best_together`, of rows that fit, where loads are waited for; and what that costs: on the GPU where it is most.
    `cost`: `waits` of these rows."""
    if count > gains.shape[1]:
        return *best_together(gains, fits, after, count), np.zeros(len(gains))
    masked = np.where(fits, gains - cost, -np.inf)
    if count == 1:
        best = masked.max(axis=1)
        free = np.where(masked >= best[:, None] - 0.5 * 10**-_DECIMALS, after, MOST)
        left = free.min(axis=1)
        wait = np.where(free == left[:, None], cost, np.inf).min(axis=1)
        return best + wait, left.astype(float), wait
    slots = _best_slots(masked, after, count)
    gain, left, waits = (np.take_along_axis(one, slots, axis=1) for one in (gains, after, cost))
    return gain.sum(axis=1), left.sum(axis=1, dtype=float), waits.max(axis=1)


def best_together(gains: Floats, fits: Bools, after: Ints, count: int) -> tuple[Floats, Floats]:
    """(rows) twice: the gains of the `count` best GPUs that fit, and the bytes left on them, each together.
    The gain is -inf where there are fewer."""
    rows, gpus = gains.shape
    if count > gpus:
        return np.full(rows, -np.inf), np.zeros(rows)
    masked = np.where(fits, gains, -np.inf)
    if count == 1:
        best = masked.max(axis=1)
        equal = masked >= best[:, None] - 0.5 * 10**-_DECIMALS
        return best, np.where(equal, after, np.inf).min(axis=1)
    slots = _best_slots(masked, after, count)
    gain, left = (np.take_along_axis(one, slots, axis=1).sum(axis=1, dtype=float) for one in (masked, after))
    return gain, left


def _best_slots(masked: Floats, after: Ints, count: int) -> NDArray[np.intp]:
    """(rows, count): the most gain first, then the least left."""
    return np.lexsort((after, -np.round(masked, _DECIMALS)))[:, :count]


def best_gpus(gains: Floats, fits: Bools, after: Ints, count: int) -> list[int]:
    """One row's GPUs to take: the most gain, then the least left, then the first."""
    gain, left = gains.round(_DECIMALS).tolist(), after.tolist()
    fitting = (slot for slot, fit in enumerate(fits.tolist()) if fit)
    return sorted(fitting, key=lambda slot: (-gain[slot], left[slot]))[:count]
