"""Reports why a pod waits: by an event for people, and by the condition that cluster autoscalers read."""

import asyncio
import logging
import re
from dataclasses import dataclass

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from berth.contract.wait_reason import WaitReason
from berth.kube.errors import Conflict, Invalid, KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.kube.times import rfc3339, utc_now
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from binder.loop.fenced import FencedClient
from binder.loop.pod_writes import patch_status

log = logging.getLogger(__name__)

_TICK_SECONDS = 60.0
FIGURES_SECONDS = 1800.0
_MOST_STATEMENTS = 32
# A count or an amount, and no part of a name.
_FIGURE = re.compile(r"(?<![\w.-])\d+(\.\d+)?( ([KMGT]i)?B\b)?(?![\w-])")
_BETWEEN = re.compile(r"[,:;] ")


@dataclass(frozen=True, slots=True)
class LastMessage:
    """Why a pod was refused, as it was reported `at` that time, in monotonic seconds. `statements`: also
    those reported shortly before; `waits`: for the end of which pods it waits."""

    reasons: str = ""
    waits: str = ""
    statements: frozenset[str] = frozenset()
    at: float = float("-inf")

    def then(self, reasons: str, waits: str, *, now: float) -> "LastMessage | None":
        """What is to be reported by now; None where that was reported already, but for new figures.

        Figures change with every report, nodes come and go: another reason is reported at once, other figures after a
        while. Each report is an event and a write of the pod's status.
        """
        statements = statements_of(reasons)
        is_recent = now < self.at + FIGURES_SECONDS
        if (reasons, waits) == (self.reasons, self.waits):
            return None
        if is_recent and waits == self.waits and statements <= self.statements:
            return None
        before = self.statements if is_recent and len(self.statements) < _MOST_STATEMENTS else frozenset()
        return LastMessage(reasons, waits, statements | before, now)


def statements_of(message: str) -> frozenset[str]:
    """What a message says, whatever the figures and the order."""
    return frozenset(_BETWEEN.split(_FIGURE.sub("#", message)))


@dataclass(frozen=True, slots=True)
class _Pending:
    ref: PodRef
    message: str
    reason: WaitReason
    is_first: bool


class ConditionWriter:
    """Writes the newest message of each pod, one pod at a time, so that no write overtakes another."""

    def __init__(self, client: FencedClient, events: EventRecorder) -> None:
        self._client, self._events = client, events
        self._pending: dict[PodUid, _Pending] = {}
        self._writing: PodUid | None = None
        self._written = asyncio.Event()
        self._wake = asyncio.Event()

    def report(
        self, ref: PodRef, message: str, *, first: bool, reason: WaitReason = WaitReason.UNSCHEDULABLE
    ) -> None:
        """Report why the pod waits. `first`: its condition did not say so before. Never waits."""
        self._events.record(ref, "Warning", "FailedScheduling", message)
        self.update_reason(ref, message, first=first, reason=reason)

    def update_reason(self, ref: PodRef, message: str, *, reason: WaitReason, first: bool = False) -> None:
        """Report the reason, to programs alone: the message is not new. Never waits."""
        pending = self._pending.get(ref.uid)
        is_first = first or (pending is not None and pending.is_first)
        self._pending[ref.uid] = _Pending(ref, message, reason, is_first)
        self._wake.set()

    async def withdraw(self, uid: PodUid) -> None:
        """The pod is about to be bound: return once nothing can write over what the Binding writes."""
        self._pending.pop(uid, None)
        while self._writing == uid:
            await self._written.wait()

    async def run(self) -> None:
        """Write for ever."""
        backoff = Backoff(initial_seconds=0.2, cap_seconds=15.0)
        while True:
            self._wake.clear()
            while self._pending:
                uid = next(iter(self._pending))
                if await self._write(uid, self._pending.pop(uid)):
                    backoff.reset()
                else:
                    await asyncio.sleep(backoff.next())
            await wait_until_set(self._wake, timeout_seconds=_TICK_SECONDS)

    async def _write(self, uid: PodUid, pending: _Pending) -> bool:
        """False when it must be tried again."""
        self._writing = uid
        self._written.clear()
        try:
            await self._patch(pending)
        except (NotFound, Conflict, Invalid):  # gone, or a successor of the same name by now
            return True
        except KubeError as error:
            log.warning("condition not written", extra=fields(pod=pending.ref, error=error))
            self._pending.setdefault(uid, pending)
            return False
        finally:
            self._writing = None
            self._written.set()
        return True

    async def _patch(self, pending: _Pending) -> None:
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": pending.reason.value,
            "message": pending.message,
        }
        if pending.is_first:  # the time of the status, not of the message
            condition["lastTransitionTime"] = rfc3339(utc_now())
        await patch_status(self._client, pending.ref, {"conditions": [condition]})
