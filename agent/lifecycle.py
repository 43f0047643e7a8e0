"""Loads and unloads models in Triton: one at a time per model, and per GPU, where it is measured."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from agent.admission import Admitted, CodeGate, CodeRefused, InvalidModel, NodeRules, admit, write_anew
from agent.failures import classify, explain
from agent.gpus import GpuReading, GpusUnknown, cuda_ordinals, grown_instead
from agent.metrics import AgentMetrics
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
from berth.triton.errors import TritonError, TritonLate, TritonRefused, TritonUnavailable

log = logging.getLogger(__name__)

# Files during whose load Triton went away this often are not tried again: they may be what kills it.
MAX_LOST_LOADS = 3
# How often a load begins anew because Triton was away, whatever became of it.
_MOST_TRIES = 10
# Longer than a kubelet's longest pause between two starts of a container (5 min).
_TRITON_WAIT_SECONDS = 360.0
_POLL_SECONDS = 0.05
_HELD = frozenset({ModelState.LOADING, ModelState.READY, ModelState.UNLOADING})
_MOVING = frozenset({IndexState.LOADING, IndexState.UNLOADING})


class LoadFailed(Exception):
    """The load is over without success; the message says why."""

    def __init__(self, reason: str, failure: Failure) -> None:
        super().__init__(reason)
        self.failure = failure


class _Late(Exception):
    """Triton is still at it after our time; it goes on."""


class _WentAway(Exception):
    """Triton went away while it was loading the model."""


class _NotWanted(Exception):
    """The pod is going or gone: nothing is loaded for it any more."""


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
        rules: NodeRules,
        gate: CodeGate,
        load_timeout_seconds: float,
        unload_timeout_seconds: float,
    ) -> None:
        self._models, self._repository, self._triton = models, repository, triton
        self._gpus, self._reported, self._events, self._metrics = gpus, reported, events, metrics
        self._rules, self._gate = rules, gate
        self._load_timeout, self._unload_timeout = load_timeout_seconds, unload_timeout_seconds
        self._model_locks: defaultdict[ModelName, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._gpu_locks: defaultdict[GpuUuid, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._suspects = asyncio.Lock()
        # Digests of files that took Triton down, with the reason. Each has cost MAX_LOST_LOADS of its lives.
        self._deadly: dict[str, str] = {}
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
        It raises TritonError or OSError; then the model is still listed, to be tried again. It leaves
        alone what a pod that goes on living has staged meanwhile.
        """
        task = self._unloads.get(name)
        if task is None:
            task = asyncio.create_task(self._unload(name), name=f"unload {name}")
            self._unloads[name] = task
            task.add_done_callback(lambda _: self._unloads.pop(name, None))
        return task

    async def publish(self, model: Model, staged: Path, record: Record) -> None:
        """Make staged files the pod's model, in place of what it had. Raises PodGone, TritonError or
        OSError."""
        async with self.lock(record.name):
            self._models.require_listed(model)
            await self._take_from_triton(record.name, model)
            await in_thread(self._repository.publish, staged, record)
            self._models.set(model, ModelState.STAGED)

    async def lose(self, model: Model) -> None:
        """Say that the model's files are gone, unless somebody is putting them there."""
        if model.name is not None and (self.lock(model.name).locked() or await self._has_files(model)):
            return
        reason = "its files are gone from the node; only a new pod stages them again"
        self._models.set(model, ModelState.LOST, reason)

    async def _has_files(self, model: Model) -> bool:
        assert model.name is not None
        async with self.lock(model.name):
            record = await asyncio.to_thread(self._repository.record, model.name)
        return record is not None and record.pod.uid == model.ref.uid

    async def _unload(self, name: ModelName) -> None:
        async with self.lock(name):
            record = await asyncio.to_thread(self._repository.record, name)
            owner = None if record is None else self._models.get(record.pod.uid)
            if owner is not None and owner.is_wanted and owner.name == name:
                return
            model = self._models.named(name)
            if model is not None and model.state is not ModelState.LOST:
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
            await self._until_reported(model)
            loaded_now = await self._load_until_settled(model, model.name)
        except _NotWanted:
            log.info("load given up: the pod is ending", extra=fields(model=model.name, pod=model.ref))
        except InvalidModel as error:
            await self._failed(model, str(error), Failure.INVALID_MODEL)
        except CodeRefused as error:
            await self._failed(model, str(error), Failure.CAPACITY)
        except LoadFailed as error:
            await self._failed(model, str(error), error.failure)
        except _Late as error:
            # Triton goes on loading it. To unload it now would only queue behind that.
            self._tell_failed(model, f"not loaded yet: {error}", Failure.TRANSIENT)
        except TritonError as error:
            await self._failed(model, f"not loaded: {error}", Failure.TRANSIENT)
        except OSError as error:
            await self._failed(model, f"repository: {error}", Failure.TRANSIENT)
        except Exception as error:  # a defect of ours over one model: told, and tried again after its pause
            log.error("load broke", extra=fields(model=model.name, pod=model.ref), exc_info=error)
            await self._failed(model, f"the agent could not load it: {error!r}", Failure.TRANSIENT)
        else:
            self._models.set(model, ModelState.READY)
            if loaded_now:
                self._tell_loaded(model, time.monotonic() - started)

    async def _until_reported(self, model: Model) -> None:
        """The binder must know of every byte that a load may take before it is taken. An API server
        that is away fails no model: the load waits for it and says so. Holds no lock meanwhile."""
        pauses = Backoff(initial_seconds=_POLL_SECONDS, cap_seconds=5.0)
        while self._wanted(model):
            try:
                await self._reported.covers(model.ref.uid)
            except TimeoutError:
                reason = "waits until the node's report can be written; is the API server away?"
                self._models.set(model, ModelState.LOADING, reason)
                await asyncio.sleep(pauses.next())
            else:
                return
        raise _NotWanted

    def _wanted(self, model: Model) -> bool:
        return self._models.get(model.ref.uid) is model and model.is_wanted

    async def _load_until_settled(self, model: Model, name: ModelName) -> bool:
        """Load; False if it has served before this. When Triton goes away meanwhile, wait and try again."""
        lost, pauses = 0, Backoff(initial_seconds=_POLL_SECONDS, cap_seconds=5.0)
        for _ in range(_MOST_TRIES):
            try:
                return await self._load_alone(model, name) if lost else await self._load(model, name)
            except _WentAway as error:
                lost += 1
                reason = f"Triton went away {lost} times during the load: {error}"
                if lost == MAX_LOST_LOADS:
                    await self._remember_as_deadly(name, reason)
                    raise LoadFailed(reason, Failure.TRANSIENT) from error
            except TritonUnavailable as error:  # others may have taken it down; this model had not begun
                reason = f"waits for Triton: {error}"
            log.warning("triton went away", extra=fields(model=name, reason=reason))
            self._models.set(model, ModelState.LOADING, reason)
            await self._until_triton_answers()
            await asyncio.sleep(pauses.next())
        raise TritonUnavailable(f"Triton was away at each of {_MOST_TRIES} tries: {reason}")

    async def _load_alone(self, model: Model, name: ModelName) -> bool:
        """Of several models that were being loaded when Triton went away one may be the reason. They are
        loaded one after another, so that the others are not charged with what that one does."""
        async with self._suspects:
            return await self._load(model, name)

    async def _remember_as_deadly(self, name: ModelName, reason: str) -> None:
        if record := await asyncio.to_thread(self._repository.record, name):
            self._deadly[record.digest] = f"{reason}; not tried again while this agent runs"

    async def _load(self, model: Model, name: ModelName) -> bool:
        async with self.lock(name):
            record = await asyncio.to_thread(self._repository.record, name)
            if not self._wanted(model):
                raise _NotWanted
            if record is None or record.pod.uid != model.ref.uid:
                # Whoever asks after a failure that took the files away is told of that failure.
                raise LoadFailed(model.reason or "no files are staged", model.failure or Failure.TRANSIENT)
            if reason := self._deadly.get(record.digest):
                raise LoadFailed(reason, Failure.TRANSIENT)
            self._models.set(model, ModelState.LOADING)
            admitted = await asyncio.to_thread(self._admit, name)
            self._gate.claim(model.ref.uid, model.ref.namespace, has_code=admitted.has_code)
            if self.busy_gpus().intersection(record.gpu.uuids):
                said = "waits until another model has been loaded on its GPU, or taken from it"
                self._models.set(model, ModelState.LOADING, said)
            async with self._gpus_of(record.gpu):
                self._models.set(model, ModelState.LOADING)
                return await self._load_on_its_gpus(model, record, admitted)

    def _admit(self, name: ModelName) -> Admitted:
        """Judged again before each load: the node's rules, and what an earlier agent let in, may be others.
        Blocks. Raises InvalidModel, CodeRefused or OSError."""
        directory = self._repository.directory(name)
        admitted = admit(directory, name, self._rules)
        write_anew(directory, admitted)
        return admitted

    async def _load_on_its_gpus(self, model: Model, record: Record, admitted: Admitted) -> bool:
        if await self._index_settled(model, record.name) is IndexState.READY:
            # An earlier agent, or a load that was late, has loaded it; again could need its memory twice.
            self._models.set_resident(model, True)
            if not record.served:
                await self._learn(record, record.measured_bytes)
            return not record.served
        before = await self._readings()
        ordinals = _ordinals_of(record.gpu, before)
        config = admitted.for_gpus(ordinals, kind=self._gpus.instance_kind)
        idle, residency = self._idle_gpus(before), self._models.residency
        await self._ask_triton(record, config)
        undisturbed = residency == self._models.residency
        self._models.set_resident(model, True)
        after = await self._readings_if_known()
        idle = idle & self._idle_gpus(after) if undisturbed else set()
        _check_grown(record.gpu, before, after, idle)
        model.measured_bytes = _taken(record.gpu, before, after)
        await self._learn(record, model.measured_bytes)
        return True

    async def _ask_triton(self, record: Record, config: Mapping[str, Any]) -> None:
        """Raises _Late, _WentAway or LoadFailed."""
        try:
            await self._triton.load(record.name, config, timeout_seconds=self._load_timeout)
        except TritonLate:
            raise _Late(f"Triton has been loading it for {self._load_timeout:g} s") from None
        except TritonUnavailable as error:
            raise _WentAway(str(error)) from error
        except TritonRefused as error:
            failure = classify(str(error))
            if record.served and failure is Failure.INVALID_MODEL:
                failure = Failure.TRANSIENT  # the same files have served here
            raise LoadFailed(explain(str(error)), failure) from error

    async def _index_settled(self, model: Model, name: ModelName) -> IndexState:
        """What Triton holds of the model once it neither loads nor unloads it any more. An earlier agent
        may have begun either. Raises _Late."""
        pauses, state = Backoff(initial_seconds=_POLL_SECONDS, cap_seconds=1.0), IndexState.UNKNOWN
        try:
            async with asyncio.timeout(self._load_timeout):
                while (state := await self._index_state(name)) in _MOVING:
                    said = f"Triton is {state.value.lower()} it since before this load"
                    self._models.set(model, ModelState.LOADING, said)
                    await asyncio.sleep(pauses.next())
        except TimeoutError:
            raise _Late(f"still {state.value} after {self._load_timeout:g} s") from None
        return state

    async def _index_state(self, name: ModelName) -> IndexState:
        return (await self._triton.index()).get(name, GONE).state

    async def _learn(self, record: Record, measured_bytes: int | None) -> None:
        await asyncio.to_thread(
            self._repository.learn, record.name, measured_bytes=measured_bytes, served=True
        )

    async def _readings(self) -> tuple[GpuReading, ...]:
        """Raises LoadFailed."""
        try:
            return await self._gpus.read_now()
        except GpusUnknown as error:
            raise LoadFailed(f"the node's GPUs are unknown: {error}", Failure.TRANSIENT) from error

    async def _readings_if_known(self) -> tuple[GpuReading, ...]:
        try:
            return await self._gpus.read_now()
        except GpusUnknown:
            return ()

    def _idle_gpus(self, readings: Sequence[GpuReading]) -> set[GpuUuid]:
        """Those on which no model comes or goes."""
        return {gpu.uuid for gpu in readings} - self.busy_gpus()

    @asynccontextmanager
    async def _gpus_of(self, gpu: GpuChoice | None) -> AsyncIterator[None]:
        """One change at a time on each of these GPUs; always taken in one order."""
        async with AsyncExitStack() as held:
            for uuid in sorted(() if gpu is None else gpu.uuids):
                await held.enter_async_context(self._gpu_locks[uuid])
            yield

    async def _until_triton_answers(self) -> None:
        """Raises TritonUnavailable."""
        backoff = Backoff(initial_seconds=0.2, cap_seconds=2.0)
        try:
            async with asyncio.timeout(_TRITON_WAIT_SECONDS):
                while not await self._answers():
                    await asyncio.sleep(backoff.next())
        except TimeoutError:
            raise TritonUnavailable(f"Triton has not answered for {_TRITON_WAIT_SECONDS:g} s") from None

    async def _answers(self) -> bool:
        try:
            return await self._triton.version() is not None
        except TritonError:
            return False

    def _tell_loaded(self, model: Model, seconds: float) -> None:
        self._metrics.loaded(seconds)
        log.info("model loaded", extra=fields(model=model.name, pod=model.ref, seconds=round(seconds, 2)))
        self._events.record(model.ref, "Normal", "ModelLoaded", f"Triton serves {model.name}")

    def refuse(self, model: Model, reason: str, failure: Failure) -> None:
        """Say that files which were offered are not taken. What the model has already stays as it is."""
        if (model.reason, model.failure) != (reason, failure) and model.state not in _HELD:
            self._tell_failed(model, reason, failure)

    async def _failed(self, model: Model, reason: str, failure: Failure) -> None:
        """Leave nothing in Triton, and no files that are to blame: those that have served are not."""
        assert model.name is not None
        try:
            async with self.lock(model.name):
                await self._take_from_triton(model.name, model)
                record = await asyncio.to_thread(self._repository.record, model.name)
                if failure is Failure.INVALID_MODEL and not (record and record.served):
                    await in_thread(self._repository.remove, model.name)
        except (TritonError, OSError) as error:
            log.warning("failed model not removed yet", extra=fields(model=model.name, error=error))
        self._tell_failed(model, reason, failure)

    def _tell_failed(self, model: Model, reason: str, failure: Failure) -> None:
        log.warning(
            "load failed", extra=fields(model=model.name, pod=model.ref, kind=failure.name, reason=reason)
        )
        self._models.set(model, ModelState.FAILED, reason, failure=failure)
        self._metrics.load_failed(failure.value)
        self._events.record(model.ref, "Warning", "ModelLoadFailed", reason)

    async def _take_from_triton(self, name: ModelName, model: Model | None) -> None:
        """Raises TritonError if it is not gone within the time. The caller holds the model's lock."""
        await in_thread(self._repository.show, name)
        if await self._index_state(name) is not IndexState.UNKNOWN:
            async with self._gpus_of(None if model is None else model.gpu):
                # One that is being loaded is unloaded after that: until then this call does not return.
                await self._triton.unload(name, timeout_seconds=self._unload_timeout)
                await self._until_gone(name)
        if model is not None:
            self._models.set_resident(model, False)
            self._gate.release(model.ref.uid)

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
        if not model.pod_lives:
            self._models.drop(model)
        elif model.state is not ModelState.LOST:
            self._models.set(model, ModelState.PENDING)


def _ordinals_of(choice: GpuChoice, readings: Sequence[GpuReading]) -> list[int]:
    """CUDA's numbers of the chosen GPUs as of now. Raises LoadFailed where one is gone or not well."""
    known, ordinals = {gpu.uuid: gpu for gpu in readings}, cuda_ordinals(readings)
    for uuid in choice.uuids:
        if uuid not in known:
            raise LoadFailed(f"GPU {uuid} is not on this node any more", Failure.TRANSIENT)
        if not known[uuid].healthy or uuid not in ordinals:
            raise LoadFailed(f"GPU {uuid} is not healthy: {known[uuid].reason}", Failure.TRANSIENT)
    return [ordinals[uuid] for uuid in choice.uuids]


def _check_grown(
    choice: GpuChoice, before: Sequence[GpuReading], after: Sequence[GpuReading], idle: set[GpuUuid]
) -> None:
    """Raises LoadFailed if the model has gone to another GPU, as far as that can be told."""
    other = grown_instead(
        _used(before),
        _used(after),
        chosen=choice.uuids,
        others=idle - set(choice.uuids),
        least_bytes=choice.bytes // 2,
    )
    if other is not None:
        chosen = ", ".join(choice.uuids)
        raise LoadFailed(
            f"the model was loaded on GPU {other} and not on {chosen}; does Triton run with "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, and does the model heed its instance group?",
            Failure.TRANSIENT,
        )


def _taken(choice: GpuChoice, before: Sequence[GpuReading], after: Sequence[GpuReading]) -> int | None:
    """What a load has taken; of several GPUs what it took on that where it took most. None: not known."""
    was, now = _used(before), _used(after)
    taken = [now[gpu] - was[gpu] for gpu in choice.uuids if gpu in was and gpu in now]
    return max(0, *taken) if len(taken) == len(choice.gpus) else None


def _used(readings: Sequence[GpuReading]) -> dict[GpuUuid, int]:
    """Bytes in use, where they are known."""
    return {gpu.uuid: gpu.used_bytes for gpu in readings if gpu.used_bytes is not None}
