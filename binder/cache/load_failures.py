"""Nodes on which a model's load has failed, and for how long pods of that model keep away. Pure.

A failure that another node could cure (`Failure.CAPACITY`, `Failure.TRANSIENT`) excludes the node for
that model; after MOST_FAILURES failures nothing is tried any more: then it is the model that is at fault,
or the cluster, and its owner gets an event.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from berth.contract.ids import NodeName, PodUid
from berth.contract.report import Failure
from binder.pod.demand import Demand

EXCLUDED_SECONDS = 15 * 60.0
MOST_FAILURES = 3
CURABLE = frozenset({Failure.CAPACITY, Failure.TRANSIENT})

# (namespace, the model's id or else its controller's uid)
ModelKey = tuple[str, str]


def model_key(demand: Demand) -> ModelKey | None:
    """What outlives the pod; None for a pod that nothing will replace and that has no identity."""
    name = demand.model.model_id or demand.owner
    return None if name is None else (demand.model.ref.namespace, name)


@dataclass(slots=True)
class _History:
    until: dict[NodeName, float] = field(default_factory=dict)
    pods: set[PodUid] = field(default_factory=set)


class LoadFailures:
    """Forgets a model EXCLUDED_SECONDS after its last failure."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._models: dict[ModelKey, _History] = {}

    def note(self, key: ModelKey, node: NodeName, pod: PodUid) -> bool:
        """A pod's load has failed; it counts once, however often that is said. True while another node is
        worth a try."""
        self._forget_old()
        history = self._models.setdefault(key, _History())
        history.pods.add(pod)
        history.until[node] = self._clock() + EXCLUDED_SECONDS
        return len(history.pods) < MOST_FAILURES

    def excluded(self, demand: Demand) -> list[NodeName]:
        """Nodes that the pod must not go to for now."""
        key = model_key(demand)
        history = None if key is None else self._models.get(key)
        if history is None:
            return []
        now = self._clock()
        return [node for node, until in history.until.items() if until > now]

    def _forget_old(self) -> None:
        now = self._clock()
        old = [key for key, one in self._models.items() if max(one.until.values()) <= now]
        for key in old:
            del self._models[key]
