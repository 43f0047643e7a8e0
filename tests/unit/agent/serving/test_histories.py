"""Random histories of a node: pods come and go, models kill Triton, hang or are at fault, and the agent and
Triton die at any moment. Nothing waits for a clock: time leaps."""

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest

from agent.models import Model
from agent.serving.journal import Journal
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import parse_model_pod
from berth.contract.report import Failure, ModelState
from berth.triton.admin import IndexEntry
from berth.triton.errors import TritonError, TritonRefused, TritonUnavailable
from tests.fakes import leaping
from tests.fakes.agent_node import FakeTriton, Node, on_server
from tests.fakes.objects import GIB
from tests.fakes.objects import pod as pod_object

TOTAL_GIB = 16
KINDS = ("well", "well", "well", "slow", "deadly", "hangs", "stays", "invalid", "moody")


class Triton(FakeTriton):
    """Refuses by the model, and knows how to be restarted."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[ModelName, str] = {}
        self.moods = random.Random(1)

    def refusal(self, name: ModelName) -> TritonError | None:
        match self.kinds.get(name):
            case "invalid":
                return TritonRefused("unable to find backend library for backend 'x'")
            case "moody" if self.moods.random() < 0.5:
                return TritonRefused("connection refused by its database")
            case _:
                return None


class History:
    """A node whose agent can be killed. `pods`: what lives, and of which kind its model is."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random, self.directory = random.Random(seed), directory
        self.triton = Triton()
        self.triton.unload_seconds, self.triton.restart_seconds = 0.5, 2.0
        self.pods: dict[str, tuple[str, str, int]] = {}
        self.born = 0
        self.restart_seen: float = 0.0
        self.node = self._agent()

    def _agent(self) -> Node:
        node = Node(
            self.directory,
            triton=self.triton,
            load_timeout=30,
            unload_timeout=10,
            poll=0.05,
            clock=leaping.now,
        )
        self.triton.models = node.repository.models
        node.gpus._triton = self.triton
        self.reconciler = node.reconciler
        return node

    # What can happen.

    async def pod_comes(self) -> None:
        self.born += 1
        uid, kind = f"p{self.born}", self.random.choice(KINDS)
        gpu, gib = self.random.choice(("GPU-a", "GPU-b")), self.random.choice((1, 3, 6, 9))
        name = on_server(uid)
        self.triton.kinds[name] = kind
        if kind == "deadly":
            self.triton.deadly.add(name)
        if kind == "stays":
            self.triton.stays.add(name)
        self.triton.takes[name] = {"hangs": 1e9, "slow": 8.0}.get(kind, 0.5)
        while uid not in self.pods:  # its loader comes again
            try:
                await self.node.stage(uid, on=gpu, gib=gib, digest=f"{uid}-{'0' * 60}")
            except TritonUnavailable:
                await self.passes(1.0)
            else:
                self.pods[uid] = (kind, gpu, gib)

    async def pods_come(self) -> None:
        for _ in range(3):
            await self.pod_comes()

    async def pod_goes(self) -> None:
        if self.pods:
            uid = self.random.choice(sorted(self.pods))
            del self.pods[uid]
            self.node.models.lose_pod(PodUid(uid))

    async def triton_dies(self) -> None:
        self.triton.die()

    async def agent_dies(self) -> None:
        """As by kill -9: nothing is cleaned up, what is on disk stays."""
        await self.node.lifecycle.close()
        self.node = self._agent()
        await self.reconciler.adopt_repository()
        for uid, (_, gpu, gib) in self.pods.items():
            self.see(uid, gpu, gib)

    def see(self, uid: str, gpu: str, gib: int) -> None:
        choice = GpuChoice(GpuUuid(gpu), 0, gib * GIB, ())
        self.node.models.see_pod(
            parse_model_pod(pod_object(uid, on="n1", choice=choice, mem=f"{gib}Gi"), Keys())
        )

    async def passes(self, seconds: float) -> None:
        """The agent's loop, and the kubelet that looks at the file."""
        end = leaping.now() + seconds
        while leaping.now() < end:
            await self.probe()
            with suppress(TritonError):
                await self.reconciler.step()
            self.check()
            await asyncio.sleep(min(seconds / 5, 10.0))

    async def probe(self) -> None:
        file = self.node.repository.models.parent / "restart-triton"
        if file.exists() and file.stat().st_mtime_ns != self.restart_seen:
            self.restart_seen = file.stat().st_mtime_ns
            self.triton.die()

    # What must hold at any moment.

    def check(self) -> None:
        records = self.node.repository.records()
        for uid, (kind, _, _) in self.pods.items():
            model = self.model(uid)
            if model is not None and model.failure is not Failure.INVALID_MODEL and kind != "invalid":
                assert on_server(uid) in records, f"files of {uid} ({kind}) are gone: {model.reason}"
        self.check_memory()
        for one in self.node.crashes._ledger.all_quarantined(self.node.crashes._now()):
            assert {one.name} in self.triton.died_with, f"{one.name} was never alone"

    def check_memory(self) -> None:
        loaded: dict[str, int] = {}
        for name, state in self.triton.loaded.items():
            if IndexEntry(state).is_gone:
                continue
            model = self.node.models.served_as(name)
            assert model is not None, f"nobody knows of {name}, which Triton holds"
            assert model.gpu is not None
            loaded[model.gpu.uuid] = loaded.get(model.gpu.uuid, 0) + model.requested_bytes
        assert all(size <= TOTAL_GIB * GIB for size in loaded.values()), loaded

    def model(self, uid: str) -> Model | None:
        return self.node.models.get(PodUid(uid))

    def check_end(self) -> None:
        """Everybody serves, or is told why not."""
        for uid, (kind, _, _) in self.pods.items():
            model = self.model(uid)
            assert model is not None
            if model.failure is Failure.CAPACITY:
                assert "do not fit" in model.reason
                continue
            match kind:
                case "well" | "slow" | "stays" | "moody":
                    is_notified = model.failure in (Failure.QUARANTINED, Failure.TRANSIENT) and model.reason
                    charged = model.failure is Failure.QUARANTINED or kind == "moody"
                    assert model.state is ModelState.READY or (is_notified and charged), (uid, kind, model)
                case "deadly":
                    assert model.failure is Failure.QUARANTINED, (uid, model)
                case "hangs":
                    assert model.state in (ModelState.FAILED, ModelState.LOADING), (uid, model)
                    assert model.reason
                case "invalid":
                    assert model.failure is Failure.INVALID_MODEL or model.state is ModelState.PENDING
        listed = {model.ref.uid for model in self.node.models}
        assert listed == set(self.pods), "a pod that is gone has left something"


ACTIONS = ("pods_come",) * 2 + ("pod_goes",) * 3 + ("triton_dies", "agent_dies") * 2


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.usefixtures("inline")
def test_a_random_history(tmp_path: Path, seed: int) -> None:
    async def live() -> None:
        history = History(tmp_path, seed)
        for _ in range(20):
            action = history.random.choice(ACTIONS)
            await getattr(history, action)()
            await history.passes(history.random.choice((0.05, 0.3, 1.0, 3.0, 40.0)))
        await history.passes(2400)
        history.check_end()
        journal = Journal(tmp_path)
        journal.read()
        assert journal.failure == ""

    leaping.run(live())
