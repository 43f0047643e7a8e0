"""May this load begin beside what is there? Pure; asked in the same step in which it begins, so that two
that do not fit together never begin both.

The binder asks the same before it binds; here it is asked of whatever pod has come, by whatever way.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from berth.contract.ids import GpuUuid
from berth.contract.memory import free_bytes, reserved_bytes
from berth.contract.report import Failure, GpuReport


@dataclass(frozen=True, slots=True)
class Misfit:
    reason: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be loaded: on each of its GPUs it takes `bytes`."""

    gpus: tuple[GpuUuid, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model that has memory, or has been placed before. `measured_bytes`: None where it is not known."""

    gpus: tuple[GpuUuid, ...]
    requested_bytes: int
    measured_bytes: int | None = None


def misfit(load: Load, others: Iterable[OtherModel], gpus: Mapping[GpuUuid, GpuReport]) -> Misfit | None:
    """Why the load may not begin; None where it may."""
    if load.bytes <= 0:
        return Misfit("its pod requests no GPU memory; what it needs must be requested", Failure.CAPACITY)
    present = list(others)
    for uuid in load.gpus:
        if (why := _misfit_on(load, present, uuid, gpus.get(uuid))) is not None:
            return why
    return None


def _misfit_on(load: Load, others: list[OtherModel], uuid: GpuUuid, gpu: GpuReport | None) -> Misfit | None:
    if gpu is None:
        return Misfit(f"GPU {uuid} is not on this node any more", Failure.TRANSIENT)
    there = [reserved_bytes(one.requested_bytes, one.measured_bytes) for one in others if uuid in one.gpus]
    free = free_bytes(gpu, sum(there))
    if free is None:
        said = "is not healthy" if not gpu.healthy else "is not known well enough"
        return Misfit(f"GPU {uuid} {said}: {gpu.reason or 'its memory is unknown'}", Failure.TRANSIENT)
    if free >= load.bytes:
        return None
    return Misfit(
        f"{load.bytes} bytes do not fit on GPU {uuid}: {max(free, 0)} are free of {gpu.total_bytes}, where "
        f"{len(there)} models hold {sum(there)}, others {gpu.other_use_bytes}, and {gpu.headroom_bytes} are kept free",
        Failure.CAPACITY,
    )
