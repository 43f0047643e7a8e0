"""Loads and unloads beside a Triton that refuses, goes away, or takes its time."""

import asyncio
import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.gpus import GpuReading
from agent.serving.journal import Journal
from berth.contract.ids import GpuUuid, PodUid, ServerName
from berth.contract.report import CodeRule, Failure, ModelState
from berth.kube.times import utc_now
from berth.triton.admin import IndexEntry, IndexState
from berth.triton.errors import TritonError, TritonLate, TritonRefused, TritonUnavailable
from tests.fakes.agent_node import GPU, Node, on_server
from tests.fakes.eventually import until
from tests.fakes.objects import GIB

NAME, UID = on_server("p1"), PodUid("p1")


@pytest.fixture
def on_node(tmp_path: Path) -> Node:
    return Node(tmp_path, quiet=0.2)


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


async def test_two_who_ask_join_one_load_and_a_third_finds_it_done(on_node: Node) -> None:
    model = await on_node.stage()
    assert on_node.lifecycle.start_load(model) is on_node.lifecycle.start_load(model)
    await on_node.lifecycle.start_load(model)
    await on_node.lifecycle.start_load(model)
    assert len(on_node.triton.configs) == 1


async def test_models_of_one_gpu_load_one_after_another_and_of_two_side_by_side(on_node: Node) -> None:
    same = [await on_node.stage(uid) for uid in ("p1", "p2")]
    await asyncio.gather(*(on_node.lifecycle.start_load(model) for model in same))
    assert on_node.triton.most_loading == 1
    on_node.triton.load_seconds = 60
    for model in (await on_node.stage("p3"), await on_node.stage("p4", on="GPU-b")):
        on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.loading == 2)
    await on_node.lifecycle.close()


async def test_a_long_load_holds_up_no_files_of_another_model_and_what_waits_for_it_says_so(
    on_node: Node,
) -> None:
    slow = await on_node.stage("p1")
    on_node.triton.takes[NAME] = 60
    loading = on_node.lifecycle.start_load(slow)
    await until(lambda: on_node.triton.loading == 1)
    async with asyncio.timeout(20):
        waits = await on_node.stage("p2")
        goes = await on_node.stage("p3")
        on_node.models.lose_pod(goes.ref.uid)
        await on_node.lifecycle.start_unload(on_server("p3"))
    then = on_node.lifecycle.start_load(waits)
    await until(lambda: "on its GPU" in waits.reason)
    assert (waits.state, slow.state) == (ModelState.LOADING, ModelState.LOADING)
    on_node.triton.takes.clear()
    on_node.triton.die()  # sooner than waiting for the end of it
    await asyncio.gather(loading, then)
    assert [(m.state, m.reason) for m in (slow, waits)] == [(ModelState.READY, "")] * 2


BACKEND = TritonRefused("unable to find backend library for backend 'tensorflow9'")


async def test_a_model_at_fault_leaves_nothing_and_tells_tritons_reason(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [BACKEND]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure, model.reason) == (
        ModelState.FAILED,
        Failure.INVALID_MODEL,
        "unable to find backend library for backend 'tensorflow9'",
    )
    assert on_node.repository.records() == {}
    assert on_node.events.said == [("ModelLoadFailed", model.reason)]


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("CUDA out of memory", Failure.CAPACITY),
        ("failed to poll from model repository", Failure.TRANSIENT),
        ("nobody knows", Failure.TRANSIENT),
    ],
)
async def test_files_that_are_not_known_to_be_at_fault_are_kept_and_may_be_loaded_again(
    on_node: Node, text: str, failure: Failure
) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonRefused(text)]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, failure)
    assert text in model.reason
    assert not model.resident
    assert list(on_node.repository.records()) == [NAME]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure, model.reason) == (ModelState.READY, None, "")


async def test_files_that_have_served_before_are_kept_and_not_at_fault(on_node: Node) -> None:
    model = await on_node.stage(served=True)
    on_node.triton.errors = [BACKEND]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert list(on_node.repository.records()) == [NAME]


async def test_a_triton_that_goes_away_once_is_waited_for(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonUnavailable("connection reset")]
    on_node.triton.restart_seconds = 0.3
    load = on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.deaths == 1)
    await asyncio.sleep(0.1)
    assert (model.state, model.resident) == (ModelState.LOADING, False)
    assert "waits for Triton" in model.reason
    await load
    assert (model.state, model.reason) == (ModelState.READY, "")
    assert on_node.events.said == [("ModelLoaded", "Triton serves model-p1")]


async def test_files_that_take_triton_down_alone_are_quarantined_and_others_are_not(on_node: Node) -> None:
    model, other = await on_node.stage(), await on_node.stage("p2")
    on_node.triton.deadly = {NAME}
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.QUARANTINED)
    assert on_node.triton.deaths == 2  # a Triton that is stopped during one load has not died of it
    assert NAME in on_node.repository.records()
    assert (
        "the files p1 took Triton 2.51.0 with backend python down while they were loaded alone at 20"
        in model.reason
    )
    assert "set the annotation seldon.io/trtis-lift-quarantine=p1 on the Node" in model.reason
    assert on_node.events.said[-1] == ("ModelQuarantined", model.reason)
    assert on_node.registry.get_sample_value("berth_agent_quarantined_models") == 1
    died = on_node.registry.get_sample_value("berth_agent_triton_restarts_total", {"reason": "died"})
    assert died == 2
    # Whoever brings these files again, be it for another pod, is told; Triton lives, and others load.
    await on_node.lifecycle.start_load(model)
    assert "quarantined" in model.reason
    again = await on_node.stage("p3", digest="p1")
    assert (again.state, again.failure) == (ModelState.FAILED, Failure.QUARANTINED)  # at once
    await on_node.lifecycle.start_load(again)
    assert again.failure is Failure.QUARANTINED
    await on_node.lifecycle.start_load(other)
    assert other.state is ModelState.READY
    assert on_node.triton.deaths == 2
    on_node.triton.deadly = set()
    await on_node.stage("p1", digest="mended")
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.reason) == (ModelState.READY, "")


async def test_the_mark_of_a_load_is_on_disk_before_triton_is_asked_and_gone_after_it(on_node: Node) -> None:
    """Whatever the load takes down with it, agent and node included, is known as a suspect afterwards."""
    model, load = await on_node.stage(), on_node.triton.load
    on_disk: list[tuple[str, bool]] = []

    def marks() -> list[tuple[str, bool]]:
        ledger = Journal(on_node.directory).read()
        return [(mark.digest, mark.open) for mark in ledger.open]

    async def looked(*args: Any, **more: Any) -> None:
        on_disk.extend(marks())
        await load(*args, **more)

    on_node.triton.load = looked  # type: ignore[method-assign]
    await on_node.lifecycle.start_load(model)
    assert on_disk == [("p1", True)]
    await until(lambda: marks() == [])
    on_node.triton.errors = [TritonRefused("nobody knows")]
    refused = await on_node.stage("p2", on="GPU-b")
    await on_node.lifecycle.start_load(refused)
    assert on_disk[1:] == [("p2", True)]
    await until(lambda: marks() == [])


async def test_what_cannot_be_marked_is_not_loaded(on_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    model = await on_node.stage()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", full)
        await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "No space left on device" in model.reason
    assert on_node.triton.loads == []
    assert list(on_node.repository.records()) == [NAME]
    await on_node.lifecycle.start_load(model)
    assert model.state is ModelState.READY


async def test_a_death_of_triton_is_on_disk_before_the_next_load(on_node: Node) -> None:
    on_node.triton.deadly = {NAME}
    model, load = await on_node.stage(), on_node.triton.load
    deaths: list[bool] = []

    async def looked(*args: Any, **more: Any) -> None:
        deaths.append(Journal(on_node.directory).read().is_suspect("p1"))
        await load(*args, **more)

    on_node.triton.load = looked  # type: ignore[method-assign]
    await on_node.lifecycle.start_load(model)
    assert deaths == [False, True]


async def test_of_two_loads_during_a_death_of_triton_only_the_one_that_kills_it_fails(on_node: Node) -> None:
    on_node.triton.load_seconds = 60
    bad, good = await on_node.stage("p1"), await on_node.stage("p2", on="GPU-b")
    loads = on_node.lifecycle.start_load(bad), on_node.lifecycle.start_load(good)
    await until(lambda: on_node.triton.loading == 2)
    on_node.triton.load_seconds, on_node.triton.deadly = 0.01, {NAME}
    on_node.triton.die()
    await asyncio.gather(*loads)
    assert on_node.triton.deaths == 2
    assert bad.failure is Failure.QUARANTINED
    await until(lambda: good.state is ModelState.READY)  # loaded again, if it had served before the second


async def test_a_model_that_waits_while_triton_dies_of_others_is_not_charged(on_node: Node) -> None:
    on_node.triton.load_seconds = 0.05
    bad, waiting = await on_node.stage("p1"), await on_node.stage("p2")  # on one GPU
    on_node.triton.deadly, on_node.triton.restart_seconds = {NAME}, 0.1
    load = on_node.lifecycle.start_load(bad)
    await until(lambda: on_node.triton.loading == 1)
    await asyncio.gather(load, on_node.lifecycle.start_load(waiting))
    assert bad.failure is Failure.QUARANTINED
    await until(lambda: waiting.state is ModelState.READY)
    # The suspect is tried once nobody else is to be loaded; then what it has taken down comes again.
    assert on_node.triton.loads == [NAME, on_server("p2"), NAME, on_server("p2")]


@pytest.mark.parametrize("error", [TritonUnavailable("connection reset"), TritonLate("Deadline Exceeded")])
async def test_a_look_at_triton_that_gets_no_answer_fails_no_load(on_node: Node, error: TritonError) -> None:
    model = await on_node.stage()
    on_node.triton.index_errors = [error] * 4
    await on_node.lifecycle.start_load(model)
    assert (model.state, on_node.triton.loads) == (ModelState.READY, [NAME])


async def test_a_triton_that_stays_away_fails_the_load_and_keeps_the_files(
    tmp_path: Path,
) -> None:
    on_node = Node(tmp_path, triton_wait=0.3)
    model = await on_node.stage()
    on_node.triton.restart_seconds = 60
    on_node.triton.die()
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "Triton has not answered for 0.3 s" in model.reason
    assert list(on_node.repository.records()) == [NAME]


async def test_what_triton_is_loading_already_is_waited_for_and_not_loaded_twice(on_node: Node) -> None:
    """As an agent finds it that starts while a load of the one before goes on."""
    model = await on_node.stage()
    on_node.triton.held[NAME] = IndexState.LOADING
    load = on_node.lifecycle.start_load(model)
    told = (ModelState.LOADING, "Triton is loading it since before this load")
    await until(lambda: (model.state, model.reason) == told)
    on_node.triton.held[NAME] = IndexState.READY
    await load
    assert (model.state, model.resident, model.reason) == (ModelState.READY, True, "")
    assert on_node.triton.loads == []
    record = on_node.repository.record(NAME)
    assert record is not None
    assert record.served


async def test_what_triton_is_unloading_is_loaded_once_it_is_gone(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.held[NAME] = IndexState.UNLOADING
    load = on_node.lifecycle.start_load(model)
    await asyncio.sleep(0.1)
    assert on_node.triton.loads == []
    on_node.triton.held[NAME] = IndexState.UNAVAILABLE
    await load
    assert (model.state, on_node.triton.loads) == (ModelState.READY, [NAME])


async def test_a_load_that_triton_never_ends_is_waited_for_with_a_bound(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, load_timeout=0.2)
    model = await node.stage()
    node.triton.held[NAME] = IndexState.LOADING
    await node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "still LOADING after 0.2 s" in model.reason
    assert node.triton.loads == []


async def test_a_load_that_comes_too_late_is_not_begun_again(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, load_timeout=0.2)
    model, behind = await node.stage(), await node.stage("p2")
    node.triton.load_seconds = 0.5
    await node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "has been loading it for 0.2 s" in model.reason
    assert list(node.repository.records()) == [NAME, on_server("p2")]
    node.triton.load_seconds = 0.01
    await node.lifecycle.start_load(behind)  # the GPU is not held meanwhile
    assert behind.state is ModelState.READY
    await until(lambda: node.triton.held[NAME] is IndexState.READY)
    await node.lifecycle.start_load(model)
    assert (model.state, model.resident) == (ModelState.READY, True)
    assert node.triton.loads.count(NAME) == 1


async def test_an_api_server_that_is_away_fails_no_load_and_deletes_nothing(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.reported.away = True
    load = on_node.lifecycle.start_load(model)
    await until(lambda: len(on_node.reported.asked) > 3)
    assert not load.done()
    assert (model.state, model.failure) == (ModelState.LOADING, None)
    assert "report" in model.reason
    assert list(on_node.repository.records()) == [NAME]
    assert on_node.triton.loads == []
    on_node.reported.away = False
    await load
    assert (model.state, model.reason) == (ModelState.READY, "")
    assert on_node.events.said == [("ModelLoaded", "Triton serves model-p1")]


async def test_a_load_that_waits_for_the_api_server_holds_nobody_up_and_ends_with_its_pod(
    on_node: Node,
) -> None:
    model, served = await on_node.stage(), await on_node.stage("p2")
    await on_node.lifecycle.start_load(served)
    on_node.reported.away = True
    load = on_node.lifecycle.start_load(model)
    await until(lambda: model.reason != "")
    on_node.models.lose_pod(PodUid("p2"))
    await on_node.lifecycle.start_unload(on_server("p2"))  # on the same GPU
    on_node.models.lose_pod(UID)
    await on_node.lifecycle.start_unload(NAME)
    await load
    assert list(on_node.models) == []
    assert on_node.repository.records() == {}
    assert [reason for reason, _ in on_node.events.said] == ["ModelLoaded"]


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
    assert on_node.triton.held[NAME] is IndexState.UNAVAILABLE


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


async def test_a_bad_config_never_reaches_triton(on_node: Node) -> None:
    model = await on_node.stage()
    (on_node.repository.directory(NAME) / "config.pbtxt").write_text("nonsense {")
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.INVALID_MODEL)
    assert on_node.triton.configs == []


async def test_files_that_have_served_are_kept_though_the_node_takes_them_no_more(on_node: Node) -> None:
    """The rules may be others than when it was let in, and may be mended."""
    model = await on_node.stage(served=True)
    (on_node.repository.directory(NAME) / "config.pbtxt").write_text("nonsense {")
    await on_node.lifecycle.start_load(model)
    assert (model.failure, on_node.triton.configs) == (Failure.INVALID_MODEL, [])
    assert list(on_node.repository.records()) == [NAME]


async def test_what_an_earlier_agent_has_let_in_is_written_anew_before_it_is_loaded(on_node: Node) -> None:
    model, config = await on_node.stage(), on_node.repository.directory(NAME) / "config.pbtxt"
    config.write_text('# nobody has read this\nbackend: "python"\n')
    await on_node.lifecycle.start_load(model)
    assert model.state is ModelState.READY
    assert "nobody has read this" not in config.read_text()


async def test_memory_is_held_until_the_model_is_gone(on_node: Node) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    on_node.models.lose_pod(UID)
    on_node.triton.stays = {NAME}
    unload = on_node.lifecycle.start_unload(NAME)
    await until(lambda: on_node.triton.held[NAME] is IndexState.UNLOADING)
    assert (model.state, model.resident) == (ModelState.UNLOADING, True)
    assert on_node.models.get(UID) is model
    assert on_node.slots.busy_gpus() == {GPU.uuid}
    on_node.triton._unloaded(NAME)
    await unload
    assert on_node.models.get(UID) is None
    assert on_node.repository.records() == {}


async def test_new_files_take_the_place_of_a_model_that_serves(on_node: Node) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    await on_node.stage()
    assert (model.state, model.resident) == (ModelState.STAGED, False)
    await on_node.lifecycle.start_load(model)
    assert len(on_node.triton.configs) == 2


async def test_triton_is_not_asked_without_pause(tmp_path: Path) -> None:
    """While it unloads, while it is away, and while the API server is."""
    node, looks = Node(tmp_path), [0]
    model, index = await node.stage(), node.triton.index

    async def counted() -> Mapping[ServerName, IndexEntry]:
        looks[0] += 1
        return await index()

    node.triton.index = counted  # type: ignore[method-assign]
    await node.lifecycle.start_load(model)
    looks[0], node.triton.unload_seconds = 0, 0.3
    node.models.lose_pod(UID)
    await node.lifecycle.start_unload(NAME)
    assert 2 < looks[0] < 20
    again = await node.stage("p9")
    node.triton.held[on_server("p9")] = IndexState.LOADING
    looks[0] = 0
    load = node.lifecycle.start_load(again)
    await asyncio.sleep(0.3)
    assert 1 < looks[0] < 10
    node.triton.held[on_server("p9")] = IndexState.READY
    await load
    node.reported.away, waits = True, await node.stage("p2")
    load = node.lifecycle.start_load(waits)
    await asyncio.sleep(0.3)
    assert 1 < len(node.reported.asked) - 2 < 10
    await node.lifecycle.close()
    assert load.done()


async def test_an_unload_is_joined_and_one_that_fails_leaves_the_model_listed_to_be_tried_again(
    on_node: Node,
) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    on_node.models.lose_pod(UID)
    on_node.triton.index_errors = [TritonUnavailable("connection refused")]
    unload = on_node.lifecycle.start_unload(NAME)
    assert on_node.lifecycle.start_unload(NAME) is unload
    with pytest.raises(TritonUnavailable, match="connection refused"):
        await unload
    assert (list(on_node.models), model.state, model.resident) == ([model], ModelState.UNLOADING, True)
    assert list(on_node.repository.records()) == [NAME]
    assert on_node.slots.busy_gpus() == set()
    await on_node.lifecycle.start_unload(NAME)
    assert list(on_node.models) == []


async def test_an_unload_is_waited_for_with_a_bound(tmp_path: Path) -> None:
    node = Node(tmp_path, unload_timeout=0.1)
    model = await node.stage()
    await node.lifecycle.start_load(model)
    node.triton.unload_seconds = 60
    node.models.lose_pod(UID)
    with pytest.raises(TritonUnavailable, match=r"model-p1 is not gone 0\.1 s after its unload"):
        await node.lifecycle.start_unload(NAME)
    assert (model.resident, list(node.repository.records())) == (True, [NAME])
    # The GPU is not held meanwhile.
    await node.lifecycle.start_load(other := await node.stage("p2"))
    assert other.state is ModelState.READY


async def test_what_triton_never_had_is_not_unloaded_there(on_node: Node) -> None:
    await on_node.stage()
    on_node.models.lose_pod(UID)

    async def refused(*_: object, **__: object) -> None:
        raise AssertionError("unloaded what it does not have")

    on_node.triton.unload = refused  # type: ignore[method-assign]
    await on_node.lifecycle.start_unload(NAME)
    assert (list(on_node.models), on_node.repository.records()) == ([], {})


async def test_a_directory_of_nobody_is_removed_and_an_unknown_name_is_no_trouble(on_node: Node) -> None:
    (on_node.repository.models / "nobodys").mkdir()
    on_node.triton.held[ServerName("nobodys")] = IndexState.READY
    for name in ("nobodys", "unheard"):
        await on_node.lifecycle.start_unload(ServerName(name))
    assert on_node.repository.records() == {}
    assert on_node.triton.held[ServerName("nobodys")] is IndexState.UNAVAILABLE


async def test_a_living_pods_model_is_unloaded_only_when_the_pod_is_ending(on_node: Node) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    await on_node.lifecycle.start_unload(NAME)
    assert (model.state, model.resident) == (ModelState.READY, True)
    model.deleting = True
    await on_node.lifecycle.start_unload(NAME)
    assert (model.state, model.resident) == (ModelState.PENDING, False)
    assert on_node.models.get(UID) is model  # until its pod is gone
    assert on_node.repository.records() == {}


async def test_nothing_is_loaded_for_a_pod_that_is_ending(on_node: Node) -> None:
    model = await on_node.stage()
    model.deleting = True
    await on_node.lifecycle.start_load(model)
    assert (model.state, on_node.triton.loads, on_node.events.said) == (ModelState.STAGED, [], [])


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


async def test_a_load_and_its_failure_are_counted_with_their_time_and_kind(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonRefused("CUDA out of memory")]
    await on_node.lifecycle.start_load(model)
    count = on_node.registry.get_sample_value
    assert count("berth_agent_load_failures_total", {"kind": "capacity"}) == 1
    assert count("berth_agent_load_seconds_count") == 0
    await on_node.lifecycle.start_load(model)
    assert count("berth_agent_load_seconds_count") == 1
    assert 0.01 <= (count("berth_agent_load_seconds_sum") or 0) < 5
    await on_node.lifecycle.start_load(model)  # it serves already: nothing is told again
    assert [reason for reason, _ in on_node.events.said] == ["ModelLoadFailed", "ModelLoaded"]


async def test_a_model_that_an_agent_before_has_loaded_keeps_what_was_measured_then(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.repository.learn(NAME, measured_bytes=7, served=False)
    on_node.triton.held[NAME] = IndexState.READY
    await on_node.lifecycle.start_load(model)
    record = on_node.repository.record(NAME)
    assert record is not None
    assert (record.served, record.measured_bytes) == (True, 7)
    assert [reason for reason, _ in on_node.events.said] == ["ModelLoaded"]  # for the first time


async def test_files_that_somebody_is_putting_there_are_not_lost(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.repository.remove(NAME)
    async with on_node.slots.lock(NAME):
        await on_node.lifecycle.mark_lost(model)
    assert model.state is ModelState.STAGED
    await on_node.lifecycle.mark_lost(model)
    assert model.state is ModelState.LOST
    assert "only a new pod stages them again" in model.reason
    await on_node.lifecycle.start_unload(NAME)  # what is left of it in Triton
    assert model.state is ModelState.LOST


async def test_a_close_waits_for_the_end_of_what_it_cancels(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.load_seconds = 60
    load = on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.loading == 1)
    assert on_node.lifecycle.is_loading(UID)
    assert on_node.slots.busy_gpus() == {GPU.uuid}
    await on_node.lifecycle.close()
    assert load.cancelled()
    await asyncio.sleep(0)
    assert not on_node.lifecycle.is_loading(UID)
    assert on_node.slots.busy_gpus() == set()
    assert on_node.triton.held[NAME] is IndexState.LOADING  # it goes on


async def test_a_triton_that_is_away_at_every_look_is_given_up_at_last(
    tmp_path: Path,
) -> None:
    on_node = Node(tmp_path, triton_wait=0.2)
    model = await on_node.stage()
    on_node.triton.index_errors = [TritonUnavailable("connection reset")] * 300
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "Triton has not answered for 0.2 s" in model.reason
    assert "connection reset" in model.reason
    assert list(on_node.repository.records()) == [NAME]


async def test_a_disk_that_cannot_be_read_fails_the_load_and_keeps_the_files(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await on_node.stage()

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(on_node.repository, "record", broken)
        await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert model.reason == "repository: [Errno 5] Input/output error"
    assert list(on_node.repository.records()) == [NAME]


async def test_a_load_without_files_says_so(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.repository.remove(NAME)
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure, model.reason) == (
        ModelState.FAILED,
        Failure.TRANSIENT,
        "no files are staged",
    )
    # Another pod's files under the name are none of its own.
    await on_node.stage(digest="x")
    record = on_node.repository.record(NAME)
    assert record is not None
    other = replace(record, pod=replace(record.pod, uid=PodUid("p9")))
    (on_node.repository.directory(NAME) / ".berth.json").write_text(other.encode())
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.reason, on_node.triton.loads) == (ModelState.FAILED, "no files are staged", [])


async def test_what_nobody_foresaw_fails_the_load_and_keeps_the_files(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await on_node.stage("a")

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nobody foresaw it")

    with monkeypatch.context() as patch:
        patch.setattr(on_node.admission, "rewrite", broken)
        await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "nobody foresaw it" in model.reason
    await on_node.lifecycle.start_load(model)
    assert model.state is ModelState.READY


async def test_a_load_that_does_not_fit_is_refused_with_the_figures_and_one_that_just_fits_is_not(
    on_node: Node,
) -> None:
    """Whoever has placed the pods: two that were promised the same memory do not both get it."""
    first, exact, one_too_many = (
        await on_node.stage("p1", gib=3),
        await on_node.stage("p2", gib=13),
        await on_node.stage("p3", gib=1),
    )
    # The last one asks first: those that were placed before it have their memory all the same.
    await on_node.lifecycle.start_load(one_too_many)
    assert (one_too_many.state, one_too_many.failure) == (ModelState.FAILED, Failure.CAPACITY)
    assert f"{GIB} bytes do not fit on GPU GPU-a: 0 are free of {16 * GIB}" in one_too_many.reason
    await asyncio.gather(on_node.lifecycle.start_load(exact), on_node.lifecycle.start_load(first))
    assert (first.state, exact.state) == (ModelState.READY, ModelState.READY)
    assert on_server("p3") in on_node.repository.records()
    assert on_node.triton.loads.count(on_server("p3")) == 0


async def test_of_two_that_want_the_same_memory_the_one_that_was_placed_first_gets_it(on_node: Node) -> None:
    first, second = await on_node.stage("p1", gib=9), await on_node.stage("p2", gib=9)
    loads = on_node.lifecycle.start_load(second), on_node.lifecycle.start_load(first)
    await asyncio.gather(*loads)
    assert (first.state, second.failure) == (ModelState.READY, Failure.CAPACITY)


async def test_memory_of_a_model_that_is_being_loaded_is_nobodys(on_node: Node) -> None:
    """Whoever was placed first: its load has failed, and another has begun meanwhile."""
    first, second = await on_node.stage("p1", gib=9), await on_node.stage("p2", gib=9)
    for name in (NAME, on_server("p2")):  # of known size: they may be loaded side by side
        on_node.repository.learn(name, measured_bytes=GIB, served=False)
    on_node.models.set(first, ModelState.FAILED, "connection refused", failure=Failure.TRANSIENT)
    on_node.triton.takes[on_server("p2")] = 60
    on_node.lifecycle.start_load(second)
    await until(lambda: on_node.triton.loading == 1)
    await on_node.lifecycle.start_load(first)
    assert (second.state, first.failure) == (ModelState.LOADING, Failure.CAPACITY)
    assert on_node.triton.loads == [on_server("p2")]
    await on_node.lifecycle.close()


async def test_who_has_served_keeps_its_memory_before_who_was_placed_first(on_node: Node) -> None:
    first, served = await on_node.stage("p1", gib=9), await on_node.stage("p2", gib=9, served=True)
    await asyncio.gather(on_node.lifecycle.start_load(first), on_node.lifecycle.start_load(served))
    assert (served.state, first.failure) == (ModelState.READY, Failure.CAPACITY)


async def test_a_load_takes_the_larger_of_what_was_promised_and_what_is_asked_for(on_node: Node) -> None:
    model = await on_node.stage(gib=17)
    model.requested_bytes = GIB
    await on_node.lifecycle.start_load(model)
    assert (model.failure, on_node.triton.loads) == (Failure.CAPACITY, [])


async def test_memory_of_a_model_that_triton_does_not_let_go_of_is_nobodys(tmp_path: Path) -> None:
    node = Node(tmp_path, unload_timeout=0.1)
    gone, later = await node.stage("p1", gib=9), await node.stage("p2", gib=9, on="GPU-b")
    await node.lifecycle.start_load(gone)
    node.triton.stays.add(NAME)
    node.models.lose_pod(UID)
    with pytest.raises(TritonUnavailable, match="is not gone"):
        await node.lifecycle.start_unload(NAME)
    await node.lifecycle.start_load(later)
    assert later.state is ModelState.READY
    beside = await node.stage("p3", gib=9)
    await node.lifecycle.start_load(beside)
    assert beside.failure is Failure.CAPACITY


async def test_a_pod_that_asks_for_no_memory_gets_none(on_node: Node) -> None:
    model = await on_node.stage()
    model.requested_bytes = 0  # placed by its owner, with an annotation of its own
    await on_node.lifecycle.start_load(model)
    assert (model.failure, on_node.triton.loads) == (Failure.CAPACITY, [])
    assert "asks for no GPU memory" in model.reason


async def test_a_load_that_hangs_holds_up_neither_unloads_nor_loads_of_its_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path, load_timeout=2)
    hangs, served, behind = await node.stage("p1"), await node.stage("p2"), await node.stage("p3")
    await node.lifecycle.start_load(served)
    node.triton.takes[NAME] = 60
    load = node.lifecycle.start_load(hangs)
    await until(lambda: node.triton.loading == 1)
    node.models.lose_pod(PodUid("p2"))
    await node.lifecycle.start_unload(on_server("p2"))
    assert not load.done()
    await load
    assert (hangs.state, hangs.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    await node.lifecycle.start_load(behind)
    assert (behind.state, behind.measured_bytes) == (ModelState.READY, None)  # nobody knows whose it was
    assert hangs.resident  # its memory counts with what its pod asked for
    assert node.models.taken_on(GPU.uuid) == 2 * GIB


async def test_a_pod_that_goes_during_its_load_is_waited_for_by_nobody(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.takes[NAME] = 2
    load = on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.loading == 1)
    on_node.models.lose_pod(UID)
    unload = on_node.lifecycle.start_unload(NAME)
    await load
    assert on_node.triton.held[NAME] is IndexState.LOADING
    await unload
    assert on_node.triton.held[NAME] is IndexState.UNAVAILABLE
    assert (list(on_node.models), on_node.repository.records()) == ([], {})


async def test_a_pod_that_ends_while_its_load_waits_for_its_turn_gets_none(on_node: Node) -> None:
    first, ends = await on_node.stage(), await on_node.stage("p2")  # on one GPU
    on_node.triton.takes[NAME] = 3
    loads = [on_node.lifecycle.start_load(first)]
    await until(lambda: on_node.triton.held.get(NAME) is IndexState.LOADING)
    loads.append(on_node.lifecycle.start_load(ends))
    await until(lambda: "on its GPU" in ends.reason)
    ends.deleting = True  # it keeps its files until it is gone
    await asyncio.gather(*loads)
    assert (first.state, ends.state, ends.reason) == (ModelState.READY, ModelState.STAGED, "")
    assert on_node.triton.loads == [NAME]


async def test_files_that_came_after_a_failure_are_not_deleted_for_it(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await on_node.stage(digest="bad")
    on_node.triton.errors = [BACKEND]
    load = on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.loading == 1)
    again = asyncio.ensure_future(on_node.stage(digest="mended"))  # waits for its turn at the name
    await asyncio.gather(load, again)
    record = on_node.repository.record(NAME)
    assert record is not None
    assert record.digest == "mended"


async def test_quarantine_is_known_to_the_next_agent_and_ends_when_it_is_lifted(tmp_path: Path) -> None:
    digest = "0123456789abcdef" * 4
    before = Node(tmp_path)
    bad = await before.stage(digest=digest)
    before.triton.deadly = {NAME}
    await before.lifecycle.start_load(bad)
    await before.lifecycle.close()
    after = Node(tmp_path)
    again = await after.stage("p2", digest=digest)
    await after.controller.look()
    await after.lifecycle.start_load(again)
    assert (again.failure, after.triton.loads) == (Failure.QUARANTINED, [])
    assert not await after.crashes.lift("0123")
    assert after.lifecycle.is_quarantined(again)
    assert await after.crashes.lift(digest[:12])
    assert not after.lifecycle.is_quarantined(again)
    assert Journal(tmp_path).read().all_quarantined(utc_now()) == []
    await after.lifecycle.start_load(again)
    assert again.state is ModelState.READY
    assert after.registry.get_sample_value("berth_agent_quarantined_models") == 0


async def test_a_triton_that_dies_of_what_it_serves_makes_nobody_suspect(on_node: Node) -> None:
    models = [await on_node.stage(), await on_node.stage("p2", on="GPU-b")]
    for model in models:
        await on_node.lifecycle.start_load(model)
    for _ in range(5):
        on_node.triton.die()
        await on_node.controller.look()
        await until(lambda: all(model.state is ModelState.READY for model in models))
    assert on_node.registry.get_sample_value("berth_agent_quarantined_models") == 0
    assert [reason for reason, _ in on_node.events.said] == ["ModelLoaded"] * 12


async def test_a_model_that_is_loaded_while_others_kill_triton_by_their_end_is_not_charged_alone(
    on_node: Node,
) -> None:
    on_node.triton.load_seconds, on_node.triton.takes[NAME] = 0.01, 2
    leavers = [await on_node.stage(f"q{n}", on="GPU-b") for n in range(3)]
    for leaver in leavers:
        await on_node.lifecycle.start_load(leaver)
    on_node.triton.kills_at_its_end = {on_server(f"q{n}") for n in range(3)}
    innocent = await on_node.stage()
    load = on_node.lifecycle.start_load(innocent)
    for leaver in leavers:
        await until(lambda: on_node.triton.held.get(NAME) is IndexState.LOADING)
        on_node.models.lose_pod(leaver.ref.uid)
        await on_node.lifecycle.start_unload(on_server(leaver.ref.uid))
    await load
    assert on_node.triton.deaths == 3
    assert (innocent.state, innocent.reason) == (ModelState.READY, "")


async def test_a_suspect_is_not_loaded_beside_one_that_kills_triton_once_it_serves(on_node: Node) -> None:
    """Or it would be charged with what that one does."""
    killer, innocent = await on_node.stage("p2", on="GPU-b"), await on_node.stage()
    on_node.triton.takes[NAME] = 2
    on_node.triton.kills_later = {on_server("p2"): 0.1}
    await on_node.lifecycle.start_load(killer)
    load = on_node.lifecycle.start_load(innocent)
    await until(lambda: on_node.triton.deaths == 3)
    assert innocent.failure is None
    on_node.triton.kills_later = {}
    await load
    assert innocent.state is ModelState.READY


async def test_models_of_known_size_come_back_side_by_side(on_node: Node) -> None:
    models = [await on_node.stage(f"p{n}", on="GPU-a" if n % 2 else "GPU-b") for n in range(6)]
    for model in models:
        await on_node.lifecycle.start_load(model)
    on_node.triton.load_seconds = 60
    on_node.triton.die()
    await on_node.controller.look()
    await until(lambda: on_node.triton.loading == 6)
    on_node.triton.load_seconds = 0.01
    on_node.triton.die()
    await until(lambda: all(model.state is ModelState.READY for model in models))
    assert {model.measured_bytes for model in models} == {3 * GIB}


async def test_triton_is_restarted_where_it_does_not_let_go_of_a_model_and_nobody_is_charged(
    tmp_path: Path,
) -> None:
    # The first unload takes all of its time, the second has to end within it, on a busy machine as well.
    node = Node(tmp_path, load_timeout=0.1, unload_timeout=4.0)
    hangs = await node.stage()
    node.triton.takes[NAME] = 60
    await node.lifecycle.start_load(hangs)
    await node.restarts.step()
    assert not (tmp_path / "restart-triton").exists()  # its pod lives: another node may be tried first
    node.models.lose_pod(UID)
    with pytest.raises(TritonUnavailable):
        await node.lifecycle.start_unload(NAME)
    await node.restarts.step()
    assert "does not release model-p1" in (tmp_path / "restart-triton").read_text()
    assert "TritonRestarted" in [reason for reason, _ in node.events.said]
    node.triton.die()  # as its kubelet does
    await node.lifecycle.start_unload(NAME)
    assert list(node.models) == []
    count = node.registry.get_sample_value
    assert count("berth_agent_triton_restarts_total", {"reason": "stuck"}) == 1
    assert count("berth_agent_triton_restarts_total", {"reason": "died"}) == 0
    await until(
        lambda: Journal(tmp_path).read().open == []
    )  # written in the background: nor at the next death


async def test_triton_is_not_restarted_while_another_model_is_being_loaded(tmp_path: Path) -> None:
    node = Node(tmp_path, unload_timeout=0.1)
    stays, loads = await node.stage(), await node.stage("p2", on="GPU-b")
    await node.lifecycle.start_load(stays)
    node.triton.stays = {NAME}
    node.models.lose_pod(UID)
    with pytest.raises(TritonUnavailable):
        await node.lifecycle.start_unload(NAME)
    node.triton.load_seconds = 60
    node.lifecycle.start_load(loads)
    await until(lambda: node.triton.loading == 1)
    await node.restarts.step()
    assert not (tmp_path / "restart-triton").exists()
    await node.lifecycle.close()


async def test_a_model_serves_on_though_the_disk_is_too_full_to_note_it(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(on_node.repository, "learn", full)
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    assert (model.state, on_node.triton.held[NAME]) == (ModelState.READY, IndexState.READY)
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
    assert (model.state, on_node.triton.held) == (ModelState.READY, {NAME: IndexState.READY})


async def test_a_triton_that_dies_while_a_copy_is_drained_is_not_asked_to_unload_what_comes_next(
    on_node: Node,
) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    on_node.gateway.seconds, unloads = 0.5, []
    unload = on_node.triton.unload

    async def noted(name: ServerName, *, timeout_seconds: float) -> None:
        unloads.append(name)
        await unload(name, timeout_seconds=timeout_seconds)

    on_node.triton.unload = noted  # type: ignore[method-assign]
    staging = asyncio.ensure_future(on_node.stage(digest="another"))
    await until(lambda: not on_node.gateway.drained and on_node.triton.held == {NAME: IndexState.READY})
    await asyncio.sleep(0.05)
    on_node.triton.die()
    model = await staging
    await on_node.lifecycle.start_load(model)
    await until(lambda: bool(on_node.gateway.drained))
    await asyncio.sleep(0.05)
    assert (model.state, unloads) == (ModelState.READY, [])


async def test_what_triton_says_of_a_load_is_told_with_the_name_that_people_know(on_node: Node) -> None:
    said = f"load failed for model '{NAME}': at least one version must be available: /models/{NAME}/1 is none"
    on_node.triton.errors = [TritonRefused(said)]
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    assert model.failure is Failure.INVALID_MODEL
    assert "'model-p1'" in model.reason
    assert "/models/model-p1/1 is none" in model.reason
    told = [model.reason, *(message for _, message in on_node.events.said)]
    assert not any(NAME in text for text in told)


async def test_whose_requests_were_in_a_triton_that_died_is_told_and_counted(on_node: Node) -> None:
    models = [await on_node.stage(uid, on=on) for uid, on in (("p1", "GPU-a"), ("p2", "GPU-b"))]
    for model in models:
        await on_node.lifecycle.start_load(model)
    count = on_node.registry.get_sample_value
    on_node.events.said.clear()
    for suspects in ([UID], [UID, PodUid("p2"), PodUid("gone")], []):
        on_node.triton.die()
        on_node.crashes.note_requests(suspects)
        await on_node.controller.look()
        await until(lambda: all(model.state is ModelState.READY for model in models))
    said = [message for reason, message in on_node.events.said if reason == "TritonDied"]
    assert said == [
        "Triton has died, and of all models only model-p1 had requests in it",
        "Triton has died with requests of 3 models in it, model-p1 among them",
        "Triton has died with requests of 3 models in it, model-p2 among them",
    ]
    assert count("berth_agent_triton_deaths_total", {"reason": "requests"}) == 2
    assert count("berth_agent_triton_deaths_total", {"reason": "unknown"}) == 1


async def test_a_triton_that_dies_over_and_over_fills_nobodys_events(on_node: Node) -> None:
    await on_node.stage()
    for _ in range(50):
        on_node.crashes.note_requests([UID])
    assert [reason for reason, _ in on_node.events.said].count("TritonDied") == 3


async def test_two_pods_serve_models_of_one_name_and_of_one_content(tmp_path: Path) -> None:
    on_node = Node(tmp_path, code=CodeRule.ANY)
    one = await on_node.stage("p1", name="net", digest="same")
    other = await on_node.stage("p2", name="net", namespace="other", digest="same", on="GPU-b")
    for model in (one, other):
        await on_node.lifecycle.start_load(model)
    assert [model.state for model in (one, other)] == [ModelState.READY] * 2
    on_node.models.lose_pod(UID)
    await on_node.lifecycle.start_unload(on_server("p1", "net"))
    assert on_node.triton.held[on_server("p2", "net")] is IndexState.READY
    assert other.state is ModelState.READY
    assert list(on_node.repository.records()) == [on_server("p2", "net")]


async def test_a_tenant_has_a_neighbours_files_refused_by_no_death_that_it_can_bring_about(
    tmp_path: Path,
) -> None:
    """node D5: it loads the files that a neighbour will bring, and its other model kills Triton meanwhile."""
    node, public = Node(tmp_path, code=CodeRule.ANY, quiet=0.05), "f" * 64
    node.triton.takes[NAME] = 1
    killer, bait = await node.stage("p2", on="GPU-b"), await node.stage(digest=public)
    await node.lifecycle.start_load(killer)
    load = node.lifecycle.start_load(bait)
    for deaths in range(6):
        if bait.failure is Failure.QUARANTINED:
            break
        await until(lambda: node.triton.held.get(NAME) is IndexState.LOADING or load.done())
        node.triton.die()
        await until(lambda deaths=deaths: node.triton.deaths > deaths and killer.state is ModelState.READY)  # type: ignore[misc]
    await load
    assert bait.failure is Failure.QUARANTINED
    assert "for namespace team" in bait.reason
    neighbour = await node.stage("p3", digest=public, namespace="another", on="GPU-b")
    await node.lifecycle.start_load(neighbour)
    assert (neighbour.state, neighbour.failure) == (ModelState.READY, None)
    await node.lifecycle.close()
