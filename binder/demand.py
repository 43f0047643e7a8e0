"""Everything that a pod asks of a node, read once from its JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from berth.contract.errors import InvalidPod, InvalidValue
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, parse_model_pod
from berth.contract.quantity import ceil_units
from binder.neighbours import Neighbours, parse_neighbours

JsonObject = Mapping[str, Any]
Amounts = Mapping[str, int]

PODS = "pods"
# Volumes that every node can mount. Claims are looked at (`volumes`); the rest ties a pod to nodes or
# is limited per node, which the binder does not decide.
_FREE_VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "hostPath", "image", "nfs", "projected", "secret"}
)
_CLAIM_VOLUMES = frozenset({"persistentVolumeClaim", "ephemeral"})
# What may stand at the level of the pod instead of its containers (KEP-2837).
_POD_LEVEL = ("cpu", "memory", "hugepages-")


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides which nodes a pod fits on, whoever it is: pods of one shape are judged together.

    `rules` is the canonical text of the three mappings behind it, which themselves are not compared.
    """

    request_bytes: int
    gpu_count: int
    products: tuple[str, ...]
    amounts: tuple[tuple[str, int], ...]
    requirements: tuple[str, ...]
    server: str | None
    rules: str
    node_selector: Mapping[str, str] = field(compare=False)
    node_affinity: JsonObject = field(compare=False)
    tolerations: tuple[JsonObject, ...] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Demand:
    """A pending pod. `unsupported` names the first field that the binder does not decide.

    `claims` are the PersistentVolumeClaims it mounts, `owned_claims` those of them that are made for
    it (generic ephemeral volumes). `owner`: uid of the controller that will replace the pod. `preempts`: it may take the place of pods of lower priority.
    """

    model: ModelPod
    shape: Shape
    owner: str | None
    labels: Mapping[str, str]
    neighbours: Neighbours
    host_ports: frozenset[tuple[str, str, int]]
    claims: tuple[str, ...]
    owned_claims: frozenset[str]
    unsupported: str | None
    priority: int
    preempts: bool
    created: str
    gated: bool

    @property
    def amounts(self) -> Amounts:
        return dict(self.shape.amounts)


def parse_demand(pod: JsonObject, keys: Keys) -> Demand:
    """Raises InvalidPod.

    A pod of ours that asks for no GPU memory asks for 0 bytes, as in the proof of concept: it still
    gets a GPU of its own, because its model must be loaded on one.
    """
    spec, meta = pod["spec"], pod["metadata"]
    model = parse_model_pod(pod, keys)
    claims, owned = pod_claims(pod)
    return Demand(
        model=model,
        shape=_shape(pod, model, keys),
        owner=controller_of(pod),
        labels=meta.get("labels") or {},
        neighbours=parse_neighbours(pod),
        host_ports=host_ports(pod),
        claims=claims,
        owned_claims=owned,
        unsupported=_unsupported(spec),
        priority=spec.get("priority") or 0,
        preempts=spec.get("preemptionPolicy") != "Never",
        created=meta.get("creationTimestamp") or "",
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


def pod_claims(pod: JsonObject) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of the claims behind the pod's volumes; an ephemeral volume's is `<pod>-<volume>`."""
    claims, owned = [], []
    for volume in pod["spec"].get("volumes") or ():
        if "persistentVolumeClaim" in volume:
            claims.append(volume["persistentVolumeClaim"]["claimName"])
        elif "ephemeral" in volume:
            owned.append(f"{pod['metadata']['name']}-{volume['name']}")
    return tuple(dict.fromkeys([*claims, *owned])), frozenset(owned)


def controller_of(pod: JsonObject) -> str | None:
    """The uid of the pod's controller."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)


@lru_cache(maxsize=4096)
def units(resource: str, quantity: str | int | float) -> int:
    """A quantity in the units that amounts are counted in. Raises InvalidValue."""
    return ceil_units(quantity, per_unit=1000 if resource == "cpu" else 1)


def product_key(product: str) -> str:
    """One spelling for NVML's `NVIDIA A100-SXM4-80GB` and the node label's `NVIDIA-A100-SXM4-80GB`."""
    return "-".join(product.split()).casefold()


def _shape(pod: JsonObject, model: ModelPod, keys: Keys) -> Shape:
    spec = pod["spec"]
    selector = spec.get("nodeSelector") or {}
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    tolerations = tuple(spec.get("tolerations") or ())
    return Shape(
        request_bytes=model.request_bytes,
        gpu_count=model.gpu_count,
        products=tuple(product_key(product) for product in model.gpu_products),
        amounts=tuple(sorted(pod_amounts(pod, keys).items())),
        requirements=model.requirements,
        server=model.server,
        rules=json.dumps([selector, affinity, tolerations], sort_keys=True, separators=(",", ":")),
        node_selector=selector,
        node_affinity=affinity,
        tolerations=tolerations,
    )


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
    if spec.get("resourceClaims"):
        return "spec.resourceClaims"
    for volume in spec.get("volumes") or ():
        if kinds := sorted(volume.keys() - _FREE_VOLUMES - _CLAIM_VOLUMES - {"name"}):
            return f"volume {volume['name']!r} ({kinds[0]})"
    return None


def total(amounts: Iterable[Amounts]) -> dict[str, int]:
    """The sum, resource by resource."""
    summed: dict[str, int] = {}
    for one in amounts:
        _add(summed, one)
    return summed


def _add(into: dict[str, int], more: Amounts) -> None:
    for resource, amount in more.items():
        into[resource] = into.get(resource, 0) + amount


def _sum(one: Amounts, other: Amounts) -> dict[str, int]:
    return total((one, other))


def _raise_to(into: dict[str, int], least: Amounts) -> None:
    for resource, amount in least.items():
        into[resource] = max(into.get(resource, 0), amount)
