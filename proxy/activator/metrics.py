"""The activator's metrics: what it buffers, what became of the requests, and how long a cold start took, by phase.

placed    from the first request to a replica that is bound to a node
started   from there to one that serves
forwarded from there to the first request that it gets
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from berth.contract.activation import Report
from berth.contract.scaling import ModelKey
from proxy.activator.histogram import Histogram

PHASES: Final = ("placed", "started", "forwarded")
_MODEL: Final = ("namespace", "model")
_REASONS: Final = {
    "COLD_STARTS": "cold-starts",
    "NO_ROOM": "full",
    "QUEUE_FULL": "full",
    "NOT_SERVED": "unavailable",
    "TOO_LARGE": "too-large",
    "INVALID": "invalid",
}


class Refusals(Protocol):
    """`proxy.activator.model.BufferedModel`, as far as it is counted here."""

    @property
    def key(self) -> ModelKey: ...
    @property
    def refusals(self) -> Mapping[str, int]:
        """By the names of the reasons."""
        ...


class Connection(NamedTuple):
    """Of the control stream: whether one is open, and how many have been."""

    is_connected: bool
    streams: int


@dataclass(slots=True)
class _ColdStart:
    """One under way: which phase it has reached, and when."""

    phase: int
    since: float


@dataclass(slots=True)
class _ModelStats:
    buffered: int = 0
    buffered_bytes: int = 0
    oldest_seconds: float = 0.0
    arrived: float = 0.0
    forwarded: float = 0.0
    cold_starts: int = 0


class ActivatorStats:
    """Of all models that are assigned; a model that is removed takes its figures along. Pure."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.models: dict[ModelKey, _ModelStats] = defaultdict(_ModelStats)
        self.phases = {phase: Histogram() for phase in PHASES}
        self._cold_starts: dict[ModelKey, _ColdStart] = {}

    @property
    def cold_starting(self) -> list[ModelKey]:
        return list(self._cold_starts)

    def reported(self, report: Report) -> None:
        one = self.models[report.model]
        one.buffered, one.buffered_bytes = report.buffered, report.buffered_bytes
        one.oldest_seconds = report.oldest_seconds
        one.arrived += report.arrived
        one.forwarded += report.forwarded

    def cold_start_began(self, model: ModelKey) -> None:
        self.models[model].cold_starts += 1
        self._cold_starts.setdefault(model, _ColdStart(0, self._clock()))

    def observe(self, model: ModelKey, *, replicas: int, serves: bool, buffers: bool) -> None:
        """A model in its cold start, as it is now. A phase that is skipped is not counted: a replica that was there before
        the first request took no time to be placed. Without a request and without a replica the cold start was given up."""
        cold_start = self._cold_starts.get(model)
        if cold_start is None:
            return
        if not buffers and not serves:
            del self._cold_starts[model]
            return
        reached = (2 if buffers else 3) if serves else (1 if replicas else 0)
        if reached > cold_start.phase:
            now = self._clock()
            self.phases[PHASES[reached - 1]].observe(now - cold_start.since)
            cold_start.phase, cold_start.since = reached, now
        if reached == len(PHASES):
            del self._cold_starts[model]

    def keep(self, models: Iterable[ModelKey]) -> None:
        """Forget all but these."""
        kept = set(models)
        for model in [one for one in self.models if one not in kept]:
            del self.models[model]
            self._cold_starts.pop(model, None)


class ActivatorCollector(Collector):
    """Renders the figures at each scrape."""

    def __init__(
        self,
        stats: ActivatorStats,
        refusals: Callable[[], Iterable[Refusals]],
        connection: Callable[[], Connection],
        buffered_seconds: Mapping[str, Histogram],
    ) -> None:
        """`buffered_seconds`: how long requests waited, by what became of them."""
        self._stats, self._refusals, self._connection = stats, refusals, connection
        self._buffered_seconds = buffered_seconds

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield self._refused()
        yield _histogram(
            "berth_activator_cold_start_seconds",
            "how long a cold start took: until a replica was placed, until it served, until it got the first request",
            "phase",
            self._stats.phases,
        )
        yield _histogram(
            "berth_activator_buffered_seconds",
            "how long a request was buffered until it was forwarded, or abandoned: its client left or it timed out",
            "result",
            self._buffered_seconds,
        )
        connection = self._connection()
        yield GaugeMetricFamily(
            "berth_activator_scaler_connected",
            "1 while the control stream to a scaler is open",
            float(connection.is_connected),
        )
        yield CounterMetricFamily(
            "berth_activator_scaler_streams", "control streams that were opened", float(connection.streams)
        )

    def _gauges(self) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_MODEL)
            for model, one in self._stats.models.items():
                gauge.add_metric(model, float(value(one)))
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_MODEL)
            for model, one in self._stats.models.items():
                counter.add_metric(model, float(value(one)))
            yield counter

    def _refused(self) -> Metric:
        refused = CounterMetricFamily(
            "berth_activator_refused_requests",
            "requests and connections that were rejected, by reason",
            labels=(*_MODEL, "reason"),
        )
        for model in self._refusals():
            by_reason: dict[str, int] = defaultdict(int)
            for name, count in model.refusals.items():
                by_reason[_REASONS.get(name, name)] += count
            for reason, count in sorted(by_reason.items()):
                refused.add_metric((*model.key, reason), float(count))
        return refused


def _histogram(name: str, text: str, label: str, histograms: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=(label,))
    for value, histogram in histograms.items():
        family.add_metric((value,), histogram.cumulative(), histogram.total)
    return family


_GAUGES: Final[tuple[tuple[str, str, Callable[[_ModelStats], float]], ...]] = (
    (
        "berth_activator_buffered_requests",
        "requests that are buffered until a replica can take them",
        lambda one: one.buffered,
    ),
    ("berth_activator_buffered_bytes", "bytes of their bodies", lambda one: one.buffered_bytes),
    (
        "berth_activator_oldest_buffered_seconds",
        "how long the first of them has waited",
        lambda one: one.oldest_seconds,
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[_ModelStats], float]], ...]] = (
    ("berth_activator_requests", "requests that arrived, rejected ones included", lambda one: one.arrived),
    (
        "berth_activator_forwarded_requests",
        "requests that were forwarded to a replica",
        lambda one: one.forwarded,
    ),
    (
        "berth_activator_cold_starts",
        "times that a request found no ready replica and no other request waited",
        lambda one: one.cold_starts,
    ),
)
