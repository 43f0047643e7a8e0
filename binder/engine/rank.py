"""How every node stands towards the pods of one shape: kept, and renewed only where nodes changed.

A decision for a shape that has been seen costs what has changed since; only a shape that comes for
the first time looks at every node.
"""

from random import Random

import numpy as np

from binder.cache.column import Ints, Rows
from binder.cache.table import Floats, NodeTable
from binder.engine.score import Strategy, best_together, best_waiting, waits
from binder.pod.demand import Shape
from binder.rules.gpu import gpu_fit
from binder.rules.registry import FITS, Codes, Registry
from binder.rules.rule import ShapeQuery

# Of all rankings together, each some 20 bytes: of a thousand nodes two thousand rankings. Of fewer nodes than so many no
# more, and so many of any number.
_KEPT_ROWS, _FEW_ROWS, _LEAST_KEPT = 2_000_000, 500, 256
_NEVER = -1


class Ranking:
    """`codes`: the first rule that each row fails; `score`: the strategy's figure, the larger the
    better, where it fails none; `preference`: what the pod's owner prefers, None where he does not care. `awaited`: of pods
    that requests may wait for."""

    def __init__(self, shape: Shape, rules: Registry, *, awaited: bool = False) -> None:
        self.shape, self._rules, self._awaited = shape, rules, awaited
        self.codes: Codes = np.zeros(0, np.int8)
        self.score: Floats = np.zeros(0)
        self._moving: Codes = np.zeros(0, np.int8)
        self._preference: Ints = np.zeros(0, np.int64)
        self._clock = _NEVER
        self._strategy_version = _NEVER

    @property
    def preference(self) -> Ints | None:
        return self._preference if self._preference.any() else None

    def renew(self, table: NodeTable, strategy: Strategy) -> None:
        """Bring every row up to date."""
        if len(self.codes) != len(table) or self._clock == _NEVER:
            self._begin(table)
            self._move(table, table.all_rows)
            self._rank(table, strategy, table.all_rows)
        else:
            if len(moved := table.moved_since(self._clock)):
                self._move(table, moved)
            if self._strategy_version != strategy.version:
                self._rank(table, strategy, table.all_rows)
            elif len(changed := table.changed_since(self._clock)):
                self._rank(table, strategy, changed)
        self._clock, self._strategy_version = table.clock, strategy.version

    def _begin(self, table: NodeTable) -> None:
        rows = len(table)
        self.codes, self._moving = np.zeros(rows, np.int8), np.zeros(rows, np.int8)
        self.score, self._preference = np.zeros(rows), np.zeros(rows, np.int64)

    def _move(self, table: NodeTable, rows: Rows) -> None:
        query = ShapeQuery(table, self.shape, rows)
        self._moving[rows] = self._rules.moving(query)
        preferred = self._rules.shape_preference(query)
        self._preference[rows] = 0 if preferred is None else preferred

    def _rank(self, table: NodeTable, strategy: Strategy, rows: Rows) -> None:
        shape, query = self.shape, ShapeQuery(table, self.shape, rows)
        codes = self._rules.shape(query, self._moving[rows])
        gpus = gpu_fit(query)
        gains = strategy.gains(table, shape, rows, gpus.after)
        cost = waits(table, strategy, rows, awaited=self._awaited)
        if cost is None:
            gain, left = best_together(gains, gpus.fits, gpus.after, shape.gpu_count)
            score = strategy.score(table, shape, rows, gain, left)
        else:
            gain, left, wait = best_waiting(gains, gpus.fits, gpus.after, shape.gpu_count, cost)
            score = strategy.score(table, shape, rows, gain, left) - wait
        score[codes != FITS] = -np.inf
        self.codes[rows], self.score[rows] = codes, score


class Rankings:
    """One ranking a shape, of awaited pods another, as many as there is memory for. Which one goes for a new one is left to chance: a question
    goes through all of its models in turn, and the one that was not used for longest would be the very next."""

    def __init__(self, strategy: Strategy, rules: Registry) -> None:
        self._strategy, self._rules = strategy, rules
        self._known: dict[tuple[Shape, bool], Ranking] = {}
        self._chance = Random(0)

    def of(self, shape: Shape, table: NodeTable, *, awaited: bool = False) -> Ranking:
        """The ranking of a shape, up to date."""
        ranking = self._known.get((shape, awaited))
        if ranking is None:
            self._make_room(len(table))
            ranking = self._known[shape, awaited] = Ranking(shape, self._rules, awaited=awaited)
        ranking.renew(table, self._strategy)
        return ranking

    def _make_room(self, rows: int) -> None:
        most = max(_LEAST_KEPT, _KEPT_ROWS // max(rows, _FEW_ROWS))
        if len(self._known) >= most:
            for key in self._chance.sample(list(self._known), len(self._known) - most + 1):
                del self._known[key]
