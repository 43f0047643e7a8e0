"""What the gateway's first process and one that serves tell each other: always all of it, so that nothing hangs
on what was said before. Where both are one process it is handed over; else it goes as JSON. Pure.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from berth.contract.gateway import ReplicaSpec
from proxy.request.load import LoadReport
from proxy.request.traffic import Figures


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What a copy has done in all processes together."""

    figures: Figures
    load: LoadReport

    def to_json(self) -> dict[str, Any]:
        return {"figures": self.figures.to_json(), "load": asdict(self.load)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ReplicaStats":
        return cls(Figures.from_json(data["figures"]), LoadReport(**data["load"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """To one that serves. By pod uid, but for `copies`.

    `held`: why a copy is kept from Triton. `draining`: to take nothing new. `drained`: of which nothing is left
    in Triton, in any process, or whose time for it is up. `leaving`: not ready, and served all the same.
    """

    copies: tuple[ReplicaSpec, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        return {
            "copies": [copy.to_json() for copy in self.copies],
            "held": dict(self.held),
            "draining": sorted(self.draining),
            "drained": sorted(self.drained),
            "leaving": sorted(self.leaving),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Spec":
        return cls(
            copies=tuple(ReplicaSpec.from_json(entry) for entry in data["copies"]),
            held=dict(data["held"]),
            draining=frozenset(data["draining"]),
            drained=frozenset(data["drained"]),
            leaving=frozenset(data["leaving"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """From one that serves. `idle`: the copies that drain here and of which nothing is left here.

    `drain_requests`: the copies whose doors have asked to drain. `leaving`: those whose doors will. `rejected`: connections that went without a word.
    """

    stats: Mapping[str, ReplicaStats] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    drain_requests: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    rejected: Mapping[str, int] = field(default_factory=dict)
    connections: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "stats": {uid: one.to_json() for uid, one in self.stats.items()},
            "idle": sorted(self.idle),
            "drain_requests": sorted(self.drain_requests),
            "leaving": sorted(self.leaving),
            "rejected": dict(self.rejected),
            "connections": self.connections,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Status":
        return cls(
            stats={uid: ReplicaStats.from_json(one) for uid, one in data["stats"].items()},
            idle=frozenset(data["idle"]),
            drain_requests=frozenset(data["drain_requests"]),
            leaving=frozenset(data["leaving"]),
            rejected=dict(data["rejected"]),
            connections=data["connections"],
        )


def aggregate(statuses: list[Status], uid: str) -> ReplicaStats | None:
    """One copy's stats of all processes; None where no process has it."""
    stats = [status.stats[uid] for status in statuses if uid in status.stats]
    if not stats:
        return None
    total = Figures()
    for one in stats:
        total.add(one.figures)
    loads = [one.load for one in stats]
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
