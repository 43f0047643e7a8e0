"""All slots of the node, with what they hold of its GPUs and of its code rule. No I/O; runs on the event loop alone."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.admission import CodeGate
from agent.models import Model, Models
from agent.serving.fit import OtherModel
from agent.serving.model_fsm import Do, Event, Phase, next_of
from agent.serving.slot import Slot
from berth.contract.ids import GpuUuid, PodUid, ServerName
from berth.contract.report import ModelState
from berth.triton.admin import GONE, IndexEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long what may last, in seconds."""

    load_timeout: float
    unload_timeout: float
    # Between two looks at Triton's index while a model waits for one; the pause grows tenfold.
    poll: float = 0.05
    # Without an answer of Triton a load is failed: longer than a kubelet's longest pause between two starts of a
    # container (5 min).
    triton_wait: float = 360.0
    # A model that crashes Triton does so while it is loaded or, if not, in the moments after.
    quiet: float = 4.0


def loop_seconds() -> float:
    return asyncio.get_running_loop().time()


class Slots:
    """`apply` is the only writer of a slot's phase."""

    def __init__(self, models: Models, gate: CodeGate, times: Times) -> None:
        self.models, self.gate, self.times = models, gate, times
        self._slots: dict[ServerName, Slot] = {}
        self._locks: defaultdict[ServerName, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Counts changes: what was read of Triton before the last one says nothing of its slot.
        self.stamp = 0
        # How often a model has come to or gone from a GPU.
        self._moves: defaultdict[GpuUuid, int] = defaultdict(int)

    def __iter__(self) -> Iterator[Slot]:
        """A copy: phases may change meanwhile."""
        return iter(list(self._slots.values()))

    def get(self, name: ServerName) -> Slot | None:
        return self._slots.get(name)

    def of(self, name: ServerName) -> Slot:
        return self._slots.setdefault(name, Slot(name, since=loop_seconds()))

    def drop(self, name: ServerName) -> None:
        self._slots.pop(name, None)

    def lock(self, name: ServerName) -> asyncio.Lock:
        """The lock of whoever writes the files of the model that has this name in Triton."""
        return self._locks[name]

    # Changes.

    def apply(self, slot: Slot, event: Event) -> tuple[Do, ...]:
        """Take one event. Returns what has to be done."""
        before = slot.phase
        slot.phase, todo = next_of(before, event)
        if slot.phase is not before:
            slot.since = loop_seconds()
            if not before.is_under_way:
                slot.under_way_since = slot.since
            self.touch(slot)
            if before.may_be_held != slot.phase.may_be_held or Do.NOTE_SERVED in todo:
                for gpu in slot.gpus:
                    self._moves[gpu] += 1
        return todo

    def touch(self, slot: Slot) -> None:
        """What Triton's index said before now of this model says nothing any more."""
        self.stamp += 1
        slot.stamp = self.stamp

    def abandon(self) -> None:
        """They are not followed any more."""
        for slot in self:
            slot.phase = Phase.UNLOADED

    def requeue(self, slot: Slot, *, is_seen: bool) -> None:
        """It comes last in the queue. `is_seen`: Triton's index has been read for it already."""
        slot.is_seen, slot.order = is_seen, self.stamp

    def hold(self, slot: Slot) -> None:
        """Count its model among those that Triton holds, with its memory and its code."""
        if slot.model is None:
            return
        self.models.set_resident(slot.model, True)
        if slot.record is not None:
            ref = slot.model.ref
            self.gate.hold(ref.uid, ref.namespace, has_code=slot.has_code)

    def claim_code(self, slot: Slot) -> None:
        """Raises CodeRefused where its model may not be beside those that Triton holds."""
        if slot.model is not None and slot.record is not None:
            ref = slot.model.ref
            self.gate.claim(ref.uid, ref.namespace, has_code=slot.has_code)

    def release(self, model: Model) -> None:
        """Triton does not hold the model any more."""
        self.models.set_resident(model, False)
        self.gate.release(model.ref.uid)

    def note_index(self, index: Mapping[ServerName, IndexEntry], begun: int) -> None:
        """Take from Triton's index what no slot has: models that this agent has not loaded, and those without a
        record, which cannot be counted with a namespace. `begun`: the stamp when the index was requested."""
        for model in self.models:
            name = model.server_name
            if name is None:
                continue
            slot = self.slot_of(model)
            if slot is None or (slot.phase is Phase.UNLOADED and slot.stamp <= begun):
                self.models.set_resident(model, not index.get(name, GONE).is_gone)
                if not model.resident:
                    self.gate.release(model.ref.uid)
        counted = {model.server_name for model in self.models if self.gate.counts(model.ref.uid)}
        self.gate.note_unowned(
            loaded=not {name for name, entry in index.items() if not entry.is_gone} <= counted
        )

    # Facts.

    def is_wanted(self, model: Model) -> bool:
        """Its pod goes on living here."""
        return self.models.get(model.ref.uid) is model and model.is_wanted

    def is_loading(self, uid: PodUid) -> bool:
        return any(
            slot.phase.is_load and slot.model is not None and slot.model.ref.uid == uid for slot in self
        )

    def busy_gpus(self) -> set[GpuUuid]:
        """GPUs whose use is changing because a model is loaded or unloaded."""
        return {gpu for slot in self for gpu in slot.gpus if slot.is_busy}

    def moves(self) -> Mapping[GpuUuid, int]:
        """How often a model has come to or gone from each GPU."""
        return dict(self._moves)

    def disturbed(self, slot: Slot, *, since: Mapping[GpuUuid, int]) -> set[GpuUuid]:
        """GPUs whose use has changed by other slots than this, or may have. `since`: an earlier `moves()`."""
        moved = {gpu for gpu, count in self._moves.items() if count != since.get(gpu, 0)}
        return moved | {
            gpu
            for other in self
            if other is not slot and (other.is_busy or other.phase.hangs)
            for gpu in other.gpus
        }

    def overdue(self, now: float) -> list[Slot]:
        """Those that have waited for Triton's index for longer than they may."""

        def patience(slot: Slot) -> float:
            return self.times.load_timeout if slot.phase is Phase.CHANGING else self.times.unload_timeout

        waiting = [slot for slot in self if slot.phase.awaits_sight and slot.phase is not Phase.QUEUED]
        return [slot for slot in waiting if now - slot.since > patience(slot)]

    def slot_of(self, model: Model) -> Slot | None:
        slot = None if model.server_name is None else self._slots.get(model.server_name)
        return slot if slot is not None and slot.model is model else None

    def others(self, model: Model) -> list[OtherModel]:
        """The models that have memory, and those that were placed here before this one and will take it."""
        table = list(self.models)
        places = {other.ref.uid: (not self._has_served(other), at) for at, other in enumerate(table)}
        mine = places.get(model.ref.uid, (True, len(table)))
        return [
            OtherModel(other.gpu.uuids, other.requested_bytes, other.measured_bytes)
            for other in table
            if other is not model
            and other.gpu is not None
            and (self._has_memory(other) or (_will_load(other) and places[other.ref.uid] < mine))
        ]

    def _has_memory(self, model: Model) -> bool:
        slot = self.slot_of(model)
        return model.resident or (slot is not None and slot.phase.may_be_held)

    def _has_served(self, model: Model) -> bool:
        slot = self.slot_of(model)
        return model.resident or (slot is not None and slot.has_served)


def _will_load(model: Model) -> bool:
    return model.is_wanted and model.state in (ModelState.PENDING, ModelState.STAGED, ModelState.LOADING)
