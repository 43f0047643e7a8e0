"""What would make a pod fit that does not: a larger GPU, or the end of which models. Pure."""

import numpy as np

from berth.contract.ids import NodeName
from berth.contract.quantity import format_bytes
from binder.cache.disruption_budgets import Budgets
from binder.engine.decision import Decider, Refusal
from binder.engine.preemption import CURABLE, curable, find_candidate
from binder.pod.demand import Demand
from binder.rules.filters import CODE
from binder.rules.reasons import Kind


def remedy(decider: Decider, demand: Demand, refusal: Refusal, *, most_nodes: int) -> str:
    """One clause; "" where only other things than room are in the way. Looks closely at `most_nodes`
    nodes at most, those with the most free memory."""
    codes = set(refusal.codes[decider.table.live].tolist())
    if refusal.because is not None or codes.isdisjoint(CODE[kind] for kind in CURABLE):
        return ""
    if CODE[Kind.GPU_MEMORY] in codes and (largest := _largest(decider, demand)) < demand.shape.request_bytes:
        asked = f"{format_bytes(demand.shape.request_bytes)} asked{' on each' * (demand.shape.gpu_count > 1)}"
        return f"no GPU is large enough: {asked}, {format_bytes(largest)} on the largest when empty"
    nodes = _freest(decider, refusal, most_nodes)
    candidate = find_candidate(decider, demand, nodes, may_go=lambda _: True, budgets=Budgets())
    if candidate is None:
        return ""
    gpus = ", ".join(str(gpu.index) for gpu in candidate.placement.gpu.gpus)
    gone = ", ".join(str(victim.ref) for victim in candidate.victims)
    return f"would fit on {candidate.placement.node}, GPU {gpus}, without {gone}"


def _freest(decider: Decider, refusal: Refusal, most: int) -> list[NodeName]:
    table = decider.table
    rows = np.flatnonzero(curable(refusal.codes) & table.live)
    if not len(rows):
        return []
    order = np.argsort(-table.free[rows].max(axis=1), kind="stable")
    return [table.view(int(row)).facts.name for row in rows[order][:most]]


def _largest(decider: Decider, demand: Demand) -> int:
    """What the largest GPU of a product that will do can give to models at all."""
    models, wanted = decider.table.models, demand.shape.products
    return max((size for product, size in models if not wanted or product in wanted), default=0)
