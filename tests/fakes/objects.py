"""Kubernetes objects as the API server would give them, for tests of pure code."""

from typing import Any

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.report import GpuReport, ModelReport, ModelState, NodeReport, TritonReport

KEYS = Keys()
GIB = 1024**3
Json = dict[str, Any]


def gpu(uuid: str = "GPU-a", *, total: int | None = 16 * GIB, index: int = 0, **changes: Any) -> GpuReport:
    values: Json = {"other_use_bytes": 0, "headroom_bytes": 0, "healthy": True, **changes}
    return GpuReport(uuid=GpuUuid(uuid), index=index, total_bytes=total, **{"product": "T4"} | values)


def listed(
    uid: str, *, on: str | None = "GPU-a", requested: int = GIB, measured: int | None = None
) -> ModelReport:
    gpu_uuid = None if on is None else GpuUuid(on)
    name = f"model-{uid}"
    return ModelReport(
        pod_uid=PodUid(uid),
        namespace="team",
        pod_name=uid,
        model_id=ModelId(name),
        model_name=ModelName(name),
        gpu=gpu_uuid,
        requested_bytes=requested,
        measured_bytes=measured,
        state=ModelState.READY,
    )


def report(*gpus: GpuReport, models: tuple[ModelReport, ...] = (), **changes: Any) -> NodeReport:
    values: Json = {
        "server": "triton",
        "capabilities": ("python",),
        "triton": TritonReport(True, "2.51.0"),
        **changes,
    }
    return NodeReport(gpus=gpus or (gpu(),), models=models, **values)


def node(name: str = "n1", *, says: NodeReport | str | None = None, **changes: Any) -> Json:
    text = says if isinstance(says, str) or says is None else says.encode()
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {"kubernetes.io/hostname": name, **changes.get("labels", {})},
            "annotations": {} if text is None else {KEYS.report: text},
        },
        "spec": {"taints": changes.get("taints", []), "unschedulable": changes.get("unschedulable", False)},
        "status": {"allocatable": changes.get("allocatable", {"cpu": "4", "memory": "8Gi", "pods": "10"})},
    }


def pod(
    uid: str = "p1",
    *,
    mem: str | None = "1Gi",
    on: str | None = None,
    choice: GpuChoice | str | None = None,
    annotations: Json | None = None,
    phase: str = "Pending",
    requests: Json | None = None,
    created: str = "2026-01-01T00:00:00Z",
    **spec: Any,
) -> Json:
    """A pod with one container. `on`: bound to that node, `choice`: its GPU annotation."""
    marks = {KEYS.model_id: f"model-{uid}", **(annotations or {})}
    if choice is not None:
        marks[KEYS.gpu] = choice if isinstance(choice, str) else choice.encode()
    limits = {} if mem is None else {KEYS.gpu_mem: mem}
    container = {
        "name": "proxy",
        "image": "berth",
        "resources": {"limits": limits, "requests": requests or {}},
    }
    return {
        "metadata": {
            "namespace": "team",
            "name": uid,
            "uid": uid,
            "annotations": {key: value for key, value in marks.items() if value is not None},
            "creationTimestamp": created,
        },
        "spec": {
            "schedulerName": "trtis-scheduler",
            "containers": [container],
            **({"nodeName": on} if on else {}),
            **spec,
        },
        "status": {"phase": phase},
    }


def budget(allowed: int | None, app: str = "web", uid: str = "pdb") -> Json:
    """A PodDisruptionBudget of the pods of this app: so many may go now."""
    return {
        "metadata": {"uid": uid, "namespace": "team", "name": uid},
        "spec": {"selector": {"matchLabels": {"app": app}}},
        "status": {"disruptionsAllowed": allowed},
    }
