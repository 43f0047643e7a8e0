"""Whether a load fits beside what is there."""

from typing import Any

import pytest

from agent.serving.fit import Load, OtherModel, misfit
from berth.contract.ids import GpuUuid
from berth.contract.report import Failure, GpuReport

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")


GIB = 1024**3


def gpu(uuid: GpuUuid = A, **more: Any) -> GpuReport:
    return GpuReport(
        **{
            "uuid": uuid, "index": 0, "product": "T4", "total_bytes": 16 * GIB, "other_use_bytes": GIB,
            "headroom_bytes": GIB, "healthy": True, "reason": "", **more,
        }
    )  # fmt: skip


def asked(
    size: int, *neighbours: OtherModel, gpus: tuple[GpuUuid, ...] = (A,), **more: Any
) -> tuple[Failure, str]:
    said = misfit(Load(gpus, size), neighbours, {A: gpu(A, **more), B: gpu(B)})
    return (said.failure, said.reason) if said is not None else (None, "")  # type: ignore[return-value]


def test_an_exact_fit_fits_and_a_byte_more_does_not() -> None:
    there = [OtherModel((A,), 3 * GIB, 4 * GIB), OtherModel((A,), 2 * GIB, None), OtherModel((B,), 14 * GIB)]
    assert asked(8 * GIB, *there)[0] is None
    failure, reason = asked(8 * GIB + 1, *there)
    assert failure is Failure.CAPACITY
    assert reason == (
        f"{8 * GIB + 1} bytes do not fit on GPU GPU-a: {8 * GIB} are free of {16 * GIB}, where 2 models hold "
        f"{6 * GIB}, others {GIB}, and {GIB} are kept free"
    )


def test_each_gpu_of_several_must_have_room() -> None:
    assert asked(GIB, OtherModel((B,), 14 * GIB), gpus=(A, B))[0] is Failure.CAPACITY
    assert asked(GIB, OtherModel((B,), 13 * GIB), gpus=(A, B))[0] is None


def test_what_requests_nothing_is_refused() -> None:
    failure, reason = asked(0)
    assert failure is Failure.CAPACITY
    assert "requests no GPU memory" in reason


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"other_use_bytes": None}, "its memory is unknown"),
        ({"total_bytes": None}, "its memory is unknown"),
        ({"healthy": False, "reason": "fell off the bus"}, "is not healthy: fell off the bus"),
    ],
)
def test_what_is_not_known_is_no_lack_of_room(more: dict[str, Any], text: str) -> None:
    failure, reason = asked(GIB, **more)
    assert failure is Failure.TRANSIENT
    assert text in reason


def test_a_gpu_that_is_gone_is_no_lack_of_room() -> None:
    assert asked(GIB, gpus=(GpuUuid("GPU-z"),))[0] is Failure.TRANSIENT
