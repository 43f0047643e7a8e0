"""NVML through a library that says what it is told to: what becomes a fact, what unknown, and who waits."""

import asyncio
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import agent.nvml
from agent.gpus import GpusHang, GpusUnknown, cuda_ordinals
from agent.nvml import NvmlGpus, NvmlMissing
from tests.fakes.objects import GIB


class NvmlFailure(Exception):
    """NVMLError."""


class NotSupported(NvmlFailure):
    """NVMLError_NotSupported."""


class IsLost(NvmlFailure):
    """NVMLError_GpuIsLost."""


@dataclass
class Card:
    """One GPU. `failure`: what every question about it meets."""

    uuid: str
    total: int = 16 * GIB
    used: int = 0
    util: int | None = None
    mig: int | None = None
    bus: str | bytes = "00"
    failure: NvmlFailure | None = None
    ecc: int | None = None
    remap: str | None = None
    pages: int | None = None


@dataclass
class Library:
    """In place of pynvml. Refuses every question while it is not open, or already is."""

    cards: list[Card] = field(default_factory=list)
    NVMLError = NvmlFailure
    NVMLError_NotSupported = NVMLError_FunctionNotFound = NVMLError_NoPermission = NotSupported
    NVMLError_GpuIsLost = NVMLError_ResetRequired = IsLost
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_DEVICE_MIG_ENABLE = 1
    missing: NvmlFailure | None = None
    counting: NvmlFailure | None = None
    is_open: bool = False
    opened: int = 0
    reads: int = 0
    # Cleared: a reading waits, having looked at nothing yet but the count.
    answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.answers.set()

    def nvmlInit(self) -> None:  # noqa: N802
        if self.missing is not None:
            raise self.missing
        assert not self.is_open
        self.is_open, self.opened = True, self.opened + 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        assert self.is_open
        self.is_open = False
        if self.counting is not None:
            raise self.counting

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.is_open
        self.reads += 1
        count = len(self.cards)
        seen = [Card(**vars(card)) for card in self.cards]
        self.answers.wait(10)
        if self.counting is not None:
            raise self.counting
        self._seen = seen
        return count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        assert self.is_open
        if error := self._seen[index].failure:
            raise error
        return self._seen[index]

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:  # noqa: N802
        return "T4"

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:  # noqa: N802
        return SimpleNamespace(total=card.total, used=card.used)

    def nvmlDeviceGetMigMode(self, card: Card) -> tuple[int, int]:  # noqa: N802
        if card.mig is None:
            raise NotSupported("Not Supported")
        return card.mig, card.mig

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:  # noqa: N802
        if card.util is None:
            raise NotSupported("Not Supported")
        return SimpleNamespace(gpu=card.util)

    def nvmlDeviceGetTotalEccErrors(self, card: Card, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return _told(card.ecc)

    def nvmlDeviceGetRemappedRows(self, card: Card) -> tuple[int, int, int, int]:  # noqa: N802
        _told(card.remap)
        return 5, 1, int(card.remap == "pending"), int(card.remap == "failed")

    def nvmlDeviceGetRetiredPagesPendingStatus(self, card: Card) -> int:  # noqa: N802
        return _told(card.pages)

    def nvmlEventSetCreate(self) -> Any:  # noqa: N802
        raise NotSupported("Not Supported")  # events are another thread's, and the stub's

    def nvmlDeviceGetPciInfo(self, card: Card) -> Any:  # noqa: N802
        return SimpleNamespace(busId=card.bus)


def _told(fact: Any) -> Any:
    if fact is None:
        raise NotSupported("Not Supported")
    return fact


LOST = IsLost("GPU is lost")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library([Card("GPU-a", used=GIB, util=25), Card("GPU-b", total=8 * GIB)])
    monkeypatch.setattr(agent.nvml, "pynvml", library)
    return library


async def test_each_gpu_is_read_and_what_it_does_not_tell_is_unknown(library: Library) -> None:
    a, b = await NvmlGpus().read()
    assert (a.uuid, a.index, a.product, a.total_bytes, a.used_bytes) == ("GPU-a", 0, "T4", 16 * GIB, GIB)
    assert (a.utilization, a.healthy, a.reason, a.in_cuda) == (0.25, True, "", True)
    assert (b.uuid, b.index, b.total_bytes, b.used_bytes, b.utilization) == ("GPU-b", 1, 8 * GIB, 0, None)


async def test_cuda_counts_by_bus_and_not_what_is_split_or_lost(library: Library) -> None:
    library.cards = [
        Card("GPU-c", bus=b"00:0C"),
        Card("GPU-b", bus="00:0B", mig=1),
        Card("GPU-a", bus="00:0A", mig=0),
        Card("GPU-d", bus="00:09", failure=LOST),
    ]
    readings = await NvmlGpus().read()
    assert cuda_ordinals(readings) == {"GPU-a": 0, "GPU-c": 1}
    assert [gpu.healthy for gpu in readings] == [True, False, True, False]
    assert "MIGEnabled" in readings[1].reason
    assert readings[3].reason == "NVML: GPU is lost"


async def test_a_lost_gpu_keeps_its_name_and_hides_no_other(library: Library) -> None:
    gpus = NvmlGpus()
    await gpus.read()
    library.cards[0].failure = LOST
    lost, well = await gpus.read()
    assert (lost.uuid, lost.index, lost.product, lost.total_bytes, lost.used_bytes, lost.utilization) == (
        "GPU-a",
        0,
        "T4",
        None,
        None,
        None,
    )
    assert (lost.healthy, lost.in_cuda, lost.broken, well.healthy, well.broken) == (
        *(False, False, True),
        *(True, False),
    )
    assert library.opened == 1  # the driver is there
    library.is_open = False
    never_seen, _ = await NvmlGpus().read()
    assert (never_seen.uuid, never_seen.product) == ("unknown-0", "")


async def test_a_driver_may_come_late_and_may_be_loaded_again(library: Library) -> None:
    gpus, library.missing = NvmlGpus(), NvmlFailure("Driver Not Loaded")
    with pytest.raises(GpusUnknown, match="NVML: Driver Not Loaded"):
        await gpus.read()
    library.missing = None
    assert len(await gpus.read()) == 2
    assert len(await gpus.read()) == 2
    assert library.opened == 1
    library.counting = NvmlFailure("Uninitialized")
    with pytest.raises(GpusUnknown, match="NVML: Uninitialized"):
        await gpus.read()
    library.counting = None
    assert len(await gpus.read()) == 2
    assert library.opened == 2
    for card in library.cards:  # as its handles are after a driver was loaded again
        card.failure = LOST
    await gpus.read()
    assert not library.is_open


async def test_a_start_that_insists_on_nvml_fails_without_its_driver(library: Library) -> None:
    assert len(await NvmlGpus.open().read()) == 2
    assert library.opened == 1
    library.is_open, library.missing = False, NvmlFailure("Driver Not Loaded")
    with pytest.raises(NvmlMissing, match="NVML: Driver Not Loaded"):
        NvmlGpus.open()


async def test_a_call_that_hangs_is_said_and_no_other_is_begun_meanwhile(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.nvml, "READ_TIMEOUT_SECONDS", 0.05)
    gpus = NvmlGpus()
    library.answers.clear()
    for _ in range(2):
        with pytest.raises(GpusHang, match=r"NVML has not answered for 0\.05 s"):
            await gpus.read()
    assert library.reads == 1
    library.answers.set()
    monkeypatch.setattr(agent.nvml, "READ_TIMEOUT_SECONDS", 5.0)
    assert len(await gpus.read()) == 2
    assert library.reads == 2


async def test_a_reading_is_begun_after_it_is_requested(library: Library) -> None:
    """Who has just loaded a model does not get the figures of one that was begun before."""
    gpus = NvmlGpus()
    library.answers.clear()
    before = asyncio.ensure_future(gpus.read())
    async with asyncio.timeout(5):
        while library.reads == 0:
            await asyncio.sleep(0.001)
    library.cards[0].used = 3 * GIB
    after = [asyncio.ensure_future(gpus.read()) for _ in range(3)]
    await asyncio.sleep(0)
    library.answers.set()
    assert (await before)[0].used_bytes == GIB
    assert [(await one)[0].used_bytes for one in after] == [3 * GIB] * 3
    assert library.reads == 2  # one for all who asked meanwhile


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"ecc": 2}, "ECC: 2 uncorrected"),
        ({"remap": "pending"}, "RowRemapPending"),
        ({"remap": "failed", "ecc": 2}, "RowRemapFailure"),
        ({"pages": 1}, "PageRetirementPending"),
        ({"ecc": 0, "remap": "none", "pages": 0}, ""),
        ({"mig": 1, "ecc": 1}, "MIGEnabled"),
    ],
)
async def test_a_fault_that_a_gpu_tells_of_itself(library: Library, fault: Any, reason: str) -> None:
    library.cards = [Card("GPU-a", **fault), Card("GPU-b")]
    sick, well = await NvmlGpus().read()
    assert sick.reason.startswith(reason)
    assert (sick.healthy, sick.broken) == (not reason, bool(reason))
    assert (well.healthy, well.broken, sick.total_bytes) == (True, False, 16 * GIB)


async def test_a_gpu_that_cannot_be_read_is_not_broken_for_that(library: Library) -> None:
    library.cards[0].failure = NvmlFailure("Unknown Error")
    unread, _ = await NvmlGpus().read()
    assert (unread.healthy, unread.broken) == (False, False)
