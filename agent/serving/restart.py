"""When Triton has to be restarted because a model cannot be unloaded otherwise, and how the restart is requested.

Triton has no call that ends a load, an execution or a finalize that hangs. Its container's liveness probe
looks at a file of the repository, which the agent writes: it ends a server that has started with another
text in it. That takes no right on the API server, no way from Triton to the agent, and no clock, which a
node may set back: a file that stayed newer than every start would end each new server.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.serving.crash_recorder import RESTART_SECONDS, CrashRecorder
from agent.serving.model_fsm import Phase
from agent.serving.outcomes import EventSink
from agent.serving.slots import Slots, loop_seconds
from agent.serving.triton_sync import TritonSync
from berth.contract.ids import ModelName
from berth.contract.report import Failure, ModelState
from berth.runtime.logs import fields
from berth.runtime.tasks import in_thread

log = logging.getLogger(__name__)

RESTART_FILE = "restart-triton"
# Between two restarts, whatever hangs: for so long a restart that is seen is taken for the first one.
LEAST_SECONDS_BETWEEN = RESTART_SECONDS
# Where others are served and no other model needs what the stuck one holds.
PATIENCE_SECONDS = 600.0
# Where another does, or where the others will be back in a moment: long enough for a slow one to end after all.
NEEDED_SECONDS = 60.0
# What may be down for the sake of a model that is not wanted any more.
SOON_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Stuck:
    """A model that no pod wants and that Triton does not release. `seconds`: since it is overdue."""

    name: ModelName
    seconds: float
    is_needed: bool = False  # its name or its memory keeps another from being loaded


@dataclass(frozen=True, slots=True)
class Other:
    """A model that Triton serves. `load_seconds`: what its last load took, None where it is not known;
    `comes_back`: its files are there and may be loaded again."""

    name: ModelName
    load_seconds: float | None
    comes_back: bool = True


def why_restart(
    stuck: Sequence[Stuck],
    others: Sequence[Other],
    *,
    loads_under_way: int,
    since_last_seconds: float | None,
) -> str | None:
    """The reason, if Triton is to be restarted now."""
    if not stuck or loads_under_way:
        return None
    if since_last_seconds is not None and since_last_seconds < LEAST_SECONDS_BETWEEN:
        return None
    patience = _patience(others, is_needed=any(one.is_needed for one in stuck))
    if patience is None or max(one.seconds for one in stuck) < patience:
        return None
    names = ", ".join(sorted(one.name for one in stuck))
    return f"Triton does not release {names}, and only a restart unloads it; {len(others)} models are loaded again"


def _patience(others: Sequence[Other], *, is_needed: bool) -> float | None:
    """None: never, because a model that is served would not come back."""
    if not others:
        return 0.0
    if not all(one.comes_back for one in others):
        return None
    downtime = sum(SOON_SECONDS if one.load_seconds is None else one.load_seconds for one in others)
    return NEEDED_SECONDS if is_needed or downtime <= SOON_SECONDS else PATIENCE_SECONDS


class RestartFile:
    """Everything here blocks: call it from a thread."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / RESTART_FILE

    def ask(self, reason: str) -> None:
        """Raises OSError, and then nothing has been asked. No two texts are alike, and none is seen in part."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(f"{reason} ({secrets.token_hex(4)})\n")
        fresh.replace(self.path)

    def seconds_since(self) -> float | None:
        """Since the last time, over restarts of the agent; None where there was none, or where the clock has
        been set back."""
        try:
            seconds = time.time() - self.path.stat().st_mtime
        except OSError:
            return None
        return seconds if seconds >= 0 else None


class TritonRestarts:
    """Requests a restart of Triton where only that unloads a model."""

    def __init__(
        self,
        file: RestartFile,
        slots: Slots,
        triton: TritonSync,
        crashes: CrashRecorder,
        events: EventSink,
    ) -> None:
        self._file, self._slots, self._triton = file, slots, triton
        self._crashes, self._events = crashes, events

    async def step(self) -> None:
        """One pass. Raises OSError."""
        if not (stuck := stuck_models(self._slots, loop_seconds())) or self._triton.is_away:
            return
        since = await asyncio.to_thread(self._file.seconds_since)
        loads = sum(slot.phase in (Phase.LOADING, Phase.CHANGING) for slot in self._slots)
        why = why_restart(stuck, _others(self._slots), loads_under_way=loads, since_last_seconds=since)
        if why is None:
            return
        await in_thread(self._file.ask, why)
        self._crashes.expect_restart()
        log.warning("triton is restarted", extra=fields(reason=why))
        for slot in self._slots:
            if slot.model is not None and slot.phase in (Phase.STUCK, Phase.SERVING):
                self._events.record(slot.model.ref, "Warning", "TritonRestarted", why)


def stuck_models(slots: Slots, now: float) -> list[Stuck]:
    """A stuck model is needed where a wanted one lacks the memory of its GPU, or where its own pod wants it loaded."""
    short = {
        gpu
        for model in slots.models
        if model.failure is Failure.CAPACITY and model.is_wanted and model.gpu is not None
        for gpu in model.gpu.uuids
    }
    return [
        Stuck(
            slot.model_name,
            now - slot.since,
            is_needed=bool(slot.gpus & short) or (slot.model is not None and slots.is_wanted(slot.model)),
        )
        for slot in slots
        if slot.phase is Phase.STUCK
    ]


def _others(slots: Slots) -> list[Other]:
    return [
        Other(
            slot.model_name,
            slot.load_seconds,
            comes_back=slot.model is not None and slot.model.state is not ModelState.LOST,
        )
        for slot in slots
        if slot.phase is Phase.SERVING
    ]
