"""Loads and unloads beside a Triton that refuses, goes away, or takes its time."""

import asyncio
from pathlib import Path

import pytest

import agent.lifecycle
from agent.lifecycle import MAX_LOST_LOADS
from berth.contract.ids import ModelName, PodUid
from berth.contract.report import Failure, ModelState
from berth.triton.errors import TritonRefused, TritonUnavailable
from tests.fakes.agent_node import GPU, Node
from tests.fakes.objects import GIB

NAME, UID = ModelName("model-p1"), PodUid("p1")


@pytest.fixture
def on_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(agent.lifecycle, "_POLL_SECONDS", 0.01)
    return Node(tmp_path)


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
    other = [await on_node.stage("p3"), await on_node.stage("p4", on="GPU-b")]
    await asyncio.gather(*(on_node.lifecycle.start_load(model) for model in other))
    assert on_node.triton.most_loading == 2


async def test_a_refused_load_leaves_nothing_and_tells_tritons_reason(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonRefused("CUDA out of memory")]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure, model.reason) == (
        ModelState.FAILED,
        Failure.CAPACITY,
        "CUDA out of memory",
    )
    assert on_node.repository.records() == {}
    assert on_node.events.said == [("ModelLoadFailed", "CUDA out of memory")]


async def test_files_that_have_served_before_are_kept(on_node: Node) -> None:
    model = await on_node.stage(served=True)
    on_node.triton.errors = [TritonRefused("CUDA out of memory")]
    await on_node.lifecycle.start_load(model)
    assert model.state is ModelState.FAILED
    assert list(on_node.repository.records()) == [NAME]


async def test_a_triton_that_goes_away_once_is_waited_for(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonUnavailable("connection reset")]
    await on_node.lifecycle.start_load(model)
    assert model.state is ModelState.READY


async def test_a_model_that_takes_triton_down_again_and_again_is_given_up(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonUnavailable("connection reset")] * 10
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert len(on_node.triton.configs) == MAX_LOST_LOADS
    assert "went away 3 times" in model.reason


async def test_a_bad_config_never_reaches_triton(on_node: Node) -> None:
    model = await on_node.stage()
    (on_node.repository.directory(NAME) / "config.pbtxt").write_text("nonsense {")
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.INVALID_MODEL)
    assert on_node.triton.configs == []


async def test_memory_is_held_until_the_model_is_gone(on_node: Node) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    on_node.models.lose_pod(UID)
    unload = on_node.lifecycle.start_unload(NAME)
    await asyncio.sleep(0.05)
    assert (model.state, model.resident) == (ModelState.UNLOADING, True)
    assert on_node.models.get(UID) is model
    assert on_node.lifecycle.busy_gpus() == {GPU.uuid}
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
