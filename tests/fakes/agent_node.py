"""The agent's inside, on a Triton that holds models in memory."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from agent.admission import Admission, CodeGate, NodeRules
from agent.gateway_link import GatewayLink
from agent.gpus import GpuReading, GpusUnknown, cuda_ordinals
from agent.metrics import AgentMetrics
from agent.models import Model, Models
from agent.repository import Record, Repository
from agent.serving.crash_recorder import CrashRecorder
from agent.serving.journal import Journal
from agent.serving.outcomes import Outcomes
from agent.serving.serving import Ports, Serving
from agent.serving.slots import Slots, Times
from agent.serving.triton_sync import TritonSync
from berth.contract.gateway import server_name_of
from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid, ServerName
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, parse_model_pod
from berth.contract.report import CodeRule, GpuReport
from berth.runtime.tasks import wait_until_set
from berth.triton.admin import IndexEntry, IndexState, TritonAdmin
from berth.triton.errors import TritonError, TritonLate, TritonUnavailable
from tests.fakes.objects import GIB, pod

GPU = GpuChoice(GpuUuid("GPU-a"), 0, GIB)


def on_server(uid: str, name: str = "") -> ServerName:
    """What Triton calls the model of this pod."""
    return server_name_of(name or f"model-{uid}", uid)


class FakeTriton:
    """Holds models in memory, slowly. As the real one does, it goes on with a load that nobody waits for
    any more. Of what has no directory in `models` it tells
    nothing, though it holds it. Unlike the real one it refuses to load what it holds.
    """

    def __init__(self) -> None:
        self.models: Path | None = None
        self.loaded: dict[ServerName, IndexState] = {}
        # Raised at the end of the next loads; TritonUnavailable is Triton's death, with all it held.
        self.errors: list[TritonError] = []
        self.index_errors: list[TritonError] = []  # raised by the next looks at the index
        self.deadly: set[ServerName] = set()
        self.configs: list[Mapping[str, Any]] = []
        self.loads: list[ServerName] = []
        self.loading = 0
        self.most_loading = 0
        self.deaths = 0
        self.died_with: list[set[ServerName]] = []  # what was being loaded at each death
        self.stays: set[ServerName] = set()  # their unload never ends
        self.kills_at_its_end: set[ServerName] = set()  # their unload is Triton's death
        self.kills_later: dict[ServerName, float] = {}  # so many seconds after they have come to serve
        self.load_seconds, self.unload_seconds, self.restart_seconds = 0.01, 0.1, 0.0
        self.takes: dict[ServerName, float] = {}  # seconds, where they are not `load_seconds`
        self._died = asyncio.Event()
        self._alive_at = 0.0

    async def version(self) -> str | None:
        self._require_alive()
        return "2.51.0"

    async def index(self) -> Mapping[ServerName, IndexEntry]:
        self._require_alive()
        if self.index_errors:
            raise self.index_errors.pop(0)
        shown = (
            self.loaded
            if self.models is None
            else {n: self.loaded[n] for n in self.loaded if (self.models / n).is_dir()}
        )
        return {name: IndexEntry(state) for name, state in shown.items()}

    async def load(self, name: ServerName, config: Mapping[str, Any], *, timeout_seconds: float) -> None:
        self._require_alive()
        state = self.loaded.get(name, IndexState.UNKNOWN)
        assert IndexEntry(state).is_gone, f"loaded while {state.value}: needs its memory twice"
        self.configs.append(config)
        self.loads.append(name)
        self.loaded[name] = IndexState.LOADING
        work = asyncio.ensure_future(self._work(name))
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.shield(work)
        except TimeoutError:
            work.add_done_callback(lambda done: done.exception())
            raise TritonLate("Deadline Exceeded") from None

    async def unload(self, name: ServerName, *, timeout_seconds: float) -> None:
        self._require_alive()
        assert self.loaded.get(name) is not IndexState.LOADING, "the call would wait for the load"
        self.loaded[name] = IndexState.UNLOADING
        if name in self.stays:
            return
        if name in self.kills_at_its_end:
            self.die()
            return
        asyncio.get_running_loop().call_later(self.unload_seconds, self._unloaded, name)

    def die(self) -> None:
        """All it held is gone; it is back after `restart_seconds`."""
        self.deaths += 1
        self.died_with.append({n for n, state in self.loaded.items() if state is IndexState.LOADING})
        self.loaded.clear()
        self._died.set()
        self._died = asyncio.Event()
        self._alive_at = asyncio.get_running_loop().time() + self.restart_seconds

    def on_ordinal(self, ordinal: int) -> int:
        """How many of the models that it serves are on the GPU that CUDA calls so."""
        last = {config["name"]: config["instance_group"][0].get("gpus", []) for config in self.configs}
        return sum(
            ordinal in last.get(n, []) for n, state in self.loaded.items() if state is IndexState.READY
        )

    def refusal(self, name: ServerName) -> TritonError | None:
        """How the load that is over now has ended."""
        return self.errors.pop(0) if self.errors else None

    async def _work(self, name: ServerName) -> None:
        self.loading += 1
        self.most_loading = max(self.most_loading, self.loading)
        # A deadly one kills half-way, so that what begins with it does not get through before.
        seconds = self.takes.get(name, self.load_seconds) / (2 if name in self.deadly else 1)
        died = await wait_until_set(self._died, timeout_seconds=seconds)
        self.loading -= 1
        error = None if died else self.refusal(name)
        if not died and (name in self.deadly or isinstance(error, TritonUnavailable)):
            self.die()
            died = True
        if died:
            raise error or TritonUnavailable("connection reset")
        self.loaded[name] = IndexState.READY if error is None else IndexState.UNAVAILABLE
        if error is not None:
            raise error
        if name in self.kills_later:
            asyncio.get_running_loop().call_later(self.kills_later[name], self._kill_if_loaded, name)

    def _kill_if_loaded(self, name: ServerName) -> None:
        if self.loaded.get(name) is IndexState.READY and name in self.kills_later:
            self.die()

    def _unloaded(self, name: ServerName) -> None:
        if self.loaded.get(name) is IndexState.UNLOADING:
            self.loaded[name] = IndexState.UNAVAILABLE

    def _require_alive(self) -> None:
        if asyncio.get_running_loop().time() < self._alive_at:
            raise TritonUnavailable("connection refused")


class Gpus:
    """Two GPUs, GPU-a before GPU-b for NVML and CUDA alike. A model takes 3 GiB of the one that Triton has put it on."""

    instance_kind = "KIND_GPU"

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton
        self.readings = [
            GpuReading(GpuUuid(uuid), index, "T4", 16 * GIB, 0, 0.0, bus_id=f"0{index}")
            for index, uuid in enumerate(("GPU-a", "GPU-b"))
        ]
        # What CUDA has under its numbers; None: as it should be.
        self.cuda: list[str] | None = None
        self.unknown = ""

    async def read_now(self) -> tuple[GpuReading, ...]:
        if self.unknown:
            raise GpusUnknown(self.unknown)
        ordinals = cuda_ordinals(self.readings)
        if self.cuda is not None:
            ordinals = {GpuUuid(uuid): number for number, uuid in enumerate(self.cuda)}
        return tuple(
            replace(gpu, used_bytes=3 * GIB * self._triton.on_ordinal(ordinals.get(gpu.uuid, -1)))
            for gpu in self.readings
        )


class Reported:
    """`away`: the API server cannot be reached, so that no report is ever written."""

    def __init__(self) -> None:
        self.asked: list[PodUid] = []
        self.away = False

    async def covers(self, uid: PodUid) -> None:
        self.asked.append(uid)
        if self.away:
            raise TimeoutError


class Gateway:
    """Records whom it was asked to drain, and what Triton held of it then. `seconds`: what a drain takes."""

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton
        self.drained: list[tuple[PodUid, list[ServerName]]] = []
        self.off: set[PodUid] = set()
        self.seconds = 0.0

    async def drain(self, uid: PodUid) -> None:
        await asyncio.sleep(self.seconds)
        ready = [name for name, state in self._triton.loaded.items() if state is IndexState.READY]
        self.drained.append((uid, ready))
        self.off.add(uid)

    def resume(self, uid: PodUid) -> None:
        self.off.discard(uid)


class Events:
    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def record(self, ref: PodRef, kind: str, reason: str, message: str) -> None:
        self.said.append((reason, message))


# As of a node, but sooner.
TIMES = Times(load_timeout=5, unload_timeout=5, poll=0.01)


class Node:
    """`triton`, `link`: others than the fake ones, which then stand idle. `times`: others than TIMES."""

    def __init__(
        self,
        directory: Path,
        *,
        triton: TritonAdmin | None = None,
        code: CodeRule = CodeRule.NAMESPACE,
        link: GatewayLink | None = None,
        clock: Callable[[], float] = time.monotonic,
        **times: float,
    ) -> None:
        self.directory, self.repository, self.models = directory, Repository(directory), Models()
        self.repository.open()
        self.triton, self.reported, self.events = FakeTriton(), Reported(), Events()
        self.triton.models = self.repository.models
        self.gateway = Gateway(self.triton)
        self.gpus, self.registry = Gpus(self.triton), CollectorRegistry()
        self.admission = Admission(NodeRules(frozenset({"python"}), code))
        self.gate = CodeGate(code)
        self.slots = Slots(self.models, self.gate, replace(TIMES, **times))
        self.outcomes = Outcomes(self.models, AgentMetrics(self.registry), self.events)
        self.crashes = CrashRecorder(Journal(directory), self.outcomes, lift_key=Keys().lift_quarantine)
        self.sync = TritonSync(triton or self.triton, self.repository)
        ports = Ports(
            triton=self.sync,
            gpus=self.gpus,
            gpu_reports=self.room,
            gateway=link or self.gateway,
            reported=self.reported,
        )
        self.serving = Serving(
            self.slots,
            self.repository,
            self.admission,
            ports,
            crashes=self.crashes,
            outcomes=self.outcomes,
            clock=clock,
        )
        self.lifecycle, self.controller = self.serving.lifecycle, self.serving.controller
        self.reconciler, self.restarts = self.serving.reconciler, self.serving.restarts

    def room(self) -> list[GpuReport]:
        """The GPUs, with no other use and nothing kept free."""
        if self.gpus.unknown:
            raise GpusUnknown(self.gpus.unknown)
        return [
            GpuReport(
                uuid=gpu.uuid,
                index=gpu.index,
                product=gpu.product,
                total_bytes=gpu.total_bytes,
                other_use_bytes=0,
                headroom_bytes=0,
                healthy=gpu.healthy,
                reason=gpu.reason,
            )
            for gpu in self.gpus.readings
        ]

    async def stage(
        self,
        uid: str = "p1",
        *,
        served: bool = False,
        on: str = "GPU-a",
        others: tuple[str, ...] = (),
        digest: str = "",
        files: Mapping[str, str | bytes] | None = None,
        namespace: str = "team",
        gib: int = 1,
        name: str = "",
    ) -> Model:
        more = tuple(GpuRef(GpuUuid(uuid), 1) for uuid in others)
        choice = GpuChoice(GpuUuid(on), 0, gib * GIB, more)
        marks = {Keys().model_id: name} if name else {}
        bound = pod(uid, on="n1", choice=choice, mem=f"{gib}Gi", annotations=marks)
        bound["metadata"]["namespace"] = namespace
        self.models.see_pod(parse_model_pod(bound, Keys()))
        called = ModelName(name or f"model-{uid}")
        staged = self.repository.new_staging()
        (staged / "1").mkdir(parents=True)
        for path, body in (files or {"1/model.py": ""}).items():
            (staged / path).parent.mkdir(parents=True, exist_ok=True)
            (staged / path).write_bytes(body.encode() if isinstance(body, str) else body)
        record = Record(
            PodRef(namespace, uid, PodUid(uid)), ModelId(called), called, choice, digest or uid, served=served
        )
        model = self.models.claim(PodUid(uid), called)
        await self.lifecycle.publish(model, staged, record)
        return model
