"""A Prometheus registry as a page: collected on the process's loop, written on the admin thread piece by piece."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from berth.runtime.admin.pages import CachedPage, Format

OPENMETRICS: Final = "application/openmetrics-text"
PLAIN_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
# What one that wants another version gets as well: its number is not taken from a request.
OPENMETRICS_TYPE: Final = openmetrics.CONTENT_TYPE_LATEST
OPENMETRICS_END: Final = b"# EOF\n"
# Of one piece: half a millisecond's work.
_SAMPLES: Final = 100


T = TypeVar("T")


def metrics_page(registry: CollectorRegistry) -> CachedPage[list[Metric]]:
    """What is collected must be the collector's no more: it is written later."""
    return written_page(lambda: list(registry.collect()), iter)


def written_page(take: Callable[[], T], metrics: Callable[[T], Iterable[Metric]]) -> CachedPage[T]:
    """`metrics` makes them of what was taken, on the admin thread, a few samples at a time."""
    return CachedPage(
        take,
        (
            Format(OPENMETRICS, OPENMETRICS_TYPE, lambda taken: openmetrics_text(metrics(taken))),
            Format("", PLAIN_TYPE, lambda taken: plain_text(metrics(taken))),
        ),
    )


def plain_text(metrics: Iterable[Metric]) -> Iterator[bytes]:
    """Text format 0.0.4. Metrics of one name that follow each other are one metric's parts."""
    for metric, is_first in _parts(metrics):
        yield _headed(generate_latest(_One(metric)), is_first)


def openmetrics_text(metrics: Iterable[Metric]) -> Iterator[bytes]:
    """OpenMetrics 1.0, in the same way."""
    for metric, is_first in _parts(metrics):
        text: bytes = openmetrics.generate_latest(_One(metric))  # type: ignore[no-untyped-call]
        yield _headed(text.removesuffix(OPENMETRICS_END), is_first)
    yield OPENMETRICS_END


class _One(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _parts(metrics: Iterable[Metric]) -> Iterator[tuple[Metric, bool]]:
    """Each with few samples, and whether it is the first of its name."""
    before = None
    for metric in metrics:
        for part in _split(metric):
            yield part, part.name != before
            before = part.name


def _split(metric: Metric) -> Iterator[Metric]:
    """Those with times of creation, which text 0.0.4 writes behind all the others, stay whole: they are few."""
    samples = metric.samples
    if len(samples) <= _SAMPLES or any(one.name.endswith("_created") for one in samples):
        yield metric
        return
    for at in range(0, len(samples), _SAMPLES):
        part = copy.copy(metric)
        part.samples = samples[at : at + _SAMPLES]
        yield part


def _headed(text: bytes, is_first: bool) -> bytes:
    """HELP and TYPE are said once."""
    while not is_first and text.startswith(b"# "):
        text = text[text.index(b"\n") + 1 :]
    return text
