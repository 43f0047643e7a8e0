"""The node's GPU facts as the report needs them: the last reading, and the use by other processes in it."""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from agent.gpus import GpuReading, Gpus, GpusHang, GpusUnknown, gpus_failure
from agent.models import Models
from berth.contract.ids import GpuUuid
from berth.contract.report import GpuReport
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

# The use by other processes changes by small amounts all the time; the report follows in steps, upwards at once.
HYSTERESIS_BYTES = 16 * 1024**2


class GpuFacts:
    """Readings of one port. After a failure the GPUs that are known stay listed, as unknown."""

    def __init__(
        self, port: Gpus, residency: Callable[[], int], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._port, self._clock = port, clock
        self.instance_kind = port.instance_kind
        self.readings: tuple[GpuReading, ...] = ()
        # `Models.residency` when the readings were begun.
        self.residency = -1
        self._residency_now = residency
        self._failure = ""
        self._whole: frozenset[GpuUuid] = frozenset()
        self._hanging_since: float | None = None

    async def read_now(self) -> tuple[GpuReading, ...]:
        """A fresh reading. Raises GpusUnknown."""
        begun = self._residency_now()
        try:
            self.readings = await self._port.read()
            self.residency = begun
        except GpusUnknown as error:
            self._note(str(error), hangs=isinstance(error, GpusHang))
            raise
        self._note("")
        return self.readings

    def listed(self) -> tuple[GpuReading, ...]:
        """The GPUs that are known to be here. Raises GpusUnknown while none has ever been seen."""
        if self._failure and not self.readings:
            raise GpusUnknown(self._failure)
        return self.readings

    def have_changed(self) -> bool:
        """Since the last call some GPU has broken or is whole again, is gone or is back."""
        before, self._whole = self._whole, frozenset(gpu.uuid for gpu in self.readings if not gpu.broken)
        return before != self._whole

    @property
    def hanging_seconds(self) -> float:
        """For how long every reading has been waiting for the same call."""
        return 0.0 if self._hanging_since is None else self._clock() - self._hanging_since

    async def refresh(self) -> None:
        """A fresh reading, or all facts unknown."""
        try:
            await self.read_now()
        except GpusUnknown as error:
            self.readings = tuple(_unknown(reading, str(error)) for reading in self.readings)

    def _note(self, failure: str, *, hangs: bool = False) -> None:
        """Say it once, when it changes."""
        if not hangs:
            self._hanging_since = None
        elif self._hanging_since is None:
            self._hanging_since = self._clock()
        if failure != self._failure:
            log.log(
                logging.WARNING if failure else logging.INFO,
                "gpu facts " + ("unknown" if failure else "known again"),
                extra=fields(reason=failure) if failure else None,
            )
        self._failure = failure


class OtherUse:
    """What NVML counts as used and no model of ours accounts for, per GPU.

    While a model comes or goes on a GPU its use says nothing, so the last figure stays; otherwise a
    half-loaded model would be counted twice, as other use and as requested, and one that has just left
    would count as other use.
    """

    def __init__(self) -> None:
        self._last: dict[GpuUuid, int] = {}

    def of(self, reading: GpuReading, *, taken_bytes: int, settled: bool) -> int | None:
        if reading.used_bytes is None:
            return None
        last = self._last.get(reading.uuid)
        if not settled and last is not None:
            return last
        actual = max(0, reading.used_bytes - taken_bytes)
        if last is None or not actual <= last <= actual + HYSTERESIS_BYTES:
            self._last[reading.uuid] = actual
        return self._last[reading.uuid]


def gpu_reports(
    facts: GpuFacts,
    models: Models,
    other_use: OtherUse,
    *,
    busy: Collection[GpuUuid],
    headroom_bytes: int,
) -> tuple[GpuReport, ...]:
    """The report's GPUs, by index, and after them those that are gone while Triton holds models on them."""
    listed = tuple(
        GpuReport(
            uuid=reading.uuid,
            index=reading.index,
            product=reading.product,
            total_bytes=reading.total_bytes,
            other_use_bytes=other_use.of(
                reading,
                taken_bytes=models.taken_on(reading.uuid),
                settled=reading.uuid not in busy and facts.residency == models.residency,
            ),
            headroom_bytes=headroom_bytes,
            healthy=reading.healthy,
            reason=reading.reason,
            broken=reading.broken,
        )
        for reading in facts.readings
    )
    return (*listed, *_gone(facts, models))


def _gone(facts: GpuFacts, models: Models) -> Iterator[GpuReport]:
    try:
        here = facts.listed()
    except GpusUnknown:
        return
    in_use = {gpu.uuid: gpu for model in models if model.resident and model.gpu for gpu in model.gpu.gpus}
    for uuid, gpu in sorted(in_use.items()):
        if uuid not in {one.uuid for one in here} and (failure := gpus_failure([uuid], here)):
            yield GpuReport(
                uuid=uuid, index=gpu.index, headroom_bytes=0, healthy=False, reason=failure, broken=True
            )


def _unknown(reading: GpuReading, reason: str) -> GpuReading:
    """What is broken stays so, whether it can be read or not."""
    reason = reading.reason if reading.broken else reason
    return replace(reading, total_bytes=None, used_bytes=None, utilization=None, healthy=False, reason=reason)
