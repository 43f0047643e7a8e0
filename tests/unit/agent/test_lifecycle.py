"""Loads and unloads beside a Triton that refuses, goes away, or takes its time."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import agent.lifecycle
from agent.failures import FailureClass
from agent.gpus import GpuReading
from agent.lifecycle import MAX_LOST_LOADS, Lifecycle
from agent.metrics import AgentMetrics
from agent.models import Model, Models
from agent.repository import Record, Repository
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, parse_model_pod
from berth.contract.report import ModelState
from berth.triton.admin import IndexEntry, IndexState
from berth.triton.errors import TritonError, TritonRefused, TritonUnavailable
from tests.fakes.objects import GIB, pod

GPU = GpuChoice(GpuUuid("GPU-a"), 0, GIB)
NAME, UID = ModelName("model-p1"), PodUid("p1")


class FakeTriton:
    """Holds models in memory; `errors` are raised by the next loads. Refuses to load what it holds."""

    def __init__(self) -> None:
        self.held: dict[ModelName, IndexState] = {}
        self.errors: list[TritonError] = []
        self.configs: list[Mapping[str, Any]] = []
        self.loading = 0
        self.most_loading = 0

    async def version(self) -> str | None:
        return "2.51.0"

    async def index(self) -> Mapping[ModelName, IndexEntry]:
        return {name: IndexEntry(state) for name, state in self.held.items()}

    async def load(self, name: ModelName, config: Mapping[str, Any], *, timeout_seconds: float) -> None:
        assert self.held.get(name) is not IndexState.READY, "loaded twice: needs its memory twice"
        self.configs.append(config)
        self.loading += 1
        self.most_loading = max(self.most_loading, self.loading)
        await asyncio.sleep(0.01)
        self.loading -= 1
        if self.errors:
            raise self.errors.pop(0)
        self.held[name] = IndexState.READY

    async def unload(self, name: ModelName, *, timeout_seconds: float) -> None:
        self.held[name] = IndexState.UNLOADING
        asyncio.get_running_loop().call_later(0.1, self.held.__setitem__, name, IndexState.UNAVAILABLE)


class Gpus:
    """Uses 3 GiB for each model that Triton holds."""

    instance_kind = "KIND_GPU"

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton

    async def read_now(self) -> tuple[GpuReading, ...]:
        ready = sum(state is IndexState.READY for state in self._triton.held.values())
        return (GpuReading(GPU.uuid, 0, "T4", 16 * GIB, ready * 3 * GIB, 0.0),)


class Reported:
    def __init__(self) -> None:
        self.asked: list[PodUid] = []

    async def covers(self, uid: PodUid) -> None:
        self.asked.append(uid)


class Events:
    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def record(self, ref: PodRef, kind: str, reason: str, message: str) -> None:
        self.said.append((reason, message))


class Node:
    def __init__(self, directory: Path) -> None:
        self.repository, self.models = Repository(directory), Models()
        self.repository.open()
        self.triton, self.reported, self.events = FakeTriton(), Reported(), Events()
        self.lifecycle = Lifecycle(
            models=self.models,
            repository=self.repository,
            triton=self.triton,
            gpus=Gpus(self.triton),
            reported=self.reported,
            events=self.events,
            metrics=AgentMetrics(CollectorRegistry()),
            load_timeout_seconds=5,
            unload_timeout_seconds=5,
        )

    async def stage(self, uid: str = "p1", *, served: bool = False, on: str = "GPU-a") -> Model:
        choice = GpuChoice(GpuUuid(on), 0, GIB)
        self.models.see_pod(parse_model_pod(pod(uid, on="n1", choice=choice), Keys()))
        name = ModelName(f"model-{uid}")
        staged = self.repository.new_staging()
        (staged / "1").mkdir()
        record = Record(PodRef("team", uid, PodUid(uid)), ModelId(name), name, choice, "d", served=served)
        model = self.models.claim(PodUid(uid), name)
        await self.lifecycle.publish(model, staged, record)
        return model


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
        FailureClass.CAPACITY,
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
    assert (model.state, model.failure) == (ModelState.FAILED, FailureClass.TRANSIENT)
    assert len(on_node.triton.configs) == MAX_LOST_LOADS
    assert "went away 3 times" in model.reason


async def test_a_bad_config_never_reaches_triton(on_node: Node) -> None:
    model = await on_node.stage()
    (on_node.repository.directory(NAME) / "config.pbtxt").write_text("nonsense {")
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, FailureClass.INVALID_MODEL)
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
