"""How many replicas of a model the nodes would hold if all else were gone. Pure.

Counted is what lasts: labels, taints that people set, what the server can do, the GPUs' sizes, allocatable amounts, one
replica of a model id a node. A node that is cordoned, silent or whose Triton is not ready comes back, and counts.
"""

import numpy as np

from binder.engine.decision import Decider
from binder.pod.demand import Demand
from binder.rules.model_id import rows_with_replica
from binder.rules.rule import UNBOUNDED, Cure


def most_replicas(decider: Decider, demand: Demand) -> int:
    """At most so many replicas, those that are there included."""
    context, table, rules = decider.context, decider.table, decider.rules
    because = decider.because(demand)
    if because is not None and Cure.OWNER in rules.named(because.rule).cures:
        return 0
    fits, each = table.live.copy(), np.full(len(table), UNBOUNDED, np.int64)
    for rule in rules.rules:
        if (never := rule.never_fits(context, demand)) is not None:
            fits &= ~never
        each = np.minimum(each, rule.replicas_per_node(context, demand))
    replicas = np.where(fits, each, 0)
    # Replicas that stand where none would be placed any more stay.
    standing = sum(1 for row in rows_with_replica(table, demand) if not replicas[row])
    together = (rule.most_replicas(context, demand, replicas) for rule in rules.rules)
    return min(int(replicas.sum()), *together) + standing
