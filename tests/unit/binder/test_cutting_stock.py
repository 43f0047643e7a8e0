"""What a remainder of a GPU is worth: a feasible price, and the best one."""

import itertools
import random

import numpy as np
import pytest

from binder.engine.cutting_stock import CELLS, remainder_values


def test_without_any_demand_a_remainder_is_worth_its_share() -> None:
    assert remainder_values({}) == pytest.approx(np.arange(CELLS + 1) / CELLS)


def test_what_nobody_asks_for_is_worth_nothing() -> None:
    worth = remainder_values({400: 10.0})
    assert worth[399] == 0
    assert worth[400] == worth[799] == pytest.approx(0.5)
    assert worth[800] == worth[CELLS] == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_duals_are_a_feasible_price_and_the_best_one(seed: int) -> None:
    """Weak duality both ways: no pattern is worth more than a GPU, and the demand's worth is what the
    best mix of patterns costs, which is at least the memory that is asked for."""
    chance = random.Random(seed)
    demand = {chance.randrange(100, 1001): float(chance.randrange(1, 50)) for _ in range(5)}
    worth = remainder_values(demand)
    assert (np.diff(worth) >= -1e-9).all()
    assert worth[0] == 0
    sizes = sorted(demand)
    for counts in itertools.product(*(range(CELLS // size + 1) for size in sizes)):
        if sum(n * size for n, size in zip(counts, sizes, strict=True)) <= CELLS:
            assert sum(n * worth[size] for n, size in zip(counts, sizes, strict=True)) <= 1 + 1e-6
    gpus = sum(count * worth[size] for size, count in demand.items())
    assert gpus >= sum(count * size for size, count in demand.items()) / CELLS - 1e-6
