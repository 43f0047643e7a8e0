"""Topology spread constraints.

Semantics of kube-scheduler 1.36: plugins/podtopologyspread/filtering.go.
"""

import numpy as np

from binder.cache.column import Bools
from binder.cache.pod_index import Neighbour
from binder.cache.table import Floats
from binder.pod.demand import Demand
from binder.pod.topology_terms import Spread
from binder.rules.domains import DomainRule, counts_by_node, is_labelled, shared_domain
from binder.rules.node_selection import selected_nodes
from binder.rules.rule import Context, Cure
from binder.rules.taints import untolerated

# How much one pod too many in a domain weighs for a constraint that is only wished for: as much as a
# preferred term of middling weight.
_SPREAD_WEIGHT = 50


class TopologySpread(DomainRule):
    """The pod would raise its domain more than maxSkew above the emptiest one."""

    name = "TopologySpread"
    cures = frozenset({Cure.NEIGHBOURS, Cure.POD_ENDS})

    def concerns(self, context: Context, demand: Demand) -> bool:
        return any(spread.required for spread in demand.neighbours.spread)

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        hard = [spread for spread in demand.neighbours.spread if spread.required]
        if not hard:
            return None
        all_keys = np.logical_and.reduce([is_labelled(context.table, one.topology_key) for one in hard])
        return np.logical_or.reduce(
            [_too_many(context, demand, one, all_keys & _counted(context, demand, one)) for one in hard]
        )

    def preference(self, context: Context, demand: Demand) -> Floats | None:
        soft = [spread for spread in demand.neighbours.spread if not spread.required]
        if not soft:
            return None
        table = context.table
        figure = np.zeros(len(table))
        for spread in soft:
            pods = context.pods.staying(demand.model.ref.namespace, spread.selector)
            counts = shared_domain(table, spread.topology_key, pods)
            figure -= _SPREAD_WEIGHT * counts / spread.max_skew
            # A node outside every domain is the last choice.
            figure[~is_labelled(table, spread.topology_key)] -= 1e6
        return figure

    def lifted_by(
        self, context: Context, demand: Demand, before: Neighbour | None, after: Neighbour | None
    ) -> bool:
        """A spread may be evened out either way."""
        return any(
            pod is not None
            and pod.namespace == demand.model.ref.namespace
            and spread.selector is not None
            and spread.selector.matches(pod.labels)
            for pod in (before, after)
            for spread in demand.neighbours.spread
        )


def _counted(context: Context, demand: Demand, spread: Spread) -> Bools:
    """Which nodes the constraint counts: those that the pod's own rules let it on."""
    table, shape = context.table, demand.shape
    mask = np.ones(len(table), np.bool_)
    if spread.honours_affinity:
        mask &= selected_nodes(table, shape)
    if (
        spread.honours_taints
        and (tainted := untolerated(table, shape.tolerations, table.all_rows)) is not None
    ):
        mask &= ~tainted
    return mask


def _too_many(context: Context, demand: Demand, spread: Spread, counted: Bools) -> Bools:
    table = context.table
    column = table.label(spread.topology_key)
    codes = column.codes[: len(table)]
    # An empty selector counts no pod that is there, as in countPodsMatchSelector (common.go).
    counted_by = spread.selector if spread.selector and spread.selector.requirements else None
    on = counts_by_node(table, context.pods.staying(demand.model.ref.namespace, counted_by))
    by_domain = np.bincount(codes, weights=np.where(counted, on, 0), minlength=len(column.values))
    domains = np.unique(codes[counted])
    itself = int(spread.selector is not None and spread.selector.matches(demand.labels))
    if not len(domains):
        return codes == 0
    least = 0 if len(domains) < spread.min_domains else by_domain[domains].min()
    too_many: Bools = by_domain[codes] + itself - least > spread.max_skew
    return too_many | (codes == 0)
