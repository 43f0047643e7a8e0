"""A model's load over its windows: concurrency and requests, over the stable and the panic window.

Source: knative.dev/serving v0.49.1, pkg/autoscaler/metrics/{collector,stats_scraper,sample_size}.go.
"""

from typing import Final, NamedTuple

from scaler.decision.annotations import RPS
from scaler.decision.spec import Spec
from scaler.decision.windows import LinearWindow, WeightedWindow
from scaler.go import SECOND_NS, ceil

# 1.96² × 100 / 5²: a mean within 5 with a confidence of 95 % where the variance is 100 (sample_size.go).
_SAMPLE_OF_MANY: Final = 1.96 * 1.96 * 100.0 / (5.0 * 5.0)


class Stat(NamedTuple):
    """Of one second: the average number of requests at once and how many came. The proxied ones have been counted by
    who passed them on."""

    concurrency: float = 0.0
    proxied_concurrency: float = 0.0
    requests: float = 0.0
    proxied_requests: float = 0.0


def sample_size(replicas: int) -> int:
    """Of so many replicas, how many are enough to know the load of all."""
    if replicas <= 3:
        return max(replicas, 0)
    return int(ceil(replicas * _SAMPLE_OF_MANY / (replicas + _SAMPLE_OF_MANY - 1)))


def extrapolated(total: Stat, sample: int, replicas: int) -> Stat:
    """The load of all replicas, from what some have, which are not none, all of those together."""
    concurrency, proxied_concurrency, requests, proxied_requests = total
    return Stat(  # one by one: this is done for every model each second
        concurrency / sample * replicas,
        proxied_concurrency / sample * replicas,
        requests / sample * replicas,
        proxied_requests / sample * replicas,
    )


class Averages(NamedTuple):
    """Of the metric that counts, over both windows."""

    stable: float
    panic: float


class _Metric:
    """One figure over both windows."""

    __slots__ = ("panic", "stable")

    def __init__(self, spec: Spec) -> None:
        kind = WeightedWindow if spec.weighted else LinearWindow
        self.stable: LinearWindow = kind(spec.stable_window_seconds)
        self.panic: LinearWindow = kind(spec.panic_window_seconds)

    def record(self, second: int, value: float) -> None:
        self.stable.record(second, value)
        self.panic.record(second, value)

    def averages(self, second: int) -> Averages:
        stable = self.stable.average(second)
        return Averages(
            stable, stable if self.panic.reads_as(self.stable, second) else self.panic.average(second)
        )

    def resize(self, spec: Spec, second: int) -> None:
        self.stable.resize(spec.stable_window_seconds, second)
        self.panic.resize(spec.panic_window_seconds, second)


class Load:
    """What has been recorded of one model."""

    __slots__ = ("_concurrency", "_requests", "_spec")

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._concurrency = _Metric(spec)
        self._requests = _Metric(spec)

    def update(self, spec: Spec, now_ns: int) -> None:
        """Another length of the windows. How they weigh stays as it was in the beginning."""
        self._spec = spec
        self._concurrency.resize(spec, now_ns // SECOND_NS)
        self._requests.resize(spec, now_ns // SECOND_NS)

    def record(self, stat: Stat, now_ns: int) -> None:
        second = now_ns // SECOND_NS
        self._concurrency.record(second, stat.concurrency - stat.proxied_concurrency)
        self._requests.record(second, stat.requests - stat.proxied_requests)

    def averages(self, now_ns: int) -> Averages | None:
        """None if nothing is known: the replicas are asked, and none has reported for a whole window."""
        return self._averages(self._requests if self._spec.metric == RPS else self._concurrency, now_ns)

    def of_both(self, now_ns: int) -> tuple[Averages | None, Averages | None]:
        """Of concurrency and of requests, whichever of them counts."""
        return self._averages(self._concurrency, now_ns), self._averages(self._requests, now_ns)

    def _averages(self, metric: _Metric, now_ns: int) -> Averages | None:
        second = now_ns // SECOND_NS
        if self._spec.scraped and metric.stable.is_empty(second):
            return None
        return metric.averages(second)
