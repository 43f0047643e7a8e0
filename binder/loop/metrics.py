"""The binder's Prometheus metrics."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from binder.cache.quarantine import Quarantines
from binder.cache.state import ClusterState
from binder.cache.view import NodeView
from binder.loop.queue import SchedulingQueue
from binder.rules.registry import RULES

_DECISION_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
_BIND_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)
RESULTS = ("scheduled", "unschedulable", "invalid", "error", "broken")


class BinderMetrics:
    """Registered in the given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._attempts = Counter(
            "berth_binder_attempts", "tries to place a pod", ("result",), registry=registry
        )
        for result in RESULTS:
            self._attempts.labels(result)
        self.decision_seconds = Histogram(
            "berth_binder_decision_seconds", "one decision", buckets=_DECISION_BUCKETS, registry=registry
        )
        self.bind_seconds = Histogram(
            "berth_binder_bind_seconds",
            "one Binding, to its answer",
            buckets=_BIND_BUCKETS,
            registry=registry,
        )
        self.schedulable_seconds = Histogram(
            "berth_binder_schedulable_seconds",
            "work on one answer to the scaler, what may be placed",
            buckets=_DECISION_BUCKETS,
            registry=registry,
        )
        self.leader = Gauge("berth_binder_leader", "1 while this replica places pods", registry=registry)
        self._refusals = Counter(
            "berth_binder_refusals", "nodes that refused a pod at a try", ("reason",), registry=registry
        )
        for rule in RULES.rules:
            self._refusals.labels(rule.name)
        self._registry = registry

    def refused(self, counts: Mapping[str, int]) -> None:
        for rule, nodes in counts.items():
            self._refusals.labels(rule).inc(nodes)

    def attempted(self, result: str) -> None:
        self._attempts.labels(result).inc()

    def follow(self, queue: SchedulingQueue, state: ClusterState, quarantines: Quarantines) -> None:
        """Show the queue and the nodes as they are at each scrape."""
        self._registry.register(_Snapshot(queue, state, quarantines))


class _Snapshot(Collector):
    """What is read at each scrape, so that no series outlives its node."""

    def __init__(self, queue: SchedulingQueue, state: ClusterState, quarantines: Quarantines) -> None:
        self._queue, self._state, self._quarantines = queue, state, quarantines

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("berth_binder_waiting_pods", "pods in the queue", labels=("queue",))
        for name, count in self._queue.counts().items():
            waiting.add_metric((name,), count)
        yield waiting
        yield GaugeMetricFamily(
            "berth_binder_assumed_pods", "pods decided and not yet seen bound", self._state.assumed_count
        )
        yield GaugeMetricFamily(
            "berth_binder_stale_models",
            "pods that are gone and whose model may still be loaded",
            self._state.stale_model_count,
        )
        yield GaugeMetricFamily(
            "berth_binder_quarantined_templates",
            "pod templates whose files took a Triton down, and that are not placed",
            len(self._quarantines),
        )
        # A node with unknown facts has no series: unknown is not 0.
        free = GaugeMetricFamily(
            "berth_binder_node_free_bytes", "free on the node's best GPU", labels=("node",)
        )
        for view in self._state.views():
            if (best := _best_free(view)) is not None:
                free.add_metric((view.facts.name,), best)
        yield free


def _best_free(view: NodeView) -> int | None:
    if view.facts.report is None:
        return None
    frees = [free for gpu in view.facts.report.gpus if (free := view.free_on(gpu)) is not None]
    return max(frees, default=None)
