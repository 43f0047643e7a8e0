"""Pods whose files took a Triton down are placed nowhere."""

from binder.pod.demand import Demand
from binder.rules.rule import Context, Cure, PodRule


class ModelQuarantined(PodRule):
    """Its template, or another pod of its model id, is quarantined (`cache.quarantine`)."""

    name = "ModelQuarantined"
    cures = frozenset({Cure.OWNER, Cure.TIME})

    def refuses(self, context: Context, demand: Demand) -> str:
        ref, model_id = demand.model.ref, demand.model.model_id
        model = None if model_id is None else (ref.namespace, model_id)
        return context.facts.quarantines.because(demand.template, model=model, family=demand.family)
