"""The memory rule."""

from berth.contract.ids import GpuUuid
from berth.contract.memory import free_bytes, reserved_bytes
from berth.contract.report import (
    GpuReport,
)
from tests.fakes.values import replace

GIB = 1024**3


GPU = GpuReport(
    uuid=GpuUuid("GPU-a"),
    index=0,
    product="A100",
    total_bytes=40 * GIB,
    other_use_bytes=2 * GIB,
    headroom_bytes=GIB,
    healthy=True,
)


def test_free_memory_counts_the_larger_of_requested_and_measured() -> None:
    held = reserved_bytes(10 * GIB) + reserved_bytes(5 * GIB, 4 * GIB) + reserved_bytes(1 * GIB, 3 * GIB)
    assert free_bytes(GPU, held) == (40 - 1 - 2 - 10 - 5 - 3) * GIB


def test_free_memory_is_negative_when_over_and_unknown_when_not_known() -> None:
    assert free_bytes(GPU, 40 * GIB) == -3 * GIB
    for unknown in ({"total_bytes": None}, {"other_use_bytes": None}, {"healthy": False}):
        assert free_bytes(replace(GPU, **unknown), 0) is None  # type: ignore[arg-type]
