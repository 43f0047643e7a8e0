"""What the control plane and a process that serves exchange. Each message holds the whole state, so that none depends on
an earlier one. Within one process the values are handed over; between processes `channel.py` encodes them. Pure.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from berth.contract.gateway import ReplicaSpec
from proxy.request.load import LoadReport
from proxy.request.traffic import Figures


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What a replica has done, in one process or in all of them."""

    figures: Figures
    load: LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """From the control plane: what is to be served. By pod uid, except `replicas`.

    `ejected`: why a replica's requests do not go to Triton. `draining`: replicas that take nothing new. `drained`: those
    of which nothing is left in Triton, in any process, or whose time for it is up. `leaving`: not ready, served all the
    same.
    """

    replicas: tuple[ReplicaSpec, ...] = ()
    ejected: dict[str, str] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """From a process that serves. `not_ready`: why a replica is not, of those that are not.

    `idle`: replicas that drain here and of which nothing is left here. `drain_requests`: replicas whose pod's proxy asks to
    drain. `leaving`: those whose pod's proxy says that it will end. `rejected`: connections closed without an answer, by
    reason.
    """

    stats: dict[str, ReplicaStats] = field(default_factory=dict)
    not_ready: dict[str, str] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    drain_requests: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    rejected: dict[str, int] = field(default_factory=dict)
    connections: int = 0

    @property
    def needs_action(self) -> tuple[frozenset[str], ...]:
        """What the control plane acts on at once when it changes."""
        return self.idle, self.drain_requests, self.leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class ToWorker:
    """`config`: a PlaneConfig, pickled, at the start. `limit_of`: the descriptors of this replica's limit come with it."""

    config: str | None = None
    limit_of: str | None = None
    spec: Spec | None = None
    stats: dict[str, ReplicaStats] | None = None
    drain_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FromWorker:
    """`crashes`: of Triton, each with the replicas that had requests in it. `failure`: why the worker cannot serve."""

    status: Status | None = None
    is_idle: bool = False
    crashes: tuple[frozenset[str], ...] = ()
    failure: str = ""


class Events:
    """What those who serve have noticed since the control plane looked last."""

    def __init__(self, wake: asyncio.Event, *, includes_readiness: bool = False) -> None:
        """`wake`: set at each event. `includes_readiness`: a change of a replica's readiness is one."""
        self._wake, self._includes_readiness = wake, includes_readiness
        self._crashes: list[frozenset[str]] = []

    def changed(self) -> None:
        """Something is to be done, or to be reported."""
        self._wake.set()

    def readiness_changed(self) -> None:
        if self._includes_readiness:
            self._wake.set()

    def triton_crashed(self, suspects: Iterable[str]) -> None:
        """Triton has crashed with requests of these replicas in it."""
        self._crashes.append(frozenset(suspects))
        self._wake.set()

    def take_crashes(self) -> list[frozenset[str]]:
        crashes, self._crashes = self._crashes, []
        return crashes


def aggregate(statuses: Iterable[Status], uid: str) -> ReplicaStats | None:
    """One replica's stats of all processes; None where no process has it."""
    found = [status.stats[uid] for status in statuses if uid in status.stats]
    if not found:
        return None
    total = Figures()
    for one in found:
        total.add(one.figures)
    loads = [one.load for one in found]
    load = LoadReport(
        sum(one.average_concurrency for one in loads),
        sum(one.requests for one in loads),
        max(one.uptime_seconds for one in loads),
        max(one.timestamp for one in loads),
        # What all have closed.
        min(one.second for one in loads),
        max(one.last_arrival for one in loads),
    )
    return ReplicaStats(total, load)
