"""The memory rule (docs/architecture.md). Integer bytes, per GPU; the only place where it is computed."""

from berth.contract.report import GpuReport


def reserved_bytes(requested_bytes: int, measured_bytes: int | None = None) -> int:
    """What one model reserves on its GPU: the larger of its request and of what was measured once it was
    loaded, so that a model that outgrew its request is counted as it is."""
    return max(requested_bytes, measured_bytes or 0)


def free_bytes(gpu: GpuReport, reserved: int) -> int | None:
    """`total - headroom - other use - reserved`, where `reserved` is Σ reserved_bytes over models placed, loading or
    not yet gone; negative when the GPU is over its memory. None when a fact is unknown or the GPU is
    not healthy: such a GPU takes nothing.
    """
    if not gpu.healthy or gpu.total_bytes is None or gpu.other_use_bytes is None:
        return None
    return gpu.total_bytes - gpu.headroom_bytes - gpu.other_use_bytes - reserved
