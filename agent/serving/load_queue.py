"""Which of the models that wait may be loaded now. `next_load` decides and is pure; `LoadQueue` reads the slots.

A load that is measured has its GPUs for itself; those whose bytes are known go side by side. Models that
have served come first. Namespaces take turns on a GPU, so that a namespace with many long loads has one place in
the line. A suspect is loaded when nothing else is and nothing has come to serve just before, so that a crash of Triton has one culprit; models behind it wait for it, so that its turn does come. What
hangs is not waited for: an operation that takes longer than its turn, or that no pod wants any more. It keeps a
thread of Triton's, of which a namespace has a share.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from agent.admission import CodeRefused
from agent.gpus import GpusUnknown
from agent.serving.crash_recorder import CrashRecorder
from agent.serving.fit import Load, Misfit, misfit
from agent.serving.model_fsm import Phase
from agent.serving.slot import Slot
from agent.serving.slots import Slots
from berth.contract.ids import GpuUuid, ServerName
from berth.contract.report import Failure, GpuReport

# Of known size, on one GPU. Triton has threads for more (--model-load-thread-count).
MOST_ON_A_GPU = 4
# What others wait for a load or an unload at the most: a tenth of the time for which a cold start's request is kept.
TURN_SECONDS = 30.0
# And for a suspect, for which the whole node waits: a death of Triton has one culprit only while it is alone.
SUSPECT_TURN_SECONDS = 120.0
# Of Triton's threads for loads (32) so many may be with what hangs, of all namespaces together.
MOST_HANGING = 16
ON_ITS_GPU = "waits until another model has been loaded on its GPU, or taken from it"
BEHIND_SUSPECTS = "waits while models that were being loaded when Triton died are tried one at a time"
TOO_MANY_HANG = (
    "waits for one of its namespace's models that Triton has been loading, or unloading, for too long"
)
SUSPECT = "was being loaded when Triton died: it is loaded alone, a while after all others"


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """`order`: the order of arrival. `last_turn`: when its namespace's last load on one of its GPUs began, in any
    unit; 0: never. `is_known`: its bytes were measured before."""

    name: ServerName
    gpus: frozenset[GpuUuid]
    order: int
    namespace: str = ""
    last_turn: int = 0
    is_known: bool = False
    has_served: bool = False
    is_suspect: bool = False

    @property
    def rank(self) -> tuple[bool, int, int]:
        return (self.is_suspect or not self.has_served, self.last_turn, self.order)


@dataclass(frozen=True, slots=True)
class ActiveOperation:
    """A load or an unload that is under way for `seconds`. `is_wanted`: a caller waits for its end;
    `is_given_up`: it has been reported as failed."""

    gpus: frozenset[GpuUuid]
    is_load: bool
    is_known: bool = False
    is_suspect: bool = False
    seconds: float = 0.0
    is_wanted: bool = True
    is_given_up: bool = False
    namespace: str = ""

    @property
    def patience_seconds(self) -> float:
        """How long yet others wait for it; 0: it hangs."""
        is_trial = self.is_load and self.is_suspect
        if self.is_given_up or not (self.is_wanted or is_trial):
            return 0.0
        return max(0.0, (SUSPECT_TURN_SECONDS if is_trial else TURN_SECONDS) - self.seconds)


@dataclass(frozen=True, slots=True)
class Decision:
    """The next to begin, if any may, and why the others wait. `again_seconds`: when to ask again though nothing
    happens; None: never. `look_seconds`: when Triton's index must be read before a suspect begins; None: it need not."""

    next: ServerName | None
    waits: dict[ServerName, str]
    again_seconds: float | None = None
    look_seconds: float | None = None


def next_load(
    waiting: Iterable[QueuedLoad], busy: Sequence[ActiveOperation], *, is_quiet: bool = True
) -> Decision:
    """Called again once the next has begun. `is_quiet`: no model has come to serve just before, which might
    kill Triton by what it does then."""
    first: ServerName | None = None
    waits: dict[ServerName, str] = {}
    taken: set[GpuUuid] = set()
    behind_suspect = False
    moving = [one for one in busy if one.patience_seconds > 0]
    hanging = Counter(one.namespace for one in busy if not one.patience_seconds)
    for one in sorted(waiting, key=lambda one: one.rank):
        if hanging[one.namespace] and not _has_share(one.namespace, hanging):
            waits[one.name] = TOO_MANY_HANG
            continue  # nor does another model wait for it
        why = BEHIND_SUSPECTS if behind_suspect else _why_not(one, moving, taken, is_quiet=is_quiet)
        if not why and first is None:
            first = one.name
        else:
            waits[one.name] = why or ON_ITS_GPU
        # A model that waits keeps its place before those behind it.
        taken |= one.gpus
        behind_suspect |= one.is_suspect
    again = min((one.patience_seconds for one in moving), default=None) if waits else None
    return Decision(first, waits, again)


def _has_share(namespace: str, hanging: Counter[str]) -> bool:
    """One more only while it has fewer than are free: half where it is alone, the next half of the rest."""
    return hanging[namespace] < MOST_HANGING - hanging.total()


def _why_not(one: QueuedLoad, busy: Sequence[ActiveOperation], taken: set[GpuUuid], *, is_quiet: bool) -> str:
    loads = [other for other in busy if other.is_load]
    if any(other.is_suspect for other in loads):
        return BEHIND_SUSPECTS
    if one.is_suspect:
        return SUSPECT if loads or taken or not is_quiet else ""
    if taken & one.gpus:
        return ON_ITS_GPU
    here = [other for other in busy if other.gpus & one.gpus]
    if not one.is_known:
        return ON_ITS_GPU if here else ""
    if any(other.is_load and not other.is_known for other in here):
        return ON_ITS_GPU
    crowded = any(sum(gpu in other.gpus for other in loads) >= MOST_ON_A_GPU for gpu in one.gpus)
    return ON_ITS_GPU if crowded else ""


class LoadQueue:
    """The queue of a node. `gpu_reports`: the GPUs as they are now; raises GpusUnknown."""

    def __init__(
        self, slots: Slots, crashes: CrashRecorder, gpu_reports: Callable[[], Iterable[GpuReport]]
    ) -> None:
        self._slots, self._crashes, self._gpu_reports = slots, crashes, gpu_reports
        # When a model has come to serve last.
        self._served_at = float("-inf")
        # When the last load of each namespace on each GPU began, by the count of changes.
        self._last_turns: dict[tuple[str, GpuUuid], int] = {}

    def next(self, now: float) -> Decision:
        waiting = [self._queued(slot) for slot in self._slots if slot.phase is Phase.QUEUED and slot.is_seen]
        active = [self._active(slot, now) for slot in self._slots if slot.is_busy or slot.phase.hangs]
        # How long yet a crash of Triton may be the work of what has come to serve last.
        noise_seconds = self._served_at + self._slots.times.quiet - now
        decision = next_load(waiting, active, is_quiet=noise_seconds <= 0)
        # Without that look the suspect is charged with a crash that came before it.
        if decision.next is None and noise_seconds > 0 and any(one.is_suspect for one in waiting):
            return replace(decision, look_seconds=noise_seconds)
        return decision

    def refusal(self, slot: Slot) -> Misfit | None:
        """Why the next may not begin; None: it may, and its code is claimed."""
        model, record = slot.model, slot.record
        assert model is not None
        assert record is not None
        if (why := self._crashes.quarantine_of(record)) is not None:
            return Misfit(why, Failure.QUARANTINED)
        try:
            gpus = {gpu.uuid: gpu for gpu in self._gpu_reports()}
        except GpusUnknown as error:
            return Misfit(f"the node's GPUs are unknown: {error}", Failure.TRANSIENT)
        requested = (record.gpu.bytes, model.requested_bytes)
        needed = Load(record.gpu.uuids, max(requested) if all(requested) else 0)
        if (no := misfit(needed, self._slots.others(model), gpus)) is not None:
            return no
        try:
            self._slots.claim_code(slot)
        except CodeRefused as error:
            return Misfit(str(error), Failure.CAPACITY)
        return None

    def note_begun(self, slot: Slot) -> None:
        """Namespaces without a model here keep no turn: a newcomer has had none."""
        here = {one.namespace for one in self._slots}
        kept = {place: turn for place, turn in self._last_turns.items() if place[0] in here}
        self._last_turns = kept | {(slot.namespace, gpu): self._slots.stamp for gpu in slot.gpus}

    def note_served(self, now: float) -> None:
        self._served_at = now

    def _queued(self, slot: Slot) -> QueuedLoad:
        turns = (self._last_turns.get((slot.namespace, gpu), 0) for gpu in slot.gpus)
        return QueuedLoad(
            slot.name,
            slot.gpus,
            slot.order,
            namespace=slot.namespace,
            last_turn=max(turns, default=0),
            is_known=slot.is_known,
            has_served=slot.has_served,
            is_suspect=self._crashes.is_suspect(slot.record),
        )

    def _active(self, slot: Slot, now: float) -> ActiveOperation:
        return ActiveOperation(
            slot.gpus,
            slot.is_load,
            is_known=slot.is_known,
            is_suspect=self._crashes.is_suspect(slot.record),
            seconds=now - slot.under_way_since,
            is_wanted=slot.phase is not Phase.CANCELLED,
            is_given_up=slot.phase.hangs,
            namespace=slot.namespace,
        )
