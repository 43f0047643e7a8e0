"""GPU facts from NVML. The only file that imports pynvml.

NVML blocks, and hangs when a driver does: every reading runs in one worker thread and is waited for
with a bound. While a call hangs, no other is begun; the facts are unknown.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pynvml

from agent.gpus import GpuReading, GpusUnknown
from berth.contract.ids import GpuUuid
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

READ_TIMEOUT_SECONDS = 5.0
_MIG_REASON = "MIGEnabled: CUDA shows one process one MIG instance at most, so models cannot share it"


class NvmlMissing(Exception):
    """The NVML library or its driver is not on this machine."""


class NvmlGpus:
    """The real GPUs. `open()` raises NvmlMissing."""

    instance_kind = "KIND_GPU"

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nvml")
        self._running: asyncio.Future[tuple[GpuReading, ...]] | None = None
        # What a GPU was when it last answered: a lost GPU stays in the report under its own name.
        self._known: dict[int, tuple[GpuUuid, str]] = {}

    @classmethod
    def open(cls) -> "NvmlGpus":
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlMissing(f"NVML: {error}") from error
        return cls()

    async def read(self) -> tuple[GpuReading, ...]:
        if self._running is None or self._running.done():
            loop = asyncio.get_running_loop()
            self._running = loop.run_in_executor(self._worker, self._read_all)
        try:
            async with asyncio.timeout(READ_TIMEOUT_SECONDS):
                return await asyncio.shield(self._running)
        except TimeoutError:
            raise GpusUnknown(f"NVML has not answered for {READ_TIMEOUT_SECONDS:g} s") from None
        except pynvml.NVMLError as error:
            raise GpusUnknown(f"NVML: {error}") from error

    def _read_all(self) -> tuple[GpuReading, ...]:
        return tuple(self._read_one(index) for index in range(pynvml.nvmlDeviceGetCount()))

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
