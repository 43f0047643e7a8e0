"""Carries out what the state machine of each model says: the only place that changes what Triton holds.

Nothing here waits for another model but in its turn, and nothing holds a lock while Triton works.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from agent.models import Model
from agent.serving.crash_recorder import CrashRecorder
from agent.serving.load_call import LoadCall, LoadFailed, UnloadCall, failure_of
from agent.serving.load_queue import LoadQueue
from agent.serving.model_fsm import Do, Event, Phase
from agent.serving.outcomes import Outcomes
from agent.serving.slot import Slot
from agent.serving.slots import Slots, loop_seconds
from agent.serving.triton_sync import EVENTS, TritonSync
from berth.contract.ids import GpuUuid, PodUid, ServerName
from berth.contract.report import Failure, ModelState
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from berth.triton.admin import GONE, IndexEntry
from berth.triton.errors import TritonError, TritonLate, TritonUnavailable

log = logging.getLogger(__name__)

_MOST_REPORT_PAUSE_SECONDS = 5.0


class Reported(Protocol):
    """What a load needs of the reporter."""

    async def covers(self, uid: PodUid) -> None:
        """Return once a report that lists this pod's model stands on the node. Raises TimeoutError."""
        ...


class SlotController:
    """`apply` takes what is wanted and how calls end; `look` takes what Triton holds."""

    def __init__(
        self,
        slots: Slots,
        triton: TritonSync,
        queue: LoadQueue,
        *,
        loads: LoadCall,
        unloads: UnloadCall,
        crashes: CrashRecorder,
        outcomes: Outcomes,
        reported: Reported,
    ) -> None:
        self._slots, self._triton, self._queue = slots, triton, queue
        self._loads, self._unloads = loads, unloads
        self._crashes, self._outcomes, self._reported = crashes, outcomes, reported
        self._models = slots.models
        self._work: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._look_soon = asyncio.Event()
        self._known_version = triton.version
        # What is under way then counts as hanging.
        self._grant_later = _Timer(self._grant)
        self._look_later = _Timer(lambda: self._spawn(self.look_safely(), "look before a suspect"))

    async def close(self) -> None:
        """Stop; Triton goes on with what it has begun, and the next agent finds it."""
        watcher = [] if self._watcher is None else [self._watcher]
        tasks = [*self._work, *watcher]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._grant_later.set(None)
        self._look_later.set(None)
        self._slots.abandon()

    # Events.

    def apply(self, slot: Slot, event: Event) -> bool:
        """Take one event, and carry out what follows. True if Triton has restarted, by the evidence of it."""
        before, had_mark = slot.phase, self._crashes.is_open(slot.record)
        todo = self._slots.apply(slot, event)
        if slot.phase is not before:
            self._look_soon.set()
            asyncio.get_running_loop().call_soon(self._grant)
        for do in todo:
            self._carry_out(slot, do, before)
        self._keep_watching()
        return Do.BLAME in todo and (had_mark or before in (Phase.SERVING, Phase.UNLOADING))

    def _carry_out(self, slot: Slot, do: Do, before: Phase) -> None:
        match do:
            case Do.REPORT:
                assert slot.model is not None
                self._spawn(self._await_report(slot, slot.model), f"report {slot.model_name}")
            case Do.LOAD:
                self._spawn(self._load(slot), f"call load {slot.model_name}")
            case Do.UNLOAD:
                self._spawn(self._unload(slot), f"call unload {slot.model_name}")
            case Do.NOTE_SERVED:
                self._note_served(slot, is_new=before is Phase.LOADING)
            case Do.NOTE_LATE:
                self._slots.hold(slot)
                self._note_failed(slot)
            case Do.NOTE_FAILED:
                self._note_failed(slot)
            case Do.NOTE_UNLOADED:
                self._note_unloaded(slot)
            case Do.GIVE_UP:
                slot.rested.set()
            case Do.CLEAR:
                if slot.record is not None and self._crashes.clear(slot.record):
                    self._spawn(self._crashes.save(), f"clear {slot.model_name}")
            case Do.BLAME:
                pass  # of all that was open together: `look`

    def _note_served(self, slot: Slot, *, is_new: bool) -> None:
        slot.failure = None
        self._queue.note_served(loop_seconds())
        self._slots.hold(slot)
        if (model := slot.model) is not None:
            if model.measured_bytes is None and slot.record is not None:
                model.measured_bytes = slot.record.measured_bytes
            self._models.set(model, ModelState.READY)
            model.retry = None
            if is_new or (slot.record is not None and not slot.record.served):
                self._outcomes.loaded(model, slot.load_seconds or 0.0)
        slot.rested.set()

    def _note_failed(self, slot: Slot) -> None:
        if slot.model is not None:
            if slot.failure is None:
                timeout = self._slots.times.load_timeout
                slot.failure = (f"not loaded yet: still {slot.seen} after {timeout:g} s", Failure.TRANSIENT)
            if not slot.rested.is_set():
                self._outcomes.failed(slot.model, *slot.failure)
        slot.rested.set()

    def _note_unloaded(self, slot: Slot) -> None:
        self._unloads.resume(slot)
        if slot.model is not None:
            self._slots.release(slot.model)
            if slot.phase is Phase.QUEUED:
                slot.rested.clear()
                self._slots.requeue(slot, is_seen=True)
                self._models.set(slot.model, ModelState.LOADING, "Triton does not have it any more")
        slot.end_unload()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # Calls.

    async def _await_report(self, slot: Slot, model: Model) -> None:
        """The binder must know of every byte that a load may take before it is taken. An API server that is
        away fails no model: the load waits for it and says so."""
        pauses = Backoff(initial_seconds=self._slots.times.poll, cap_seconds=_MOST_REPORT_PAUSE_SECONDS)
        while slot.phase is Phase.REPORTING and slot.model is model:
            if not self._slots.is_wanted(model):
                log.info("load given up: the pod is ending", extra=fields(model=model.name, pod=model.ref))
                self.apply(slot, Event.DENIED)
                return
            try:
                await self._reported.covers(model.ref.uid)
            except TimeoutError:
                reason = "waits until the node's report can be written; is the API server away?"
                self._models.set(model, ModelState.LOADING, reason)
                await asyncio.sleep(pauses.next())
            else:
                self._slots.requeue(slot, is_seen=False)
                self.apply(slot, Event.REPORTED)

    async def _load(self, slot: Slot) -> None:
        began = loop_seconds()
        try:
            await self._loads.run(slot, _Progress(self._slots, self._crashes, slot))
        except TritonLate:
            timeout = self._slots.times.load_timeout
            slot.failure = (
                f"not loaded yet: Triton has been loading it for {timeout:g} s",
                Failure.TRANSIENT,
            )
            self.apply(slot, Event.TIMED_OUT)
        except TritonUnavailable as error:
            self._note_away(f"Triton went away during the load: {error}")
            self.apply(slot, Event.CUT_OFF)
        except Exception as error:  # also an unforeseen one: whatever Triton holds of it must go
            slot.failure = failure_of(error)
            if slot.failure[1] is Failure.TRANSIENT and not isinstance(
                error, (LoadFailed, TritonError, OSError)
            ):
                log.error("load broke", extra=fields(model=slot.model_name), exc_info=error)
            self.apply(slot, Event.REFUSED)
        else:
            slot.load_seconds = loop_seconds() - began
            self.apply(slot, Event.LOADED)

    async def _unload(self, slot: Slot) -> None:
        """Once at a time. Meanwhile Triton serves the requests that it has."""
        if slot.is_leaving:
            return
        slot.is_leaving = True
        try:
            await self._unloads.drain(slot)
            if slot.phase in (Phase.UNLOADING, Phase.FAILING):
                await self._call_unload(slot)
        finally:
            slot.is_leaving = False

    async def _call_unload(self, slot: Slot) -> None:
        try:
            await self._unloads.unload(slot)
        except TritonLate:
            return  # Triton works on it
        except TritonError as error:
            slot.end_unload(error)
            self.apply(slot, Event.UNLOAD_FAILED)
        else:
            self._slots.touch(slot)
            self._look_soon.set()

    # What Triton holds.

    async def look(self) -> Mapping[ServerName, IndexEntry] | None:
        """Read what Triton holds now; everything goes on by that. None while it is not ready. Raises TritonError,
        OSError."""
        begun = self._slots.stamp
        shown = [slot.name for slot in self._slots if slot.phase is not Phase.UNLOADED]
        try:
            index = await self._triton.read(shown, now=loop_seconds())
        finally:
            self._note_version()
            self._tell_waiting()
        if index is not None:
            await self._see(index, begun)
        return index

    def _note_version(self) -> None:
        """The binder places nothing here before the report says that Triton is ready."""
        if self._triton.version != self._known_version:
            self._known_version = self._triton.version
            self._models.touch()

    async def look_safely(self) -> None:
        """As `look`; an error goes to those who wait."""
        try:
            await self.look()
        except (TritonError, OSError) as error:
            for slot in self._slots:
                slot.end_unload(error)
            self._give_up_waiting(error)

    async def _see(self, index: Mapping[ServerName, IndexEntry], begun: int) -> None:
        self._crashes.note_running(self._triton.version or "", index)
        restarted, was_unloading = False, self._is_unloading()
        for slot in self._slots:
            if slot.stamp > begun:
                continue
            slot.is_seen = True
            entry = index.get(slot.name, GONE)
            slot.seen = entry.state.value
            restarted |= self.apply(slot, EVENTS[entry.state])
            if slot.phase is Phase.CHANGING and slot.model is not None:
                said = f"Triton is {entry.state.value.lower()} it since before this load"
                self._models.set(slot.model, ModelState.LOADING, said)
        self._slots.note_index(index, begun)
        if restarted:
            await self._crashes.note_restart(was_unloading=was_unloading)
        self._grant()

    def _is_unloading(self) -> bool:
        """Whether Triton is at the end of a model that it had loaded."""
        return any(
            slot.phase in (Phase.UNLOADING, Phase.UNLOAD_PENDING) and not self._crashes.is_open(slot.record)
            for slot in self._slots
        )

    def _note_away(self, reason: str) -> None:
        self._triton.note_away(reason, loop_seconds())
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Models that wait for Triton say so."""
        if not self._triton.is_away:
            return
        for slot in self._slots:
            if slot.phase in (Phase.QUEUED, Phase.CHANGING) and slot.model is not None:
                reason = f"waits for Triton: {self._triton.away_reason}"
                self._models.set(slot.model, ModelState.LOADING, reason)

    def _give_up_waiting(self, error: Exception) -> None:
        patience = self._slots.times.triton_wait
        if self._triton.away_seconds(loop_seconds()) < patience:
            return
        why = (f"not loaded: Triton has not answered for {patience:g} s: {error}", Failure.TRANSIENT)
        for slot in self._slots:
            if slot.phase is Phase.QUEUED:
                self._deny(slot, *why)
            elif slot.phase is Phase.CHANGING:
                slot.failure = why
                self.apply(slot, Event.OVERDUE)

    def _keep_watching(self) -> None:
        is_idle = self._watcher is None or self._watcher.done()
        if is_idle and self._needs_look():
            self._watcher = asyncio.create_task(self._watch(), name="watch")

    def _needs_look(self) -> bool:
        return any(slot.needs_look(is_away=self._triton.is_away) for slot in self._slots)

    async def _watch(self) -> None:
        poll = self._slots.times.poll
        pauses = Backoff(initial_seconds=poll, cap_seconds=10 * poll)
        while True:
            self._look_soon.clear()
            await self.look_safely()
            if not self._triton.is_away:  # a Triton that has ended has ended its models, too
                for slot in self._slots.overdue(loop_seconds()):
                    self.apply(slot, Event.OVERDUE)
            if not self._needs_look():
                return
            if await wait_until_set(self._look_soon, timeout_seconds=pauses.next()):
                pauses.reset()
                await asyncio.sleep(poll / 10)

    # Turns.

    def _grant(self) -> None:
        """Begin what may begin now."""
        while not self._triton.is_away:
            turn = self._queue.next(loop_seconds())
            self._grant_later.set(turn.again_seconds)
            for name, why in turn.waits.items():
                if (model := self._slots.of(name).model) is not None:
                    self._models.set(model, ModelState.LOADING, why)
            if turn.next is None:
                if turn.look_seconds is not None:
                    self._look_later.set(turn.look_seconds)
                return
            self._begin(self._slots.of(turn.next))

    def _begin(self, slot: Slot) -> None:
        """Its turn has come: load it, unless it is not wanted or may not begin beside what is there."""
        model = slot.model
        assert model is not None
        if not self._slots.is_wanted(model):
            log.info("load given up: the pod is ending", extra=fields(model=model.name, pod=model.ref))
            self._models.set(model, ModelState.STAGED)
            self.apply(slot, Event.DENIED)
        elif (why := self._queue.refusal(slot)) is not None:
            self._deny(slot, why.reason, why.failure)
        else:
            self._models.set(model, ModelState.LOADING)
            self.apply(slot, Event.TURN)
            self._queue.note_begun(slot)

    def _deny(self, slot: Slot, reason: str, failure: Failure) -> None:
        slot.failure = (reason, failure)
        if slot.model is not None:
            self._outcomes.failed(slot.model, reason, failure)
        self.apply(slot, Event.DENIED)


class _Progress:
    """Of one load: its mark in the journal, and what has changed on the GPUs since."""

    def __init__(self, slots: Slots, crashes: CrashRecorder, slot: Slot) -> None:
        self._slots, self._crashes, self._slot = slots, crashes, slot
        self._moves: Mapping[GpuUuid, int] = {}

    async def begin(self) -> None:
        record, admitted = self._slot.record, self._slot.admitted
        assert record is not None
        assert admitted is not None
        await self._crashes.mark(record, backend=admitted.backend, has_code=admitted.has_code)
        if self._slot.phase is not Phase.LOADING:
            raise LoadFailed("the pod is ending", Failure.TRANSIENT)
        self._moves = self._slots.moves()

    def loaded(self) -> None:
        self._slots.hold(self._slot)

    def disturbed(self) -> set[GpuUuid]:
        return self._slots.disturbed(self._slot, since=self._moves)


class _Timer:
    """Calls once after the time that was set last."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float | None) -> None:
        """None: not at all."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if seconds is not None:
            self._handle = asyncio.get_running_loop().call_later(seconds, self._call)
