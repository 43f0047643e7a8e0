"""The memory rule (DESIGN section 2). Integer bytes, per GPU; the only place where it is computed."""

from collections.abc import Iterable
from dataclasses import dataclass

from berth.contract.report import GpuReport


@dataclass(frozen=True, slots=True)
class Held:
    """What one model holds on its GPU: its request, and what was measured once it was loaded."""

    requested_bytes: int
    measured_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """The larger of the two: a model that outgrew its request is counted as it is."""
        return max(self.requested_bytes, self.measured_bytes or 0)


def free_bytes(gpu: GpuReport, held: Iterable[Held]) -> int | None:
    """`total - headroom - foreign - Σ max(requested, measured)` over models placed, loading or not
    yet gone; negative when the GPU is over its memory. None when a fact is unknown or the GPU is
    not healthy: such a GPU takes nothing.
    """
    if not gpu.healthy or gpu.total_bytes is None or gpu.foreign_bytes is None:
        return None
    return gpu.total_bytes - gpu.headroom_bytes - gpu.foreign_bytes - sum(model.bytes for model in held)
