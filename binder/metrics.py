"""The binder's Prometheus metrics."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from binder.view import NodeView

_DECISION_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
_BIND_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)
RESULTS = ("scheduled", "unschedulable", "invalid", "error")


class BinderMetrics:
    """Registered in the given registry. A node's series go with the node."""

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
        self.waiting = Gauge("berth_binder_waiting_pods", "pods in the queue", registry=registry)
        self.assumed = Gauge(
            "berth_binder_assumed_pods", "pods decided and not yet seen bound", registry=registry
        )
        self.leader = Gauge("berth_binder_leader", "1 while this replica places pods", registry=registry)
        self._free = Gauge(
            "berth_binder_node_free_bytes", "free on the node's best GPU", ("node",), registry=registry
        )
        self._known: set[str] = set()

    def attempted(self, result: str) -> None:
        self._attempts.labels(result).inc()

    def set_nodes(self, views: Iterable[NodeView]) -> None:
        """Follow the nodes' free memory; a node with unknown facts has no series."""
        free = {view.facts.name: best for view in views if (best := _best_free(view)) is not None}
        for gone in self._known - free.keys():
            self._free.remove(gone)
        for name, value in free.items():
            self._free.labels(name).set(value)
        self._known = set(free)


def _best_free(view: NodeView) -> int | None:
    if view.facts.report is None:
        return None
    frees = [free for gpu in view.facts.report.gpus if (free := view.free_on(gpu)) is not None]
    return max(frees, default=None)
