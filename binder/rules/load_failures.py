"""Nodes on which the model's load has failed are left out for a while."""

from binder.cache.column import Bools
from binder.pod.demand import Demand
from binder.rules.rule import Context, Cure, PairRule


class ExcludedAfterLoadFailure(PairRule):
    """A failure there that another node could cure (`cache.load_failures`)."""

    name = "ExcludedAfterLoadFailure"
    cures = frozenset({Cure.TIME})

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        row_of = context.table.row_of
        excluded = context.facts.load_failures.excluded(demand)
        return context.mask([row_of[node] for node in excluded if node in row_of])
