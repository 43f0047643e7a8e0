"""A model's name in Triton, and the callers that wait for its load or unload. No I/O; runs on the event loop alone."""

import asyncio
from dataclasses import dataclass, field

from agent.admission import Admitted
from agent.models import Model
from agent.repository import Record
from agent.serving.model_fsm import Phase
from berth.contract.gateway import public_name_of
from berth.contract.ids import GpuUuid, ModelName, ServerName
from berth.contract.report import Failure


@dataclass(slots=True, eq=False)
class Slot:
    """`record`, `admitted`: the files of the last load that was requested. `model`: None for a model without an owner."""

    name: ServerName
    since: float
    phase: Phase = Phase.UNLOADED
    # When Triton has begun to work on it, through whatever phases.
    under_way_since: float = 0.0
    model: Model | None = None
    record: Record | None = None
    admitted: Admitted | None = None
    # Counts changes of all slots: an answer of Triton's that is older than the last one says nothing.
    stamp: int = 0
    # Its order in the queue, and whether Triton's index has been read since.
    order: int = 0
    is_seen: bool = False
    # Its last state in Triton's index.
    seen: str = ""
    # Why the load fails, once that is known.
    failure: tuple[str, Failure] | None = None
    load_seconds: float | None = None
    # It is being drained and unloaded.
    is_leaving: bool = False
    # Set where no load of it is waited for.
    rested: asyncio.Event = field(default_factory=asyncio.Event)
    # Of the caller that waits until Triton does not hold it.
    out: "asyncio.Future[None] | None" = None

    @property
    def model_name(self) -> ModelName:
        """For people."""
        return public_name_of(self.name)

    @property
    def namespace(self) -> str:
        return "" if self.record is None else self.record.pod.namespace

    @property
    def gpus(self) -> frozenset[GpuUuid]:
        if self.record is not None:
            return frozenset(self.record.gpu.uuids)
        return (
            frozenset() if self.model is None or self.model.gpu is None else frozenset(self.model.gpu.uuids)
        )

    @property
    def is_known(self) -> bool:
        """Its bytes were measured by an earlier load of these files."""
        return self.record is not None and self.record.measured_bytes is not None

    @property
    def has_served(self) -> bool:
        """These files have served here."""
        return self.record is not None and self.record.served

    @property
    def has_code(self) -> bool:
        """By its last admission, or by its record where it was not admitted yet."""
        if self.admitted is not None:
            return self.admitted.has_code
        return self.record is None or self.record.code

    @property
    def is_unload_awaited(self) -> bool:
        return self.out is not None and not self.out.done()

    @property
    def is_busy(self) -> bool:
        """What it takes on its GPUs is changing, or may be, and not for ever."""
        if self.phase in (Phase.UNLOAD_PENDING, Phase.UNLOADING):
            return self.is_unload_awaited
        return self.phase in (Phase.LOADING, Phase.CANCELLED, Phase.CHANGING, Phase.FAILING)

    @property
    def is_load(self) -> bool:
        return self.phase in (Phase.LOADING, Phase.CANCELLED, Phase.CHANGING)

    def needs_look(self, *, is_away: bool) -> bool:
        """Whether it goes on by what Triton's index will say. `is_away`: Triton does not answer now."""
        if self.phase is Phase.QUEUED:
            return not self.is_seen or is_away
        if self.phase in (Phase.UNLOAD_PENDING, Phase.UNLOADING):
            return self.is_unload_awaited
        return self.phase.awaits_sight

    def end_unload(self, error: Exception | None = None) -> None:
        """Wake the caller that waits for its unload; with `error`, it has failed."""
        if self.out is None or self.out.done():
            return
        if error is None:
            self.out.set_result(None)
        else:
            self.out.set_exception(error)
