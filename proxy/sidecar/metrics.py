"""A copy's figures as Prometheus reads them (exposition_formats.md, text 0.0.4), and its load as Knative does. Pure.

The names are those of `proxy.metrics`; written here by hand, because prometheus_client is more than all of the door.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from proxy.request.traffic import BUCKETS, GRPC, REST, Figures, Traffic

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Labels = Sequence[tuple[str, str]]


def exposition(figures: Figures, *, is_fresh: bool) -> str:
    """`is_fresh`: False leaves out what is true of one moment only, for nobody knows how it is now."""
    lines = [*_requests(figures), *_seconds(figures), *_moved(figures)]
    if is_fresh:
        lines += _now(figures)
    else:
        lines += _gauge("berth_proxy_model_ready", "1 if Triton serves the model", 0.0)
    return "\n".join(lines) + "\n"


def _requests(figures: Figures) -> Iterator[str]:
    yield from _head("berth_proxy_requests_total", "requests answered", "counter")
    for protocol, traffic in _traffic(figures):
        for code, count in sorted(traffic.codes.items()):
            yield _sample("berth_proxy_requests_total", (("code", code), ("protocol", protocol)), count)


def _seconds(figures: Figures) -> Iterator[str]:
    name = "berth_proxy_request_seconds"
    yield from _head(name, "from a request's arrival to its answer's end", "histogram")
    for protocol, traffic in _traffic(figures):
        total = 0
        for bound, count in zip((*map(float, BUCKETS), "+Inf"), traffic.buckets, strict=False):
            total += count
            yield _sample(f"{name}_bucket", (("le", str(bound)), ("protocol", protocol)), total)
        yield _sample(f"{name}_count", (("protocol", protocol),), total)
        yield _sample(f"{name}_sum", (("protocol", protocol),), traffic.seconds)


def _moved(figures: Figures) -> Iterator[str]:
    name = "berth_proxy_body_bytes_total"
    yield from _head(name, "bytes of bodies", "counter")
    for protocol, traffic in _traffic(figures):
        for direction, size in (("received", traffic.received_bytes), ("sent", traffic.sent_bytes)):
            yield _sample(name, (("direction", direction), ("protocol", protocol)), size)


def _now(figures: Figures) -> Iterator[str]:
    name = "berth_proxy_client_connections"
    yield from _head(name, "open connections of clients", "gauge")
    for protocol, traffic in _traffic(figures):
        yield _sample(name, (("protocol", protocol),), traffic.connections)
    for name, text, value in (
        ("berth_proxy_running_requests", "requests inside Triton", figures.running),
        ("berth_proxy_waiting_requests", "requests in the queue", figures.waiting),
        ("berth_proxy_model_ready", "1 if Triton serves the model", figures.model_ready),
        # Knative's names, which dashboards and autoscalers know.
        (
            "queue_average_concurrent_requests",
            "average concurrency over the last second",
            figures.average_concurrency,
        ),
        (
            "queue_requests_per_second",
            "requests that arrived in the last second",
            figures.requests_per_second,
        ),
    ):
        yield from _gauge(name, text, value)


def _traffic(figures: Figures) -> tuple[tuple[str, Traffic], ...]:
    return (REST, figures.rest), (GRPC, figures.grpc)


def _gauge(name: str, text: str, value: float) -> list[str]:
    return [*_head(name, text, "gauge"), _sample(name, (), value)]


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _sample(name: str, labels: Labels, value: float) -> str:
    said = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{said}}} {float(value)}" if labels else f"{name} {float(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
