"""Claims that a pod mounts, and where their volumes are. Pure.

The binder places a pod whose claims are bound, where their volumes can be reached; it binds no volume
itself. What needs that is refused with a reason that names who can: kube-scheduler, with the binder
as its extender (docs/operating.md).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from berth.contract.pod import PodRef
from binder.cache.table import Bools, NodeTable
from binder.pod.demand import Demand
from binder.rules.node_selection import matches_node_selector
from binder.rules.reasons import Kind, Reason

JsonObject = Mapping[str, Any]

_BOUND = "pv.kubernetes.io/bind-completed"
_EXTENDER = "place the pod with kube-scheduler and Berth's extender, which binds volumes"


@dataclass(slots=True)
class Volumes:
    """Claims by (namespace, name), volumes and storage classes by name, as the watches tell them."""

    claims: dict[tuple[str, str], JsonObject] = field(default_factory=dict)
    volumes: dict[str, JsonObject] = field(default_factory=dict)
    classes: dict[str, JsonObject] = field(default_factory=dict)

    def refusal(self, demand: Demand) -> Reason | None:
        """Why no node at all can take the pod yet."""
        for name in demand.claims:
            if reason := self._claim_refusal(demand, name):
                return reason
        return None

    def misfits(self, table: NodeTable, demand: Demand) -> Iterator[tuple[Kind, Bools]]:
        """The nodes from which some bound volume cannot be reached. Asks only what `refusal` let pass."""
        for name in demand.claims:
            volume = self.volumes[self.claims[demand.model.ref.namespace, name]["spec"]["volumeName"]]
            required = (volume["spec"].get("nodeAffinity") or {}).get("required")
            if required is not None:
                yield Kind.VOLUME_ELSEWHERE, ~matches_node_selector(table, required, table.all_rows)
            if zones := _zone_labels(volume):
                reached = [_in_zone(table, key, values) for key, values in zones.items()]
                # A node without any such label is in the only zone (volumezone/volume_zone.go).
                known = np.logical_or.reduce([table.label(k).codes[: len(table)] != 0 for k in _ZONES])
                yield Kind.VOLUME_ELSEWHERE, known & ~np.logical_and.reduce(reached)

    def exclusive(self, demand: Demand) -> Iterator[str]:
        """Claims that one pod alone may use at a time (ReadWriteOncePod)."""
        for name in demand.claims:
            claim = self.claims.get((demand.model.ref.namespace, name))
            if claim is not None and "ReadWriteOncePod" in (claim["spec"].get("accessModes") or ()):
                yield name

    def _claim_refusal(self, demand: Demand, name: str) -> Reason | None:
        claim = self.claims.get((demand.model.ref.namespace, name))
        if claim is None or "deletionTimestamp" in claim["metadata"]:
            return Reason(
                Kind.VOLUME_NOT_FOUND, f"persistentvolumeclaim {name!r} does not exist or is being deleted"
            )
        if name in demand.owned_claims and not _is_owned(claim, demand.model.ref):
            return Reason(Kind.VOLUME_NOT_FOUND, f"persistentvolumeclaim {name!r} was not made for this pod")
        volume = claim["spec"].get("volumeName")
        bound = volume and _BOUND in (claim["metadata"].get("annotations") or {})
        if not bound:
            return Reason(Kind.VOLUME_NOT_BOUND, self._why_unbound(claim, name))
        if volume not in self.volumes:
            return Reason(
                Kind.VOLUME_NOT_FOUND, f"persistentvolume {volume!r} of claim {name!r} does not exist"
            )
        return None

    def _why_unbound(self, claim: JsonObject, name: str) -> str:
        chosen = claim["spec"].get("storageClassName") or ""
        mode = self.classes.get(chosen, {}).get("volumeBindingMode", "Immediate")
        if mode == "WaitForFirstConsumer":
            return f"claim {name!r} (class {chosen!r}) waits for its first consumer; {_EXTENDER}"
        return f"claim {name!r} is not bound yet"


_NEW_LABEL = {
    "failure-domain.beta.kubernetes.io/zone": "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region": "topology.kubernetes.io/region",
}
_ZONES = (*_NEW_LABEL, *_NEW_LABEL.values())


def _in_zone(table: NodeTable, key: str, values: list[str]) -> Bools:
    """Nodes whose label is one of these; where a node lacks an old label, its new one."""
    old, new = table.label(key), table.label(_NEW_LABEL.get(key, key))
    rows = table.all_rows
    has_old = old.codes[rows] != 0
    return np.where(has_old, old.is_one_of(values, rows), new.is_one_of(values, rows))


def _zone_labels(volume: JsonObject) -> dict[str, list[str]]:
    """Old volumes name their zones in labels, several with `__` between them."""
    labels = volume["metadata"].get("labels") or {}
    return {key: labels[key].split("__") for key in _ZONES if key in labels}


def _is_owned(claim: JsonObject, pod: PodRef) -> bool:
    owners = claim["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == pod.uid for owner in owners)
