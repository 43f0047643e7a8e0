"""A node without a cluster: the agent's serving side, on a real Triton that comes back when it dies."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from agent.admission import Admission, CodeGate, NodeRules
from agent.gateway_link import NoGateway
from agent.gpus import GpuReading
from agent.metrics import AgentMetrics
from agent.models import Model, Models
from agent.repository import Record, Repository
from agent.serving.crash_recorder import CrashRecorder
from agent.serving.journal import Journal
from agent.serving.outcomes import Outcomes
from agent.serving.serving import Ports, Serving
from agent.serving.slots import Slots, Times
from agent.serving.triton_sync import TritonSync
from berth.contract.endpoint import Endpoint
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef
from berth.contract.report import CodeRule, GpuReport, ModelState
from berth.triton.admin import TritonAdmin, open_admin
from berth.triton.errors import TritonError
from berth.triton.keys import TritonKeys
from localcluster import triton
from localcluster.addresses import cluster_network
from localcluster.processes import Supervised

GIB = 1024**3
GPUS = (GpuUuid("GPU-a"), GpuUuid("GPU-b"))
CONFIG = """
backend: "python"
input [ { name: "I" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
MODEL = """
import os, signal, time
class TritonPythonModel:
    def initialize(self, args):
        {work}
    def execute(self, requests):
        return []
"""


class _Gpus:
    """Large ones, on which each model takes what it has requested."""

    instance_kind = "KIND_CPU"

    def __init__(self, models: Models) -> None:
        self._models = models
        self._readings = [
            GpuReading(uuid, index, "bench", 80 * GIB, 0, 0.0, bus_id=str(index))
            for index, uuid in enumerate(GPUS)
        ]

    async def read_now(self) -> tuple[GpuReading, ...]:
        taken = [one.gpu for one in self._models.residents()]
        return tuple(replace(gpu, used_bytes=GIB * taken.count(gpu.uuid)) for gpu in self._readings)

    def room(self) -> list[GpuReport]:
        return [
            GpuReport(
                uuid=gpu.uuid,
                index=gpu.index,
                product=gpu.product,
                total_bytes=gpu.total_bytes,
                other_use_bytes=0,
                headroom_bytes=0,
                healthy=True,
            )
            for gpu in self._readings
        ]


class _Reported:
    async def covers(self, uid: PodUid) -> None:
        return


class _Events:
    def record(self, *_: object) -> None:
        return


class BenchNode:
    """`deaths`: of Triton, since the start."""

    def __init__(self, directory: Path, admin: TritonAdmin, server: Supervised) -> None:
        self.repository, self.models, self.server = Repository(directory), Models(), server
        self.repository.open()
        gpus, gate = _Gpus(self.models), CodeGate(CodeRule.ANY)
        times = Times(load_timeout=60, unload_timeout=10)
        slots, self.sync = Slots(self.models, gate, times), TritonSync(admin, self.repository)
        outcomes = Outcomes(self.models, AgentMetrics(CollectorRegistry()), _Events())
        crashes = CrashRecorder(Journal(directory), outcomes, lift_key=Keys().lift_quarantine)
        ports = Ports(
            triton=self.sync, gpus=gpus, gpu_reports=gpus.room, gateway=NoGateway(), reported=_Reported()
        )
        admission = Admission(NodeRules(frozenset({"python"}), CodeRule.ANY))
        serving = Serving(slots, self.repository, admission, ports, crashes=crashes, outcomes=outcomes)
        self.lifecycle, self.controller = serving.lifecycle, serving.controller
        self._reconciler = serving.reconciler
        self.deaths = 0

    async def stage(self, uid: str, *, on: GpuUuid, work: str) -> Model:
        choice, name = GpuChoice(on, 0, GIB), ModelName(uid)
        ref = PodRef("bench", uid, PodUid(uid))
        self.models.see_pod(_pod(ref, name, choice))
        staged = self.repository.new_staging()
        write_model(staged, work=work)
        model = self.models.claim(ref.uid, name)
        await self.lifecycle.publish(model, staged, Record(ref, None, name, choice, f"{uid}-{'0' * 56}"))
        return model

    async def until(self, check: Callable[[], bool], *, seconds: float = 170.0) -> float:
        """Seconds until it is so."""
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(seconds):
            while not check():
                await asyncio.sleep(0.02)
        return asyncio.get_running_loop().time() - began

    async def until_served(self, *models: Model) -> float:
        return await self.until(lambda: all(model.state is ModelState.READY for model in models))

    async def reconcile(self) -> None:
        while True:
            with suppress(TritonError):
                await self._reconciler.step()
            await asyncio.sleep(0.5)

    async def count_deaths(self) -> None:
        pid = self.server.pid
        while True:
            await asyncio.sleep(0.02)
            if self.server.pid != pid:
                self.deaths += pid is not None
                pid = self.server.pid


@dataclass(frozen=True, slots=True)
class Server:
    """A Triton on the repository in `directory`, at an address of its own."""

    process: Supervised
    address: str
    keys: TritonKeys


def write_model(directory: Path, *, work: str) -> None:
    """A python model that does `work` when it is loaded."""
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(CONFIG)
    (directory / "1" / "model.py").write_text(MODEL.format(work=work))


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Server]:
    keys = TritonKeys.generate()
    (directory / "models").mkdir(parents=True)
    backends = triton.prepare_backends(directory / "backends")
    with cluster_network() as network:
        address, prefix = f"{network}.0.1", f"berth-bench-{os.getpid()}-"
        command = triton.command(
            address=address, models=directory / "models", backends=backends, keys=keys, shm_prefix=prefix
        )
        process = Supervised(
            "triton",
            command,
            log=directory / "log",
            env=triton.environment(os.environ),
            before=lambda: triton.remove_shared_memory(prefix),
        )
        await process.start()
        try:
            yield Server(process, address, keys)
        finally:
            await process.stop(grace_seconds=0)
            triton.remove_shared_memory(prefix)


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[BenchNode]:
    """A node whose Triton answers."""
    async with (
        serving(directory) as server,
        open_admin(Endpoint(server.address, triton.GRPC_PORT), server.keys) as admin,
    ):
        node = BenchNode(directory, admin, server.process)
        loops = [asyncio.ensure_future(work) for work in (node.reconcile(), node.count_deaths())]
        try:
            await node.until(lambda: node.sync.version is not None)
            yield node
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await node.lifecycle.close()


def _pod(ref: PodRef, name: ModelName, choice: GpuChoice) -> ModelPod:
    return ModelPod(
        ref=ref,
        node=None,
        deleting=False,
        ended=False,
        request_bytes=choice.bytes,
        model_id=None,
        declared_name=name,
        requirements=(),
        server=None,
        gpu=choice,
    )
