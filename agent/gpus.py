"""The port to GPU facts, and the implementation for nodes without any."""

from dataclasses import dataclass
from typing import Protocol

from berth.contract.ids import GpuUuid


class GpusUnknown(Exception):
    """No GPU facts can be had now: NVML hangs, its driver is gone, or the scenario is unreadable."""


class GpusHang(GpusUnknown):
    """A call that has not returned, and none else can be made meanwhile."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment. None where NVML gives no figure; `reason` says why it is not healthy."""

    uuid: GpuUuid
    index: int
    product: str
    total_bytes: int | None
    used_bytes: int | None
    utilization: float | None  # 0 to 1
    healthy: bool = True
    reason: str = ""


class Gpus(Protocol):
    """Where GPU facts come from."""

    instance_kind: str
    """Triton's KIND_GPU, or KIND_CPU where the GPUs are not real."""

    async def read(self) -> tuple[GpuReading, ...]:
        """Every GPU of the node, by index. Raises GpusUnknown."""
        ...


class NoGpus:
    """A node whose GPUs are not read. It takes no models, because nothing is known to be free."""

    instance_kind = "KIND_CPU"

    async def read(self) -> tuple[GpuReading, ...]:
        return ()
