"""One load: pinned, measured, checked on its GPU; and the drain before an unload."""

import asyncio
import errno
from collections.abc import Mapping
from typing import Any

import pytest

from agent.gpus import GpuReading
from berth.contract.ids import GpuUuid, PodUid, ServerName
from berth.contract.report import Failure, ModelState
from berth.triton.admin import IndexEntry, IndexState
from berth.triton.errors import TritonRefused
from tests.fakes.agent_node import Node, on_server
from tests.fakes.eventually import until
from tests.fakes.objects import GIB

NAME, UID = on_server("p1"), PodUid("p1")


async def test_a_load_is_reported_first_pinned_and_measured(on_node: Node) -> None:
    model = await on_node.stage()
    assert model.state is ModelState.STAGED
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.measured_bytes, model.resident) == (ModelState.READY, 3 * GIB, True)
    assert on_node.reported.asked == [UID]
    assert on_node.triton.configs[0]["instance_group"] == [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}]
    record = on_node.repository.record(NAME)
    assert record is not None
    assert (record.served, record.measured_bytes) == (True, 3 * GIB)
    assert on_node.events.said == [("ModelLoaded", "Triton serves model-p1")]


def gpu(uuid: str, index: int, **more: Any) -> GpuReading:
    return GpuReading(GpuUuid(uuid), index, "T4", 16 * GIB, 0, 0.0, **more)


@pytest.mark.parametrize(
    ("readings", "ordinal"),
    [
        ([gpu("GPU-z", 0), gpu("GPU-a", 1)], 1),  # another index than at the Binding
        ([gpu("GPU-z", 0, bus_id="02"), gpu("GPU-a", 1, bus_id="01")], 0),  # CUDA goes by the bus
        ([gpu("GPU-z", 0, healthy=False, in_cuda=False), gpu("GPU-a", 1)], 0),  # lost, or with MIG on
        ([gpu("GPU-z", 0, healthy=False), gpu("GPU-a", 1)], 1),  # unhealthy, but CUDA has it
    ],
)
async def test_a_gpu_is_its_uuid_and_its_number_is_cudas_of_now(
    on_node: Node, readings: list[GpuReading], ordinal: int
) -> None:
    model = await on_node.stage()
    on_node.gpus.readings = readings
    await on_node.lifecycle.start_load(model)
    assert on_node.triton.configs[0]["instance_group"] == [
        {"kind": "KIND_GPU", "count": 1, "gpus": [ordinal]}
    ]
    assert (model.state, model.measured_bytes) == (ModelState.READY, 3 * GIB)


@pytest.mark.parametrize(
    ("readings", "unknown", "reason"),
    [
        ([gpu("GPU-z", 0)], "", "GPU GPU-a is not on this node any more"),
        ([gpu("GPU-a", 0, healthy=False, reason="GPU is lost")], "", "GPU GPU-a is not healthy: GPU is lost"),
        ([], "NVML has not answered for 5 s", "GPUs are unknown: NVML has not answered for 5 s"),
    ],
)
async def test_a_gpu_that_is_gone_ill_or_unknown_takes_no_load_and_may_do_so_later(
    on_node: Node, readings: list[GpuReading], unknown: str, reason: str
) -> None:
    model, well = await on_node.stage(), list(on_node.gpus.readings)
    on_node.gpus.readings, on_node.gpus.unknown = readings, unknown
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert reason in model.reason
    assert on_node.triton.loads == []
    on_node.gpus.readings, on_node.gpus.unknown = well, ""
    await on_node.lifecycle.start_load(model)
    assert model.state is ModelState.READY


async def test_a_model_that_went_to_another_gpu_is_unloaded(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.gpus.cuda = ["GPU-b", "GPU-a"]  # as without CUDA_DEVICE_ORDER=PCI_BUS_ID
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure, model.resident) == (ModelState.FAILED, Failure.TRANSIENT, False)
    assert "loaded on GPU GPU-b and not on GPU-a" in model.reason
    assert on_node.triton.loaded[NAME] is IndexState.UNAVAILABLE


@pytest.mark.parametrize("seconds", [0.05, 0.5])  # it is loaded before the first is, or still being loaded
async def test_growth_of_a_gpu_that_another_model_comes_to_meanwhile_says_nothing(
    on_node: Node, seconds: float
) -> None:
    """The first takes nothing on its GPU; while it is loaded, another comes to the second."""
    on_node.gpus.cuda = ["nowhere", "GPU-b"]
    first, second = await on_node.stage("p1"), await on_node.stage("p2", on="GPU-b")
    on_node.triton.takes = {NAME: 0.25, on_server("p2"): seconds}
    load = on_node.lifecycle.start_load(first)
    await until(lambda: on_node.triton.loading == 1)
    await asyncio.gather(load, on_node.lifecycle.start_load(second))
    assert (first.state, second.state) == (ModelState.READY, ModelState.READY)
    assert (first.measured_bytes, second.measured_bytes) == (0, 3 * GIB)


async def test_a_load_of_several_gpus_takes_them_all_and_tells_the_most_that_it_took(on_node: Node) -> None:
    model, other = await on_node.stage("p1", others=("GPU-b",)), await on_node.stage("p2", on="GPU-b")
    await asyncio.gather(on_node.lifecycle.start_load(model), on_node.lifecycle.start_load(other))
    assert on_node.triton.most_loading == 1  # they share one
    assert model.server_name is not None
    config = on_node.triton.configs[
        on_node.triton.loads.index(model.server_name)
    ]  # either may have been first
    assert config["instance_group"][0]["gpus"] == [0, 1]
    assert (model.state, model.measured_bytes) == (ModelState.READY, 3 * GIB)


async def test_what_was_not_measured_is_unknown_and_the_model_serves_all_the_same(on_node: Node) -> None:
    model, load = await on_node.stage(), on_node.triton.load

    async def then_blind(*args: Any, **more: Any) -> None:
        await load(*args, **more)
        on_node.gpus.unknown = "NVML has not answered for 5 s"

    on_node.triton.load = then_blind  # type: ignore[method-assign]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.measured_bytes) == (ModelState.READY, None)
    record = on_node.repository.record(NAME)
    assert record is not None
    assert (record.served, record.measured_bytes) == (True, None)


async def test_a_model_serves_on_though_the_disk_is_too_full_to_note_it(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(on_node.repository, "learn", full)
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    assert (model.state, on_node.triton.loaded[NAME]) == (ModelState.READY, IndexState.READY)
    assert model.measured_bytes is not None  # nor is what it takes forgotten
    monkeypatch.undo()
    await on_node.lifecycle.start_load(model)
    (record,) = on_node.repository.records().values()
    assert (record.measured_bytes, record.served) == (model.measured_bytes, True)


async def test_requests_are_taken_off_before_an_unload_and_once(on_node: Node) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    on_node.gateway.seconds, looks, index = 0.3, [0], on_node.triton.index

    async def counted() -> Mapping[ServerName, IndexEntry]:
        looks[0] += 1
        return await index()

    on_node.triton.index = counted  # type: ignore[method-assign]
    on_node.models.lose_pod(UID)
    await on_node.lifecycle.start_unload(NAME)
    assert looks[0] > 3  # each of which has seen it serve
    assert on_node.gateway.drained == [(UID, [NAME])]
    assert on_node.gateway.off == set()
    assert on_node.repository.records() == {}


async def test_what_is_staged_anew_is_used_again_once_the_old_is_out(on_node: Node) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    await on_node.stage(digest="another")
    assert on_node.gateway.drained == [(UID, [NAME])]
    assert on_node.gateway.off == set()
    await on_node.lifecycle.start_load(model)
    assert (model.state, on_node.triton.loaded) == (ModelState.READY, {NAME: IndexState.READY})


async def test_what_triton_says_of_a_load_is_reported_with_the_name_that_people_know(on_node: Node) -> None:
    said = f"load failed for model '{NAME}': at least one version must be available: /models/{NAME}/1 is none"
    on_node.triton.errors = [TritonRefused(said)]
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    assert model.failure is Failure.INVALID_MODEL
    assert "'model-p1'" in model.reason
    assert "/models/model-p1/1 is none" in model.reason
    told = [model.reason, *(message for _, message in on_node.events.said)]
    assert not any(NAME in text for text in told)
