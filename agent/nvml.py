"""GPU facts from NVML. The only file that imports pynvml.

NVML blocks, and hangs when a driver does: every reading runs in one worker thread and is waited for
with a bound. While a call hangs, no other is begun; the facts are unknown. Where NVML gives nothing at
all it is opened again for the next reading: a driver may come late, and may be loaded again.

The driver's error reports (XIDs) are sent only to a thread that waits for them (`_Xids`). What
they said is forgotten when the driver was loaded again, when a GPU that was lost answers again, and when its
count of memory errors restarts: each is a reset. So does an agent that is restarted, as a reset needs
it to be stopped; all else that makes a GPU unhealthy the GPU itself remembers.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_void_p, cast
from typing import Any

import pynvml

from agent.gpu_health import CRITICAL_XIDS, Health
from agent.gpus import GpuReading, GpusHang, GpusUnknown, nameless
from berth.contract.ids import GpuUuid
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

READ_TIMEOUT_SECONDS = 5.0
# For how long a thread waits for an XID at a time, and how long its end is waited for.
_XID_WAIT_MS = 250
_XID_END_SECONDS = 0.5
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
        # The first critical XID of each GPU since its reset. Written by two threads, one key at a time.
        self._xid: dict[GpuUuid, int] = {}
        self._ecc: dict[GpuUuid, int] = {}
        self._lost: set[GpuUuid] = set()
        self._listener: _Xids | None = None

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
        handles: dict[GpuUuid, Any] = {}
        try:
            readings = tuple(self._read_one(index, handles) for index in range(pynvml.nvmlDeviceGetCount()))
        except pynvml.NVMLError:
            self._close()
            raise
        if all(reading.total_bytes is None for reading in readings):
            self._close()
        else:
            self._listen(handles)
        return readings

    def _require_open(self) -> None:
        if not self._is_open:
            pynvml.nvmlInit()
            self._is_open = True

    def _close(self) -> None:
        """What is left of a driver that is gone."""
        if self._listener is not None:
            self._listener.stop(wait=True)
        self._xid.clear()
        self._is_open = False
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _listen(self, handles: Mapping[GpuUuid, Any]) -> None:
        """Hear of the XIDs of these GPUs, which are all that answer. Events of one that was lost and is back
        are registered again: at the next reading, for the thread that listens has to end first, and may hang."""
        known = self._listener
        if known is None or not (known.is_alive or known.is_of_no_use(handles)):
            self._listener = _Xids(handles, self._hear)
        elif known.gpus != handles.keys():
            known.stop(wait=False)

    def _hear(self, uuid: GpuUuid, xid: int) -> None:
        critical = xid in CRITICAL_XIDS
        level = logging.WARNING if critical else logging.INFO
        log.log(level, "xid", extra=fields(gpu=uuid, xid=xid, critical=critical))
        if critical:
            self._xid.setdefault(uuid, xid)

    def _read_one(self, index: int, handles: dict[GpuUuid, Any]) -> GpuReading:
        """One GPU; its error is its own and hides no other GPU."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._known[index] = (GpuUuid(pynvml.nvmlDeviceGetUUID(handle)), pynvml.nvmlDeviceGetName(handle))
            reading = self._read_whole(index, handle)
        except pynvml.NVMLError as error:
            return self._unreadable(index, error)
        handles[reading.uuid] = handle
        return reading

    def _unreadable(self, index: int, error: Exception) -> GpuReading:
        """Lost, or not to be read for another reason."""
        log.debug("gpu not readable", extra=fields(index=index, error=error))
        uuid, product = self._known.get(index, (nameless(index), ""))
        lost = isinstance(error, (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired))
        if lost:
            self._lost.add(uuid)
        return GpuReading(
            *(uuid, index, product, None, None, None),
            healthy=False,
            reason=f"NVML: {error}",
            in_cuda=False,
            broken=lost,
        )

    def _read_whole(self, index: int, handle: Any) -> GpuReading:
        uuid, product = self._known[index]
        # Version 1 counts what the driver reserves as used, which is what no model can have.
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        mig = _optional(pynvml.nvmlDeviceGetMigMode, handle)
        rates = _optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
        split = mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        bus_id = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        fault = self._health(uuid, handle).fault
        return GpuReading(
            uuid,
            index,
            product,
            total_bytes=int(memory.total),
            used_bytes=int(memory.used),
            utilization=None if rates is None else rates.gpu / 100,
            healthy=not split and not fault,
            reason=_MIG_REASON if split else fault,
            bus_id=bus_id,
            in_cuda=not split,
            broken=bool(fault),
        )

    def _health(self, uuid: GpuUuid, handle: Any) -> Health:
        uncorrected, since_reset = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ecc = _optional(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, since_reset)
        rows = _optional(pynvml.nvmlDeviceGetRemappedRows, handle)
        pages = _optional(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        if uuid in self._lost or (ecc or 0) < self._ecc.get(uuid, 0):
            self._xid.pop(uuid, None)  # it has been reset
        self._lost.discard(uuid)
        self._ecc[uuid] = ecc or 0
        pending, failed = (False, False) if rows is None else rows[2:]
        return Health(self._xid.get(uuid), ecc, bool(pending), bool(failed), bool(pages))


class _Xids:
    """One event set, and the thread that waits for it: it ends when it is stopped, when its driver does, and
    is not waited for at the end of the process. NVML's calls take as long as they like."""

    def __init__(self, handles: Mapping[GpuUuid, Any], hear: Callable[[GpuUuid, int], None]) -> None:
        self.gpus, self._hear = frozenset(handles), hear
        self._of: dict[int | None, GpuUuid] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            events = pynvml.nvmlEventSetCreate()
            for uuid, handle in handles.items():
                self._register(events, uuid, handle)
        except pynvml.NVMLError as error:
            log.warning("xids are not watched", extra=fields(error=error))
            return
        self._thread = threading.Thread(target=self._wait, args=(events,), name="nvml-xids", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def is_of_no_use(self, handles: Mapping[GpuUuid, Any]) -> bool:
        """None of these reports XIDs: there is nothing to register again."""
        return self._thread is None and self.gpus == handles.keys()

    def stop(self, *, wait: bool) -> None:
        """Stop it; with `wait`, return when it has ended, within a bound."""
        self._stopped.set()
        if wait and self._thread is not None:
            self._thread.join(_XID_END_SECONDS)

    def _register(self, events: Any, uuid: GpuUuid, handle: Any) -> None:
        supported = _optional(pynvml.nvmlDeviceGetSupportedEventTypes, handle) or 0
        wanted = supported & pynvml.nvmlEventTypeXidCriticalError
        if not wanted:
            log.info("gpu reports no xids", extra=fields(gpu=uuid))
            return
        pynvml.nvmlDeviceRegisterEvents(handle, wanted, events)
        self._of[_address(handle)] = uuid

    def _wait(self, events: Any) -> None:
        try:
            while not self._stopped.is_set():
                with suppress(pynvml.NVMLError_Timeout):
                    self._take(pynvml.nvmlEventSetWait_v2(events, _XID_WAIT_MS))
        except pynvml.NVMLError as error:  # of a driver that is gone; the next reading registers again
            log.warning("xids are not watched any more", extra=fields(error=error))
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _take(self, event: Any) -> None:
        uuid = self._of.get(_address(event.device))
        if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
            self._hear(uuid, int(event.eventData))


def _optional(call: Any, handle: Any, *more: Any) -> Any:
    """A fact that not every GPU, and not every driver, has."""
    try:
        return call(handle, *more)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        return None


def _address(handle: Any) -> int | None:
    """Which device a handle is, without a call: one that has fallen off the bus answers none."""
    return cast(handle, c_void_p).value


def _text(value: str | bytes) -> str:
    """A string field of one of NVML's structures."""
    return value if isinstance(value, str) else value.decode()
