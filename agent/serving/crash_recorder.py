"""The evidence of Triton's crashes: keeps the ledger and its journal, and says what is quarantined.

The ledger decides; this writes it to disk before a load begins, and distinguishes crashes from requested restarts.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from agent.limits import RateLimiter
from agent.models import Model
from agent.repository import Record
from agent.serving.journal import Journal
from agent.serving.outcomes import Outcomes
from agent.serving.slots import loop_seconds
from berth.contract.errors import InvalidValue
from berth.contract.gateway import public_name_of
from berth.contract.ids import PodUid, ServerName
from berth.kube.times import utc_now
from berth.runtime.logs import fields
from berth.runtime.tasks import in_thread
from berth.triton.admin import IndexEntry, IndexState

log = logging.getLogger(__name__)

# A restart of Triton that is seen within this time is the one that the agent has requested.
RESTART_SECONDS = 600.0
# A crash that is seen within this time is the one that the gateway has reported.
_REPORTED_SECONDS = 360.0
# Of the models that had requests in Triton when it died, as the log names them.
_SHOWN = 10
# By whether a load was under way, and whether requests were in Triton.
_REASONS = {
    (False, False): "unknown",
    (False, True): "requests",
    (True, False): "load",
    (True, True): "load_and_requests",
}


class CrashRecorder:
    """`lift_key`: the node annotation that ends a quarantine."""

    def __init__(
        self,
        journal: Journal,
        outcomes: Outcomes,
        *,
        lift_key: str,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._journal, self._writing = journal, asyncio.Lock()
        self._ledger = journal.read()
        self._outcomes, self._lift_key, self._now = outcomes, lift_key, now
        self._triton = ""
        self._has_adopted = False
        self._restart_expected_until = 0.0
        self._requests_reported_until = 0.0
        self._invalid_request = ""
        self._events_of_pods = RateLimiter(rate=1 / 60, burst=3)
        self._count_quarantined()

    # Before and after a load.

    async def mark(self, record: Record, *, backend: str, has_code: bool) -> None:
        """A load of these files is about to begin. On disk when it returns. Raises OSError."""
        self._ledger.begin(
            record.digest,
            backend=backend,
            name=record.server_name,
            now=self._now(),
            namespace=record.pod.namespace,
            has_code=has_code,
        )
        await self._save()

    def clear(self, record: Record) -> bool:
        """Its load is over and Triton lives. True where the journal has to be saved."""
        return self._ledger.clear(record.digest, record.server_name)

    def is_open(self, record: Record | None) -> bool:
        """A load of these files is under way, by its mark."""
        return record is not None and self._ledger.is_open(record.digest, record.server_name)

    def is_suspect(self, record: Record | None) -> bool:
        return record is not None and self._ledger.is_suspect(record.digest, record.pod.namespace)

    async def save(self) -> None:
        try:
            await self._save()
        except OSError as error:
            log.warning("journal not written", extra=fields(error=error))

    # Quarantine.

    def quarantine_of(self, record: Record) -> str | None:
        """Why these files are not loaded; None where they are not quarantined."""
        known = self._ledger.quarantined(
            record.digest, self._triton, self._now(), namespace=record.pod.namespace
        )
        return None if known is None else known.reason(self._lift_key)

    async def lift(self, request: str) -> bool:
        """End quarantines as the node's annotation asks. False if it is invalid. Raises OSError."""
        try:
            ended = self._ledger.lift(request, self._now())
        except InvalidValue as error:
            if request != self._invalid_request:
                log.warning("quarantine not lifted", extra=fields(annotation=self._lift_key, error=error))
            self._invalid_request = request
            return False
        await self._save()
        self._count_quarantined()
        log.info("quarantine lifted", extra=fields(digests=", ".join(one.digest for one in ended) or "none"))
        self._outcomes.models.touch()
        return True

    # Triton's life.

    def note_running(self, version: str, index: Mapping[ServerName, IndexEntry]) -> None:
        """Triton answers. At the first time, settle the loads that an earlier agent has left open."""
        self._triton = version
        if self._has_adopted:
            return
        self._has_adopted = True
        loaded = {name for name, entry in index.items() if not entry.is_gone}
        remembers = any(entry.state is not IndexState.UNKNOWN for entry in index.values())
        self._ledger.inherit(loaded, remembers=remembers)

    def expect_restart(self) -> None:
        """The agent has requested a restart: no model is charged with it."""
        self._restart_expected_until = loop_seconds() + RESTART_SECONDS

    def note_requests(self, uids: Sequence[PodUid]) -> None:
        """Triton has died with requests of these pods' models in it, by the gateway's report."""
        now, known = loop_seconds(), self._outcomes.models
        if not uids or now < self._restart_expected_until:
            return
        self._requests_reported_until = now + _REPORTED_SECONDS
        models = [model for uid in uids if (model := known.get(uid)) is not None]
        log.warning("triton has died with requests in it", extra=fields(pods=len(uids), of=_some(models)))
        for model in models:
            if not self._events_of_pods.take(model.ref.uid):
                self._outcomes.events.record(model.ref, "Warning", "TritonDied", _suspicion(model, len(uids)))

    async def note_restart(self, *, was_unloading: bool) -> None:
        """Triton has restarted. `was_unloading`: it was at the end of a model that it had loaded."""
        now = loop_seconds()
        if now < self._restart_expected_until:
            self._restart_expected_until = 0.0
            self._ledger.restarted()
            self._outcomes.metrics.triton_restarted("stuck")
        else:
            had_requests, self._requests_reported_until = self._requests_reported_until > now, 0.0
            self._note_crash(was_unloading=was_unloading, had_requests=had_requests)
        await self.save()

    def _note_crash(self, *, was_unloading: bool, had_requests: bool) -> None:
        metrics, opened = self._outcomes.metrics, self._ledger.open
        reason = _REASONS[bool(opened), had_requests]
        metrics.triton_restarted("died")
        metrics.triton_died(reason)
        loading = ", ".join(sorted(public_name_of(mark.name) for mark in opened))
        log.warning("triton has died", extra=fields(loading=loading, reason=reason))
        culprit = self._ledger.died(
            triton=self._triton, now=self._now(), was_unloading=was_unloading, had_requests=had_requests
        )
        if culprit is not None:
            self._count_quarantined()
            log.error(
                "quarantined",
                extra=fields(model=public_name_of(culprit.name), reason=culprit.reason(self._lift_key)),
            )

    def _count_quarantined(self) -> None:
        self._outcomes.metrics.quarantined(len(self._ledger.all_quarantined(self._now())))

    async def _save(self) -> None:
        """Raises OSError."""
        async with self._writing:
            text = json.dumps(self._ledger.encode(self._now()))
            await in_thread(self._journal.write, text)


def _suspicion(model: Model, suspects: int) -> str:
    if suspects == 1:
        return f"Triton has died, and of all models only {model.name} had requests in it"
    return f"Triton has died with requests of {suspects} models in it, {model.name} among them"


def _some(models: Sequence[Model]) -> str:
    named = ", ".join(f"{model.ref.namespace}/{model.name}" for model in models[:_SHOWN])
    return named if len(models) <= _SHOWN else f"{named} and {len(models) - _SHOWN} more"
