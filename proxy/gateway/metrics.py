"""What the gateway shows to Prometheus: each replica's figures under its pod's own metric names, and its own."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from berth.contract.gateway import ReplicaSpec
from berth.runtime.admin import CachedPage
from berth.runtime.admin.prometheus import written_page
from proxy.gateway.control_plane import ControlPlane
from proxy.gateway.spec import ReplicaStats, Status
from proxy.metrics import GAUGES, TOTALS, Family
from proxy.request.traffic import Figures

LABELS = ("namespace", "pod", "model")
# Replicas of one part of a metric: less than a millisecond's work.
_REPLICAS: Final = 10

ByLabels = Sequence[tuple[Mapping[str, str], Figures]]


def figures_metrics(replicas: ByLabels) -> Iterator[Metric]:
    """Of each replica, under these labels.

    A metric comes in parts of a few replicas each, one behind the other: so nothing here takes long at once.
    """
    for family in (*TOTALS, *GAUGES):
        for at in range(0, len(replicas), _REPLICAS):
            yield _metric(family, replicas[at : at + _REPLICAS])


def _metric(family: Family, replicas: ByLabels) -> Metric:
    metric = Metric(family.name, family.help, family.type.value)
    for labels, figures in replicas:
        for sample in family.samples(figures):
            metric.add_sample(family.name + sample.suffix, {**labels, **sample.labels}, sample.value)
    return metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One moment of a gateway's: nothing in it changes any more. By pod uid: `stats`, `crashes`, `ejected`."""

    replicas: Sequence[ReplicaSpec]
    stats: Mapping[str, ReplicaStats]
    crashes: Mapping[str, int]
    ejected: frozenset[str]
    triton_crashes: int
    connections: int
    rejected: Mapping[str, int]


def take(control_plane: ControlPlane, statuses: Sequence[Status]) -> Snapshot:
    rejected = Counter[str]()
    for status in statuses:
        rejected.update(status.rejected)
    return Snapshot(
        replicas=tuple(control_plane.registry),
        stats=control_plane.stats(),
        crashes=dict(control_plane.outliers.deaths),
        ejected=control_plane.ejected,
        triton_crashes=control_plane.triton_crashes,
        connections=sum(status.connections for status in statuses),
        rejected=rejected,
    )


def metrics_page(
    control_plane: ControlPlane, statuses: Callable[[], Sequence[Status]]
) -> CachedPage[Snapshot]:
    """A series goes with its replica."""
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    PlatformCollector(registry=process)

    def metrics(snapshot: Snapshot) -> Iterator[Metric]:
        yield from snapshot_metrics(snapshot)
        yield from process.collect()

    return written_page(lambda: take(control_plane, statuses()), metrics)


def snapshot_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    yield from figures_metrics(
        [
            (dict(zip(LABELS, _labels(replica), strict=True)), snapshot.stats[replica.pod_uid].figures)
            for replica in snapshot.replicas
            if replica.pod_uid in snapshot.stats
        ]
    )
    yield from _crashes(snapshot)
    yield from _own(snapshot)


def _labels(replica: ReplicaSpec) -> tuple[str, str, str]:
    return replica.namespace, replica.pod, replica.model


def _crashes(snapshot: Snapshot) -> Iterator[Metric]:
    crashes = CounterMetricFamily(
        "berth_gateway_triton_crashes_with_requests",
        "crashes of Triton with requests of this replica in it",
        labels=LABELS,
    )
    ejected = GaugeMetricFamily(
        "berth_gateway_ejected", "1 while the replica's requests are kept from Triton for that", labels=LABELS
    )
    for replica in snapshot.replicas:
        crashes.add_metric(_labels(replica), snapshot.crashes.get(replica.pod_uid, 0))
        ejected.add_metric(_labels(replica), float(replica.pod_uid in snapshot.ejected))
    yield from (crashes, ejected)
    yield CounterMetricFamily(
        "berth_gateway_triton_crashes", "crashes of Triton", value=snapshot.triton_crashes
    )


def _own(snapshot: Snapshot) -> Iterator[Metric]:
    yield GaugeMetricFamily("berth_gateway_replicas", "replicas served", float(len(snapshot.replicas)))
    yield GaugeMetricFamily(
        "berth_gateway_connections", "connections of pods' proxies", float(snapshot.connections)
    )
    rejected = CounterMetricFamily(
        "berth_gateway_rejected_connections", "connections closed without an answer", labels=("reason",)
    )
    for reason, count in snapshot.rejected.items():
        rejected.add_metric((reason,), count)
    yield rejected
