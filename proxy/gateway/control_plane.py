"""The gateway's control plane: what the agent and the pods' proxies want, and the spec that follows for the workers.

One pass (`step`) looks at everything and sends the whole spec; it is repeated, and triggered by events.
"""

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from berth.contract.gateway import ReplicaSpec
from berth.runtime.logs import fields
from proxy.gateway.registry import Ceilings, Registry
from proxy.gateway.spec import ReplicaStats, Spec, Status, aggregate
from proxy.request.outlier_detection import OutlierDetector

log = logging.getLogger(__name__)

# Messages that the agent has missed because it was away: the last of them.
_MOST_MESSAGES: Final = 64
# Each process that serves notices Triton's crash by itself.
_ONE_CRASH_SECONDS: Final = 10.0
# Of one pod's proxy, which may ask to drain as often as it likes, one line is logged in so long.
_DRAINED_LINE_SECONDS: Final = 60.0


class Workers(Protocol):
    """`proxy.gateway.worker_pool.Workers`, as far as it is needed here."""

    def apply(self, spec: Spec) -> None: ...

    def statuses(self) -> Sequence[Status]: ...


class ControlPlane:
    """`now`: seconds on one monotonic clock."""

    def __init__(self, workers: Workers, ceilings: Ceilings) -> None:
        self._workers, self._ceilings = workers, ceilings
        self.registry = Registry()
        self.outliers = OutlierDetector()
        # When a replica that drains counts as drained whatever is left of it: never, where only its pod's proxy asks.
        self._draining: dict[str, float] = {}
        self._drained: set[str] = set()
        # When it was last logged that a replica had drained because its pod's proxy asked.
        self._logged: dict[str, float] = {}
        # Replicas whose pod's proxy has said that it will end.
        self._leaving = frozenset[str]()
        self._spec: Spec | None = None
        # Of Triton's last crash: when, and whose requests were in it.
        self._crashed_at, self._in_triton = -math.inf, frozenset[str]()
        self._is_crash_reported = True
        self.triton_crashes = 0
        # For the agent.
        self.messages: deque[dict[str, object]] = deque(maxlen=_MOST_MESSAGES)

    # What is wanted.

    def list_replicas(self, replicas: Iterable[ReplicaSpec], *, is_new_agent: bool = False) -> None:
        """These are all that there are. `is_new_agent`: it is an agent's first message, and knows no drain that another
        has requested."""
        if is_new_agent:
            for uid in [uid for uid, until in self._draining.items() if not math.isinf(until)]:
                self._resume(uid)
        changes = self.registry.apply(self._capped(replica) for replica in replicas)
        ended = {replica.pod_uid for replica in changes.ended}
        for uid in ended:
            self._resume(uid)
            self._logged.pop(uid, None)
        self.outliers.keep({replica.pod_uid for replica in self.registry})
        if changes.new or changes.ended:
            log.info("replicas", extra=fields(all=len(self.registry), new=len(changes.new), ended=len(ended)))

    def _capped(self, replica: ReplicaSpec) -> ReplicaSpec:
        limits = self._ceilings.capped(replica.limits)
        return replica if limits == replica.limits else replace(replica, limits=limits)

    def drain(self, uid: str, seconds: float, now: float) -> None:
        """A replica that is not listed has nothing left."""
        if self.registry.get(uid) is None or uid in self._drained:
            self.messages.append({"drained": uid})
            return
        self._draining[uid] = min(self._draining.get(uid, math.inf), now + seconds)

    def _resume(self, uid: str) -> None:
        """Its drain is no longer wanted."""
        self._draining.pop(uid, None)
        self._drained.discard(uid)

    def triton_crashed(self, in_triton: Collection[str], now: float) -> None:
        """One of those that serve has noticed it, with requests of these replicas in it."""
        if now - self._crashed_at > _ONE_CRASH_SECONDS:
            self._crashed_at, self._in_triton = now, frozenset()
        self._in_triton |= frozenset(in_triton)
        self._is_crash_reported = False

    # What is done about it.

    def step(self, now: float, *, settle_seconds: float = 0.0) -> None:
        """`settle_seconds`: how long after Triton's crash all that serve have reported it."""
        statuses = self._workers.statuses()
        self._judge_crash(now - settle_seconds)
        leaving = frozenset[str]().union(*(status.leaving for status in statuses))
        self._leaving = frozenset(uid for uid in leaving if self.registry.get(uid) is not None)
        asked = frozenset[str]().union(*(status.drain_requests for status in statuses))
        for uid in asked:
            if self.registry.get(uid) is not None:
                self._draining.setdefault(uid, math.inf)
        # What a pod's proxy asks holds while it is there: its container may be started again, in the same pod.
        for uid in [uid for uid, until in self._draining.items() if math.isinf(until) and uid not in asked]:
            self._resume(uid)
        for uid, until in self._draining.items():
            if uid not in self._drained and (_is_idle(uid, statuses) or now > until):
                self._finish_drain(uid, now)
        self._apply_spec(now)

    def _finish_drain(self, uid: str, now: float) -> None:
        until = self._draining[uid]
        self._drained.add(uid)
        if not math.isinf(until):
            self.messages.append({"drained": uid})
        elif now - self._logged.get(uid, -math.inf) < _DRAINED_LINE_SECONDS:
            return
        else:
            self._logged[uid] = now
        log.log(
            logging.WARNING if now > until else logging.INFO,
            "out of time with requests in flight" if now > until else "drained",
            extra=fields(pod_uid=uid),
        )

    def _judge_crash(self, until: float) -> None:
        if self._is_crash_reported or self._crashed_at > until:
            return
        self._is_crash_reported = True
        self.triton_crashes += 1
        self.outliers.triton_died(self._in_triton, self._crashed_at)
        suspects = sorted(self._in_triton)
        self.messages.append({"tritonDied": {"suspects": suspects}})
        log.warning("Triton has crashed", extra=fields(requests_of=",".join(suspects) or "-"))

    def _apply_spec(self, now: float) -> None:
        ejections = {one.pod_uid: self.outliers.ejection(one.pod_uid, now) for one in self.registry}
        spec = Spec(
            replicas=tuple(self.registry),
            ejected={uid: one.reason for uid, one in ejections.items() if one is not None},
            draining=frozenset(self._draining),
            drained=frozenset(self._drained),
            leaving=self._leaving,
        )
        if self.registry.is_listed and spec != self._spec:
            for uid in spec.ejected.keys() - self.ejected:
                log.warning("ejected", extra=fields(pod_uid=uid, reason=spec.ejected[uid]))
            self._spec = spec
            self._workers.apply(spec)

    @property
    def is_draining(self) -> bool:
        """Whether something waits for a replica to be idle."""
        return len(self._draining) > len(self._drained)

    # What is seen.

    @property
    def ejected(self) -> frozenset[str]:
        """The replicas whose requests do not go to Triton for now."""
        return frozenset(() if self._spec is None else self._spec.ejected)

    def not_ready(self) -> str | None:
        return None if self.registry.is_listed else "the agent has not listed the replicas yet"

    def stats(self) -> dict[str, ReplicaStats]:
        """Of all processes, by pod uid."""
        statuses = self._workers.statuses()
        found = {one.pod_uid: aggregate(statuses, one.pod_uid) for one in self.registry}
        return {uid: one for uid, one in found.items() if one is not None}


def _is_idle(uid: str, statuses: Sequence[Status]) -> bool:
    """A status from before the drain does not count: it names as idle only replicas that drain."""
    return bool(statuses) and all(uid in status.idle for status in statuses)
