"""What the gateway tells Prometheus: each model's figures under its pod's own metrics' names, and its own."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from proxy.gateway.hub import Hub
from proxy.gateway.orders import Word
from proxy.metrics import figures_metrics

LABELS = ("namespace", "pod", "model")


class GatewayCollector(Collector):
    """Renders everything at each scrape: series go with their copy."""

    def __init__(self, hub: Hub, words: Callable[[], list[Word]]) -> None:
        self._hub, self._words = hub, words

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        sums = self._hub.sums()
        copies = [copy for copy in self._hub.registry if copy.pod_uid in sums]
        yield from figures_metrics(
            LABELS,
            [((copy.namespace, copy.pod, copy.model), sums[copy.pod_uid].figures) for copy in copies],
        )
        yield from self._deaths()
        yield from self._own()

    def _deaths(self) -> Iterator[Metric]:
        deaths = CounterMetricFamily(
            "berth_gateway_triton_deaths_with_requests",
            "how often Triton died with requests of this model in it",
            labels=LABELS,
        )
        held = GaugeMetricFamily(
            "berth_gateway_held", "1 while the model's requests are held back for that", labels=LABELS
        )
        for copy in self._hub.registry:
            labels = (copy.namespace, copy.pod, copy.model)
            deaths.add_metric(labels, self._hub.suspects.deaths.get(copy.pod_uid, 0))
            held.add_metric(labels, float(copy.pod_uid in self._hub.held))
        yield from (deaths, held)
        yield CounterMetricFamily(
            "berth_gateway_triton_deaths", "how often Triton died", value=self._hub.triton_deaths
        )

    def _own(self) -> Iterator[Metric]:
        words = self._words()
        yield GaugeMetricFamily("berth_gateway_copies", "models served", float(len(self._hub.registry)))
        yield GaugeMetricFamily(
            "berth_gateway_connections",
            "connections of doors",
            float(sum(word.connections for word in words)),
        )
        away = CounterMetricFamily(
            "berth_gateway_turned_away", "connections that ended without a word", labels=("reason",)
        )
        for reason, count in _added(word.turned_away for word in words).items():
            away.add_metric((reason,), count)
        yield away


def _added(counts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total
