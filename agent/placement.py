"""Whether a pod's GPU choice is the binder's and holds here. Pure.

Annotations can be written by others, at any time: the choice that was seen first holds. A GPU is its UUID; its
index is of the time of the Binding.
"""

from collections.abc import Collection

from agent.models import Model
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.pod import ModelPod


class NotPlaced(Exception):
    """The pod has no usable GPU choice: the binder has not placed it."""


class GpuGone(NotPlaced):
    """The node does not have a chosen GPU. `reason`: of the model's failure."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def require_chosen(pod: ModelPod, model: Model | None) -> None:
    """Raises NotPlaced for a pod that never had a choice."""
    if pod.gpu is None and model is None:
        raise _no_choice(pod)


def require_unmoved(pod: ModelPod, model: Model) -> None:
    """Raises NotPlaced where the pod's GPU choice has been changed since it was first seen."""
    if model.gpu is None or (pod.gpu is not None and _place(pod.gpu) == _place(model.gpu)):
        return
    now = "it is gone" if pod.gpu is None else f"it says {pod.gpu.encode()}"
    raise NotPlaced(
        f"pod {pod.ref}: its GPU choice was {model.gpu.encode()} and holds, but now {now[:300]};"
        " only the binder chooses: delete the pod, and its owner makes one that is placed again"
    )


def choice_of(pod: ModelPod, model: Model) -> GpuChoice:
    """The choice that holds, which is what the pod requests. Raises NotPlaced."""
    require_unmoved(pod, model)
    gpu = model.gpu
    if gpu is None:
        raise _no_choice(pod)
    if not pod.request_bytes:
        raise NotPlaced(f"pod {pod.ref} requests no GPU memory; a model has some of its own")
    if gpu.bytes != pod.request_bytes:
        raise NotPlaced(f"pod {pod.ref} requests {pod.request_bytes} bytes but was given {gpu.bytes}")
    if len(gpu.gpus) != pod.gpu_count:
        raise NotPlaced(f"pod {pod.ref} requests {pod.gpu_count} GPUs but was given {len(gpu.gpus)}")
    return gpu


def require_here(pod: ModelPod, gpu: GpuChoice, here: Collection[GpuUuid]) -> None:
    """`here`: the node's GPUs. Raises GpuGone."""
    for uuid in gpu.uuids:
        if uuid not in here:
            raise GpuGone(
                f"pod {pod.ref} was given GPU {uuid}, which this node does not have",
                reason=f"GPU {uuid} is not on this node any more",
            )


def _no_choice(pod: ModelPod) -> NotPlaced:
    return NotPlaced(f"pod {pod.ref} has no GPU choice; is its schedulerName the binder's?")


def _place(gpu: GpuChoice) -> tuple[tuple[GpuUuid, ...], int]:
    return gpu.uuids, gpu.bytes
