"""Claims that a pod mounts, and where their volumes can be reached.

The binder places a pod whose claims are bound, where their volumes can be reached; it binds no volume
itself. What needs that is refused with a reason that names who can: kube-scheduler, with the binder
as its extender (docs/operating.md).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from berth.contract.pod import PodRef
from binder.cache.cluster_facts import ClusterEvent
from binder.cache.column import Bools, Ints
from binder.cache.table import NodeTable
from binder.cache.volumes import Volumes
from binder.pod.demand import Demand
from binder.rules.node_selection import matches_node_selector
from binder.rules.rule import UNBOUNDED, Context, Cure, PairRule, PodRule

JsonObject = Mapping[str, Any]

_BOUND = "pv.kubernetes.io/bind-completed"
_EXTENDER = "place the pod with kube-scheduler and Berth's extender, which binds volumes"


class _ClaimRule(PodRule):
    """Of a pod's claims the first one that is not right says what is wrong."""

    cures = frozenset({Cure.CLUSTER})

    def refuses(self, context: Context, demand: Demand) -> str:
        rule, detail = _first_refusal(context.facts.volumes, demand) if demand.claims else ("", "")
        return detail if rule == self.name else ""


class VolumeClaimNotFound(_ClaimRule):
    """A claim, or the volume that it is bound to, does not exist, or is not this pod's."""

    name = "VolumeClaimNotFound"


class VolumeClaimNotBound(_ClaimRule):
    """A claim has no volume yet."""

    name = "VolumeClaimNotBound"


class VolumeInUse(PodRule):
    """Another pod has the volume to itself."""

    name = "VolumeInUse"
    cures = frozenset({Cure.CLUSTER})

    def refuses(self, context: Context, demand: Demand) -> str:
        namespace = demand.model.ref.namespace
        for claim in context.facts.volumes.exclusive(namespace, demand.claims):
            if context.is_claimed(namespace, claim):
                return f"claim {claim!r} is ReadWriteOncePod and in use"
        return ""

    def most_replicas(self, context: Context, demand: Demand, per_node: Ints) -> int:
        exclusive = context.facts.volumes.exclusive(demand.model.ref.namespace, demand.claims)
        return 1 if any(exclusive) else UNBOUNDED


class VolumeNodeAffinityConflict(PairRule):
    """Some bound volume cannot be reached from the node."""

    name = "VolumeNodeAffinityConflict"
    cures = frozenset({Cure.NODE})
    of_fresh_nodes = True

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        elsewhere = list(_elsewhere(context.table, context.facts.volumes, demand)) if demand.claims else []
        return np.logical_or.reduce(elsewhere) if elsewhere else None

    def never_fits(self, context: Context, demand: Demand) -> Bools | None:
        volumes = context.facts.volumes
        if _first_refusal(volumes, demand)[0] or VolumeInUse().refuses(context, demand):
            return None
        return self.fails(context, demand)

    def woken_by(self, context: Context, demand: Demand, event: ClusterEvent) -> bool:
        return event.volumes


def _first_refusal(volumes: Volumes, demand: Demand) -> tuple[str, str]:
    """Which rule refuses, and the detail; "" for none."""
    for name in demand.claims:
        found = _claim_refusal(volumes, demand, name)
        if found[0]:
            return found
    return "", ""


def _claim_refusal(volumes: Volumes, demand: Demand, name: str) -> tuple[str, str]:
    missing = VolumeClaimNotFound.name
    claim = volumes.claims.get((demand.model.ref.namespace, name))
    if claim is None or "deletionTimestamp" in claim["metadata"]:
        return missing, f"persistentvolumeclaim {name!r} does not exist or is being deleted"
    if name in demand.owned_claims and not _is_owned(claim, demand.model.ref):
        return missing, f"persistentvolumeclaim {name!r} was not made for this pod"
    volume = claim["spec"].get("volumeName")
    bound = volume and _BOUND in (claim["metadata"].get("annotations") or {})
    if not bound:
        return VolumeClaimNotBound.name, _why_unbound(volumes, claim, name)
    if volume not in volumes.volumes:
        return missing, f"persistentvolume {volume!r} of claim {name!r} does not exist"
    return "", ""


def _why_unbound(volumes: Volumes, claim: JsonObject, name: str) -> str:
    chosen = claim["spec"].get("storageClassName") or ""
    mode = volumes.classes.get(chosen, {}).get("volumeBindingMode", "Immediate")
    if mode == "WaitForFirstConsumer":
        return f"claim {name!r} (class {chosen!r}) waits for its first consumer; {_EXTENDER}"
    return f"claim {name!r} is not bound yet"


def _elsewhere(table: NodeTable, volumes: Volumes, demand: Demand) -> Iterator[Bools]:
    """The nodes from which one of the volumes cannot be reached."""
    for name in demand.claims:
        claim = volumes.claims.get((demand.model.ref.namespace, name))
        volume = None if claim is None else volumes.volumes.get(claim["spec"].get("volumeName") or "")
        if volume is None:  # another rule's
            continue
        required = (volume["spec"].get("nodeAffinity") or {}).get("required")
        if required is not None:
            yield ~matches_node_selector(table, required, table.all_rows)
        if zones := _zone_labels(volume):
            reached = [_in_zone(table, key, values) for key, values in zones.items()]
            # A node without any such label is in the only zone (volumezone/volume_zone.go).
            known = np.logical_or.reduce([table.label(k).codes[: len(table)] != 0 for k in _ZONES])
            yield known & ~np.logical_and.reduce(reached)


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
