"""What one pod holds of its node, and what all of them hold of each GPU. Pure.

Whatever cannot be read fails closed: bytes whose GPU is not known are counted on every GPU of the
node, because they are on one of them and it is unknown which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.memory import reserved_bytes
from berth.contract.pod import PodRef, effective_request, is_deleting, is_placed, parse_model_pod, pod_ref
from berth.contract.report import CODE_BACKENDS, ModelReport
from binder.cache.view import HostPort
from binder.pod.demand import Demand, controller_kind, controller_of, host_ports, pod_claims
from binder.pod.resources import pod_amounts
from binder.pod.template import Family, Template, family_of, template_of

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reservation:
    """A pod's share of a node: `bytes` on each of `gpus`. Without `gpus` it is unknown where its
    bytes are."""

    ref: PodRef
    node: NodeName
    amounts: Mapping[str, int]
    ports: frozenset[HostPort]
    priority: int = 0
    created: str = ""
    model_id: ModelId | None = None
    model_name: ModelName | None = None
    gpus: tuple[GpuUuid, ...] = ()
    bytes: int = 0
    claims: tuple[str, ...] = ()
    deleting: bool = False
    has_code: bool = False
    template: Template | None = None
    # Its node is where it belongs: a DaemonSet's, or a mirror of a static pod.
    stays_with_node: bool = False
    family: Family = ""

    @property
    def has_model(self) -> bool:
        """Its pod's end is not the end of what it holds."""
        return bool(self.bytes or self.gpus or self.model_id or self.model_name)


def placed_reservation(demand: Demand, node: NodeName, gpu: GpuChoice) -> Reservation:
    """A pod that has just been given a place."""
    model = demand.model
    return Reservation(
        ref=model.ref,
        node=node,
        amounts=demand.amounts,
        ports=demand.host_ports,
        priority=demand.priority,
        created=demand.created,
        model_id=model.model_id,
        model_name=model.model_name,
        gpus=tuple(one.uuid for one in gpu.gpus),
        bytes=gpu.bytes,
        claims=demand.claims,
        has_code=demand.has_code,
        template=demand.template,
        family=demand.family,
    )


def bound_reservation(pod: JsonObject, node: NodeName, keys: Keys) -> Reservation:
    """A pod that is bound to the node. Never fails: what can be read of it is counted."""
    plain = Reservation(
        pod_ref(pod),
        node,
        _amounts(pod, keys),
        host_ports(pod),
        priority=pod["spec"].get("priority") or 0,
        created=pod["metadata"].get("creationTimestamp") or "",
        claims=pod_claims(pod)[0],
        deleting=is_deleting(pod),
        template=template_of(
            pod["metadata"].get("namespace", ""),
            controller_of(pod),
            pod["metadata"].get("labels") or {},
            (pod["metadata"].get("annotations") or {}).get(keys.model_id, "").strip(),
        ),
        stays_with_node=controller_kind(pod) in ("DaemonSet", "Node"),
        family=family_of(pod),
    )
    # A pod that is bound without the binder gets no model loaded: it holds no GPU memory,
    # whatever it requests, or one such pod could close a node to all others.
    if not is_placed(pod, keys):
        return plain
    try:
        model = parse_model_pod(pod, keys)
    except InvalidPod:
        return _unreadable(plain, pod, keys)
    return replace(
        plain,
        model_id=model.model_id,
        model_name=model.model_name,
        gpus=() if model.gpu is None else tuple(gpu.uuid for gpu in model.gpu.gpus),
        # What the pod requests, which a quota can bound; its owner can edit the annotation.
        bytes=model.request_bytes,
        has_code=not CODE_BACKENDS.isdisjoint(model.requirements),
    )


def reserved_by_gpu(
    reservations: Mapping[PodUid, Reservation], listed: Mapping[PodUid, ModelReport], gpus: frozenset[GpuUuid]
) -> tuple[dict[GpuUuid, int], int]:
    """Bytes reserved on each GPU, and bytes reserved on one of them that is not known.

    A pod counts once on a GPU: the larger of what it requests and what the report lists. Where the
    two name different GPUs it is counted on both.
    """
    reserved: dict[GpuUuid, int] = {}
    anywhere = 0
    for uid in reservations.keys() | listed.keys():
        reservation, model = reservations.get(uid), listed.get(uid)
        share = _share(reservation, model)
        known = _gpus_of(reservation, model, gpus)
        for gpu in known:
            reserved[gpu] = reserved.get(gpu, 0) + share
        if not known:
            anywhere += share
    return reserved, anywhere


def place_of(
    reservation: Reservation | None, model: ModelReport | None, gpus: frozenset[GpuUuid]
) -> tuple[frozenset[GpuUuid], int]:
    """The GPUs on which a pod is counted (none: on all of them), and its bytes on each."""
    return _gpus_of(reservation, model, gpus), _share(reservation, model)


def _share(reservation: Reservation | None, model: ModelReport | None) -> int:
    asked = 0 if reservation is None else reservation.bytes
    if model is None:
        return asked
    return reserved_bytes(max(asked, model.requested_bytes), model.measured_bytes)


def _gpus_of(
    reservation: Reservation | None, model: ModelReport | None, gpus: frozenset[GpuUuid]
) -> frozenset[GpuUuid]:
    """The GPUs that a pod's bytes are counted on; none where that is not known.

    A choice of a GPU that the node does not have is believed only if the report tells the same: a
    GPU that has fallen off must not block the others, and an edited annotation must not free one. Where
    the choice cannot be read any more the report says where the pod is, and it is nowhere else.
    """
    said = frozenset() if model is None else model.gpus
    chosen = frozenset() if reservation is None else frozenset(reservation.gpus)
    return said | chosen if said or gpus.issuperset(chosen) else frozenset()


def _amounts(pod: JsonObject, keys: Keys) -> dict[str, int]:
    try:
        return pod_amounts(pod, keys)
    except InvalidPod:  # the API server refuses such quantities; a pod without any still is one
        return {"pods": 1}


def _unreadable(plain: Reservation, pod: JsonObject, keys: Keys) -> Reservation:
    """A model pod some of whose keys are damaged: its names count as they are written."""
    annotations = pod["metadata"].get("annotations") or {}
    model_id = annotations.get(keys.model_id, "").strip() or None
    name = annotations.get(keys.model_name, "").strip() or model_id
    return replace(
        plain,
        model_id=None if model_id is None else ModelId(model_id),
        model_name=None if name is None else ModelName(name),
        bytes=_asked(pod, keys),
    )


def _asked(pod: JsonObject, keys: Keys) -> int:
    try:
        return effective_request(pod, keys.gpu_mem)
    except InvalidPod:
        return 0
