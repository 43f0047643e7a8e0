"""What the proxy has counted (`exchange.traffic`) in Prometheus' form, when somebody asks.

prometheus_client's own counters would cost as much on the way as the rest of the proxy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from proxy.request.traffic import BUCKETS, GRPC, REST, Figures, Traffic


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
    """Of each model, under the values of these labels. `protocol` is rest or grpc.

    A metric comes in parts of a few models each, one behind the other: so nothing here takes long at once.
    """
    found = list(models)
    makers: list[_Make] = [*_BY_PROTOCOL, *(partial(_gauge, *gauge) for gauge in _GAUGES)]
    for make in makers:
        for at in range(0, len(found), _MODELS):
            yield make(labels, found[at : at + _MODELS])


# Of one part: less than a millisecond's work.
_MODELS = 10

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


_Models = Sequence[tuple[Sequence[str], Figures]]
_Make = Callable[[Sequence[str], _Models], Metric]


def _gauge(
    name: str, text: str, value: Callable[[Figures], float], labels: Sequence[str], models: _Models
) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for values, figures in models:
        gauge.add_metric(values, float(value(figures)))
    return gauge


def _requests(labels: Sequence[str], models: _Models) -> Metric:
    requests = CounterMetricFamily(
        "berth_proxy_requests", "requests answered", labels=(*labels, "protocol", "code")
    )
    for values, protocol, one in _by_protocol(models):
        for code, count in sorted(one.codes.items()):
            requests.add_metric((*values, protocol, code), count)
    return requests


def _seconds(labels: Sequence[str], models: _Models) -> Metric:
    seconds = HistogramMetricFamily(
        "berth_proxy_request_seconds",
        "from a request's arrival to its answer's end",
        labels=(*labels, "protocol"),
    )
    for values, protocol, one in _by_protocol(models):
        seconds.add_metric((*values, protocol), _cumulative(one.buckets), one.seconds)
    return seconds


def _moved(labels: Sequence[str], models: _Models) -> Metric:
    moved = CounterMetricFamily(
        "berth_proxy_body_bytes", "bytes of bodies", labels=(*labels, "protocol", "direction")
    )
    for values, protocol, one in _by_protocol(models):
        moved.add_metric((*values, protocol, "received"), one.received_bytes)
        moved.add_metric((*values, protocol, "sent"), one.sent_bytes)
    return moved


def _connections(labels: Sequence[str], models: _Models) -> Metric:
    connections = GaugeMetricFamily(
        "berth_proxy_client_connections", "open connections of clients", labels=(*labels, "protocol")
    )
    for values, protocol, one in _by_protocol(models):
        connections.add_metric((*values, protocol), one.connections)
    return connections


_BY_PROTOCOL: tuple[_Make, ...] = (_requests, _seconds, _moved, _connections)


def _by_protocol(models: _Models) -> Iterator[tuple[Sequence[str], str, Traffic]]:
    for values, figures in models:
        yield values, REST, figures.rest
        yield values, GRPC, figures.grpc


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total, out = 0, []
    for bound, count in zip((*BUCKETS, float("inf")), buckets, strict=True):
        total += count
        out.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
    return out
