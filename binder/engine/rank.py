"""How every node stands towards the pods of one shape: kept, and renewed only where nodes changed.

A decision for a shape that has been seen costs what has changed since; only a shape that comes for
the first time looks at every node.
"""

from random import Random

import numpy as np

from binder.cache.table import Floats, Ints, NodeTable, Rows
from binder.engine.score import Strategy, best_together, best_waiting, waits
from binder.pod.demand import Shape
from binder.rules.filters import FITS, Codes, first_failing, gpu_fit, resource_misfits, standing_codes
from binder.rules.node_selection import preference, untolerated_preferences

# Of all rankings together, each some 20 bytes: of a thousand nodes two thousand rankings. Of fewer nodes than so many no
# more, and so many of any number.
_KEPT_ROWS, _FEW_ROWS, _LEAST_KEPT = 2_000_000, 500, 256
# One untolerated PreferNoSchedule taint outweighs all preferred terms: 100 terms of weight 100 at most.
_TAINT_WEIGHT = 1_000_000
_NEVER = -1


class Ranking:
    """`codes`: the first rule that each row fails; `score`: the strategy's figure, the larger the
    better, where it fails none; `wishes`: what the pod's owner prefers, None where he does not care. `awaited`: of pods
    that requests may wait for."""

    def __init__(self, shape: Shape, *, awaited: bool = False) -> None:
        self.shape, self._awaited = shape, awaited
        self.codes: Codes = np.zeros(0, np.int8)
        self.score: Floats = np.zeros(0)
        self._standing: Codes = np.zeros(0, np.int8)
        self._wishes: Ints = np.zeros(0, np.int64)
        self._clock = _NEVER
        self._strategy_version = _NEVER

    @property
    def wishes(self) -> Ints | None:
        return self._wishes if self._wishes.any() else None

    def renew(self, table: NodeTable, strategy: Strategy) -> None:
        """Bring every row up to date."""
        if len(self.codes) != len(table) or self._clock == _NEVER:
            self._begin(table)
            self._stand(table, table.all_rows)
            self._rank(table, strategy, table.all_rows)
        else:
            if len(moved := table.moved_since(self._clock)):
                self._stand(table, moved)
            if self._strategy_version != strategy.version:
                self._rank(table, strategy, table.all_rows)
            elif len(changed := table.changed_since(self._clock)):
                self._rank(table, strategy, changed)
        self._clock, self._strategy_version = table.clock, strategy.version

    def _begin(self, table: NodeTable) -> None:
        rows = len(table)
        self.codes, self._standing = np.zeros(rows, np.int8), np.zeros(rows, np.int8)
        self.score, self._wishes = np.zeros(rows), np.zeros(rows, np.int64)

    def _stand(self, table: NodeTable, rows: Rows) -> None:
        self._standing[rows] = standing_codes(table, self.shape, rows)
        wishes = -_TAINT_WEIGHT * untolerated_preferences(table, self.shape.tolerations, rows)
        preferred = preference(table, self.shape.node_affinity, rows)
        self._wishes[rows] = wishes if preferred is None else wishes + preferred

    def _rank(self, table: NodeTable, strategy: Strategy, rows: Rows) -> None:
        shape, standing = self.shape, self._standing[rows]
        gpus = gpu_fit(table, shape, rows)
        misfits = (*resource_misfits(table, shape, rows), *gpus.misfits)
        codes = first_failing(len(standing), misfits, standing)
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

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._known: dict[tuple[Shape, bool], Ranking] = {}
        self._chance = Random(0)

    def of(self, shape: Shape, table: NodeTable, *, awaited: bool = False) -> Ranking:
        """The ranking of a shape, up to date."""
        ranking = self._known.get((shape, awaited))
        if ranking is None:
            self._make_room(len(table))
            ranking = self._known[shape, awaited] = Ranking(shape, awaited=awaited)
        ranking.renew(table, self._strategy)
        return ranking

    def _make_room(self, rows: int) -> None:
        most = max(_LEAST_KEPT, _KEPT_ROWS // max(rows, _FEW_ROWS))
        if len(self._known) >= most:
            for key in self._chance.sample(list(self._known), len(self._known) - most + 1):
                del self._known[key]
