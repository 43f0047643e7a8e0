"""What the gateway tells Prometheus: each model's figures under its pod's own metrics' names, and its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from berth.contract.gateway import ReplicaSpec
from berth.runtime.admin import CachedPage
from berth.runtime.admin.prometheus import written_page
from proxy.gateway.control_plane import ControlPlane
from proxy.gateway.spec import ReplicaStats, Status
from proxy.metrics import figures_metrics

LABELS = ("namespace", "pod", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One moment of a gateway's: nothing in it changes any more. By pod uid: `stats`, `deaths`, `held`."""

    copies: Sequence[ReplicaSpec]
    stats: Mapping[str, ReplicaStats]
    deaths: Mapping[str, int]
    held: frozenset[str]
    triton_crashes: int
    connections: int
    rejected: Mapping[str, int]


def take(control_plane: ControlPlane, statuses: Sequence[Status]) -> Snapshot:
    return Snapshot(
        copies=tuple(control_plane.registry),
        stats=control_plane.stats(),
        deaths=dict(control_plane.suspects.deaths),
        held=control_plane.held,
        triton_crashes=control_plane.triton_crashes,
        connections=sum(status.connections for status in statuses),
        rejected=_added(status.rejected for status in statuses),
    )


def metrics_page(control_plane: ControlPlane, statuses: Callable[[], list[Status]]) -> CachedPage[Snapshot]:
    """Series go with their copy."""
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    PlatformCollector(registry=process)

    def metrics(snapshot: Snapshot) -> Iterator[Metric]:
        yield from snapshot_metrics(snapshot)
        yield from process.collect()

    return written_page(lambda: take(control_plane, statuses()), metrics)


def snapshot_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    yield from figures_metrics(
        LABELS,
        [
            (_labels(copy), snapshot.stats[copy.pod_uid].figures)
            for copy in snapshot.copies
            if copy.pod_uid in snapshot.stats
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
        "berth_gateway_triton_deaths", "how often Triton died", value=snapshot.triton_crashes
    )


def _own(snapshot: Snapshot) -> Iterator[Metric]:
    yield GaugeMetricFamily("berth_gateway_copies", "models served", float(len(snapshot.copies)))
    yield GaugeMetricFamily("berth_gateway_connections", "connections of doors", float(snapshot.connections))
    away = CounterMetricFamily(
        "berth_gateway_turned_away", "connections that ended without a word", labels=("reason",)
    )
    for reason, count in snapshot.rejected.items():
        away.add_metric((reason,), count)
    yield away


def _added(counts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total
