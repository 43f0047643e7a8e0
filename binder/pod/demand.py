"""Everything that a pod asks of a node, read once from its JSON."""

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from berth.contract.ids import NodeName
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, parse_model_pod
from berth.contract.report import CODE_BACKENDS
from binder.pod.bounds import require_bounded
from binder.pod.resources import Amounts, pod_amounts
from binder.pod.template import Family, Template, family_of, template_of
from binder.pod.topology_terms import Neighbours, parse_neighbours

JsonObject = Mapping[str, Any]

# Volumes that every node can mount. Claims are looked at (`volumes`); the rest ties a pod to nodes or
# is limited per node, which the binder does not decide.
_FREE_VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "hostPath", "image", "nfs", "projected", "secret"}
)
_CLAIM_VOLUMES = frozenset({"persistentVolumeClaim", "ephemeral"})


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides which nodes a pod fits on, apart from its identity: pods of one shape are judged together.

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
    """A pending pod. `unsupported` names the first field that the binder does not decide; `family`: see `quarantine`.

    `claims` are the PersistentVolumeClaims it mounts, `owned_claims` those of them that are made for
    it (generic ephemeral volumes). `owner`: uid of the controller that will replace the pod. `preempts`: it may take the place of pods of lower priority.
    `nominated`: the node where a leader has begun to make room for it; what it requests is the same without.
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
    nominated: NodeName | None = field(default=None, compare=False)
    family: Family = ""

    @property
    def question(self) -> Hashable:
        """All that an answer depends on but the pod's name and age: pods that ask the same are refused
        alike."""
        model = self.model
        return (
            *(model.ref.namespace, model.model_id, model.model_name, self.owner, self.shape, self.neighbours),
            *(frozenset(self.labels.items()), self.host_ports, self.claims, self.owned_claims),
            *(self.unsupported, self.priority, self.preempts, self.gated),
        )

    @property
    def template(self) -> Template | None:
        """What it has in common with the pods that bring the same files."""
        return template_of(self.model.ref.namespace, self.owner, self.labels, self.model.model_id)

    @property
    def has_code(self) -> bool:
        """Its requirements say that its model is a program."""
        return not CODE_BACKENDS.isdisjoint(self.shape.requirements)

    @property
    def amounts(self) -> Amounts:
        return dict(self.shape.amounts)


def parse_demand(pod: JsonObject, keys: Keys) -> Demand:
    """Raises InvalidPod.

    A pod of ours that requests no GPU memory requests 0 bytes, as in the proof of concept: it still
    gets a GPU of its own, because its model must be loaded on one.
    """
    require_bounded(pod)  # before any work that grows with it
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
        family=family_of(pod),
        nominated=(pod.get("status") or {}).get("nominatedNodeName") or None,
    )


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


def controller_kind(pod: JsonObject) -> str | None:
    """What kind of object the pod's controller is."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner.get("kind") for owner in owners if owner.get("controller")), None)


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


def _unsupported(spec: JsonObject) -> str | None:
    if spec.get("resourceClaims"):
        return "spec.resourceClaims"
    for volume in spec.get("volumes") or ():
        if kinds := sorted(volume.keys() - _FREE_VOLUMES - _CLAIM_VOLUMES - {"name"}):
            return f"volume {volume['name']!r} ({kinds[0]})"
    return None
