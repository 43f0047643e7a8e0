"""The agent's inside, on a Triton that holds models in memory."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from agent.gpus import GpuReading
from agent.lifecycle import Lifecycle
from agent.metrics import AgentMetrics
from agent.models import Model, Models
from agent.repository import Record, Repository
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, parse_model_pod
from berth.triton.admin import IndexEntry, IndexState
from berth.triton.errors import TritonError
from tests.fakes.objects import GIB, pod

GPU = GpuChoice(GpuUuid("GPU-a"), 0, GIB)


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
