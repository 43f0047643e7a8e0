"""Leader election over a Lease, safe by the holder's own clock.

The leader stops leading before its last successful renewal has run out, whether or not an answer came, so no other
candidate can have taken over. `kubernetes.aio.leaderelection` bounds neither a hanging renewal nor the leader's last
writes.

A renewal is one request: the Lease as the leader wrote it last, with its resourceVersion, is written anew, and read only
when the API server says that it is another by now (client-go's `tryAcquireOrRenew` does so, too). Where the API server
takes seconds to answer, the leader makes its Lease longer, or it would hold it and never be sure for as long as a write
takes.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from berth.kube import paths
from berth.kube.client import WRITE_SECONDS, JsonObject, KubeClient
from berth.kube.errors import Conflict, KubeError, NotFound
from berth.kube.times import micro_time, utc_now
from berth.runtime.logs import fields

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ElectionTimes:
    """Kubernetes' own defaults (client-go leaderelection), except that the deadline leaves time for two answers of 5 s:
    the one by which the leader learns that the API server has become slow, and the one to the longer Lease."""

    lease_seconds: int = 15
    renew_deadline_seconds: float = 12.0
    retry_seconds: float = 2.0
    # Of a leader whose API server has once taken longer than `retry_seconds` to answer, for as long as it leads. Never
    # shorter again: after a write without an answer it would be unknown which of the two times counts.
    slow_lease_seconds: int = 30


class LeadershipLost(Exception):
    """The Lease could not be renewed in time, or another candidate holds it."""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """A process that has ended for certain, and that this one has replaced: its Lease need not run out, only what it may
    still have been writing. `ended_at`: by the candidate's clock, at the latest."""

    is_holder: Callable[[str], bool]
    ended_at: float


class Election:
    """One candidate. `await acquire()`, then run `hold()` beside the work; it raises when lost."""

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        predecessor: Predecessor | None = None,
        times: ElectionTimes = ElectionTimes(),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._client, self._namespace, self._name, self._identity = client, namespace, name, identity
        self._times, self._clock, self._now = times, clock, now
        self._predecessor = predecessor
        self._said = ""
        self._observed: tuple[str, str] | None = None
        self._observed_at = 0.0
        self._lease_seconds = times.lease_seconds
        # As the API server has answered our last write.
        self._written: JsonObject | None = None
        # When the last renewal was sent, and how long another candidate waits from then on at least.
        self._renewed_at = self._ends_at = -math.inf

    async def acquire(self) -> None:
        """Return once this candidate leads."""
        while not await self._try():
            await asyncio.sleep(self._times.retry_seconds)
        log.info("leading", extra=fields(lease=self._name, identity=self._identity))

    async def hold(self) -> None:
        """Renew for ever. Raises LeadershipLost as soon as it is no longer certain to lead."""
        while True:
            # Counted from the asking: an answer that took long is followed by the next request at once.
            await asyncio.sleep(self._renewed_at + self._times.retry_seconds - self._clock())
            try:
                async with asyncio.timeout(self._leads_until - self._clock()):
                    while not await self._try():
                        await asyncio.sleep(self._times.retry_seconds / 4)
            except TimeoutError:
                raise LeadershipLost(f"{self._name}: not renewed in time") from None

    async def regain(self) -> bool:
        """After LeadershipLost. True once this candidate leads again, and no other has meanwhile; False as soon as it is
        known that another candidate has had the Lease, or that it is gone: then `acquire` as any other candidate."""
        while True:
            try:
                return await self._renewed()
            except KubeError as error:
                self._failed(error)
            await asyncio.sleep(self._times.retry_seconds)

    async def _renewed(self) -> bool:
        """Raises KubeError, of which a Conflict says that the Lease is to be read."""
        try:
            lease = self._written or await self._timed(self._client.get(self._path))
            if _holder(lease) != self._identity:
                return False
            return await self._replace(lease)
        except NotFound:
            return False
        except Conflict:
            self._written = None
            raise

    def is_certain(self, *, for_seconds: float = 0.0) -> bool:
        """No other candidate can lead at this moment, nor for so long, whatever this process has slept
        through."""
        now = self._clock()
        return now < self._leads_until and now + for_seconds < self._ends_at

    async def release(self) -> None:
        """Release the Lease at once so that the next candidate need not wait for its end."""
        try:
            lease = await self._client.get(self._path)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"].update(holderIdentity="", leaseDurationSeconds=1)
                await self._client.replace(self._path, lease)
        except KubeError as error:
            log.warning("lease not released", extra=fields(lease=self._name, error=error))

    @property
    def _path(self) -> str:
        return paths.lease(self._namespace, self._name)

    @property
    def _leads_until(self) -> float:
        return self._ends_at - (self._times.lease_seconds - self._times.renew_deadline_seconds)

    async def _try(self) -> bool:
        try:
            return await self._write()
        except KubeError as error:
            self._failed(error)
            return False

    def _failed(self, error: KubeError) -> None:
        """Said once, and again when it is another error, or one after a success."""
        if str(error) != self._said:
            self._said = str(error)
            log.warning("lease not written", extra=fields(lease=self._name, error=error))

    async def _write(self) -> bool:
        """Raises KubeError."""
        if self._written is not None:
            try:
                return await self._replace(self._written)
            except (
                Conflict,
                NotFound,
            ):  # another candidate's write, or one of ours whose answer was lost
                self._written = None
        try:
            lease = await self._timed(self._client.get(self._path))
        except NotFound:
            return await self._create()
        holder = _holder(lease)
        if holder not in ("", self._identity) and not self._expired(lease.get("spec") or {}):
            return False
        try:
            return await self._replace(lease)
        except Conflict:
            return False

    async def _replace(self, lease: JsonObject) -> bool:
        """Its resourceVersion is the precondition. Raises KubeError."""
        before, is_ours = lease.get("spec") or {}, _holder(lease) == self._identity
        spec = self._spec(
            acquired=before.get("acquireTime") if is_ours else None,
            transitions=int(before.get("leaseTransitions") or 0) + (not is_ours),
        )
        return await self._lead_by(self._client.replace(self._path, {**lease, "spec": spec}))

    async def _create(self) -> bool:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": self._spec(acquired=None, transitions=0),
        }
        try:
            return await self._lead_by(self._client.create(paths.leases(self._namespace), body))
        except Conflict:
            return False

    async def _lead_by(self, write: Awaitable[JsonObject]) -> bool:
        """Leads once the write has an answer. Raises KubeError."""
        # Taken before the write: the Lease cannot end earlier than this clock says.
        asked_at, lease_seconds = self._clock(), self._lease_seconds
        self._written = await self._timed(write)
        self._renewed_at, self._ends_at, self._said = asked_at, asked_at + lease_seconds, ""
        return True

    async def _timed(self, request: Awaitable[JsonObject]) -> JsonObject:
        asked_at = self._clock()
        try:
            return await request
        finally:
            if self._clock() - asked_at > self._times.retry_seconds:
                self._lease_seconds = self._times.slow_lease_seconds

    def _expired(self, spec: JsonObject) -> bool:
        """True once the holder has not renewed for a whole lease, by this candidate's clock."""
        state = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        if state != self._observed:
            self._observed, self._observed_at = state, self._clock()
        ends_at = self._observed_at + float(spec.get("leaseDurationSeconds") or 0)
        before = self._predecessor
        if before is not None and before.is_holder(spec.get("holderIdentity") or ""):
            ends_at = min(ends_at, before.ended_at + WRITE_SECONDS)
        return self._clock() >= ends_at

    def _spec(self, *, acquired: str | None, transitions: int) -> JsonObject:
        stamp = micro_time(self._now())
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._lease_seconds,
            "acquireTime": acquired or stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions,
        }


def _holder(lease: JsonObject) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""
