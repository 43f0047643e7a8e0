"""What the proxy has counted (`exchange.traffic`) in Prometheus' form, when somebody asks.

prometheus_client's own counters would cost as much on the way as the rest of the proxy.
"""

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from proxy.exchange.traffic import BUCKETS, GRPC, REST, Figures


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
