"""The gateway's first process: what the agent and the doors want, what those that serve do about it.

One pass (`step`) looks at everything and tells everybody all of it; it is repeated, and woken by news.
"""

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final, Protocol

from berth.contract.gateway import ReplicaSpec
from berth.runtime.logs import fields
from proxy.gateway.registry import Ceilings, Registry
from proxy.gateway.spec import ReplicaStats, Spec, Status, aggregate
from proxy.request.outlier_detection import OutlierDetector

log = logging.getLogger(__name__)

# What the agent has not heard because it was away: the last of it.
_MOST_NEWS: Final = 64
# Each process that serves sees Triton's death for itself.
_ONE_DEATH_SECONDS: Final = 10.0
# Of one copy's door, which may wish to drain as often as it likes, one line is written in so long.
_DRAINED_LINE_SECONDS: Final = 60.0


class Workers(Protocol):
    """The processes that serve."""

    def apply(self, orders: Spec) -> None: ...

    def statuses(self) -> list[Status]: ...


class ControlPlane:
    """`now`: seconds on one monotonic clock."""

    def __init__(self, planes: Workers, ceilings: Ceilings) -> None:
        self._planes, self._ceilings = planes, ceilings
        self.registry = Registry()
        self.suspects = OutlierDetector()
        # When a copy that drains counts as drained whatever is left of it: never, where only its door asks.
        self._draining: dict[str, float] = {}
        self._drained: set[str] = set()
        # When it was last written that a copy had drained because its door changed it.
        self._written: dict[str, float] = {}
        # Those whose doors have said that they will go.
        self._leaving = frozenset[str]()
        self._orders: Spec | None = None
        # Of Triton's last death: when, and who was in it.
        self._died_at, self._inside = -math.inf, frozenset[str]()
        self._died_told = True
        # For the agent.
        self.triton_crashes = 0
        self.news: deque[dict[str, object]] = deque(maxlen=_MOST_NEWS)

    # What is wanted.

    def take_copies(self, copies: Iterable[ReplicaSpec], *, anew: bool = False) -> None:
        """These are all that there are. `anew`: it is an agent's first message, which knows nothing of another's wishes."""
        if anew:
            for uid in [uid for uid, until in self._draining.items() if not math.isinf(until)]:
                self._serve_on(uid)
        changes = self.registry.apply(self._clipped(copy) for copy in copies)
        gone = {copy.pod_uid for copy in changes.ended}
        for uid in gone:
            self._serve_on(uid)
            self._written.pop(uid, None)
        self.suspects.keep({copy.pod_uid for copy in self.registry})
        if changes.new or changes.ended:
            log.info("copies", extra=fields(all=len(self.registry), new=len(changes.new), ended=len(gone)))

    def _clipped(self, copy: ReplicaSpec) -> ReplicaSpec:
        limits = self._ceilings.clip(copy.limits)
        return copy if limits == copy.limits else replace(copy, limits=limits)

    def drain(self, uid: str, seconds: float, now: float) -> None:
        """Of a copy that there is not, nothing is left."""
        if self.registry.get(uid) is None or uid in self._drained:
            self.news.append({"drained": uid})
            return
        self._draining[uid] = min(self._draining.get(uid, math.inf), now + seconds)

    def _serve_on(self, uid: str) -> None:
        """Nobody drain_requests any more that it drain."""
        self._draining.pop(uid, None)
        self._drained.discard(uid)

    def triton_crashed(self, inside: Collection[str], now: float) -> None:
        """One of those that serve has seen it, with requests of these in it."""
        if now - self._died_at > _ONE_DEATH_SECONDS:
            self._died_at, self._inside = now, frozenset()
        self._inside |= frozenset(inside)
        self._died_told = False

    # What is done about it.

    def step(self, now: float, *, settle_seconds: float = 0.0) -> None:
        """`settle_seconds`: how long after Triton's death all that serve will have told."""
        statuses = self._planes.statuses()
        self._judge_death(now - settle_seconds)
        leaving = frozenset[str]().union(*(status.leaving for status in statuses))
        self._leaving = frozenset(uid for uid in leaving if self.registry.get(uid) is not None)
        drain_requests = frozenset[str]().union(*(status.drain_requests for status in statuses))
        for uid in drain_requests:
            if self.registry.get(uid) is not None:
                self._draining.setdefault(uid, math.inf)
        # A door's wish holds while it is there: its container may be started anew, in the same pod.
        for uid in [
            uid for uid, until in self._draining.items() if math.isinf(until) and uid not in drain_requests
        ]:
            self._serve_on(uid)
        for uid, until in self._draining.items():
            if uid not in self._drained and (self._is_idle(uid, statuses) or now > until):
                self._is_drained(uid, now)
        self._give_orders(now)

    def _is_idle(self, uid: str, statuses: list[Status]) -> bool:
        """What a word said before it was told to drain does not count: it says idle only of those that drain."""
        return bool(statuses) and all(uid in status.idle for status in statuses)

    def _is_drained(self, uid: str, now: float) -> None:
        until = self._draining[uid]
        self._drained.add(uid)
        if not math.isinf(until):
            self.news.append({"drained": uid})
        elif now - self._written.get(uid, -math.inf) < _DRAINED_LINE_SECONDS:
            return
        else:
            self._written[uid] = now
        log.log(
            logging.WARNING if now > until else logging.INFO,
            "out of time with requests in flight" if now > until else "drained",
            extra=fields(pod_uid=uid),
        )

    def _judge_death(self, until: float) -> None:
        if self._died_told or self._died_at > until:
            return
        self._died_told = True
        self.triton_crashes += 1
        self.suspects.triton_died(self._inside, self._died_at)
        self.news.append({"tritonDied": {"suspects": sorted(self._inside)}})
        log.warning("Triton has died", extra=fields(requests_of=",".join(sorted(self._inside)) or "-"))

    def _give_orders(self, now: float) -> None:
        held = {copy.pod_uid: self.suspects.ejection(copy.pod_uid, now) for copy in self.registry}
        orders = Spec(
            copies=tuple(self.registry),
            held={uid: hold.reason for uid, hold in held.items() if hold is not None},
            draining=frozenset(self._draining),
            drained=frozenset(self._drained),
            leaving=self._leaving,
        )
        if self.registry.is_told and orders != self._orders:
            for uid in orders.held.keys() - (self._orders.held.keys() if self._orders else ()):
                log.warning("held back", extra=fields(pod_uid=uid, reason=orders.held[uid]))
            self._orders = orders
            self._planes.apply(orders)

    @property
    def is_draining(self) -> bool:
        """Whether somebody waits for a copy to be idle."""
        return len(self._draining) > len(self._drained)

    # What is seen.

    @property
    def held(self) -> frozenset[str]:
        """The copies whose requests do not go to Triton for now."""
        return frozenset(() if self._orders is None else self._orders.held)

    def not_ready(self) -> str | None:
        return None if self.registry.is_told else "the agent has not told yet which models there are"

    def stats(self) -> dict[str, ReplicaStats]:
        """Of all processes, by pod uid."""
        statuses = self._planes.statuses()
        found = {copy.pod_uid: aggregate(statuses, copy.pod_uid) for copy in self.registry}
        return {uid: one for uid, one in found.items() if one is not None}
