"""What the proxy counts: plain numbers on the way, Prometheus' form when somebody asks.

A request costs two additions and a search here; prometheus_client's own counters would cost as much
as the rest of the proxy.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

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


class ProxyCollector(Collector):
    """Renders the figures at each scrape. `protocol` is rest or grpc."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        traffic = ((REST, figures.rest), (GRPC, figures.grpc))
        requests = CounterMetricFamily(
            "berth_proxy_requests", "requests answered", labels=("protocol", "code")
        )
        seconds = HistogramMetricFamily(
            "berth_proxy_request_seconds",
            "from a request's arrival to its answer's end",
            labels=("protocol",),
        )
        moved = CounterMetricFamily(
            "berth_proxy_body_bytes", "bytes of bodies", labels=("protocol", "direction")
        )
        connections = GaugeMetricFamily(
            "berth_proxy_client_connections", "open connections of clients", labels=("protocol",)
        )
        for protocol, one in traffic:
            for code, count in sorted(one.codes.items()):
                requests.add_metric((protocol, code), count)
            seconds.add_metric((protocol,), _cumulative(one.buckets), one.seconds)
            moved.add_metric((protocol, "received"), one.received_bytes)
            moved.add_metric((protocol, "sent"), one.sent_bytes)
            connections.add_metric((protocol,), one.connections)
        yield from (requests, seconds, moved, connections)
        for name, text, value in (
            ("berth_proxy_running_requests", "requests inside Triton", figures.running),
            ("berth_proxy_waiting_requests", "requests in the queue", figures.waiting),
            ("berth_proxy_model_ready", "1 if Triton serves the model", figures.model_ready),
            # Knative's names, which dashboards and autoscalers know.
            (
                "queue_average_concurrent_requests",
                "average concurrency over the last second",
                figures.average_concurrency,
            ),
            (
                "queue_requests_per_second",
                "requests that arrived in the last second",
                figures.requests_per_second,
            ),
        ):
            yield GaugeMetricFamily(name, text, float(value))


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total, out = 0, []
    for bound, count in zip((*BUCKETS, float("inf")), buckets, strict=True):
        total += count
        out.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
    return out
