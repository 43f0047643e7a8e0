"""Everything that a pod asks of a node, read once from its JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from berth.contract.errors import InvalidPod, InvalidValue
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, parse_model_pod
from berth.contract.quantity import ceil_units

JsonObject = Mapping[str, Any]
Amounts = Mapping[str, int]

PODS = "pods"
# Volumes that every node can mount. Others tie a pod to nodes or are limited per node, which the
# binder does not decide; ignoring that would break a promise that nobody else keeps.
_FREE_VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "hostPath", "image", "nfs", "projected", "secret"}
)
# What may stand at the level of the pod instead of its containers (KEP-2837).
_POD_LEVEL = ("cpu", "memory", "hugepages-")


@dataclass(frozen=True, slots=True)
class Demand:
    """A pending pod. `unsupported` names the first field that the binder does not decide."""

    model: ModelPod
    amounts: Amounts
    node_selector: Mapping[str, str]
    affinity: JsonObject
    tolerations: tuple[JsonObject, ...]
    host_ports: frozenset[tuple[str, str, int]]
    unsupported: str | None
    priority: int
    created: str
    gated: bool


def parse_demand(pod: JsonObject, keys: Keys) -> Demand:
    """Raises InvalidPod.

    A pod of ours that asks for no GPU memory asks for 0 bytes, as in the proof of concept: it still
    gets a GPU of its own, because its model must be loaded on one.
    """
    spec = pod["spec"]
    return Demand(
        model=parse_model_pod(pod, keys),
        amounts=pod_amounts(pod, keys),
        node_selector=spec.get("nodeSelector") or {},
        affinity=(spec.get("affinity") or {}).get("nodeAffinity") or {},
        tolerations=tuple(spec.get("tolerations") or ()),
        host_ports=host_ports(pod),
        unsupported=_unsupported(spec),
        priority=spec.get("priority") or 0,
        created=pod["metadata"].get("creationTimestamp") or "",
        gated=bool(spec.get("schedulingGates")),
    )


def pod_amounts(pod: JsonObject, keys: Keys) -> dict[str, int]:
    """What the pod takes of a node's allocatable, GPU memory aside: CPU in milli-cores, the rest in
    units; at its peak, by Kubernetes' rule for init containers and sidecars; one of `pods`.

    Raises InvalidPod.
    """
    spec = pod["spec"]
    running: dict[str, int] = {}
    for container in spec.get("containers") or ():
        _add(running, _requests(container, keys))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        asked = _requests(container, keys)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, asked)
            _raise_to(peak, sidecars)
        else:
            _raise_to(peak, _sum(sidecars, asked))
    _add(running, sidecars)
    _raise_to(running, peak)
    running |= _pod_level(spec, keys)
    _add(running, _amounts_of(spec.get("overhead") or {}, keys, "overhead"))
    return {**running, PODS: 1}


def host_ports(pod: JsonObject) -> frozenset[tuple[str, str, int]]:
    """(address, protocol, port) of every host port of what runs for the pod's whole life."""
    spec = pod["spec"]
    sidecars = (c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always")
    return frozenset(
        (port.get("hostIP") or "0.0.0.0", port.get("protocol", "TCP"), port["hostPort"])  # noqa: S104 - the API's wildcard
        for container in (*(spec.get("containers") or ()), *sidecars)
        for port in container.get("ports") or ()
        if port.get("hostPort")
    )


def units(resource: str, quantity: str) -> int:
    """A quantity in the units that amounts are counted in. Raises InvalidValue."""
    return ceil_units(quantity, per_unit=1000 if resource == "cpu" else 1)


def _pod_level(spec: JsonObject, keys: Keys) -> dict[str, int]:
    """Requests of the pod as a whole, which count instead of its containers'."""
    asked = (spec.get("resources") or {}).get("requests") or {}
    return _amounts_of({k: v for k, v in asked.items() if k.startswith(_POD_LEVEL)}, keys, "pod")


def _requests(container: JsonObject, keys: Keys) -> dict[str, int]:
    resources = container.get("resources") or {}
    # The API server copies limits into absent requests; a pod read before that is treated alike.
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return _amounts_of(asked, keys, f"container {container.get('name', '?')!r}")


def _amounts_of(quantities: Mapping[str, str], keys: Keys, where: str) -> dict[str, int]:
    amounts = {}
    for resource, quantity in quantities.items():
        if resource == keys.gpu_mem:
            continue  # no node advertises it; the report decides
        try:
            amounts[resource] = units(resource, quantity)
        except InvalidValue as error:
            raise InvalidPod(f"{where}: {resource}: {error}") from error
    return amounts


def _unsupported(spec: JsonObject) -> str | None:
    affinity = spec.get("affinity") or {}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    for kind in ("podAffinity", "podAntiAffinity"):
        if (affinity.get(kind) or {}).get(required):
            return f"spec.affinity.{kind}.{required}"
    for constraint in spec.get("topologySpreadConstraints") or ():
        if constraint.get("whenUnsatisfiable") == "DoNotSchedule":
            return "spec.topologySpreadConstraints with DoNotSchedule"
    if spec.get("resourceClaims"):
        return "spec.resourceClaims"
    for volume in spec.get("volumes") or ():
        if kinds := sorted(volume.keys() - _FREE_VOLUMES - {"name"}):
            return f"volume {volume['name']!r} ({kinds[0]})"
    return None


def _add(into: dict[str, int], more: Amounts) -> None:
    for resource, amount in more.items():
        into[resource] = into.get(resource, 0) + amount


def _sum(one: Amounts, other: Amounts) -> dict[str, int]:
    total = dict(one)
    _add(total, other)
    return total


def _raise_to(into: dict[str, int], least: Amounts) -> None:
    for resource, amount in least.items():
        into[resource] = max(into.get(resource, 0), amount)
