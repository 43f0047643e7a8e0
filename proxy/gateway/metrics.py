"""What the gateway tells Prometheus: each model's figures under its pod's own metrics' names, and its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from berth.contract.gateway import ReplicaSpec
from berth.runtime.admin import CachedPage
from berth.runtime.admin.prometheus import written_page
from proxy.gateway.hub import Hub
from proxy.gateway.orders import Sum, Word
from proxy.metrics import figures_metrics

LABELS = ("namespace", "pod", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One moment of a gateway's: nothing in it changes any more. By pod uid: `sums`, `deaths`, `held`."""

    copies: Sequence[ReplicaSpec]
    sums: Mapping[str, Sum]
    deaths: Mapping[str, int]
    held: frozenset[str]
    triton_deaths: int
    connections: int
    turned_away: Mapping[str, int]


def take(hub: Hub, words: Sequence[Word]) -> Snapshot:
    return Snapshot(
        copies=tuple(hub.registry),
        sums=hub.sums(),
        deaths=dict(hub.suspects.deaths),
        held=hub.held,
        triton_deaths=hub.triton_deaths,
        connections=sum(word.connections for word in words),
        turned_away=_added(word.turned_away for word in words),
    )


def metrics_page(hub: Hub, words: Callable[[], list[Word]]) -> CachedPage[Snapshot]:
    """Series go with their copy."""
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    PlatformCollector(registry=process)

    def metrics(snapshot: Snapshot) -> Iterator[Metric]:
        yield from snapshot_metrics(snapshot)
        yield from process.collect()

    return written_page(lambda: take(hub, words()), metrics)


def snapshot_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    yield from figures_metrics(
        LABELS,
        [
            (_labels(copy), snapshot.sums[copy.pod_uid].figures)
            for copy in snapshot.copies
            if copy.pod_uid in snapshot.sums
        ],
    )
    yield from _deaths(snapshot)
    yield from _own(snapshot)


def _labels(copy: ReplicaSpec) -> tuple[str, str, str]:
    return copy.namespace, copy.pod, copy.model


def _deaths(snapshot: Snapshot) -> Iterator[Metric]:
    deaths = CounterMetricFamily(
        "berth_gateway_triton_deaths_with_requests",
        "how often Triton died with requests of this model in it",
        labels=LABELS,
    )
    held = GaugeMetricFamily(
        "berth_gateway_held", "1 while the model's requests are held back for that", labels=LABELS
    )
    for copy in snapshot.copies:
        deaths.add_metric(_labels(copy), snapshot.deaths.get(copy.pod_uid, 0))
        held.add_metric(_labels(copy), float(copy.pod_uid in snapshot.held))
    yield from (deaths, held)
    yield CounterMetricFamily(
        "berth_gateway_triton_deaths", "how often Triton died", value=snapshot.triton_deaths
    )


def _own(snapshot: Snapshot) -> Iterator[Metric]:
    yield GaugeMetricFamily("berth_gateway_copies", "models served", float(len(snapshot.copies)))
    yield GaugeMetricFamily("berth_gateway_connections", "connections of doors", float(snapshot.connections))
    away = CounterMetricFamily(
        "berth_gateway_turned_away", "connections that ended without a word", labels=("reason",)
    )
    for reason, count in snapshot.turned_away.items():
        away.add_metric((reason,), count)
    yield away


def _added(counts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total
