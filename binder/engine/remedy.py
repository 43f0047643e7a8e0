"""What would make a pod fit that does not: a larger GPU, or the end of which models. Pure."""

import numpy as np

from berth.contract.ids import NodeName
from binder.cache.disruption_budgets import Budgets
from binder.engine.decision import Decider, Refusal
from binder.engine.preemption import curable, find_candidate
from binder.pod.demand import Demand
from binder.rules.registry import FITS


def remedy(decider: Decider, demand: Demand, refusal: Refusal, *, most_nodes: int) -> str:
    """One clause; "" where only other things than room are in the way. Looks closely at `most_nodes`
    nodes at most, those with the most free memory."""
    rules = decider.rules
    failed = set(refusal.codes[decider.table.live].tolist())
    if refusal.because is not None or not any(curable(rules, np.array(sorted(failed), np.int8))):
        return ""
    for code in sorted(failed - {FITS}):
        if help := rules.rule(code).remedy(decider.context, demand):
            return help
    nodes = _freest(decider, refusal, most_nodes)
    candidate = find_candidate(decider, demand, nodes, may_go=lambda _: True, budgets=Budgets())
    if candidate is None:
        return ""
    gpus = ", ".join(str(gpu.index) for gpu in candidate.placement.gpu.gpus)
    gone = ", ".join(str(victim.ref) for victim in candidate.victims)
    return f"would fit on {candidate.placement.node}, GPU {gpus}, without {gone}"


def _freest(decider: Decider, refusal: Refusal, most: int) -> list[NodeName]:
    table = decider.table
    rows = np.flatnonzero(curable(decider.rules, refusal.codes) & table.live)
    if not len(rows):
        return []
    order = np.argsort(-table.free[rows].max(axis=1), kind="stable")
    return [table.view(int(row)).facts.name for row in rows[order][:most]]
