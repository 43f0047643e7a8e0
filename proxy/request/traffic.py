"""What is counted of a replica: plain numbers, of which a request costs two additions and a search. Pure."""

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import Any

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
REST, GRPC = "rest", "grpc"


@dataclass(slots=True)
class Traffic:
    """Counts of one protocol since the start. `codes`: requests by HTTP status or gRPC status' name."""

    codes: dict[str, int] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    seconds: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    connections: int = 0

    def answered(self, code: str, seconds: float) -> None:
        self.codes[code] = self.codes.get(code, 0) + 1
        self.buckets[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds

    def add(self, other: "Traffic") -> None:
        for code, count in other.codes.items():
            self.codes[code] = self.codes.get(code, 0) + count
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        self.seconds += other.seconds
        self.received_bytes += other.received_bytes
        self.sent_bytes += other.sent_bytes
        self.connections += other.connections


@dataclass(slots=True)
class Figures:
    """One moment's figures of one process, or the sum of several."""

    rest: Traffic = field(default_factory=Traffic)
    grpc: Traffic = field(default_factory=Traffic)
    running: int = 0
    waiting: int = 0
    average_concurrency: float = 0.0
    requests_per_second: float = 0.0
    # Connections with a request or an undelivered answer.
    busy_connections: int = 0
    model_ready: bool = True

    def add(self, other: "Figures") -> None:
        self.rest.add(other.rest)
        self.grpc.add(other.grpc)
        self.running += other.running
        self.waiting += other.waiting
        self.average_concurrency += other.average_concurrency
        self.requests_per_second += other.requests_per_second
        self.busy_connections += other.busy_connections
        self.model_ready = self.model_ready and other.model_ready

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Figures":
        traffic = {name: Traffic(**data[name]) for name in (REST, GRPC)}
        return cls(**{**data, **traffic})
