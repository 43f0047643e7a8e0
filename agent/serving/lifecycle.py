"""The only place that changes what Triton holds: carries out what the machine of each model says.

Nothing here waits for another model but in its turn, and nothing holds a lock while Triton is at work, but
the one of the model's own name.
"""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from agent.admission import Admitted, CodeGate, CodeRefused, InvalidModel, NodeRules, admit, write_anew
from agent.gpus import GpusUnknown
from agent.limits import RateLimiter
from agent.metrics import AgentMetrics
from agent.models import Model, Models
from agent.repository import Record, Repository
from agent.serving.crash_ledger import Quarantined
from agent.serving.fit import Load, Misfit, OtherModel, misfit
from agent.serving.journal import Journal
from agent.serving.load_call import GpuFacts, LoadCall, LoadFailed
from agent.serving.load_queue import ActiveOperation, QueuedLoad, next_load
from agent.serving.model_fsm import Do, Event, Phase, next_of
from agent.serving.restart import LEAST_SECONDS_BETWEEN, Other, RestartFile, Stuck, why_restart
from agent.serving.slot import Slot
from berth.contract.errors import InvalidValue
from berth.contract.gateway import public_name_of
from berth.contract.ids import GpuUuid, PodUid, ServerName
from berth.contract.pod import PodRef
from berth.contract.report import Failure, GpuReport, ModelState
from berth.kube.events import EventType
from berth.kube.times import utc_now
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import in_thread, wait_until_set
from berth.triton.admin import GONE, IndexEntry, IndexState, TritonAdmin
from berth.triton.errors import TritonError, TritonLate, TritonUnavailable

log = logging.getLogger(__name__)

# Longer than a kubelet's longest pause between two starts of a container (5 min).
_TRITON_WAIT_SECONDS = 360.0
_POLL_SECONDS = 0.05
_MOST_POLL_SECONDS = 0.5
# A model that kills Triton does so while it is loaded or, if not, in the moments after.
_QUIET_SECONDS = 4.0
# Of the models that had requests in Triton when it died, as the log names them.
_SHOWN = 10
# Of Triton, by whether a load was under way, and whether requests were in it.
_DEATHS = {
    (False, False): "unknown",
    (False, True): "requests",
    (True, False): "load",
    (True, True): "load_and_requests",
}
_SEEN = {
    IndexState.READY: Event.SEEN_SERVED,
    IndexState.LOADING: Event.SEEN_CHANGING,
    IndexState.UNLOADING: Event.SEEN_CHANGING,
    IndexState.UNAVAILABLE: Event.SEEN_ENDED,
    IndexState.UNKNOWN: Event.SEEN_UNKNOWN,
}


class Reported(Protocol):
    """What the lifecycle needs of the reporter."""

    async def covers(self, uid: PodUid) -> None:
        """Return once a report that lists this pod's model stands on the node. Raises TimeoutError."""
        ...


class Gateway(Protocol):
    """What the lifecycle needs of the way to Triton's models."""

    async def drain(self, uid: PodUid) -> None:
        """Take this pod's requests off: nothing new comes to Triton until `resume`, and when it returns, after a
        bounded time, nothing is there any more as far as can be told."""
        ...

    def resume(self, uid: PodUid) -> None:
        """Let its requests come again."""
        ...


class EventSink(Protocol):
    def record(self, pod: PodRef, type: EventType, reason: str, message: str) -> None: ...


class Lifecycle:
    """`start_load`, `start_unload` and `publish` say what is wanted; `look` sees what Triton holds."""

    def __init__(
        self,
        *,
        models: Models,
        repository: Repository,
        triton: TritonAdmin,
        gpus: GpuFacts,
        room: Callable[[], Iterable[GpuReport]],  # raises GpusUnknown
        reported: Reported,
        events: EventSink,
        gateway: Gateway,
        metrics: AgentMetrics,
        rules: NodeRules,
        gate: CodeGate,
        journal: Journal,
        restart_file: RestartFile,
        lift_key: str,
        load_timeout_seconds: float,
        unload_timeout_seconds: float,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._models, self._repository, self._triton = models, repository, triton
        self._reported, self._events, self._metrics = reported, events, metrics
        self._gateway = gateway
        self._room, self._lift_key, self._now = room, lift_key, now
        self._load_timeout, self._unload_timeout = load_timeout_seconds, unload_timeout_seconds
        self._rules, self._gate = rules, gate
        self._call = LoadCall(triton, gpus, timeout_seconds=load_timeout_seconds)
        self._journal, self._writing = journal, asyncio.Lock()
        self._ledger = journal.read()
        self._restart_file = restart_file
        # A restart of Triton that comes before this is the one that was asked for.
        self._restarting_until = 0.0
        # A death of Triton that is seen before this is the one that the gateway has told of.
        self._suspected_until = 0.0
        self._name_locks: defaultdict[ServerName, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._slots: dict[ServerName, Slot] = {}
        self._loads: dict[PodUid, asyncio.Task[None]] = {}
        self._unloads: dict[ServerName, asyncio.Task[None]] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._look_soon = asyncio.Event()
        self._stamp = 0
        # When a model has come to serve last, and when suspects are looked at again for that.
        self._served_at = float("-inf")
        self._looking_later: asyncio.TimerHandle | None = None
        # When the last load of each namespace on each GPU began, by the count of changes.
        self._last_turns: dict[tuple[str, GpuUuid], int] = {}
        # When what is under way is waited for no longer.
        self._granting_later: asyncio.TimerHandle | None = None
        # How often something has come or gone on a GPU.
        self._moves: defaultdict[GpuUuid, int] = defaultdict(int)
        self.triton_version: str | None = None
        self._last_version = ""
        # Until Triton has answered, nothing is known of it.
        self._away_since: float | None = None
        self._away_reason = ""
        self._is_inherited = False
        self._wish_not_understood = ""
        self._death_events = RateLimiter(rate=1 / 60, burst=3)
        metrics.quarantined(len(self._ledger.all_quarantined(now())))

    # What is wanted.

    def lock(self, name: ServerName) -> asyncio.Lock:
        """Held by whoever changes the files of the model that Triton calls so."""
        return self._name_locks[name]

    def is_loading(self, uid: PodUid) -> bool:
        return uid in self._loads or any(
            slot.phase.is_load and slot.model is not None and slot.model.ref.uid == uid
            for slot in self._slots.values()
        )

    def busy_gpus(self) -> set[GpuUuid]:
        """GPUs whose use is changing because a model comes or goes."""
        return {gpu for slot in self._slots.values() if slot.is_busy for gpu in slot.gpus}

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
        async with self.lock(name):
            self._models.require_listed(model)
            await self._take_out(name, model)
            await in_thread(self._repository.publish, staged, record)
            if (known := self._quarantine_of(record)) is None:
                self._models.set(model, ModelState.STAGED)
            else:
                self._slot(name).record = record
                self._report_failed(model, known.reason(self._lift_key), Failure.QUARANTINED)

    def refuse(self, model: Model, reason: str, failure: Failure) -> None:
        """Say that files which were offered are not taken. What the model has already stays as it is."""
        held = model.state in (ModelState.LOADING, ModelState.READY, ModelState.UNLOADING)
        if not held and (model.reason, model.failure) != (reason, failure):
            self._report_failed(model, reason, failure)

    async def lose(self, model: Model) -> None:
        """Say that the model's files are gone, unless somebody is putting them there."""
        name = model.server_name
        if name is not None and (self.lock(name).locked() or await self._has_files(name, model)):
            return
        reason = "its files are gone from the node; only a new pod stages them again"
        self._models.set(model, ModelState.LOST, reason)

    def is_barred(self, model: Model) -> bool:
        """Of a model whose load ended in quarantine: whether that holds still."""
        slot = None if model.server_name is None else self._slots.get(model.server_name)
        record = None if slot is None else slot.record
        return record is not None and self._quarantine_of(record) is not None

    async def lift(self, wish: str) -> bool:
        """End quarantines as the node's annotation asks. False if that cannot be understood. Raises OSError."""
        try:
            ended = self._ledger.lift(wish, self._now())
        except InvalidValue as error:
            if wish != self._wish_not_understood:
                log.warning("quarantine not lifted", extra=fields(annotation=self._lift_key, error=error))
            self._wish_not_understood = wish
            return False
        await self._save()
        self._metrics.quarantined(len(self._ledger.all_quarantined(self._now())))
        log.info("quarantine lifted", extra=fields(digests=", ".join(one.digest for one in ended) or "none"))
        self._models.touch()
        return True

    async def close(self) -> None:
        """Stop loading; what Triton has begun it goes on with, and the next agent finds it."""
        watcher = [] if self._watcher is None else [self._watcher]
        tasks = [*self._loads.values(), *self._unloads.values(), *self._work, *watcher]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._looking_later is not None:
            self._looking_later.cancel()
        self._grant_in(None)
        for slot in self._slots.values():
            slot.phase = Phase.UNLOADED  # nobody here knows any more

    # Loading.

    async def _load_safely(self, model: Model) -> None:
        try:
            await self._load(model)
        except OSError as error:
            self._report_failed(model, f"repository: {error}", Failure.TRANSIENT)
        except Exception as error:  # a defect of ours over one model: told, and tried again after its pause
            log.error("load broke", extra=fields(model=model.name, pod=model.ref), exc_info=error)
            self._report_failed(model, f"the agent could not load it: {error!r}", Failure.TRANSIENT)

    async def _load(self, model: Model) -> None:
        name = model.server_name
        assert name is not None
        slot = self._slot(name)
        if slot.phase in (Phase.SERVING, Phase.LATE):
            await self._look_safely()
        async with self.lock(name):
            record = await asyncio.to_thread(self._repository.record, name)
            if not self._wanted(model):
                return
            if record is None or record.pod.uid != model.ref.uid:
                # Whoever asks after a failure that took the files away is told of that failure.
                why = (model.reason or "no files are staged", model.failure or Failure.TRANSIENT)
                self._report_failed(model, *why)
                return
            if slot.phase is Phase.UNLOADED or slot.record is None:
                slot.record = record
            if (known := self._quarantine_of(record)) is not None:
                self._report_failed(model, known.reason(self._lift_key), Failure.QUARANTINED)
                return
            slot.model, slot.failure = model, None
            try:
                slot.admitted = await asyncio.to_thread(self._admit, record)
            except (InvalidModel, CodeRefused) as error:
                await self._turn_away(slot, model, record, error)
                return
            slot.rested.clear()
            self._apply(slot, Event.REQUESTED)
        if slot.phase is Phase.SERVING:
            self._models.set(model, ModelState.READY)
        elif slot.phase.is_load:
            await slot.rested.wait()
            await self._remove_if_at_fault(slot, record)
        if slot.phase is Phase.SERVING and slot.record is not None and not slot.record.served:
            await self._learn(slot, model.measured_bytes)  # an agent before has begun it, or it was not noted

    def _admit(self, record: Record) -> Admitted:
        """Judged again before each load: the node's rules, and what an earlier agent let in, may be others.
        Blocks. Raises InvalidModel, CodeRefused or OSError."""
        directory = self._repository.directory(record.server_name)
        admitted = admit(directory, record.name, self._rules)
        write_anew(directory, admitted)
        return admitted

    async def _turn_away(
        self, slot: Slot, model: Model, record: Record, error: InvalidModel | CodeRefused
    ) -> None:
        """Nothing of it stays in Triton, nor its files if they are at fault. The caller holds the name's lock."""
        reason, failure = _failure_of(error)
        self._report_failed(model, reason, failure)
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
        async with self.lock(slot.name):
            record = await asyncio.to_thread(self._repository.record, slot.name)
            same = record is not None and (record.pod, record.digest) == (tried.pod, tried.digest)
            if record is not None and same and not record.served and not slot.phase.may_be_held:
                await in_thread(self._repository.remove, slot.name)

    async def _await_report(self, slot: Slot, model: Model) -> None:
        """The binder must know of every byte that a load may take before it is taken. An API server that is
        away fails no model: the load waits for it and says so."""
        pauses = Backoff(initial_seconds=_POLL_SECONDS, cap_seconds=5.0)
        while slot.phase is Phase.REPORTING and slot.model is model:
            if not self._wanted(model):
                log.info("load given up: the pod is ending", extra=fields(model=model.name, pod=model.ref))
                self._apply(slot, Event.DENIED)
                return
            try:
                await self._reported.covers(model.ref.uid)
            except TimeoutError:
                reason = "waits until the node's report can be written; is the API server away?"
                self._models.set(model, ModelState.LOADING, reason)
                await asyncio.sleep(pauses.next())
            else:
                slot.is_seen, slot.order = False, self._stamp
                self._apply(slot, Event.REPORTED)

    async def _call_load(self, slot: Slot) -> None:
        assert slot.record is not None
        assert slot.admitted is not None
        began = asyncio.get_running_loop().time()
        progress = _Progress(self, slot)
        try:
            measured = await self._call.load(slot.record, slot.admitted, progress)
            await self._learn(slot, measured)
        except TritonLate:
            slot.failure = (
                f"not loaded yet: Triton has been loading it for {self._load_timeout:g} s",
                Failure.TRANSIENT,
            )
            self._apply(slot, Event.TIMED_OUT)
        except TritonUnavailable as error:
            self._note_away(f"Triton went away during the load: {error}")
            self._apply(slot, Event.CUT_OFF)
        except Exception as error:  # also what nobody foresaw: whatever Triton holds of it must go
            slot.failure = _failure_of(error)
            if slot.failure[1] is Failure.TRANSIENT and not isinstance(
                error, (LoadFailed, TritonError, OSError)
            ):
                log.error("load broke", extra=fields(model=slot.model_name), exc_info=error)
            self._apply(slot, Event.REFUSED)
        else:
            slot.load_seconds = asyncio.get_running_loop().time() - began
            self._apply(slot, Event.LOADED)

    async def _learn(self, slot: Slot, measured_bytes: int | None) -> None:
        assert slot.record is not None
        if slot.model is not None:
            slot.model.measured_bytes = measured_bytes
        try:
            await asyncio.to_thread(
                self._repository.learn, slot.name, measured_bytes=measured_bytes, served=True
            )
        except OSError as error:  # it serves all the same; an agent that starts anew will not know that
            log.warning("not noted that a model serves", extra=fields(model=slot.model_name, error=error))
            return
        slot.record = await asyncio.to_thread(self._repository.record, slot.name) or slot.record

    def _wanted(self, model: Model) -> bool:
        return self._models.get(model.ref.uid) is model and model.is_wanted

    def moves(self) -> Mapping[GpuUuid, int]:
        """How often something has come or gone on each GPU."""
        return dict(self._moves)

    def disturbed(self, slot: Slot, *, since: Mapping[GpuUuid, int]) -> set[GpuUuid]:
        """GPUs whose use has changed by others than this slot, or may have."""
        moved = {gpu for gpu, count in self._moves.items() if count != since.get(gpu, 0)}
        others = (other for other in self._slots.values() if other is not slot)
        return moved | {gpu for other in others if other.is_busy or other.phase.hangs for gpu in other.gpus}

    def note_loaded(self, slot: Slot) -> None:
        """Triton has loaded it; it has its memory from now on."""
        if slot.model is not None:
            self._models.set_resident(slot.model, True)

    # Unloading.

    async def _unload(self, name: ServerName) -> None:
        async with self.lock(name):
            record = await asyncio.to_thread(self._repository.record, name)
            owner = None if record is None else self._models.get(record.pod.uid)
            if owner is not None and owner.is_wanted and owner.server_name == name:
                return
            model = self._models.served_as(name)
            if model is not None and model.state is not ModelState.LOST:
                self._models.set(model, ModelState.UNLOADING)
            await self._take_out(name, model)
            await in_thread(self._repository.remove, name)
            self._slots.pop(name, None)
            if model is not None:
                self._released(model)
        said = (
            fields(model=public_name_of(name)) if model is None else fields(model=model.name, pod=model.ref)
        )
        log.info("model unloaded", extra=said)

    async def _take_out(self, name: ServerName, model: Model | None) -> None:
        """Raises TritonError if Triton is not rid of it within the time. The caller holds the name's lock."""
        slot = self._slot(name)
        slot.model = model or slot.model
        await in_thread(self._repository.show, name)
        slot.out = asyncio.get_running_loop().create_future()
        self._apply(slot, Event.DROPPED)
        try:
            async with asyncio.timeout(self._unload_timeout):
                await slot.out
        except TimeoutError:
            if not slot.phase.is_load:
                self._apply(slot, Event.OVERDUE)
            raise TritonUnavailable(
                f"{public_name_of(name)} is not gone {self._unload_timeout:g} s after its unload"
            ) from None
        finally:
            slot.out = None

    async def _drain_and_unload(self, slot: Slot) -> None:
        """Once at a time: what Triton serves meanwhile, it serves until nobody is asking."""
        if slot.is_leaving:
            return
        slot.is_leaving = True
        try:
            if slot.model is not None:
                await self._gateway.drain(slot.model.ref.uid)
            if slot.phase in (Phase.UNLOADING, Phase.FAILING):
                await self._call_unload(slot)
        finally:
            slot.is_leaving = False

    async def _call_unload(self, slot: Slot) -> None:
        try:
            await self._triton.unload(slot.name, timeout_seconds=self._unload_timeout)
        except TritonLate:
            return  # it is at it
        except TritonError as error:
            slot.fail_leavers(error)
            self._apply(slot, Event.UNLOAD_FAILED)
        else:
            self._touch(slot)

    def _released(self, model: Model) -> None:
        if not model.pod_lives:
            self._models.drop(model)
        elif model.state is not ModelState.LOST:
            self._models.set(model, ModelState.PENDING)

    # What happens.

    def _slot(self, name: ServerName) -> Slot:
        return self._slots.setdefault(name, Slot(name, since=asyncio.get_running_loop().time()))

    def _touch(self, slot: Slot) -> None:
        """What Triton said before now of this model says nothing any more."""
        self._stamp += 1
        slot.stamp = self._stamp
        self._look_soon.set()

    def _apply(self, slot: Slot, event: Event) -> bool:
        """Take one event, and carry out what follows. True if Triton has restarted, by the evidence of it."""
        before = slot.phase
        slot.phase, todo = next_of(before, event)
        if slot.phase is not before:
            slot.since = asyncio.get_running_loop().time()
            if not before.is_under_way:
                slot.under_way_since = slot.since
            self._touch(slot)
            if before.may_be_held != slot.phase.may_be_held or Do.NOTE_SERVED in todo:
                for gpu in slot.gpus:
                    self._moves[gpu] += 1
            asyncio.get_running_loop().call_soon(self._grant)
        had_mark = slot.record is not None and self._ledger.is_open(slot.record.digest, slot.name)
        for do in todo:
            self._carry_out(slot, do, before)
        self._keep_watching()
        return Do.BLAME in todo and (had_mark or before in (Phase.SERVING, Phase.UNLOADING))

    def _carry_out(self, slot: Slot, do: Do, before: Phase) -> None:
        match do:
            case Do.REPORT:
                assert slot.model is not None
                self._spawn(self._await_report(slot, slot.model), f"tell {slot.model_name}")
            case Do.LOAD:
                self._spawn(self._call_load(slot), f"call load {slot.model_name}")
            case Do.UNLOAD:
                self._spawn(self._drain_and_unload(slot), f"call unload {slot.model_name}")
            case Do.NOTE_SERVED:
                self._note_served(slot, is_new=before is Phase.LOADING)
            case Do.NOTE_LATE | Do.NOTE_FAILED:
                self._note_failed(slot, is_held=do is Do.NOTE_LATE)
            case Do.NOTE_UNLOADED:
                self._note_out(slot)
            case Do.GIVE_UP:
                slot.rested.set()
            case Do.CLEAR:
                self._clear(slot)
            case Do.BLAME:
                pass  # of all that was open together: `look`

    def _note_served(self, slot: Slot, *, is_new: bool) -> None:
        model = slot.model
        slot.failure = None
        self._served_at = asyncio.get_running_loop().time()
        if model is not None:
            self._models.set_resident(model, True)
            self._hold_gate(slot, self._gate.hold)
            if model.measured_bytes is None and slot.record is not None:
                model.measured_bytes = slot.record.measured_bytes
            self._models.set(model, ModelState.READY)
            model.retry = None
            if is_new or (slot.record is not None and not slot.record.served):
                self._report_loaded(slot, model)
        slot.rested.set()

    def _note_failed(self, slot: Slot, *, is_held: bool) -> None:
        if slot.model is not None:
            if is_held:
                self._models.set_resident(slot.model, True)
            if slot.failure is None:
                slot.failure = (
                    f"not loaded yet: still {slot.seen} after {self._load_timeout:g} s",
                    Failure.TRANSIENT,
                )
            if not slot.rested.is_set():
                self._report_failed(slot.model, *slot.failure)
        slot.rested.set()

    def _note_out(self, slot: Slot) -> None:
        if slot.model is not None:
            self._models.set_resident(slot.model, False)
            self._gate.release(slot.model.ref.uid)
            self._gateway.resume(slot.model.ref.uid)
            if slot.phase is Phase.QUEUED:
                slot.rested.clear()
                slot.is_seen, slot.order = True, self._stamp
                self._models.set(slot.model, ModelState.LOADING, "Triton does not have it any more")
        if slot.out is not None and not slot.out.done():
            slot.out.set_result(None)

    def _report_loaded(self, slot: Slot, model: Model) -> None:
        seconds = slot.load_seconds or 0.0
        self._metrics.loaded(seconds)
        log.info("model loaded", extra=fields(model=model.name, pod=model.ref, seconds=round(seconds, 2)))
        self._events.record(model.ref, "Normal", "ModelLoaded", f"Triton serves {model.name}")

    def _report_failed(self, model: Model, reason: str, failure: Failure) -> None:
        log.warning(
            "load failed", extra=fields(model=model.name, pod=model.ref, kind=failure.name, reason=reason)
        )
        self._models.set(model, ModelState.FAILED, reason, failure=failure)
        self._metrics.load_failed(failure.value)
        said = "ModelQuarantined" if failure is Failure.QUARANTINED else "ModelLoadFailed"
        self._events.record(model.ref, "Warning", said, reason)

    # What Triton holds.

    async def look(self) -> Mapping[ServerName, IndexEntry]:
        """See what Triton holds now; everything goes on by that. Raises TritonError, OSError."""
        begun = self._stamp
        shown = [slot.name for slot in self._slots.values() if slot.phase is not Phase.UNLOADED]
        await asyncio.to_thread(self._repository.show, *shown)  # else Triton tells nothing of what it holds
        try:
            version = await self._triton.version()
            index = {} if version is None else await self._triton.index()
        except TritonError as error:
            self._note_version(None)
            self._note_away(str(error))
            raise
        self._note_version(version)
        if version is None:
            self._note_away("it is not ready yet")
            return {}
        self._last_version = version
        await self._see(index, begun)
        return index

    def _note_version(self, version: str | None) -> None:
        if version != self.triton_version:
            self.triton_version = version
            self._models.touch()  # nobody places anything here before it is told that Triton is there

    async def _see(self, index: Mapping[ServerName, IndexEntry], begun: int) -> None:
        self._away_since = None
        if not self._is_inherited:
            self._is_inherited = True
            held = {name for name, entry in index.items() if not entry.is_gone}
            remembers = any(entry.state is not IndexState.UNKNOWN for entry in index.values())
            self._ledger.inherit(held, remembers=remembers)
        restarted, was_unloading = False, self._is_unloading()
        for slot in list(self._slots.values()):
            if slot.stamp > begun:
                continue
            slot.is_seen = True
            entry = index.get(slot.name, GONE)
            slot.seen = entry.state.value
            restarted |= self._apply(slot, _SEEN[entry.state])
            if slot.phase is Phase.CHANGING and slot.model is not None:
                said = f"Triton is {entry.state.value.lower()} it since before this load"
                self._models.set(slot.model, ModelState.LOADING, said)
        self._see_others(index, begun)
        self._see_unowned(index)
        if restarted:
            self._note_restart(was_unloading=was_unloading)
            await self._save_safely()
        self._grant()

    def _see_others(self, index: Mapping[ServerName, IndexEntry], begun: int) -> None:
        """What was not loaded by this agent, and not asked of it yet."""
        for model in self._models:
            name = model.server_name
            if name is None:
                continue
            slot = self._slot_of(model)
            if slot is None or (slot.phase is Phase.UNLOADED and slot.stamp <= begun):
                self._models.set_resident(model, not index.get(name, GONE).is_gone)
                if not model.resident:
                    self._gate.release(model.ref.uid)

    def _see_unowned(self, index: Mapping[ServerName, IndexEntry]) -> None:
        """What Triton holds and nobody's record tells of. It cannot be counted with a namespace."""
        counted = {model.server_name for model in self._models if self._gate.counts(model.ref.uid)}
        held = {name for name, entry in index.items() if not entry.is_gone}
        self._gate.note_unowned(held=not held <= counted)

    def _is_unloading(self) -> bool:
        """Whether Triton is at the end of a model that it had loaded."""
        leaving = [
            slot for slot in self._slots.values() if slot.phase in (Phase.UNLOADING, Phase.UNLOAD_PENDING)
        ]
        return any(
            slot.record is None or not self._ledger.is_open(slot.record.digest, slot.name) for slot in leaving
        )

    def _note_restart(self, *, was_unloading: bool) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._restarting_until:
            self._restarting_until = 0.0
            self._ledger.restarted()
            self._metrics.triton_restarted("stuck")
            return
        self._metrics.triton_restarted("died")
        had_requests, self._suspected_until = self._suspected_until > now, 0.0
        reason = _DEATHS[bool(self._ledger.open), had_requests]
        self._metrics.triton_died(reason)
        opened = ", ".join(sorted(public_name_of(mark.name) for mark in self._ledger.open))
        log.warning("triton has died", extra=fields(loading=opened, reason=reason))
        culprit = self._ledger.died(
            triton=self._last_version,
            now=self._now(),
            was_unloading=was_unloading,
            had_requests=had_requests,
        )
        if culprit is not None:
            self._metrics.quarantined(len(self._ledger.all_quarantined(self._now())))
            log.error(
                "quarantined",
                extra=fields(model=public_name_of(culprit.name), reason=culprit.reason(self._lift_key)),
            )

    def note_suspects(self, uids: Sequence[PodUid]) -> None:
        """Triton has died with requests of these pods' models in it."""
        loop_time = asyncio.get_running_loop().time()
        if not uids or loop_time < self._restarting_until:
            return
        self._suspected_until = loop_time + _TRITON_WAIT_SECONDS
        models = [model for uid in uids if (model := self._models.get(uid)) is not None]
        log.warning("triton has died with requests in it", extra=fields(pods=len(uids), of=_some(models)))
        for model in models:
            if not self._death_events.take(model.ref.uid):
                self._events.record(model.ref, "Warning", "TritonDied", _suspicion(model, len(uids)))

    def _note_away(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._away_since is None:
            self._away_since = now
            log.warning("triton is away", extra=fields(reason=reason))
        self._away_reason = reason
        for slot in self._slots.values():
            if slot.phase in (Phase.QUEUED, Phase.CHANGING) and slot.model is not None:
                self._models.set(slot.model, ModelState.LOADING, f"waits for Triton: {reason}")

    async def _look_safely(self) -> None:
        """What is waited for is told of what is in the way."""
        try:
            await self.look()
        except (TritonError, OSError) as error:
            for slot in self._slots.values():
                slot.fail_leavers(error)
            self._give_up_waiting(error)

    def _give_up_waiting(self, error: Exception) -> None:
        if self._away_since is None:
            return
        if asyncio.get_running_loop().time() - self._away_since < _TRITON_WAIT_SECONDS:
            return
        why = (
            f"not loaded: Triton has not answered for {_TRITON_WAIT_SECONDS:g} s: {error}",
            Failure.TRANSIENT,
        )
        for slot in list(self._slots.values()):
            if slot.phase is Phase.QUEUED:
                self._deny(slot, *why)
            elif slot.phase is Phase.CHANGING:
                slot.failure = why
                self._apply(slot, Event.OVERDUE)

    def _keep_watching(self) -> None:
        is_idle = self._watcher is None or self._watcher.done()
        if is_idle and any(self._is_watched(slot) for slot in self._slots.values()):
            self._watcher = asyncio.create_task(self._watch(), name="watch")

    def _is_watched(self, slot: Slot) -> bool:
        """Whether somebody waits for what Triton says of it."""
        if slot.phase is Phase.QUEUED:
            return not slot.is_seen or self._away_since is not None
        if slot.phase in (Phase.UNLOAD_PENDING, Phase.UNLOADING):
            return slot.out is not None and not slot.out.done()
        return slot.phase.awaits_sight

    async def _watch(self) -> None:
        pauses = Backoff(initial_seconds=_POLL_SECONDS, cap_seconds=_MOST_POLL_SECONDS)
        while True:
            self._look_soon.clear()
            await self._look_safely()
            self._note_overdue()
            if not any(self._is_watched(slot) for slot in self._slots.values()):
                return
            if await wait_until_set(self._look_soon, timeout_seconds=pauses.next()):
                pauses.reset()
                await asyncio.sleep(_POLL_SECONDS / 10)

    def _note_overdue(self) -> None:
        if self._away_since is not None:
            return  # Triton's end has ended it, too
        now = asyncio.get_running_loop().time()
        for slot in list(self._slots.values()):
            patience = self._load_timeout if slot.phase is Phase.CHANGING else self._unload_timeout
            if slot.phase.awaits_sight and slot.phase is not Phase.QUEUED and now - slot.since > patience:
                self._apply(slot, Event.OVERDUE)

    # Decision.

    def _grant(self) -> None:
        """Begin what may begin now."""
        while self._away_since is None:
            waiting, noise_seconds = self._waiting(), self._noise_seconds()
            turns = next_load(waiting, self._busy(), is_quiet=noise_seconds <= 0)
            self._grant_in(turns.again_seconds)
            for name, why in turns.waits.items():
                if (model := self._slots[name].model) is not None:
                    self._models.set(model, ModelState.LOADING, why)
            if turns.next is None:
                if noise_seconds > 0 and any(one.is_suspect for one in waiting):
                    self._look_in(noise_seconds)
                return
            self._begin(self._slots[turns.next])

    def _grant_in(self, seconds: float | None) -> None:
        """What is under way then counts as hanging."""
        if self._granting_later is not None:
            self._granting_later.cancel()
            self._granting_later = None
        if seconds is not None:
            self._granting_later = asyncio.get_running_loop().call_later(seconds, self._grant)

    def _look_in(self, seconds: float) -> None:
        """Look before the suspect begins: else it is charged with a death that came before."""
        if self._looking_later is not None:
            self._looking_later.cancel()
        self._looking_later = asyncio.get_running_loop().call_later(seconds, self._look_now)

    def _look_now(self) -> None:
        self._spawn(self._look_safely(), "look before a suspect")

    def _noise_seconds(self) -> float:
        """How long yet a death of Triton may be the work of what has come to serve last."""
        return self._served_at + _QUIET_SECONDS - asyncio.get_running_loop().time()

    def _begin(self, slot: Slot) -> None:
        """Its turn has come: load it, unless it is not wanted or may not begin beside what is there."""
        model = slot.model
        assert model is not None and slot.record is not None  # noqa: PT018
        if not self._wanted(model):
            log.info("load given up: the pod is ending", extra=fields(model=model.name, pod=model.ref))
            self._models.set(model, ModelState.STAGED)
            self._apply(slot, Event.DENIED)
        elif (known := self._quarantine_of(slot.record)) is not None:
            self._deny(slot, known.reason(self._lift_key), Failure.QUARANTINED)
        elif (why := self._misfit(slot, model)) is not None:
            self._deny(slot, why.reason, why.failure)
        else:
            self._models.set(model, ModelState.LOADING)
            self._apply(slot, Event.TURN)
            self._note_turn(slot)

    def _note_turn(self, slot: Slot) -> None:
        """Of namespaces that have a model here: another's place in the line is none yet."""
        here = {_namespace(one) for one in self._slots.values()}
        kept = {place: turn for place, turn in self._last_turns.items() if place[0] in here}
        self._last_turns = kept | {(_namespace(slot), gpu): self._stamp for gpu in slot.gpus}

    def _deny(self, slot: Slot, reason: str, failure: Failure) -> None:
        slot.failure = (reason, failure)
        if slot.model is not None:
            self._report_failed(slot.model, reason, failure)
        self._apply(slot, Event.DENIED)

    def _misfit(self, slot: Slot, model: Model) -> Misfit | None:
        assert slot.record is not None
        try:
            gpus = {gpu.uuid: gpu for gpu in self._room()}
        except GpusUnknown as error:
            return Misfit(f"the node's GPUs are unknown: {error}", Failure.TRANSIENT)
        asked = (slot.record.gpu.bytes, model.requested_bytes)
        needed = Load(slot.record.gpu.uuids, max(asked) if all(asked) else 0)
        if (why := misfit(needed, self._other_models(model), gpus)) is not None:
            return why
        try:
            self._hold_gate(slot, self._gate.claim)
        except CodeRefused as error:
            return Misfit(str(error), Failure.CAPACITY)
        return None

    def _hold_gate(self, slot: Slot, hold: Callable[..., None]) -> None:
        if slot.model is not None and slot.record is not None:
            code = slot.record.code if slot.admitted is None else slot.admitted.has_code
            hold(slot.model.ref.uid, slot.model.ref.namespace, has_code=code)

    def _other_models(self, model: Model) -> list[OtherModel]:
        """Who has memory, and who was placed here before and will take it."""
        table = list(self._models)
        places = {other.ref.uid: (not self._has_served(other), at) for at, other in enumerate(table)}
        mine = places.get(model.ref.uid, (True, len(table)))
        return [
            OtherModel(other.gpu.uuids, other.requested_bytes, other.measured_bytes)
            for other in table
            if other is not model
            and other.gpu is not None
            and (self._has_memory(other) or (_will_load(other) and places[other.ref.uid] < mine))
        ]

    def _slot_of(self, model: Model) -> Slot | None:
        slot = None if model.server_name is None else self._slots.get(model.server_name)
        return slot if slot is not None and slot.model is model else None

    def _has_memory(self, model: Model) -> bool:
        slot = self._slot_of(model)
        return model.resident or (slot is not None and slot.phase.may_be_held)

    def _has_served(self, model: Model) -> bool:
        slot = self._slot_of(model)
        return model.resident or (slot is not None and slot.record is not None and slot.record.served)

    def _waiting(self) -> list[QueuedLoad]:
        return [
            QueuedLoad(
                slot.name,
                slot.gpus,
                slot.order,
                namespace=_namespace(slot),
                last_turn=max(
                    (self._last_turns.get((_namespace(slot), gpu), 0) for gpu in slot.gpus), default=0
                ),
                is_known=slot.is_known,
                has_served=slot.record is not None and slot.record.served,
                is_suspect=self._is_suspect(slot),
            )
            for slot in self._slots.values()
            if slot.phase is Phase.QUEUED and slot.is_seen
        ]

    def _busy(self) -> list[ActiveOperation]:
        now = asyncio.get_running_loop().time()
        return [
            ActiveOperation(
                slot.gpus,
                slot.is_load,
                is_known=slot.is_known,
                is_suspect=self._is_suspect(slot),
                seconds=now - slot.under_way_since,
                is_wanted=slot.phase is not Phase.CANCELLED,
                is_given_up=slot.phase.hangs,
                namespace=_namespace(slot),
            )
            for slot in self._slots.values()
            if slot.is_busy or slot.phase.hangs
        ]

    def _is_suspect(self, slot: Slot) -> bool:
        record = slot.record
        return record is not None and self._ledger.is_suspect(record.digest, record.pod.namespace)

    # The journal.

    def _quarantine_of(self, record: Record) -> Quarantined | None:
        return self._ledger.quarantined(
            record.digest, self._last_version, self._now(), namespace=record.pod.namespace
        )

    async def mark(self, slot: Slot) -> None:
        """On disk when it returns. Raises OSError."""
        assert slot.record is not None
        assert slot.admitted is not None
        self._ledger.begin(
            slot.record.digest,
            backend=slot.admitted.backend,
            name=slot.name,
            now=self._now(),
            namespace=slot.record.pod.namespace,
            has_code=slot.admitted.has_code,
        )
        await self._save()

    def _clear(self, slot: Slot) -> None:
        if slot.record is not None and self._ledger.clear(slot.record.digest, slot.name):
            self._spawn(self._save_safely(), f"clear {slot.model_name}")

    async def _save(self) -> None:
        """Raises OSError."""
        async with self._writing:
            text = json.dumps(self._ledger.encode(self._now()))
            await in_thread(self._journal.write, text)

    async def _save_safely(self) -> None:
        try:
            await self._save()
        except OSError as error:
            log.warning("journal not written", extra=fields(error=error))

    # Triton's restart.

    async def restart_if_stuck(self) -> None:
        """Have Triton restarted where it cannot be rid of a model in another way. Raises OSError."""
        if not (stuck := self._stuck()) or self._away_since is not None:
            return
        since = await asyncio.to_thread(self._restart_file.seconds_since)
        loads = sum(slot.phase in (Phase.LOADING, Phase.CHANGING) for slot in self._slots.values())
        why = why_restart(stuck, self._others(), loads_under_way=loads, since_last_seconds=since)
        if why is None:
            return
        await in_thread(self._restart_file.ask, why)
        self._restarting_until = asyncio.get_running_loop().time() + LEAST_SECONDS_BETWEEN
        log.warning("triton is restarted", extra=fields(reason=why))
        for slot in self._slots.values():
            if slot.model is not None and slot.phase in (Phase.STUCK, Phase.SERVING):
                self._events.record(slot.model.ref, "Warning", "TritonRestarted", why)

    def _stuck(self) -> list[Stuck]:
        now = asyncio.get_running_loop().time()
        short = {
            gpu
            for model in self._models
            if model.failure is Failure.CAPACITY and model.is_wanted and model.gpu is not None
            for gpu in model.gpu.uuids
        }
        return [
            Stuck(
                slot.model_name, now - slot.since, is_needed=bool(slot.gpus & short) or self._is_awaited(slot)
            )
            for slot in self._slots.values()
            if slot.phase is Phase.STUCK
        ]

    def _is_awaited(self, slot: Slot) -> bool:
        """Its pod, that lives, wants to have it loaded anew."""
        return slot.model is not None and self._wanted(slot.model)

    def _others(self) -> list[Other]:
        return [
            Other(
                slot.model_name,
                slot.load_seconds,
                comes_back=slot.model is not None and slot.model.state is not ModelState.LOST,
            )
            for slot in self._slots.values()
            if slot.phase is Phase.SERVING
        ]

    # Helpers.

    async def _has_files(self, name: ServerName, model: Model) -> bool:
        async with self.lock(name):
            record = await asyncio.to_thread(self._repository.record, name)
        return record is not None and record.pod.uid == model.ref.uid

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


class _Progress:
    """Of one load: what the lifecycle does meanwhile, and what has moved since."""

    def __init__(self, lifecycle: Lifecycle, slot: Slot) -> None:
        self._lifecycle, self._slot = lifecycle, slot
        self._moves: Mapping[GpuUuid, int] = {}

    async def begin(self) -> None:
        await self._lifecycle.mark(self._slot)
        if self._slot.phase is not Phase.LOADING:
            raise LoadFailed("the pod is ending", Failure.TRANSIENT)
        self._moves = self._lifecycle.moves()

    def loaded(self) -> None:
        self._lifecycle.note_loaded(self._slot)

    def disturbed(self) -> set[GpuUuid]:
        return self._lifecycle.disturbed(self._slot, since=self._moves)


def _namespace(slot: Slot) -> str:
    return "" if slot.record is None else slot.record.pod.namespace


def _will_load(model: Model) -> bool:
    return model.is_wanted and model.state in (ModelState.PENDING, ModelState.STAGED, ModelState.LOADING)


def _suspicion(model: Model, suspects: int) -> str:
    if suspects == 1:
        return f"Triton has died, and of all models only {model.name} had requests in it"
    return f"Triton has died with requests of {suspects} models in it, {model.name} among them"


def _some(models: Sequence[Model]) -> str:
    named = ", ".join(f"{model.ref.namespace}/{model.name}" for model in models[:_SHOWN])
    return named if len(models) <= _SHOWN else f"{named} and {len(models) - _SHOWN} more"


def _failure_of(error: Exception) -> tuple[str, Failure]:
    match error:
        case LoadFailed():
            return str(error), error.failure
        case InvalidModel():
            return str(error), Failure.INVALID_MODEL
        case CodeRefused():
            return str(error), Failure.CAPACITY
        case TritonError():
            return f"not loaded: {error}", Failure.TRANSIENT
        case OSError():
            return f"repository: {error}", Failure.TRANSIENT
        case _:
            return f"the agent could not load it: {error!r}", Failure.TRANSIENT
