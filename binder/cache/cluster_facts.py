"""What decisions look at beside the nodes' rows, in one place: kept by the watch of the cluster, read by rules."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from binder.cache.load_failures import LoadFailures
from binder.cache.pod_index import PodChange
from binder.cache.quarantine import Quarantines
from binder.cache.state import ClusterState
from binder.cache.volumes import Volumes
from binder.pod.selectors import Labels


@dataclass(slots=True, kw_only=True)
class ClusterFacts:
    """`clock`: monotonic seconds."""

    state: ClusterState
    clock: Callable[[], float] = time.monotonic
    namespaces: dict[str, Labels] = field(default_factory=dict)
    volumes: Volumes = field(default_factory=Volumes)
    quarantines: Quarantines = field(default_factory=Quarantines)
    load_failures: LoadFailures = field(default_factory=LoadFailures)

    def labels_of(self, namespace: str) -> Labels:
        return self.namespaces.get(namespace, {})


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """What else has changed than that nodes have become free or better. `moved`: something of nodes that only people
    change; `pods`: those with a node that came, went or changed, None: too many to tell."""

    moved: bool
    pods: list[PodChange] | None
    volumes: bool
    namespaces: frozenset[str]

    def __bool__(self) -> bool:
        return self.moved or self.volumes or bool(self.namespaces) or self.pods is None or bool(self.pods)
