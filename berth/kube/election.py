"""Leader election over a Lease, safe by the holder's own clock.

The leader stops leading `renew_deadline_seconds` after its last successful renewal, whether or not
an answer came, and that is shorter than the Lease, so no other candidate can have taken over.
`kubernetes.aio.leaderelection` bounds neither a hanging renewal nor the leader's last writes.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from berth.kube import paths
from berth.kube.client import JsonObject, KubeClient
from berth.kube.errors import Conflict, KubeError, NotFound
from berth.kube.times import micro_time, utc_now
from berth.runtime.logs import fields

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ElectionTimes:
    """Kubernetes' own defaults (client-go leaderelection)."""

    lease_seconds: int = 15
    renew_deadline_seconds: float = 10.0
    retry_seconds: float = 2.0


class LeadershipLost(Exception):
    """The Lease could not be renewed in time, or somebody else holds it."""


class Election:
    """One candidate. `await acquire()`, then run `hold()` beside the work; it raises when lost."""

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: ElectionTimes = ElectionTimes(),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._client, self._namespace, self._name, self._identity = client, namespace, name, identity
        self._times, self._clock, self._now = times, clock, now
        self._observed: tuple[str, str] | None = None
        self._observed_at = 0.0
        self._renewed_at = 0.0

    async def acquire(self) -> None:
        """Return once this candidate leads."""
        while not await self._try():
            await asyncio.sleep(self._times.retry_seconds)
        log.info("leading", extra=fields(lease=self._name, identity=self._identity))

    async def hold(self) -> None:
        """Renew for ever. Raises LeadershipLost as soon as it is no longer certain to lead."""
        while True:
            await asyncio.sleep(self._times.retry_seconds)
            left = self._renewed_at + self._times.renew_deadline_seconds - self._clock()
            try:
                async with asyncio.timeout(left):
                    while not await self._try():
                        await asyncio.sleep(self._times.retry_seconds / 4)
            except TimeoutError:
                raise LeadershipLost(f"{self._name}: not renewed in time") from None

    def is_certain(self, *, for_seconds: float = 0.0) -> bool:
        """No other candidate can lead at this moment, nor for so long, whatever this process has slept
        through."""
        now = self._clock()
        led_until = self._renewed_at + self._times.renew_deadline_seconds
        return now < led_until and now + for_seconds < self._renewed_at + self._times.lease_seconds

    async def release(self) -> None:
        """Let go of the Lease at once so that the next candidate need not wait for its end."""
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

    async def _try(self) -> bool:
        # Taken before the write: the Lease cannot end earlier than this clock says.
        asked_at = self._clock()
        try:
            led = await self._write()
        except KubeError as error:
            log.warning("lease not written", extra=fields(lease=self._name, error=error))
            return False
        if led:
            self._renewed_at = asked_at
        return led

    async def _write(self) -> bool:
        try:
            lease = await self._client.get(self._path)
        except NotFound:
            return await self._create()
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._expired(spec):
            return False
        lease["spec"] = self._spec(
            acquired=spec.get("acquireTime") if holder == self._identity else None,
            transitions=int(spec.get("leaseTransitions") or 0) + (holder != self._identity),
        )
        try:
            await self._client.replace(self._path, lease)  # its resourceVersion is the precondition
        except Conflict:
            return False
        return True

    async def _create(self) -> bool:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": self._spec(acquired=None, transitions=0),
        }
        try:
            await self._client.create(paths.leases(self._namespace), body)
        except Conflict:
            return False
        return True

    def _expired(self, spec: JsonObject) -> bool:
        """True once the holder has not renewed for a whole lease, by this candidate's clock."""
        state = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        if state != self._observed:
            self._observed, self._observed_at = state, self._clock()
        return self._clock() >= self._observed_at + float(spec.get("leaseDurationSeconds") or 0)

    def _spec(self, *, acquired: str | None, transitions: int) -> JsonObject:
        stamp = micro_time(self._now())
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._times.lease_seconds,
            "acquireTime": acquired or stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions,
        }
