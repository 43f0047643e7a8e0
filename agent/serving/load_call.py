"""One load and one unload: the calls to Triton, and what the GPUs and the gateway add to them."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agent.admission import Admitted, CodeRefused, InvalidModel
from agent.gpus import GpuReading, GpusUnknown, cuda_ordinals, grown_instead
from agent.load_errors import classify, explain
from agent.repository import Record, Repository
from agent.serving.slot import Slot
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, PodUid
from berth.contract.report import Failure
from berth.runtime.logs import fields
from berth.triton.admin import TritonAdmin
from berth.triton.errors import TritonError, TritonRefused

log = logging.getLogger(__name__)


class LoadFailed(Exception):
    """The load is over without success; the message says why."""

    def __init__(self, reason: str, failure: Failure) -> None:
        super().__init__(reason)
        self.failure = failure


class GpuFacts(Protocol):
    """What a load needs of the agent's GPU facts."""

    instance_kind: str

    async def read_now(self) -> tuple[GpuReading, ...]:
        """A fresh reading. Raises GpusUnknown."""
        ...


class Gateway(Protocol):
    """What an unload needs of the gateway to Triton's models."""

    async def drain(self, uid: PodUid) -> None:
        """Send no new request of this pod to Triton until `resume`. Returns after a bounded time; then no request of
        it is left in Triton, as far as can be known."""
        ...

    def resume(self, uid: PodUid) -> None:
        """Send its requests again."""
        ...


class Progress(Protocol):
    """What the caller learns of a load while it goes on, and what else happens on the GPUs meanwhile."""

    async def begin(self) -> None:
        """Called when all that can be wrong before has been looked at. Raises what is to end the load."""
        ...

    def loaded(self) -> None:
        """Triton has loaded it."""
        ...

    def disturbed(self) -> set[GpuUuid]:
        """GPUs on which another model has come or gone since it began, or may have."""
        ...


class LoadCall:
    """Asks Triton for one load per call; knows nothing of the queue or of waiting callers."""

    def __init__(
        self, triton: TritonAdmin, gpus: GpuFacts, repository: Repository, *, timeout_seconds: float
    ) -> None:
        self._triton, self._gpus, self._repository = triton, gpus, repository
        self._timeout = timeout_seconds

    async def run(self, slot: Slot, progress: Progress) -> None:
        """Load, and note in its record what it has taken. Raises as `load`."""
        assert slot.record is not None
        assert slot.admitted is not None
        measured = await self.load(slot.record, slot.admitted, progress)
        if slot.model is not None:
            slot.model.measured_bytes = measured
        await note_served(self._repository, slot, measured)

    async def load(self, record: Record, admitted: Admitted, progress: Progress) -> int | None:
        """Load; what it has taken, None where that is not known.

        Raises LoadFailed, OSError or TritonError; TritonLate where Triton goes on with it.
        """
        before = await self._readings()
        ordinals = _ordinals_of(record.gpu, before)
        config = admitted.for_gpus(ordinals, kind=self._gpus.instance_kind, server_name=record.server_name)
        await progress.begin()
        await self._ask(record, config)
        progress.loaded()
        after = await self._readings_if_known()
        disturbed = progress.disturbed()
        _check_grown(record.gpu, before, after, {gpu.uuid for gpu in after} - disturbed)
        if record.measured_bytes is not None or disturbed.intersection(record.gpu.uuids):
            return record.measured_bytes
        return _taken(record.gpu, before, after)

    async def _ask(self, record: Record, config: Mapping[str, Any]) -> None:
        try:
            await self._triton.load(record.server_name, config, timeout_seconds=self._timeout)
        except TritonRefused as error:
            said = str(error).replace(record.server_name, record.name)
            failure = classify(said)
            if record.served and failure is Failure.INVALID_MODEL:
                failure = Failure.TRANSIENT  # the same files have served here
            raise LoadFailed(explain(said), failure) from error

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


class UnloadCall:
    """Drains a model at the gateway before Triton unloads it."""

    def __init__(self, triton: TritonAdmin, gateway: Gateway, *, timeout_seconds: float) -> None:
        self._triton, self._gateway, self._timeout = triton, gateway, timeout_seconds

    async def drain(self, slot: Slot) -> None:
        if slot.model is not None:
            await self._gateway.drain(slot.model.ref.uid)

    async def unload(self, slot: Slot) -> None:
        """Raises TritonError; TritonLate where Triton goes on with it."""
        await self._triton.unload(slot.name, timeout_seconds=self._timeout)

    def resume(self, slot: Slot) -> None:
        """Triton holds nothing of it any more: newly staged files may be used."""
        if slot.model is not None:
            self._gateway.resume(slot.model.ref.uid)


async def note_served(repository: Repository, slot: Slot, measured_bytes: int | None) -> None:
    """Keep for later loads that these files have served here, and what they took."""
    try:
        await asyncio.to_thread(repository.learn, slot.name, measured_bytes=measured_bytes, served=True)
    except OSError as error:  # it serves all the same; the agent will not know that after its restart
        log.warning("not noted that a model serves", extra=fields(model=slot.model_name, error=error))
        return
    slot.record = await asyncio.to_thread(repository.record, slot.name) or slot.record


def failure_of(error: Exception) -> tuple[str, Failure]:
    """The reason of a failed load, for people, and its class."""
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
    choice: GpuChoice, before: Sequence[GpuReading], after: Sequence[GpuReading], quiet: set[GpuUuid]
) -> None:
    """Raises LoadFailed if the model has gone to another GPU, as far as that can be determined."""
    other = grown_instead(
        _used(before),
        _used(after),
        chosen=choice.uuids,
        others=quiet - set(choice.uuids),
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
