"""The metrics of a replica's figures (`proxy.request.traffic`): names, help and samples. Pure, and light: the sidecar
writes them itself, because prometheus_client takes more memory than all of the sidecar.

Made at each scrape; prometheus_client's own counters would cost each request as much as the rest of the proxy.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from proxy.request.traffic import BUCKETS, GRPC, REST, Figures, Traffic


class MetricType(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Sample(NamedTuple):
    """`suffix`: behind the family's name."""

    suffix: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """`name`: without a counter's `_total`."""

    name: str
    help: str
    type: MetricType
    samples: Callable[[Figures], Iterator[Sample]]


def _by_protocol(figures: Figures) -> Iterator[tuple[str, Traffic]]:
    yield REST, figures.rest
    yield GRPC, figures.grpc


def _requests(figures: Figures) -> Iterator[Sample]:
    for protocol, traffic in _by_protocol(figures):
        for code, count in sorted(traffic.codes.items()):
            yield Sample("_total", {"protocol": protocol, "code": code}, count)


def _seconds(figures: Figures) -> Iterator[Sample]:
    for protocol, traffic in _by_protocol(figures):
        total = 0
        for bound, count in zip((*map(float, BUCKETS), "+Inf"), traffic.buckets, strict=True):
            total += count
            yield Sample("_bucket", {"protocol": protocol, "le": str(bound)}, total)
        yield Sample("_count", {"protocol": protocol}, total)
        yield Sample("_sum", {"protocol": protocol}, traffic.seconds)


def _body_bytes(figures: Figures) -> Iterator[Sample]:
    for protocol, traffic in _by_protocol(figures):
        yield Sample("_total", {"protocol": protocol, "direction": "received"}, traffic.received_bytes)
        yield Sample("_total", {"protocol": protocol, "direction": "sent"}, traffic.sent_bytes)


def _connections(figures: Figures) -> Iterator[Sample]:
    for protocol, traffic in _by_protocol(figures):
        yield Sample("", {"protocol": protocol}, traffic.connections)


def _gauge(name: str, help: str, value: Callable[[Figures], float]) -> Family:
    def samples(figures: Figures) -> Iterator[Sample]:
        yield Sample("", {}, float(value(figures)))

    return Family(name, help, MetricType.GAUGE, samples)


MODEL_READY: Final = _gauge(
    "berth_proxy_model_ready", "1 if Triton serves the model", lambda one: one.model_ready
)
# What has been counted since the start.
TOTALS: Final = (
    Family("berth_proxy_requests", "requests answered", MetricType.COUNTER, _requests),
    Family(
        "berth_proxy_request_seconds",
        "from a request's arrival to its answer's end",
        MetricType.HISTOGRAM,
        _seconds,
    ),
    Family("berth_proxy_body_bytes", "bytes of bodies", MetricType.COUNTER, _body_bytes),
)
# What is true of one moment.
GAUGES: Final = (
    Family("berth_proxy_client_connections", "open connections of clients", MetricType.GAUGE, _connections),
    _gauge("berth_proxy_running_requests", "requests inside Triton", lambda one: one.running),
    _gauge("berth_proxy_waiting_requests", "requests in the queue", lambda one: one.waiting),
    MODEL_READY,
    # Knative's names, which dashboards and autoscalers know.
    _gauge(
        "queue_average_concurrent_requests",
        "average concurrency over the last second",
        lambda one: one.average_concurrency,
    ),
    _gauge(
        "queue_requests_per_second",
        "requests that arrived in the last second",
        lambda one: one.requests_per_second,
    ),
)
