from dataclasses import replace

import pytest

from agent.gpus import (
    GpuReading,
    NoGpus,
    cuda_ordinals,
    gpus_failure,
    grown_instead,
    nameless,
)
from berth.contract.ids import GpuUuid
from tests.fakes.objects import GIB

A = GpuUuid("GPU-a")


def reading(used: int | None) -> GpuReading:
    return GpuReading(A, 0, "A10", 24 * GIB, used, 0.0)


BROKEN = GpuReading(A, 0, "T4", None, None, None, healthy=False, reason="XID 79", broken=True)


def test_a_models_gpu_has_failed_where_it_is_broken_or_gone_and_not_where_it_is_unknown() -> None:
    well, other = reading(GIB), replace(reading(GIB), uuid=GpuUuid("GPU-b"), index=1)
    unread = replace(BROKEN, broken=False, reason="NVML: Unknown Error")
    assert gpus_failure([A], [well, other]) == ""
    assert gpus_failure([A], [unread]) == ""
    assert gpus_failure([], [BROKEN]) == ""
    assert gpus_failure([A], [BROKEN, other]) == "GPU 0 (GPU-a): XID 79"
    assert gpus_failure([GpuUuid("GPU-b"), A], [BROKEN, other]) == "GPU 0 (GPU-a): XID 79"
    assert gpus_failure([A], [other]) == "GPU GPU-a is not on this node any more"
    assert gpus_failure([A], [replace(BROKEN, uuid=nameless(0)), other]).endswith("not on this node any more")
    assert gpus_failure([A], [replace(unread, uuid=nameless(0)), other]) == ""  # it may be that one


B, C = GpuUuid("GPU-b"), GpuUuid("GPU-c")


@pytest.mark.parametrize(
    ("grown", "others", "told"),
    [
        ({A: 0, B: GIB}, {B}, B),
        ({A: 0, B: GIB, C: 2 * GIB}, {B, C}, C),
        ({A: 1, B: GIB}, {B}, None),  # it did grow
        ({A: 0, B: GIB - 1}, {B}, None),  # too little to be the model
        ({A: 0, B: GIB}, set(), None),  # another model may have come
        ({B: GIB}, {B}, None),  # the chosen one is not known
        ({A: -GIB, B: GIB}, {B}, B),
    ],
)
def test_the_gpu_that_a_load_went_to_instead(
    grown: dict[GpuUuid, int], others: set[GpuUuid], told: GpuUuid | None
) -> None:
    before = dict.fromkeys((A, B, C), 4 * GIB)
    after = {gpu: 4 * GIB + more for gpu, more in grown.items()}
    assert grown_instead(before, after, chosen=[A], others=others, least_bytes=GIB) == told
    assert (
        grown_instead(before, {A: 4 * GIB, B: 4 * GIB + 2**20}, chosen=[A], others={B}, least_bytes=0) is None
    )


def test_noise_is_no_model() -> None:
    before, noise = {A: 0, B: 0}, 64 * 1024**2
    for grown, told in ((noise - 1, None), (noise, B)):
        after = {A: 0, B: grown}
        assert grown_instead(before, after, chosen=[A], others=[B], least_bytes=0) == told


def test_cuda_goes_by_nvmls_order_where_no_bus_is_known() -> None:
    one, two = (replace(reading(0), uuid=uuid, index=index) for uuid, index in ((B, 1), (A, 0)))
    assert cuda_ordinals([one, two]) == {A: 0, B: 1}


async def test_without_gpus_there_is_nothing_to_read_and_nothing_to_pin() -> None:
    assert await NoGpus().read() == ()
    assert NoGpus().instance_kind == "KIND_CPU"
