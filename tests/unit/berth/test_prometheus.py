"""Metrics, written in pieces."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics

from berth.runtime.admin.prometheus import OPENMETRICS, metrics_page, openmetrics_text, plain_text


def large_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("things", "with\ntwo lines", ("a",), registry=registry).labels("x").inc()
    Histogram("seconds", "h", registry=registry).observe(1)
    Info("build", "i", registry=registry).info({"version": "1"})
    Gauge("nothing", "none", ("a",), registry=registry)

    class Large:
        def collect(self) -> Iterator[Any]:
            many = CounterMetricFamily("many", "m", labels=("number",))
            times = HistogramMetricFamily("times", "t", labels=("number",))
            for number in range(250):
                many.add_metric([str(number)], number)
                times.add_metric([str(number)], [("1.0", 1), ("+Inf", 2)], 3.0)
            yield from (many, times)

    large: Any = Large()
    registry.register(large)
    return registry


def test_what_is_written_in_pieces_is_what_the_library_writes() -> None:
    registry = large_registry()
    metrics = list(registry.collect())
    plain, opened = list(plain_text(metrics)), list(openmetrics_text(metrics))
    assert b"".join(plain) == generate_latest(registry)
    assert b"".join(opened) == openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
    assert max(piece.count(b"\n") for piece in plain) <= 102


def test_parts_of_a_metric_that_follow_each_other_have_one_head() -> None:
    registry = large_registry()
    (many, *_) = [metric for metric in registry.collect() if metric.name == "many"]
    assert b"".join(plain_text([many, many])).count(b"# TYPE many_total counter\n") == 1
    assert b"".join(plain_text([many, many])).count(b'many_total{number="7"} 7.0\n') == 2


def test_which_version_is_written_is_not_taken_from_the_request() -> None:
    page = metrics_page(CollectorRegistry())
    assert page.format_for(f"{OPENMETRICS};version=9.9.9x,*/*") == 0
    assert page.formats[0].content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    for accept in ("", "text/plain;version=1.0.0;escaping=dots", "*/*"):
        assert (
            page.formats[page.format_for(accept)].content_type == "text/plain; version=0.0.4; charset=utf-8"
        )


def test_nothing_here_needs_a_loop() -> None:
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
