"""What the proxy has counted (`exchange.traffic`) in Prometheus' form, when somebody asks.

prometheus_client's own counters would cost as much on the way as the rest of the proxy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from proxy.exchange.traffic import BUCKETS, GRPC, REST, Figures


class ProxyCollector(Collector):
    """Renders one model's figures at each scrape."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from figures_metrics((), [((), self._figures())])


def figures_metrics(
    labels: Sequence[str], models: Iterable[tuple[Sequence[str], Figures]]
) -> Iterator[Metric]:
    """Of each model, under the values of these labels. `protocol` is rest or grpc."""
    found = list(models)
    yield from _by_protocol(labels, found)
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for values, figures in found:
            gauge.add_metric(values, float(value(figures)))
        yield gauge


_GAUGES: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("berth_proxy_running_requests", "requests inside Triton", lambda one: one.running),
    ("berth_proxy_waiting_requests", "requests in the queue", lambda one: one.waiting),
    ("berth_proxy_model_ready", "1 if Triton serves the model", lambda one: one.model_ready),
    # Knative's names, which dashboards and autoscalers know.
    (
        "queue_average_concurrent_requests",
        "average concurrency over the last second",
        lambda one: one.average_concurrency,
    ),
    (
        "queue_requests_per_second",
        "requests that arrived in the last second",
        lambda one: one.requests_per_second,
    ),
)


def _by_protocol(
    labels: Sequence[str], models: Iterable[tuple[Sequence[str], Figures]]
) -> tuple[Metric, ...]:
    requests = CounterMetricFamily(
        "berth_proxy_requests", "requests answered", labels=(*labels, "protocol", "code")
    )
    seconds = HistogramMetricFamily(
        "berth_proxy_request_seconds",
        "from a request's arrival to its answer's end",
        labels=(*labels, "protocol"),
    )
    moved = CounterMetricFamily(
        "berth_proxy_body_bytes", "bytes of bodies", labels=(*labels, "protocol", "direction")
    )
    connections = GaugeMetricFamily(
        "berth_proxy_client_connections", "open connections of clients", labels=(*labels, "protocol")
    )
    for values, figures in models:
        for protocol, one in ((REST, figures.rest), (GRPC, figures.grpc)):
            for code, count in sorted(one.codes.items()):
                requests.add_metric((*values, protocol, code), count)
            seconds.add_metric((*values, protocol), _cumulative(one.buckets), one.seconds)
            moved.add_metric((*values, protocol, "received"), one.received_bytes)
            moved.add_metric((*values, protocol, "sent"), one.sent_bytes)
            connections.add_metric((*values, protocol), one.connections)
    return requests, seconds, moved, connections


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total, out = 0, []
    for bound, count in zip((*BUCKETS, float("inf")), buckets, strict=True):
        total += count
        out.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
    return out
