"""What the activator tells Prometheus: what it holds, what has become of it, and how long a wake took, by phase.

placed    from the first request to a copy that is bound to a node
started   from there to one that serves
forwarded from there to the first request that it gets
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from berth.contract.scaling import ModelKey, Report
from proxy.activator.histogram import Histogram

PHASES: Final = ("placed", "started", "forwarded")
_MODEL: Final = ("namespace", "model")
_REASONS: Final = {
    "WAKES": "wakes",
    "NO_ROOM": "full",
    "QUEUE_FULL": "full",
    "NOT_SERVED": "hopeless",
    "TOO_LARGE": "too-large",
    "INVALID": "invalid",
}


class Held(Protocol):
    """`proxy.activator.model.HeldModel`, as far as it is counted here."""

    @property
    def key(self) -> ModelKey: ...
    @property
    def refusals(self) -> dict[str, int]:
        """By the names of the reasons."""
        ...


@dataclass(slots=True)
class _Wake:
    """One under way: what has been reached, and when."""

    phase: int
    since: float


@dataclass(slots=True)
class _Model:
    held: int = 0
    held_bytes: int = 0
    oldest_seconds: float = 0.0
    arrived: float = 0.0
    forwarded: float = 0.0
    wakes: int = 0


class Counts:
    """Of all models that are held; a model that is gone takes its figures along. Pure."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.models: dict[ModelKey, _Model] = defaultdict(_Model)
        self.phases = {phase: Histogram() for phase in PHASES}
        self._wakes: dict[ModelKey, _Wake] = {}

    @property
    def waking(self) -> list[ModelKey]:
        return list(self._wakes)

    def reported(self, report: Report) -> None:
        one = self.models[report.model]
        one.held, one.held_bytes, one.oldest_seconds = report.held, report.held_bytes, report.oldest_seconds
        one.arrived += report.arrived
        one.forwarded += report.forwarded

    def woken(self, model: ModelKey) -> None:
        self.models[model].wakes += 1
        self._wakes.setdefault(model, _Wake(0, self._clock()))

    def seen(self, model: ModelKey, *, copies: int, serves: bool, held: bool) -> None:
        """A model that wakes, as it is now. Nothing that is skipped is told: a copy that was there before the first
        request has no time to be placed. One that holds nobody any more without a copy was given up."""
        wake = self._wakes.get(model)
        if wake is None:
            return
        reached = (3 if not held else 2) if serves else (1 if copies else 0)
        if not held and not serves:
            del self._wakes[model]
            return
        if reached > wake.phase:
            now = self._clock()
            self.phases[PHASES[reached - 1]].observe(now - wake.since)
            wake.phase, wake.since = reached, now
        if reached == len(PHASES):
            del self._wakes[model]

    def forget(self, models: Iterable[ModelKey]) -> None:
        """All but these."""
        kept = set(models)
        for model in [one for one in self.models if one not in kept]:
            del self.models[model]
            self._wakes.pop(model, None)


class ActivatorCollector(Collector):
    """Renders the figures at each scrape."""

    def __init__(
        self,
        counts: Counts,
        held: Callable[[], Iterable[Held]],
        link: Callable[[], tuple[bool, int]],
        buffered: Mapping[str, Histogram],
    ) -> None:
        """`link`: whether a scaler is attached, and how often one has been. `buffered`: how long requests waited, by what
        became of them."""
        self._counts, self._held, self._link, self._buffered = counts, held, link, buffered

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield self._wake_seconds()
        yield self._buffered_seconds()
        attached, times = self._link()
        yield GaugeMetricFamily(
            "berth_activator_scaler_attached", "1 while a scaler tells what to hold", float(attached)
        )
        yield CounterMetricFamily(
            "berth_activator_scaler_streams", "streams from scalers that have begun", float(times)
        )

    def _gauges(self) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_MODEL)
            for model, one in self._counts.models.items():
                gauge.add_metric(model, float(value(one)))
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_MODEL)
            for model, one in self._counts.models.items():
                counter.add_metric(model, float(value(one)))
            yield counter
        refused = CounterMetricFamily(
            "berth_activator_refused_requests",
            "requests and connections that were turned away, by reason",
            labels=(*_MODEL, "reason"),
        )
        for held in self._held():
            by_reason: dict[str, int] = defaultdict(int)
            for name, count in held.refusals.items():
                by_reason[_REASONS.get(name, name)] += count
            for reason, count in sorted(by_reason.items()):
                refused.add_metric((*held.key, reason), float(count))
        yield refused

    def _buffered_seconds(self) -> Metric:
        seconds = HistogramMetricFamily(
            "berth_activator_buffered_seconds",
            "how long a request was buffered until it was forwarded, or abandoned: its client left or its time was over",
            labels=("result",),
        )
        for result, histogram in self._buffered.items():
            seconds.add_metric((result,), histogram.cumulative(), histogram.total)
        return seconds

    def _wake_seconds(self) -> Metric:
        seconds = HistogramMetricFamily(
            "berth_activator_wake_seconds",
            "how long a wake took: until a copy was placed, until it served, until it got the first request",
            labels=("phase",),
        )
        for phase, histogram in self._counts.phases.items():
            seconds.add_metric((phase,), histogram.cumulative(), histogram.total)
        return seconds


_GAUGES: Final[tuple[tuple[str, str, Callable[[_Model], float]], ...]] = (
    ("berth_activator_held_requests", "requests that wait for a copy", lambda one: one.held),
    ("berth_activator_held_bytes", "bytes of their bodies", lambda one: one.held_bytes),
    (
        "berth_activator_oldest_seconds",
        "how long the first of them has waited",
        lambda one: one.oldest_seconds,
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[_Model], float]], ...]] = (
    ("berth_activator_requests", "requests that have come, the refused ones too", lambda one: one.arrived),
    ("berth_activator_forwarded_requests", "requests that a copy has got", lambda one: one.forwarded),
    (
        "berth_activator_wakes",
        "times that a request had no copy and none waited before",
        lambda one: one.wakes,
    ),
)
