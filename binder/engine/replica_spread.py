"""Replicas of one controller are spread over zones and nodes, where the pod does not say itself how. Pure."""

from typing import Final

import numpy as np

from binder.cache.column import Bools
from binder.cache.table import Floats
from binder.pod.demand import Demand
from binder.rules.rule import Context

_ZONE: Final = "topology.kubernetes.io/zone"


def replicas_nearby(context: Context, demand: Demand, *, among: Bools) -> Floats | None:
    """How many replicas of the pod's controller share a zone and a node with it already, as one figure a node, infinite but
    among those nodes; None where there are none, or where the pod says itself how it is to be spread.

    The weights are those of kube-scheduler's system default constraints (podtopologyspread/scoring.go): one replica
    counts ln(domains + 2), so that nodes are evened out before a zone with few of them gets as many as others.
    """
    table = context.table
    there = context.pods.owned(demand.model.ref.namespace, demand.owner)
    if not there or demand.neighbours.spread:
        return None
    known = [(row, count) for node, count in there.items() if (row := table.row_of.get(node)) is not None]
    on = np.zeros(len(table))
    for row, count in known:
        on[row] = count
    zones = table.label(_ZONE).codes[: len(table)]  # nodes without a zone are in one together
    by_zone = np.bincount(zones, weights=on)
    figure: Floats = by_zone[zones] * np.log(len(np.unique(zones[among])) + 2) + on * np.log(among.sum() + 2)
    figure[~among] = np.inf
    return figure
