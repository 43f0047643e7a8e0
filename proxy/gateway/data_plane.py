"""The replicas that one process serves. It applies the last `Spec`, whole each time, and says what it sees (`Status`)."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from berth.contract.gateway import ReplicaSpec
from berth.runtime.logs import fields
from proxy.gateway.registry import Registry
from proxy.gateway.replica import ServedReplica
from proxy.gateway.spec import ReplicaStats, Spec, Status

log = logging.getLogger(__name__)

# Requests of a replica that has ended go on for so long at most: its pod has gone, and with it most who ask.
ENDING_SECONDS: Final = 15.0

MakeReplica = Callable[[ReplicaSpec], ServedReplica]


class DataPlane:
    """Runs on the event loop alone."""

    def __init__(self, make_replica: MakeReplica) -> None:
        self._make_replica = make_replica
        # Seconds that have closed.
        self.seconds = 0
        self._registry = Registry()
        self._by_ticket: dict[bytes, ServedReplica] = {}
        self._by_uid: dict[str, ServedReplica] = {}
        # Replicas that are no longer listed, and when what is left of them is broken off.
        self._ending: dict[ServedReplica, float] = {}
        self.is_draining = False

    def __iter__(self) -> Iterator[ServedReplica]:
        """All that are listed, and those that have not come to their end."""
        return iter([*self._by_uid.values(), *self._ending])

    def find(self, ticket: bytes) -> ServedReplica | None:
        return self._by_ticket.get(ticket)

    def apply(self, spec: Spec) -> None:
        changes = self._registry.apply(spec.replicas)
        now = time.monotonic()
        for replica in changes.ended:
            self._end(self._by_uid.pop(replica.pod_uid), now)
        for replica in changes.new:
            served = self._by_uid[replica.pod_uid] = self._by_ticket[replica.ticket] = self._make_replica(
                replica
            )
            served.start()
        for replica in changes.changed:
            self._by_uid[replica.pod_uid].change(replica)
        for uid, served in self._by_uid.items():
            served.eject(spec.ejected.get(uid))
            served.set_draining(uid in spec.draining or self.is_draining)
            served.set_leaving(uid in spec.leaving)
            if uid in spec.drained:
                served.mark_drained()

    def _end(self, served: ServedReplica, now: float) -> None:
        """From this step on its ticket is not accepted."""
        del self._by_ticket[served.spec.ticket]
        served.set_draining(True)
        self._ending[served] = now + ENDING_SECONDS

    def tick(self, now: float) -> None:
        """Called every second: end what has waited too long."""
        for served in self:
            served.tick(now)
        self.seconds += 1
        for served, until in list(self._ending.items()):
            is_idle = served.is_idle
            if is_idle or now > until:
                del self._ending[served]
                served.close()
                if not is_idle:
                    log.warning(
                        "a replica that has ended was broken off", extra=fields(pod_uid=served.spec.pod_uid)
                    )

    def publish_stats(self, stats: Mapping[str, ReplicaStats]) -> None:
        """Tell the pods' proxies, every second. `stats`: of all processes."""
        for uid, served in self._by_uid.items():
            served.publish(stats.get(uid))

    def status(self) -> Status:
        served = self._by_uid.items()
        reasons = {uid: one.replica.not_ready() for uid, one in served}
        return Status(
            stats={uid: one.stats for uid, one in served},
            not_ready={uid: reason for uid, reason in reasons.items() if reason is not None},
            idle=frozenset(uid for uid, one in served if one.is_draining and one.is_idle),
            drain_requests=frozenset(uid for uid, one in served if one.asks_to_drain),
            leaving=frozenset(uid for uid, one in served if one.announces_leaving),
        )

    def in_triton(self) -> frozenset[str]:
        """The replicas that have requests in Triton now."""
        return frozenset(
            served.spec.pod_uid
            for served in self
            if served.replica.admissions.running or served.replica.questions.running
        )

    def uids_of(self, replicas: Collection[object]) -> frozenset[str]:
        return frozenset(served.spec.pod_uid for served in self if served.replica in replicas)

    def drain_all(self) -> None:
        """Take nothing new; requests that are under way go on to their end."""
        self.is_draining = True
        for served in self._by_uid.values():
            served.set_draining(True)

    @property
    def is_idle(self) -> bool:
        return all(served.is_idle for served in self)

    async def close(self) -> None:
        for served in self:
            served.close()
        for served in self:
            await served.closed()
