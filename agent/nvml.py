"""GPU facts from NVML. The only file that imports pynvml.

NVML blocks, and hangs when a driver does: every reading runs in one worker thread and is waited for
with a bound. While a call hangs, no other is begun; the facts are unknown. Where NVML gives nothing at
all it is opened anew for the next reading: a driver may come late, and may be loaded again.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pynvml

from agent.gpus import GpuReading, GpusHang, GpusUnknown
from berth.contract.ids import GpuUuid
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

READ_TIMEOUT_SECONDS = 5.0
_MIG_REASON = "MIGEnabled: CUDA shows one process one MIG instance at most, so models cannot share it"


class NvmlMissing(Exception):
    """The NVML library or its driver is not on this machine."""


class NvmlGpus:
    """The real GPUs, as soon as their driver is there."""

    instance_kind = "KIND_GPU"

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nvml")
        self._running: asyncio.Future[tuple[GpuReading, ...]] | None = None
        # What a GPU was when it last answered: a lost GPU stays in the report under its own name.
        self._known: dict[int, tuple[GpuUuid, str]] = {}
        self._is_open = False

    @classmethod
    def open(cls) -> "NvmlGpus":
        """With a driver that is there now. Raises NvmlMissing."""
        gpus = cls()
        try:
            gpus._require_open()
        except pynvml.NVMLError as error:
            raise NvmlMissing(f"NVML: {error}") from error
        return gpus

    async def read(self) -> tuple[GpuReading, ...]:
        try:
            async with asyncio.timeout(READ_TIMEOUT_SECONDS):
                return await asyncio.shield(await self._begun())
        except TimeoutError:
            raise GpusHang(f"NVML has not answered for {READ_TIMEOUT_SECONDS:g} s") from None
        except pynvml.NVMLError as error:
            raise GpusUnknown(f"NVML: {error}") from error

    async def _begun(self) -> "asyncio.Future[tuple[GpuReading, ...]]":
        """A reading that is begun from now on, for all who ask meanwhile. One that is under way may have
        passed the GPU whose use has changed since."""
        older = self._running
        if older is not None and not older.done():
            await asyncio.wait({older})
        if self._running is None or self._running is older:
            self._running = asyncio.get_running_loop().run_in_executor(self._worker, self._read_all)
        return self._running

    def _read_all(self) -> tuple[GpuReading, ...]:
        self._require_open()
        try:
            readings = tuple(self._read_one(index) for index in range(pynvml.nvmlDeviceGetCount()))
        except pynvml.NVMLError:
            self._close()
            raise
        if all(reading.total_bytes is None for reading in readings):
            self._close()
        return readings

    def _require_open(self) -> None:
        if not self._is_open:
            pynvml.nvmlInit()
            self._is_open = True

    def _close(self) -> None:
        self._is_open = False
        with suppress(pynvml.NVMLError):  # of a driver that is gone
            pynvml.nvmlShutdown()

    def _read_one(self, index: int) -> GpuReading:
        """One GPU; its error is its own and hides no other GPU."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._known[index] = (GpuUuid(pynvml.nvmlDeviceGetUUID(handle)), pynvml.nvmlDeviceGetName(handle))
            return self._healthy(index, handle)
        except pynvml.NVMLError as error:
            log.debug("gpu not readable", extra=fields(index=index, error=error))
            uuid, product = self._known.get(index, (GpuUuid(f"unknown-{index}"), ""))
            trouble = f"NVML: {error}"
            return GpuReading(
                uuid, index, product, None, None, None, healthy=False, reason=trouble, in_cuda=False
            )

    def _healthy(self, index: int, handle: Any) -> GpuReading:
        uuid, product = self._known[index]
        # Version 1 counts what the driver reserves as used, which is what no model can have.
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        mig = _optional(pynvml.nvmlDeviceGetMigMode, handle)
        rates = _optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
        split = mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        return GpuReading(
            uuid,
            index,
            product,
            total_bytes=int(memory.total),
            used_bytes=int(memory.used),
            utilization=None if rates is None else rates.gpu / 100,
            healthy=not split,
            reason=_MIG_REASON if split else "",
            bus_id=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
            in_cuda=not split,
        )


def _optional(call: Any, handle: Any) -> Any:
    """A fact that not every GPU has."""
    try:
        return call(handle)
    except pynvml.NVMLError_NotSupported:
        return None


def _text(value: str | bytes) -> str:
    """A string field of one of NVML's structures."""
    return value if isinstance(value, str) else value.decode()
