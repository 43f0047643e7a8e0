"""What a model pod requests, read from the pod as the API server gives it (JSON)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from berth.contract.backends import backend_name
from berth.contract.errors import InvalidPod, InvalidValue
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import ModelId, ModelName, NodeName, PodUid, parse_model_name
from berth.contract.keys import Keys
from berth.contract.quantity import MOST, parse_bytes

JsonObject = Mapping[str, Any]
ENDED_PHASES = frozenset({"Succeeded", "Failed"})
_ANNOTATION_LIMIT = 253
_MIB = 1024**2
MOST_GPUS = 64  # of one node; no machine has more


@dataclass(frozen=True, slots=True)
class PodRef:
    """Which pod: the uid tells apart two pods that had one name after another."""

    namespace: str
    name: str
    uid: PodUid

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ModelPod:
    """The Berth side of one pod.

    `request_bytes` is what each of its GPUs carries: its limits are the pod's total, as a quota counts it,
    shared out among `gpu_count` GPUs, or once it is placed among those of `gpu`.
    """

    ref: PodRef
    node: NodeName | None
    deleting: bool
    ended: bool
    request_bytes: int
    model_id: ModelId | None
    declared_name: ModelName | None
    requirements: tuple[str, ...]
    server: str | None
    gpu: GpuChoice | None
    gpu_count: int = 1
    gpu_products: tuple[str, ...] = ()

    @property
    def model_name(self) -> ModelName | None:
        """The name in Triton that the annotations fix; None for an anonymous pod, whose loader names it."""
        if self.declared_name is not None:
            return self.declared_name
        return None if self.model_id is None else ModelName(self.model_id)


def pod_ref(pod: JsonObject) -> PodRef:
    meta = pod["metadata"]
    return PodRef(meta.get("namespace", ""), meta["name"], PodUid(meta.get("uid", "")))


def node_of(pod: JsonObject) -> NodeName | None:
    """The node that the pod is bound to."""
    name = pod.get("spec", {}).get("nodeName")
    return NodeName(name) if name else None


def has_ended(pod: JsonObject) -> bool:
    """True once no container of the pod runs or will run again."""
    return pod.get("status", {}).get("phase") in ENDED_PHASES


def is_deleting(pod: JsonObject) -> bool:
    return pod["metadata"].get("deletionTimestamp") is not None


def is_initialized(pod: JsonObject) -> bool:
    """Its init containers are done, the loader among them: its model has been loaded."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Initialized" and one.get("status") == "True" for one in conditions)


def is_placed(pod: JsonObject, keys: Keys) -> bool:
    """True if it says which GPU it has, readable or not: the binder has bound it."""
    return keys.gpu in (pod["metadata"].get("annotations") or {})


def is_model_pod(pod: JsonObject, keys: Keys) -> bool:
    """True if some container requests the GPU memory resource, or the binder has chosen a GPU for it
    (which it also does for a pod of its own that requests none)."""
    if is_placed(pod, keys):
        return True
    return any(keys.gpu_mem in _resources(container) for container in _all_containers(pod))


def parse_model_pod(pod: JsonObject, keys: Keys) -> ModelPod:
    """Read a pod. Raises InvalidPod naming the key, its value and what would be right."""
    annotations = pod["metadata"].get("annotations") or {}
    try:
        count, gpu = _gpu_count(annotations, keys), _gpu(annotations, keys)
        # Of a placed pod the binder's word counts: its owner may have changed the count since.
        total, gpus = effective_request(pod, keys.gpu_mem), count if gpu is None else len(gpu.gpus)
        return ModelPod(
            ref=pod_ref(pod),
            node=node_of(pod),
            deleting=is_deleting(pod),
            ended=has_ended(pod),
            request_bytes=_share(total, gpus, keys),
            model_id=_model_id(annotations, keys),
            declared_name=_declared_name(annotations, keys),
            requirements=_requirements(annotations, keys),
            server=_text(annotations, keys.server),
            gpu=gpu,
            gpu_count=count,
            gpu_products=_comma_list(annotations, keys.gpu_product),
        )
    except InvalidPod:
        raise
    except InvalidValue as error:
        raise InvalidPod(str(error)) from error


def effective_request(pod: JsonObject, resource: str) -> int:
    """Bytes of `resource` that the pod needs at its peak, MOST at most, by Kubernetes' own rule.

    The containers' sum plus the sidecars' (init containers with restartPolicy Always), or the
    largest init container plus the sidecars started before it, whichever is more
    (k8s.io/component-helpers/resource/helpers.go, PodRequests).
    """
    spec = pod.get("spec", {})
    running = sum(_amount(c, resource) for c in spec.get("containers", ()))
    sidecars = peak = 0
    for container in spec.get("initContainers", ()) or ():
        if container.get("restartPolicy") == "Always":
            sidecars += _amount(container, resource)
            peak = max(peak, sidecars)
        else:
            peak = max(peak, sidecars + _amount(container, resource))
    return min(max(running + sidecars, peak), MOST)


def _share(total_bytes: int, gpus: int, keys: Keys) -> int:
    """What each of `gpus` GPUs carries of a pod's total. Raises InvalidPod where that is no whole number."""
    rest = total_bytes % gpus
    if not rest or total_bytes == MOST:  # MOST stands for all amounts that no machine has
        return total_bytes // gpus
    raise InvalidPod(
        f"limit {keys.gpu_mem} is the pod's total, {total_bytes} bytes, which is no whole number of bytes for "
        f"each of {gpus} GPUs (annotation {keys.gpu_count}); the next that is: "
        f"{_next_total(total_bytes, gpus)}"
    )


def _next_total(total_bytes: int, gpus: int) -> str:
    """The next larger total that divides, and the next in MiB where the total was written in such."""
    nearest = f"{-(-total_bytes // gpus) * gpus}"
    whole_mib, rest = divmod(total_bytes, _MIB)
    return nearest if rest else f"{nearest}, or {-(-whole_mib // gpus) * gpus}Mi"


def _all_containers(pod: JsonObject) -> list[JsonObject]:
    spec = pod.get("spec", {})
    return [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]


def _resources(container: JsonObject) -> JsonObject:
    resources = container.get("resources") or {}
    return {**(resources.get("requests") or {}), **(resources.get("limits") or {})}


def _amount(container: JsonObject, resource: str) -> int:
    text = _resources(container).get(resource, "0")
    try:
        return parse_bytes(text)
    except InvalidValue as error:
        raise InvalidPod(f"container {container.get('name', '?')!r}: {resource}: {error}") from error


def _text(annotations: Mapping[str, str], key: str) -> str | None:
    value = annotations.get(key, "").strip()
    if len(value) > _ANNOTATION_LIMIT or not value.isprintable():
        raise InvalidPod(f"annotation {key} must be printable and at most {_ANNOTATION_LIMIT} characters")
    return value or None


def _model_id(annotations: Mapping[str, str], keys: Keys) -> ModelId | None:
    text = _text(annotations, keys.model_id)
    if text is None:
        return None
    if _text(annotations, keys.model_name) is None:
        _checked_name(text, keys.model_id)
    return ModelId(text)


def _declared_name(annotations: Mapping[str, str], keys: Keys) -> ModelName | None:
    text = _text(annotations, keys.model_name)
    return None if text is None else _checked_name(text, keys.model_name)


def _checked_name(text: str, key: str) -> ModelName:
    try:
        return parse_model_name(text)
    except InvalidValue as error:
        raise InvalidPod(f"annotation {key}: {error}") from error


def _comma_list(annotations: Mapping[str, str], key: str) -> tuple[str, ...]:
    text = _text(annotations, key)
    if text is None:
        return ()
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise InvalidPod(f"annotation {key} is {text!r}; write a comma list such as a,b")
    return tuple(sorted(set(entries)))


def _requirements(annotations: Mapping[str, str], keys: Keys) -> tuple[str, ...]:
    return tuple(sorted({backend_name(one) for one in _comma_list(annotations, keys.requirements)}))


def _gpu_count(annotations: Mapping[str, str], keys: Keys) -> int:
    text = _text(annotations, keys.gpu_count)
    if text is None:
        return 1
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_GPUS):
        raise InvalidPod(f"annotation {keys.gpu_count} is {text!r}; write a number from 1 to {MOST_GPUS}")
    return int(text)


def _gpu(annotations: Mapping[str, str], keys: Keys) -> GpuChoice | None:
    text = annotations.get(keys.gpu)
    if text is None:
        return None
    try:
        return GpuChoice.decode(text)
    except InvalidValue as error:
        raise InvalidPod(f"annotation {keys.gpu}: {error}") from error
