"""Which nodes of a cluster that is given as plain API objects can take a pod: the rules alone."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from berth.contract.keys import Keys
from binder.decision import Decider
from binder.demand import parse_demand
from binder.filters import FITS
from binder.state import ClusterState
from binder.strategies import make_strategy
from binder.volumes import Volumes

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class World:
    """API objects as JSON. Every node's heartbeat counts as alive."""

    nodes: Sequence[Json]
    pods: Sequence[Json] = ()
    namespaces: Sequence[Json] = ()
    claims: Sequence[Json] = ()
    volumes: Sequence[Json] = ()
    storage_classes: Sequence[Json] = ()

    def decider(self, keys: Keys | None = None) -> Decider:
        """A decider that knows all of it."""
        state = ClusterState(keys or Keys(), clock=time.monotonic)
        decider = Decider(
            state,
            make_strategy("binpack", np.random.default_rng()),
            clock=time.monotonic,
            volumes=Volumes(
                {(c["metadata"]["namespace"], c["metadata"]["name"]): c for c in self.claims},
                {v["metadata"]["name"]: v for v in self.volumes},
                {s["metadata"]["name"]: s for s in self.storage_classes},
            ),
            namespaces={n["metadata"]["name"]: n["metadata"].get("labels") or {} for n in self.namespaces},
        )
        for node in self.nodes:
            state.set_node(node)
            decider.table.beat(node["metadata"]["name"], math.inf)
        for pod in self.pods:
            state.set_pod(pod)
        return decider


def feasible_nodes(pod: Json, world: World, decider: Decider | None = None) -> frozenset[str]:
    """The names of the nodes that no rule forbids. Raises InvalidPod."""
    decider = decider or world.decider()
    codes = decider.codes(parse_demand(pod, Keys()))
    return frozenset(name for name, row in decider.table.row_of.items() if codes[row] == FITS)
