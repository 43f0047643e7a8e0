"""The port to GPU facts, and the implementation for nodes without any."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from berth.contract.ids import GpuUuid, ModelName

# What NVML's figures move by when nothing of ours happens.
_NOISE_BYTES = 64 * 1024**2
_NAMELESS = "unknown-"


class GpusUnknown(Exception):
    """No GPU facts can be had now: NVML hangs, its driver is gone, or the scenario is unreadable."""


class GpusHang(GpusUnknown):
    """A call that has not returned, and none else can be made meanwhile."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment. None where NVML gives no figure; `reason` says why it is not healthy.

    `index` is NVML's and may change with every start of the machine. `in_cuda`: CUDA counts it, which
    it does neither with a GPU that is lost nor with one that has MIG on. `broken`: the GPU itself or its
    driver says so, which is more than that it cannot be read: nothing that runs on it is to be trusted.
    """

    uuid: GpuUuid
    index: int
    product: str
    total_bytes: int | None
    used_bytes: int | None
    utilization: float | None  # 0 to 1
    healthy: bool = True
    reason: str = ""
    bus_id: str = ""
    in_cuda: bool = True
    broken: bool = False

    @property
    def is_named(self) -> bool:
        """Its UUID is known, from this reading or an earlier one."""
        return not self.uuid.startswith(_NAMELESS)


def nameless(index: int) -> GpuUuid:
    """In place of a UUID that has never been read."""
    return GpuUuid(f"{_NAMELESS}{index}")


@dataclass(frozen=True, slots=True)
class Resident:
    """One model that Triton holds, as a port without GPUs has to charge it."""

    name: ModelName
    gpu: GpuUuid
    requested_bytes: int


def cuda_ordinals(readings: Iterable[GpuReading]) -> dict[GpuUuid, int]:
    """The number by which CUDA, and so Triton, calls each GPU under CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    seen = sorted((gpu for gpu in readings if gpu.in_cuda), key=lambda gpu: (gpu.bus_id, gpu.index))
    return {gpu.uuid: ordinal for ordinal, gpu in enumerate(seen)}


def gpus_failure(gpus: Collection[GpuUuid], readings: Collection[GpuReading]) -> str:
    """What is broken of the GPUs that a model is on; "" where nothing is, or it cannot be known. A GPU that is
    not among the readings is gone, unless the UUID of one of them is unknown."""
    there = {reading.uuid: reading for reading in readings}
    for uuid in gpus:
        reading = there.get(uuid)
        if reading is None and all(one.is_named or one.broken for one in readings):
            return f"GPU {uuid} is not on this node any more"
        if reading is not None and reading.broken:
            return f"GPU {reading.index} ({uuid}): {reading.reason}"
    return ""


def grown_instead(
    before: Mapping[GpuUuid, int],
    after: Mapping[GpuUuid, int],
    *,
    chosen: Collection[GpuUuid],
    others: Collection[GpuUuid],
    least_bytes: int,
) -> GpuUuid | None:
    """The GPU that a load went to if it was not a chosen one: none of those grew, and this one did, by
    `least_bytes` or more. None where that cannot be determined. `before`, `after`: bytes in use."""

    def growth(gpu: GpuUuid) -> int:
        return after[gpu] - before[gpu]

    known = before.keys() & after.keys()
    if not known.issuperset(chosen) or any(growth(gpu) > 0 for gpu in chosen):
        return None
    grown = [gpu for gpu in known.intersection(others) if growth(gpu) >= max(least_bytes, _NOISE_BYTES)]
    return max(grown, key=growth, default=None)


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
