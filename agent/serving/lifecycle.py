"""What is wanted of the node's models: their files published, loaded, unloaded or rejected.

It changes files, under the lock of the model's name; what changes Triton is the controller's.
"""

import asyncio
import logging
from pathlib import Path

from agent.admission import Admission, Admitted, CodeRefused, InvalidModel
from agent.models import Model
from agent.repository import Record, Repository
from agent.serving.controller import SlotController
from agent.serving.crash_recorder import CrashRecorder
from agent.serving.load_call import failure_of, note_served
from agent.serving.model_fsm import Event, Phase
from agent.serving.outcomes import Outcomes
from agent.serving.slot import Slot
from agent.serving.slots import Slots
from berth.contract.gateway import public_name_of
from berth.contract.ids import PodUid, ServerName
from berth.contract.report import Failure, ModelState
from berth.runtime.logs import fields
from berth.runtime.tasks import in_thread
from berth.triton.errors import TritonError, TritonUnavailable

log = logging.getLogger(__name__)


class Lifecycle:
    """Loads and unloads run in the background, one of each for a model; callers join the one under way."""

    def __init__(
        self,
        slots: Slots,
        controller: SlotController,
        repository: Repository,
        admission: Admission,
        *,
        crashes: CrashRecorder,
        outcomes: Outcomes,
    ) -> None:
        self._slots, self._controller, self._repository = slots, controller, repository
        self._admission, self._crashes, self._outcomes = admission, crashes, outcomes
        self._models = slots.models
        self._loads: dict[PodUid, asyncio.Task[None]] = {}
        self._unloads: dict[ServerName, asyncio.Task[None]] = {}

    def is_loading(self, uid: PodUid) -> bool:
        return uid in self._loads or self._slots.is_loading(uid)

    def start_load(self, model: Model) -> "asyncio.Task[None]":
        """Load in the background, or join the load that is under way. The task never raises: its
        outcome is the model's state."""
        task = self._loads.get(model.ref.uid)
        if task is None:
            task = asyncio.create_task(self._load_safely(model), name=f"load {model.name}")
            self._loads[model.ref.uid] = task
            task.add_done_callback(lambda _: self._loads.pop(model.ref.uid, None))
        return task

    def start_unload(self, name: ServerName) -> "asyncio.Task[None]":
        """Unload in the background, or join the unload that is under way.

        The task waits until Triton shows the model gone, removes its files and releases its memory.
        It raises TritonError or OSError; then the model is still listed, to be tried again. It leaves
        alone what a pod that goes on living has staged meanwhile.
        """
        task = self._unloads.get(name)
        if task is None:
            task = asyncio.create_task(self._unload(name), name=f"unload {public_name_of(name)}")
            self._unloads[name] = task
            task.add_done_callback(lambda _: self._unloads.pop(name, None))
        return task

    async def publish(self, model: Model, staged: Path, record: Record) -> None:
        """Make staged files the pod's model, in place of what it had. Raises PodGone, TritonError or
        OSError."""
        name = record.server_name
        async with self._slots.lock(name):
            self._models.require_listed(model)
            await self._take_out(name, model)
            await in_thread(self._repository.publish, staged, record)
            if (quarantine := self._crashes.quarantine_of(record)) is None:
                self._models.set(model, ModelState.STAGED)
            else:
                self._slots.of(name).record = record
                self._outcomes.failed(model, quarantine, Failure.QUARANTINED)

    def reject(self, model: Model, reason: str, failure: Failure) -> None:
        """Offered files are not taken. What the model has already stays as it is."""
        has_files = model.state in (ModelState.LOADING, ModelState.READY, ModelState.UNLOADING)
        if not has_files and (model.reason, model.failure) != (reason, failure):
            self._outcomes.failed(model, reason, failure)

    async def mark_lost(self, model: Model) -> None:
        """The model's files are gone, unless they are being published now."""
        name = model.server_name
        if name is not None and (self._slots.lock(name).locked() or await self._has_files(name, model)):
            return
        reason = "its files are gone from the node; only a new pod stages them again"
        self._models.set(model, ModelState.LOST, reason)

    def is_quarantined(self, model: Model) -> bool:
        """Of a model whose load ended in quarantine: whether that holds still."""
        slot = None if model.server_name is None else self._slots.get(model.server_name)
        record = None if slot is None else slot.record
        return record is not None and self._crashes.quarantine_of(record) is not None

    async def close(self) -> None:
        """Stop loading; Triton goes on with what it has begun, and the next agent finds it."""
        tasks = [*self._loads.values(), *self._unloads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._controller.close()

    # Loading.

    async def _load_safely(self, model: Model) -> None:
        try:
            await self._load(model)
        except OSError as error:
            self._outcomes.failed(model, f"repository: {error}", Failure.TRANSIENT)
        except (
            Exception
        ) as error:  # a defect of ours over one model: reported, and tried again after its pause
            log.error("load broke", extra=fields(model=model.name, pod=model.ref), exc_info=error)
            self._outcomes.failed(model, f"the agent could not load it: {error!r}", Failure.TRANSIENT)

    async def _load(self, model: Model) -> None:
        name = model.server_name
        assert name is not None
        slot = self._slots.of(name)
        if slot.phase in (Phase.SERVING, Phase.LATE):
            await self._controller.look_safely()
        async with self._slots.lock(name):
            record = await asyncio.to_thread(self._repository.record, name)
            if not self._slots.is_wanted(model):
                return
            if record is None or record.pod.uid != model.ref.uid:
                # A caller that comes after a failure that took the files away gets that failure.
                why = (model.reason or "no files are staged", model.failure or Failure.TRANSIENT)
                self._outcomes.failed(model, *why)
                return
            if slot.phase is Phase.UNLOADED or slot.record is None:
                slot.record = record
            if (quarantine := self._crashes.quarantine_of(record)) is not None:
                self._outcomes.failed(model, quarantine, Failure.QUARANTINED)
                return
            slot.model, slot.failure = model, None
            try:
                slot.admitted = await asyncio.to_thread(self._admit, record)
            except (InvalidModel, CodeRefused) as error:
                await self._turn_away(slot, model, record, error)
                return
            slot.rested.clear()
            self._controller.apply(slot, Event.REQUESTED)
        if slot.phase is Phase.SERVING:
            self._models.set(model, ModelState.READY)
        elif slot.phase.is_load:
            await slot.rested.wait()
            await self._remove_if_at_fault(slot, record)
        if slot.phase is Phase.SERVING and slot.record is not None and not slot.record.served:
            # An earlier agent has begun the load, or its success was not noted.
            await note_served(self._repository, slot, model.measured_bytes)

    def _admit(self, record: Record) -> Admitted:
        """Judged again before each load: the node's rules, and what an earlier agent let in, may be others.
        Blocks. Raises InvalidModel, CodeRefused or OSError."""
        return self._admission.rewrite(self._repository.directory(record.server_name), record.name)

    async def _turn_away(
        self, slot: Slot, model: Model, record: Record, error: InvalidModel | CodeRefused
    ) -> None:
        """Nothing of it stays in Triton, nor its files if they are at fault. The caller holds the name's lock."""
        reason, failure = failure_of(error)
        self._outcomes.failed(model, reason, failure)
        try:
            await self._take_out(slot.name, model)
            if failure is Failure.INVALID_MODEL and not record.served:
                await in_thread(self._repository.remove, slot.name)
        except (TritonError, OSError) as late:
            log.warning("refused model not removed yet", extra=fields(model=slot.model_name, error=late))

    async def _remove_if_at_fault(self, slot: Slot, tried: Record) -> None:
        """Files that have served are not to blame, and those that have come since are others."""
        if slot.failure is None or slot.failure[1] is not Failure.INVALID_MODEL:
            return
        async with self._slots.lock(slot.name):
            record = await asyncio.to_thread(self._repository.record, slot.name)
            same = record is not None and (record.pod, record.digest) == (tried.pod, tried.digest)
            if record is not None and same and not record.served and not slot.phase.may_be_held:
                await in_thread(self._repository.remove, slot.name)

    async def _has_files(self, name: ServerName, model: Model) -> bool:
        async with self._slots.lock(name):
            record = await asyncio.to_thread(self._repository.record, name)
        return record is not None and record.pod.uid == model.ref.uid

    # Unloading.

    async def _unload(self, name: ServerName) -> None:
        async with self._slots.lock(name):
            record = await asyncio.to_thread(self._repository.record, name)
            owner = None if record is None else self._models.get(record.pod.uid)
            if owner is not None and owner.is_wanted and owner.server_name == name:
                return
            model = self._models.served_as(name)
            if model is not None and model.state is not ModelState.LOST:
                self._models.set(model, ModelState.UNLOADING)
            await self._take_out(name, model)
            await in_thread(self._repository.remove, name)
            self._slots.drop(name)
            if model is not None:
                self._released(model)
        said = (
            fields(model=public_name_of(name)) if model is None else fields(model=model.name, pod=model.ref)
        )
        log.info("model unloaded", extra=said)

    async def _take_out(self, name: ServerName, model: Model | None) -> None:
        """Raises TritonError if Triton holds it still after the time. The caller holds the name's lock."""
        slot, timeout = self._slots.of(name), self._slots.times.unload_timeout
        slot.model = model or slot.model
        await in_thread(self._repository.show, name)
        slot.out = asyncio.get_running_loop().create_future()
        self._controller.apply(slot, Event.DROPPED)
        try:
            async with asyncio.timeout(timeout):
                await slot.out
        except TimeoutError:
            if not slot.phase.is_load:
                self._controller.apply(slot, Event.OVERDUE)
            raise TritonUnavailable(
                f"{public_name_of(name)} is not gone {timeout:g} s after its unload"
            ) from None
        finally:
            slot.out = None

    def _released(self, model: Model) -> None:
        if not model.pod_lives:
            self._models.drop(model)
        elif model.state is not ModelState.LOST:
            self._models.set(model, ModelState.PENDING)
