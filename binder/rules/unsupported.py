"""What the binder does not decide."""

from binder.pod.demand import Demand
from binder.rules.rule import Context, Cure, PodRule


class UnsupportedConstraint(PodRule):
    """The pod requests something that only kube-scheduler decides."""

    name = "UnsupportedConstraint"
    cures = frozenset({Cure.OWNER})

    def refuses(self, context: Context, demand: Demand) -> str:
        return demand.unsupported or ""
