"""The openb trace (Alibaba cluster-trace-gpu-v2023) as nodes and pods of a Berth cluster.

One GPU is 1 000 bytes of memory, `gpu_milli` of it is requested; a task with several GPUs requests
all of each. `gpu_spec` (`A|B`) is a node affinity on the GPU product.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from berth.contract.ids import GpuUuid, PodUid
from berth.contract.keys import Keys
from berth.contract.report import GpuReport, NodeReport, TritonReport
from binder.pod.demand import Demand, parse_demand

KEYS = Keys()
PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Task:
    """`gpus`: how much of GPUs it requests, in GPUs. Times in seconds."""

    name: str
    cpu: int
    memory_mib: int
    gpu_count: int
    gpu_bytes: int
    products: tuple[str, ...]
    created: float
    deleted: float

    @property
    def gpus(self) -> float:
        return self.gpu_count * self.gpu_bytes / GPU_BYTES


def read_nodes(path: Path, memory: Sequence[int] = (GPU_BYTES,)) -> list[dict[str, Any]]:
    """Node objects; `memory`: bytes of a GPU, by turns from node to node."""
    with path.open() as rows:
        return [_node(row, memory[n % len(memory)]) for n, row in enumerate(csv.DictReader(rows))]


def read_tasks(path: Path) -> list[Task]:
    """Some of the published files lack the columns after `gpu_milli`, or the memory: nothing is asked then."""
    with path.open() as rows:
        return [_task(row) for row in csv.DictReader(rows)]


def demand(task: Task, uid: str) -> Demand:
    """The task as a pending pod of that uid."""
    known = _demand(replace(task, name="", created=0, deleted=0))
    ref = replace(known.model.ref, name=uid, uid=PodUid(uid))
    return replace(known, model=replace(known.model, ref=ref))


@cache
def _demand(task: Task) -> Demand:
    return parse_demand(_pod(task), KEYS)


def _pod(task: Task) -> dict[str, Any]:
    limits = {KEYS.gpu_mem: str(task.gpu_bytes * task.gpu_count)} if task.gpu_count else {}
    requests = {"cpu": f"{task.cpu}m", "memory": f"{task.memory_mib}Mi"}
    annotations = {KEYS.gpu_count: str(task.gpu_count)} if task.gpu_count > 1 else {}
    return {
        "metadata": {"namespace": "trace", "name": "task", "uid": "task", "annotations": annotations},
        "spec": {
            "containers": [{"name": "task", "resources": {"limits": limits, "requests": requests}}],
            **({"affinity": _affinity(task.products)} if task.products else {}),
        },
    }


def _affinity(products: tuple[str, ...]) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": PRODUCT_LABEL, "operator": "In", "values": list(products)}]}
    required = {"nodeSelectorTerms": [term]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _node(row: dict[str, str], gpu_bytes: int) -> dict[str, Any]:
    name, count = row["sn"], int(row["gpu"] or 0)
    gpus = tuple(
        GpuReport(
            uuid=GpuUuid(f"{name}-{i}"),
            index=i,
            product=row["model"],
            total_bytes=gpu_bytes,
            other_use_bytes=0,
            headroom_bytes=0,
            healthy=True,
        )
        for i in range(count)
    )
    report = NodeReport(
        server="triton", capabilities=(), triton=TritonReport(True, "trace"), gpus=gpus, models=()
    )
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, PRODUCT_LABEL: row["model"]},
            "annotations": {KEYS.report: report.encode()},
        },
        "spec": {},
        "status": {
            "allocatable": {
                "cpu": f"{row['cpu_milli']}m",
                "memory": f"{row['memory_mib']}Mi",
                "pods": "1000",  # the trace knows no such limit
            }
        },
    }


def _task(row: dict[str, str]) -> Task:
    count = int(row["num_gpu"])
    return Task(
        name=row["name"],
        cpu=int(row["cpu_milli"]),
        memory_mib=int(row.get("memory_mib") or 0),
        gpu_count=count,
        gpu_bytes=int(row["gpu_milli"]) if count == 1 else GPU_BYTES if count else 0,
        products=tuple(sorted(p for p in (row.get("gpu_spec") or "").split("|") if p)),
        created=float(row.get("creation_time") or 0),
        deleted=float(row.get("deletion_time") or 0),
    )
