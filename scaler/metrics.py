"""The scaler's Prometheus metrics."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from berth.contract.scaling import ModelKey
from scaler.activation.attend import Attached, Figures
from scaler.core.models_view import ModelView, WakeView
from scaler.core.wakes import PHASES

_SCRAPE_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.8)
_WRITE_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STEP_BUCKETS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
_WAKE_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
SCRAPES: Final = ("ok", "failed")
WRITES: Final = ("scale", "status", "slice")
WRITE_RESULTS: Final = ("written", "failed", "refused", "gone")
_ALL: Final = "all"
_LABELS: Final = ("namespace", "deployment")


class Models(Protocol):
    """`scaler.core.tick.Scaler`, as far as it is needed here."""

    def models(self) -> Sequence[ModelKey]: ...
    def view(self, model: ModelKey) -> ModelView | None: ...


class Attendance(Protocol):
    """`scaler.activation.attend.Attendance`, as far as it is needed here."""

    figures: Figures

    def attached(self) -> Sequence[Attached]: ...


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
            "berth_scaler_scrapes", "questions to gateways", ("result",), registry=registry
        )
        self._scrape_seconds = Histogram(
            "berth_scaler_scrape_seconds", "one of them", buckets=_SCRAPE_BUCKETS, registry=registry
        )
        self._rows = Counter(
            "berth_scaler_rows_left_aside", "copies of which a gateway told what cannot be", registry=registry
        )
        self._writes = Counter(
            "berth_scaler_writes", "writes to the API server", ("what", "result"), registry=registry
        )
        self._write_seconds = Histogram(
            "berth_scaler_write_seconds",
            "one of them, to its end",
            ("what",),
            buckets=_WRITE_BUCKETS,
            registry=registry,
        )
        self.decisions = Counter(
            "berth_scaler_decisions", "decisions of how many copies a model wants", registry=registry
        )
        self.step_seconds = Histogram(
            "berth_scaler_step_seconds",
            "a decision for each model",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._wake_seconds = Histogram(
            "berth_scaler_wake_seconds",
            "from the first request of a model at zero to the first that a copy takes, and each phase of that",
            ("phase",),
            buckets=_WAKE_BUCKETS,
            registry=registry,
        )
        for scrape in SCRAPES:
            self._scrapes.labels(scrape)
        for what in WRITES:
            self._write_seconds.labels(what)
            for result in WRITE_RESULTS:
                self._writes.labels(what, result)
        for phase in (*PHASES, _ALL):
            self._wake_seconds.labels(phase)
        self._registry = registry

    def scraped(self, result: str, seconds: float) -> None:
        self._scrapes.labels(result).inc()
        self._scrape_seconds.observe(seconds)

    def left_aside(self, rows: int) -> None:
        self._rows.inc(rows)

    def wrote(self, what: str, result: str, seconds: float) -> None:
        self._writes.labels(what, result).inc()
        self._write_seconds.labels(what).observe(seconds)

    def woke(self, wake: WakeView) -> None:
        for phase, seconds in wake.phases:
            self._wake_seconds.labels(phase).observe(seconds)
        self._wake_seconds.labels(_ALL).observe(sum(seconds for _, seconds in wake.phases))

    def follow(
        self,
        models: Models,
        *,
        writes_waiting: Callable[[], int],
        binder_silent_seconds: Callable[[], float],
        attendance: Attendance,
    ) -> None:
        """Show models and activators as they are at each scrape."""
        self._registry.register(_Models(models))
        self._registry.register(_Activators(attendance))
        for name, text, figure in (
            ("berth_scaler_writes_waiting", "objects that are still to be written", writes_waiting),
            (
                "berth_scaler_binder_silent_seconds",
                "for how long no question to the binder has had an answer",
                binder_silent_seconds,
            ),
        ):
            Gauge(name, text, registry=self._registry).set_function(figure)


_Read = Callable[[ModelView], float | None]
_GAUGES: Final[tuple[tuple[str, str, _Read], ...]] = (
    ("desired_replicas", "replicas that the decider desires, before any bound", lambda view: view.desired),
    ("wanted_copies", "copies that are wanted, within bounds", lambda view: view.wanted),
    ("asked_copies", "copies that are asked for: spec.replicas", lambda view: view.replicas),
    ("ready_copies", "copies that are ready", lambda view: view.ready),
    ("clipped_copies", "of the wanted copies, those that are not asked for", lambda view: view.clipped),
    ("not_ready_pods", "pods that have a node and are not ready", lambda view: view.pods.not_ready),
    ("pending_pods", "pods that have no node, for whatever reason", lambda view: view.pods.pending),
    ("unschedulable_pods", "of those, the ones that have no place", lambda view: view.pods.unschedulable),
    ("gated_pods", "of those, the ones that scheduling gates hold back", lambda view: view.pods.gated),
    ("terminating_pods", "pods that are being deleted", lambda view: view.pods.terminating),
    ("in_panic", "1 while the panic window counts, and nothing goes", lambda view: view.in_panic),
    ("held_requests", "requests that activators hold", lambda view: view.held),
    (
        "target",
        "what a copy is to have of the metric",
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
        "1 while its annotations are refused, and the last good ones count",
        lambda view: bool(view.invalid),
    ),
)


class _Models(Collector):
    """What is read when somebody asks, so that no series outlives its model; what is unknown has none."""

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
    """Those that are attached now, and what has come of all that ever were."""

    def __init__(self, attendance: Attendance) -> None:
        self._attendance = attendance

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        attached, figures = self._attendance.attached(), self._attendance.figures
        yield GaugeMetricFamily(
            "berth_scaler_activators", "activators that are attached", value=len(attached)
        )
        age = GaugeMetricFamily(
            "berth_scaler_activator_attached_seconds",
            "for how long an activator has been attached",
            labels=("activator",),
        )
        held = GaugeMetricFamily(
            "berth_scaler_activator_held_requests",
            "requests that an activator holds, of all models",
            labels=("activator",),
        )
        for one in attached:
            age.add_metric((one.name,), one.seconds)
            held.add_metric((one.name,), one.held)
        yield from (age, held)
        for name, text, value in (
            ("reports", "what activators have told of a model", figures.reports),
            (
                "reports_left_aside",
                "of those, the ones of models that are not theirs, or of what cannot be",
                figures.left_aside,
            ),
            (
                "reports_slowed",
                "messages of activators that sent more than is read in a moment",
                figures.slowed,
            ),
        ):
            yield CounterMetricFamily(f"berth_scaler_{name}", text, value=value)
