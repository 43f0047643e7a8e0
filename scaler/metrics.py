"""The scaler's Prometheus metrics."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from berth.contract.scaling import ModelKey
from scaler.activation.control_server import ControlStats
from scaler.activation.sessions import Connected
from scaler.core.cold_starts import PHASES
from scaler.core.models_view import ColdStartView, ModelView

_SCRAPE_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.8)
_WRITE_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STEP_BUCKETS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
_COLD_START_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
SCRAPES: Final = ("ok", "failed")
WRITES: Final = ("scale", "status", "slice")
WRITE_RESULTS: Final = ("written", "failed", "refused", "gone")
_ALL: Final = "all"
_LABELS: Final = ("namespace", "deployment")


class Models(Protocol):
    """`scaler.core.scaler.Scaler`, as far as it is needed here."""

    def models(self) -> Sequence[ModelKey]: ...
    def view(self, model: ModelKey) -> ModelView | None: ...


class ControlServer(Protocol):
    """`scaler.activation.control_server.ControlServer`, as far as it is needed here."""

    stats: ControlStats

    def connected(self) -> Sequence[Connected]: ...


class ScalerMetrics:
    """Registered in the given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leader = Gauge("berth_scaler_leader", "1 while this replica scales", registry=registry)
        self.config_refused = Gauge(
            "berth_scaler_config_refused",
            "1 while the mounted ConfigMap is rejected and the last valid one holds",
            registry=registry,
        )
        self._scrapes = Counter(
            "berth_scaler_scrapes",
            "requests to gateways for the load of replicas",
            ("result",),
            registry=registry,
        )
        self._scrape_seconds = Histogram(
            "berth_scaler_scrape_seconds",
            "duration of one of these requests",
            buckets=_SCRAPE_BUCKETS,
            registry=registry,
        )
        self._rows = Counter(
            "berth_scaler_rejected_rows", "rows of a gateway's answer that are invalid", registry=registry
        )
        self._writes = Counter(
            "berth_scaler_writes", "writes to the API server", ("what", "result"), registry=registry
        )
        self._write_seconds = Histogram(
            "berth_scaler_write_seconds",
            "duration of one write",
            ("what",),
            buckets=_WRITE_BUCKETS,
            registry=registry,
        )
        self.decisions = Counter(
            "berth_scaler_decisions", "decisions of the number of replicas of a model", registry=registry
        )
        self.step_seconds = Histogram(
            "berth_scaler_step_seconds",
            "duration of one decision for every model",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._cold_start_seconds = Histogram(
            "berth_scaler_cold_start_seconds",
            "from the first request of a model at zero to the first that a replica accepts, in all and by phase",
            ("phase",),
            buckets=_COLD_START_BUCKETS,
            registry=registry,
        )
        for scrape in SCRAPES:
            self._scrapes.labels(scrape)
        for what in WRITES:
            self._write_seconds.labels(what)
            for result in WRITE_RESULTS:
                self._writes.labels(what, result)
        for phase in (*PHASES, _ALL):
            self._cold_start_seconds.labels(phase)
        self._registry = registry

    def scraped(self, result: str, seconds: float) -> None:
        self._scrapes.labels(result).inc()
        self._scrape_seconds.observe(seconds)

    def rejected(self, rows: int) -> None:
        self._rows.inc(rows)

    def wrote(self, what: str, result: str, seconds: float) -> None:
        self._writes.labels(what, result).inc()
        self._write_seconds.labels(what).observe(seconds)

    def cold_started(self, cold_start: ColdStartView) -> None:
        for phase, seconds in cold_start.phases:
            self._cold_start_seconds.labels(phase).observe(seconds)
        self._cold_start_seconds.labels(_ALL).observe(sum(seconds for _, seconds in cold_start.phases))

    def follow(
        self,
        models: Models,
        *,
        writes_waiting: Callable[[], int],
        binder_silent_seconds: Callable[[], float],
        control_server: ControlServer,
    ) -> None:
        """Show models and activators as they are at each scrape."""
        self._registry.register(_Models(models))
        self._registry.register(_Activators(control_server))
        for name, text, figure in (
            ("berth_scaler_writes_waiting", "objects with a write that is not done", writes_waiting),
            (
                "berth_scaler_binder_silent_seconds",
                "time since the binder last answered, while a request to it is open",
                binder_silent_seconds,
            ),
        ):
            Gauge(name, text, registry=self._registry).set_function(figure)


_Read = Callable[[ModelView], float | None]
_GAUGES: Final[tuple[tuple[str, str, _Read], ...]] = (
    ("recommended_replicas", "replicas by load alone, before any bound", lambda view: view.recommended),
    ("desired_replicas", "replicas within minScale and maxScale", lambda view: view.desired),
    ("requested_replicas", "spec.replicas of the Deployment", lambda view: view.replicas),
    ("ready_replicas", "replicas that are ready", lambda view: view.ready),
    (
        "capacity_limited_replicas",
        "desired replicas that cannot be scheduled",
        lambda view: view.capacity_limited,
    ),
    ("not_ready_pods", "pods that have a node and are not ready", lambda view: view.pods.not_ready),
    ("pending_pods", "pods that have no node", lambda view: view.pods.pending),
    ("unschedulable_pods", "pending pods that cannot be scheduled", lambda view: view.pods.unschedulable),
    ("gated_pods", "pending pods that scheduling gates block", lambda view: view.pods.gated),
    ("terminating_pods", "pods that are being deleted", lambda view: view.pods.terminating),
    ("in_panic", "1 while in panic mode: no replica is removed", lambda view: view.in_panic),
    ("buffered_requests", "requests buffered by activators", lambda view: view.buffered),
    (
        "target",
        "target of the metric per replica",
        lambda view: None if view.spec is None else view.spec.target,
    ),
    ("concurrency", "requests at once, over the stable window", lambda view: view.concurrency.stable),
    ("requests", "requests a second, over the stable window", lambda view: view.requests_per_second.stable),
    ("waiting_requests", "requests that wait, over the stable window", lambda view: view.waiting.stable),
    ("concurrency_panic", "requests at once, over the panic window", lambda view: view.concurrency.panic),
    (
        "requests_panic",
        "requests a second, over the panic window",
        lambda view: view.requests_per_second.panic,
    ),
    ("waiting_requests_panic", "requests that wait, over the panic window", lambda view: view.waiting.panic),
    (
        "invalid",
        "1 while its annotations are invalid and the last valid ones are in effect",
        lambda view: bool(view.invalid),
    ),
)


class _Models(Collector):
    """Collected at each scrape, so that no series outlives its model. An unknown value has no series."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        found = (self._models.view(model) for model in self._models.models())
        views = [view for view in found if view is not None]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"berth_scaler_{name}", text, labels=_LABELS)
            for view in views:
                if (value := read(view)) is not None:
                    gauge.add_metric(view.model, value)
            yield gauge


class _Activators(Collector):
    """The activators connected now, and totals over all that ever were."""

    def __init__(self, control_server: ControlServer) -> None:
        self._control_server = control_server

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        connected, stats = self._control_server.connected(), self._control_server.stats
        yield GaugeMetricFamily(
            "berth_scaler_activators", "activators that are connected", value=len(connected)
        )
        age = GaugeMetricFamily(
            "berth_scaler_activator_session_seconds",
            "time since an activator opened its control stream",
            labels=("activator",),
        )
        buffered = GaugeMetricFamily(
            "berth_scaler_activator_buffered_requests",
            "requests of all models buffered by one activator",
            labels=("activator",),
        )
        for one in connected:
            age.add_metric((one.name,), one.seconds)
            buffered.add_metric((one.name,), one.buffered)
        yield from (age, buffered)
        for name, text, value in (
            ("reports", "reports of activators about a model", stats.reports),
            (
                "rejected_reports",
                "reports about a model that is not assigned to the activator, or with invalid values",
                stats.rejected,
            ),
            (
                "throttled_reports",
                "messages of activators that exceeded the rate limit",
                stats.throttled,
            ),
        ):
            yield CounterMetricFamily(f"berth_scaler_{name}", text, value=value)
