"""The cluster that the schedulers are measured on, as JSON for the API server.

Both see the same node: what Berth reads from the report stands in an extended resource for kube-scheduler,
which knows the sum over a node's GPUs and not the single GPU.
"""

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from berth.contract.ids import GpuUuid
from berth.contract.keys import SCHEDULER_NAME, Keys, agent_lease_name
from berth.contract.report import GpuReport, NodeReport, TritonReport
from berth.kube.times import micro_time, rfc3339, utc_now

Json = dict[str, Any]

GIB = 1024**3
GPUS, GPU_GIB = 8, 80
KEYS = Keys()
KUBE_SCHEDULER_NAME = "default-scheduler"
KUBE_GPU_MEM = "example.com/gpu-mem"
"""The extended resource, in MiB: the scheduler's arithmetic is the same for any unit."""
_LEASE_SECONDS = 24 * 3600
_ALLOCATABLE = {"cpu": "128", "memory": "1Ti", "pods": "110", KUBE_GPU_MEM: str(GPUS * GPU_GIB * 1024)}
_MODEL_GIB = (2, 3, 4, 6, 8, 12, 16, 24, 40)
# Many small and few large ones: 7 GiB on average, so that 5000 pods take 6 % of 1000 nodes.
_MODEL_WEIGHTS = (8, 8, 8, 6, 6, 4, 3, 2, 1)


@dataclass(frozen=True, slots=True)
class Ask:
    """What one pod wants."""

    gpu_gib: int
    cpu_milli: int
    memory_mib: int


def node_name(index: int) -> str:
    return f"gpu-{index:05d}"


def node(index: int) -> Json:
    """Ready, with eight healthy and empty GPUs."""
    name = node_name(index)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
            "annotations": {KEYS.report: _report(index).encode()},
        },
        "status": {
            "allocatable": _ALLOCATABLE,
            "capacity": _ALLOCATABLE,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def gpu_uuid(node_index: int, gpu: int) -> GpuUuid:
    """As the node's report names it."""
    return GpuUuid(f"GPU-{uuid.UUID(int=node_index * GPUS + gpu)}")


def lease(index: int) -> Json:
    """The heartbeat of a node's agent, good for longer than any run."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": agent_lease_name(node_name(index))},
        "spec": {
            "holderIdentity": node_name(index),
            "leaseDurationSeconds": _LEASE_SECONDS,
            "renewTime": micro_time(utc_now()),
        },
    }


def asks(count: int) -> Iterator[Ask]:
    """The same pods for every scheduler."""
    chance = random.Random(1)
    for _ in range(count):
        (gib,) = chance.choices(_MODEL_GIB, _MODEL_WEIGHTS)
        yield Ask(gib, chance.randrange(100, 501, 100), chance.choice((256, 512, 1024)))


def berth_pod(name: str, ask: Ask) -> Json:
    return _pod(name, ask, SCHEDULER_NAME, {KEYS.gpu_mem: f"{ask.gpu_gib}Gi"})


def set_gpu_mem(pod: Json, *, mib_each: int) -> None:
    """So much on each of the GPUs that the pod requests; its limit is the total."""
    count = int(pod["metadata"]["annotations"].get(KEYS.gpu_count, "1"))
    pod["spec"]["containers"][0]["resources"]["limits"][KEYS.gpu_mem] = f"{mib_each * count}Mi"


def kube_pod(name: str, ask: Ask) -> Json:
    return _pod(name, ask, KUBE_SCHEDULER_NAME, {KUBE_GPU_MEM: str(ask.gpu_gib * 1024)})


def require_room(nodes: int, pods: int) -> None:
    """A pod that fits nowhere would be measured too. Raises SystemExit."""
    wanted = sum(ask.gpu_gib for ask in asks(pods))
    if wanted > 0.8 * nodes * GPUS * GPU_GIB or pods > 0.8 * nodes * int(_ALLOCATABLE["pods"]):
        raise SystemExit(f"bench.binder: {pods} pods with {wanted} GiB do not fit on {nodes} nodes with ease")


def _pod(name: str, ask: Ask, scheduler: str, limits: dict[str, str]) -> Json:
    requests = {"cpu": f"{ask.cpu_milli}m", "memory": f"{ask.memory_mib}Mi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {KEYS.model_id: name}, "labels": {"app": "bench"}},
        "spec": {
            "schedulerName": scheduler,
            "containers": [
                {"name": "proxy", "image": "berth", "resources": {"limits": limits, "requests": requests}}
            ],
        },
    }


def _report(index: int) -> NodeReport:
    return NodeReport(
        server="triton",
        capabilities=("onnxruntime", "python"),
        triton=TritonReport(True, "2.51.0", ("onnxruntime", "python")),
        gpus=tuple(_gpu(index, gpu) for gpu in range(GPUS)),
        models=(),
        generation=1,
        observed_at=rfc3339(utc_now()),
    )


def _gpu(node_index: int, gpu: int) -> GpuReport:
    name = gpu_uuid(node_index, gpu)
    return GpuReport(
        uuid=name,
        index=gpu,
        product="NVIDIA A100-SXM4-80GB",
        total_bytes=GPU_GIB * GIB,
        other_use_bytes=0,
        headroom_bytes=0,
        healthy=True,
    )
