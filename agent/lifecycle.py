"""Loads and unloads models in Triton: one at a time per model, and per GPU, where it is measured."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from agent.failures import classify
from agent.gpus import GpuReading, GpusUnknown
from agent.metrics import AgentMetrics
from agent.model_config import InvalidModel, load_config
from agent.models import Model, Models
from agent.repository import Record, Repository
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName, PodUid
from berth.contract.pod import PodRef
from berth.contract.report import Failure, ModelState
from berth.kube.events import EventType
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import in_thread
from berth.triton.admin import GONE, IndexState, TritonAdmin
from berth.triton.errors import TritonError, TritonRefused, TritonUnavailable

log = logging.getLogger(__name__)

# A model during whose load Triton went away this often is not tried again at once: it may be what kills it.
MAX_LOST_LOADS = 3
_TRITON_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


class GpuFacts(Protocol):
    """What the lifecycle needs of the agent's GPU facts."""

    instance_kind: str

    async def read_now(self) -> tuple[GpuReading, ...]:
        """A fresh reading. Raises GpusUnknown."""
        ...


class Reported(Protocol):
    """What the lifecycle needs of the reporter."""

    async def covers(self, uid: PodUid) -> None:
        """Return once a report that lists this pod's model stands on the node. Raises TimeoutError."""
        ...


class EventSink(Protocol):
    def record(self, pod: PodRef, type: EventType, reason: str, message: str) -> None: ...


class Lifecycle:
    """The only place that changes what Triton holds."""

    def __init__(
        self,
        *,
        models: Models,
        repository: Repository,
        triton: TritonAdmin,
        gpus: GpuFacts,
        reported: Reported,
        events: EventSink,
        metrics: AgentMetrics,
        load_timeout_seconds: float,
        unload_timeout_seconds: float,
    ) -> None:
        self._models, self._repository, self._triton = models, repository, triton
        self._gpus, self._reported, self._events, self._metrics = gpus, reported, events, metrics
        self._load_timeout, self._unload_timeout = load_timeout_seconds, unload_timeout_seconds
        self._model_locks: defaultdict[ModelName, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._gpu_locks: defaultdict[GpuUuid, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._loads: dict[PodUid, asyncio.Task[None]] = {}
        self._unloads: dict[ModelName, asyncio.Task[None]] = {}

    def lock(self, name: ModelName) -> asyncio.Lock:
        """Held by whoever changes the model of this name, its files included."""
        return self._model_locks[name]

    def is_loading(self, uid: PodUid) -> bool:
        return uid in self._loads

    def busy_gpus(self) -> set[GpuUuid]:
        """GPUs whose use is changing because a model comes or goes."""
        return {gpu for gpu, lock in self._gpu_locks.items() if lock.locked()}

    def start_load(self, model: Model) -> asyncio.Task[None]:
        """Load in the background, or join the load that is under way. The task never raises: its
        outcome is the model's state."""
        task = self._loads.get(model.ref.uid)
        if task is None:
            task = asyncio.create_task(self._load_safely(model), name=f"load {model.name}")
            self._loads[model.ref.uid] = task
            task.add_done_callback(lambda _: self._loads.pop(model.ref.uid, None))
        return task

    def start_unload(self, name: ModelName) -> asyncio.Task[None]:
        """Unload in the background, or join the unload that is under way.

        The task waits until Triton shows the model gone, removes its files and releases its memory.
        It raises TritonError or OSError; then the model is still listed, to be tried again.
        """
        task = self._unloads.get(name)
        if task is None:
            task = asyncio.create_task(self._unload(name), name=f"unload {name}")
            self._unloads[name] = task
            task.add_done_callback(lambda _: self._unloads.pop(name, None))
        return task

    async def publish(self, model: Model, staged: Path, record: Record) -> None:
        """Make staged files the pod's model, in place of what it had. Raises TritonError or OSError."""
        async with self.lock(record.name):
            await self._take_from_triton(record.name, model)
            await in_thread(self._repository.publish, staged, record)
            self._models.set(model, ModelState.STAGED)

    async def _unload(self, name: ModelName) -> None:
        async with self.lock(name):
            model = self._models.named(name)
            if model is not None:
                self._models.set(model, ModelState.UNLOADING)
            await self._take_from_triton(name, model)
            await in_thread(self._repository.remove, name)
            if model is not None:
                self._released(model)
        log.info("model unloaded", extra=fields(model=name))

    async def close(self) -> None:
        """Stop loading; what Triton has begun it goes on with, and the next agent finds it."""
        tasks = [*self._loads.values(), *self._unloads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load_safely(self, model: Model) -> None:
        assert model.name is not None
        started = time.monotonic()
        try:
            loaded_now = await self._load_until_settled(model, model.name)
        except InvalidModel as error:
            await self._failed(model, str(error), Failure.INVALID_MODEL)
        except TritonRefused as error:
            await self._failed(model, str(error), classify(str(error)))
        except (TritonUnavailable, TimeoutError) as error:
            await self._failed(model, f"not loaded: {error}", Failure.TRANSIENT)
        except OSError as error:
            await self._failed(model, f"repository: {error}", Failure.TRANSIENT)
        else:
            self._models.set(model, ModelState.READY)
            if loaded_now:
                self._tell_loaded(model, time.monotonic() - started)

    async def _load_until_settled(self, model: Model, name: ModelName) -> bool:
        """Load; False if Triton had it already. When Triton goes away meanwhile, wait for it and try again, a bounded number of times."""
        attempt = 0
        while True:
            try:
                async with self.lock(name):
                    return await self._load(model, name)
            except TritonUnavailable as error:
                attempt += 1
                if attempt == MAX_LOST_LOADS:
                    raise TritonUnavailable(
                        f"Triton went away {attempt} times during the load: {error}"
                    ) from error
                log.warning("triton went away during a load", extra=fields(model=name, error=error))
                await self._until_triton_answers()

    async def _load(self, model: Model, name: ModelName) -> bool:
        record = await asyncio.to_thread(self._repository.record, name)
        if record is None or record.pod.uid != model.ref.uid:
            # Whoever asks after a failure that took the files away is told of that failure.
            raise InvalidModel(model.reason or "no files have been staged")
        self._models.set(model, ModelState.LOADING)
        # The binder must know of every byte that a load may take before it is taken.
        await self._reported.covers(model.ref.uid)
        config = await asyncio.to_thread(
            load_config,
            self._repository.directory(name),
            name,
            gpu=record.gpu,
            kind=self._gpus.instance_kind,
        )
        async with self._gpus_of(record.gpu):
            entry = (await self._triton.index()).get(name, GONE)
            if entry.state is IndexState.READY:
                self._models.set_resident(model, True)
                return False  # an earlier agent has loaded it; loading again could need its memory twice
            before = await self._used(record.gpu)
            await self._triton.load(name, config, timeout_seconds=self._load_timeout)
            self._models.set_resident(model, True)
            await self._measure(model, record, before)
        return True

    async def _measure(self, model: Model, record: Record, before: Mapping[GpuUuid, int]) -> None:
        """What the load has taken; of several GPUs what it took on that where it took most."""
        after = await self._used(record.gpu)
        taken = [after[gpu] - before[gpu] for gpu in record.gpu.uuids if gpu in before and gpu in after]
        if len(taken) == len(record.gpu.gpus):
            model.measured_bytes = max(0, *taken)
        await asyncio.to_thread(
            self._repository.learn, record.name, measured_bytes=model.measured_bytes, served=True
        )

    async def _used(self, gpu: GpuChoice) -> dict[GpuUuid, int]:
        """Bytes in use on these GPUs, as far as they are known."""
        try:
            readings = await self._gpus.read_now()
        except GpusUnknown:
            return {}
        return {r.uuid: r.used_bytes for r in readings if r.uuid in gpu.uuids and r.used_bytes is not None}

    @asynccontextmanager
    async def _gpus_of(self, gpu: GpuChoice | None) -> AsyncIterator[None]:
        """One change at a time on each of these GPUs; always taken in one order."""
        async with AsyncExitStack() as held:
            for uuid in sorted(() if gpu is None else gpu.uuids):
                await held.enter_async_context(self._gpu_locks[uuid])
            yield

    async def _until_triton_answers(self) -> None:
        backoff = Backoff(initial_seconds=0.2, cap_seconds=2.0)
        async with asyncio.timeout(_TRITON_WAIT_SECONDS):
            while not await self._answers():
                await asyncio.sleep(backoff.next())

    async def _answers(self) -> bool:
        try:
            return await self._triton.version() is not None
        except TritonError:
            return False

    def _tell_loaded(self, model: Model, seconds: float) -> None:
        self._metrics.loaded(seconds)
        log.info("model loaded", extra=fields(model=model.name, pod=model.ref, seconds=round(seconds, 2)))
        self._events.record(model.ref, "Normal", "ModelLoaded", f"Triton serves {model.name}")

    async def _failed(self, model: Model, reason: str, failure: Failure) -> None:
        """Leave nothing in Triton. The files stay only if they have served: then they are not to blame."""
        assert model.name is not None
        log.warning(
            "load failed", extra=fields(model=model.name, pod=model.ref, kind=failure.name, reason=reason)
        )
        try:
            async with self.lock(model.name):
                await self._take_from_triton(model.name, model)
                record = await asyncio.to_thread(self._repository.record, model.name)
                if record is None or not record.served:
                    await in_thread(self._repository.remove, model.name)
        except (TritonError, OSError) as error:
            log.warning("failed model not removed yet", extra=fields(model=model.name, error=error))
        self._models.set(model, ModelState.FAILED, reason, failure=failure)
        self._metrics.load_failed(failure.value)
        self._events.record(model.ref, "Warning", "ModelLoadFailed", reason)

    async def _take_from_triton(self, name: ModelName, model: Model | None) -> None:
        """Raises TritonError if it is not gone within the time."""
        async with self._gpus_of(None if model is None else model.gpu):
            if (await self._triton.index()).get(name, GONE).state is not IndexState.UNKNOWN:
                await self._triton.unload(name, timeout_seconds=self._unload_timeout)
                await self._until_gone(name)
            if model is not None:
                self._models.set_resident(model, False)

    async def _until_gone(self, name: ModelName) -> None:
        """An unload is asynchronous: requests in flight finish first. Raises TritonUnavailable when late."""
        try:
            async with asyncio.timeout(self._unload_timeout):
                while not (await self._triton.index()).get(name, GONE).is_gone:
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise TritonUnavailable(
                f"{name} is not gone {self._unload_timeout:g} s after its unload"
            ) from None

    def _released(self, model: Model) -> None:
        if model.pod_lives:
            self._models.set(model, ModelState.PENDING)
        else:
            self._models.drop(model)
