"""What is left of a GPU is worth what could still be cut from it. Pure.

GPU memory is given out like stock that is cut to order: sizes s are asked d_s times, and every GPU is
cut by some pattern (how many of each size). The cheapest mix of patterns that serves all is a linear
program; its dual π_s is the part of a GPU that one piece of size s costs. A remainder r is then worth
the best Σ π_s·k_s with Σ s·k_s ≤ r, which is 1 for a whole GPU at most. Solved by column generation
(Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", 1961).
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A GPU is cut in thousandths: 16 MiB of a GPU of 16 GiB.
CELLS = 1000
_MOST_SIZES = 48
_MOST_COLUMNS = 500
_EPSILON = 1e-9


def remainder_values(demand: Mapping[int, float]) -> Floats:
    """Worth of a remainder of 0 to CELLS cells, in GPUs. `demand`: how often each size is requested,
    in cells from 1 to CELLS; without any the worth is the share that is left."""
    sizes, wanted = _few_sizes(demand)
    if not len(sizes):
        return np.linspace(0.0, 1.0, CELLS + 1)
    duals = _duals(sizes, wanted)
    worth, _ = _knapsack(sizes, duals)
    worth = np.minimum(worth, 1.0)
    worth[CELLS] = 1.0
    return worth


def _few_sizes(demand: Mapping[int, float]) -> tuple[NDArray[np.int64], Floats]:
    """At most _MOST_SIZES sizes, rounded up as far as need be."""
    for step in (1, 2, 5, 10, 20, 25):
        merged: dict[int, float] = {}
        for size, count in demand.items():
            rounded = min(CELLS, -(-size // step) * step)
            merged[rounded] = merged.get(rounded, 0.0) + count
        if len(merged) <= _MOST_SIZES:
            break
    sizes = sorted(merged)
    return np.array(sizes, np.int64), np.array([merged[size] for size in sizes])


def _duals(sizes: NDArray[np.int64], wanted: Floats) -> Floats:
    """Revised simplex over the patterns; each round adds the pattern that is worth most."""
    basis = np.diag((CELLS // sizes).astype(float))
    for _ in range(_MOST_COLUMNS):
        duals = np.linalg.solve(basis.T, np.ones(len(sizes)))
        worth, pattern = _knapsack(sizes, duals)
        if worth[CELLS] <= 1.0 + _EPSILON:
            break
        amounts, column = np.linalg.solve(basis, np.column_stack((wanted, pattern))).T
        ratios = np.full(len(sizes), np.inf)
        np.divide(amounts, column, out=ratios, where=column > _EPSILON)
        basis[:, int(np.argmin(ratios))] = pattern
    return np.maximum(duals, 0.0)


def _knapsack(sizes: NDArray[np.int64], worths: Floats) -> tuple[Floats, Floats]:
    """The best worth for every room up to CELLS, and the pattern that fills all of it."""
    best = np.zeros(CELLS + 1)
    last = np.full(CELLS + 1, -1, np.int64)
    for number, (size, worth) in enumerate(zip(sizes.tolist(), worths.tolist(), strict=True)):
        if worth <= 0.0:
            continue
        # In strides of one size, so that a size may be taken again and again.
        for start in range(size, CELLS + 1, size):
            end = min(start + size, CELLS + 1)
            taken = best[start - size : end - size] + worth
            better = taken > best[start:end] + _EPSILON
            best[start:end][better] = taken[better]
            last[start:end][better] = number
    return best, _pattern(sizes, best, last)


def _pattern(sizes: NDArray[np.int64], best: Floats, last: NDArray[np.int64]) -> Floats:
    pattern, room = np.zeros(len(sizes)), CELLS
    while last[room] >= 0:
        pattern[last[room]] += 1
        room -= int(sizes[last[room]])
    return pattern
