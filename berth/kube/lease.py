"""A Lease as a heartbeat: written by one holder, judged by readers with their own clock."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from berth.kube import paths
from berth.kube.client import JsonObject, KubeClient
from berth.kube.errors import NotFound
from berth.kube.times import micro_time, parse_time, utc_now

log = logging.getLogger(__name__)


class Heartbeat:
    """Renews one Lease. Creates it when it does not exist, owned by its Node if `node` names one: then the
    Lease goes when the Node goes."""

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        holder: str,
        duration_seconds: int,
        node: str | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._client, self._namespace, self._name = client, namespace, name
        self._holder, self._duration, self._node, self._now = holder, duration_seconds, node, now

    async def beat(self, annotations: Mapping[str, str | None] | None = None) -> None:
        """Write the current time once, and set `annotations`; None removes one. Raises KubeError."""
        metadata: JsonObject = {"annotations": dict(annotations)} if annotations else {}
        spec = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": self._duration,
            "renewTime": micro_time(self._now()),
        }
        try:
            await self._client.patch(
                paths.lease(self._namespace, self._name), {"metadata": metadata, "spec": spec}
            )
        except NotFound:
            await self._create(metadata, spec)

    async def _create(self, metadata: JsonObject, spec: JsonObject) -> None:
        metadata = {**metadata, "name": self._name}
        if annotations := metadata.get("annotations"):
            metadata["annotations"] = {key: value for key, value in annotations.items() if value is not None}
        if self._node is not None:
            # Read now: a Node that was made anew is another owner.
            node = await self._client.get(paths.node(self._node))
            owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": node["metadata"]["uid"]}
            metadata["ownerReferences"] = [owner]
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        await self._client.create(paths.leases(self._namespace), lease)


@dataclass(frozen=True, slots=True)
class _Seen:
    renew_time: str
    deadline: float
    duration_seconds: float


class Freshness:
    """Which heartbeats are alive, by the reader's monotonic clock.

    A renewal is what counts, not the time written in it, so clocks that differ do no harm. Only a
    Lease that is seen for the first time is judged by its own time, because nothing else is known.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def observe(self, lease: JsonObject, *, monotonic: float, wall: datetime) -> None:
        """Take one state of a Lease."""
        name, spec = lease["metadata"]["name"], lease.get("spec") or {}
        renewed, duration = spec.get("renewTime") or "", float(spec.get("leaseDurationSeconds") or 0)
        known = self._seen.get(name)
        if known is not None and known.renew_time == renewed:
            return
        left = duration if known is not None else _time_left(renewed, duration, wall)
        self._seen[name] = _Seen(renewed, monotonic + left, duration)

    def forget(self, name: str) -> None:
        self._seen.pop(name, None)

    def is_fresh(self, name: str, *, monotonic: float) -> bool:
        seen = self._seen.get(name)
        return seen is not None and monotonic < seen.deadline

    def deadline(self, name: str) -> float:
        """When the Lease expires, or has; -inf where there is none."""
        seen = self._seen.get(name)
        return -math.inf if seen is None else seen.deadline


def _time_left(renewed: str, duration: float, wall: datetime) -> float:
    time = parse_time(renewed)
    if time is None:
        return 0.0
    return min(duration, duration - (wall - time).total_seconds())
