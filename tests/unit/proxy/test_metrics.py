"""What the proxy counts, as Prometheus and the first of several processes get it."""

import json

import pytest

from berth.runtime.admin.prometheus import plain_text
from proxy.config import ProxyOptions
from proxy.gateway.metrics import figures_metrics
from proxy.request.traffic import BUCKETS, Figures, Traffic


def traffic(scale: int) -> Traffic:
    """Bytes and clients are so many times 10, 20, 30; two requests, the second one slow."""
    one = Traffic(received_bytes=10 * scale, sent_bytes=20 * scale, connections=30 * scale)
    one.answered("200", 0.005)
    one.answered("503", 1000.0 * scale)
    return one


def figures(scale: int = 1, *, ready: bool = True) -> Figures:
    return Figures(
        rest=traffic(scale),
        grpc=traffic(100 * scale),
        running=1 * scale,
        waiting=2 * scale,
        average_concurrency=3.5 * scale,
        requests_per_second=4.5 * scale,
        busy_connections=5 * scale,
        model_ready=ready,
    )


def scraped(of: Figures) -> dict[str, float]:
    text = b"".join(plain_text(figures_metrics([({}, of)]))).decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_what_prometheus_sees() -> None:
    seen = scraped(figures())
    buckets = {name: seen.pop(name) for name in list(seen) if "_bucket" in name}
    assert seen == {
        'berth_proxy_requests_total{code="200",protocol="rest"}': 1,
        'berth_proxy_requests_total{code="503",protocol="rest"}': 1,
        'berth_proxy_requests_total{code="200",protocol="grpc"}': 1,
        'berth_proxy_requests_total{code="503",protocol="grpc"}': 1,
        'berth_proxy_request_seconds_count{protocol="rest"}': 2,
        'berth_proxy_request_seconds_sum{protocol="rest"}': 1000.005,
        'berth_proxy_request_seconds_count{protocol="grpc"}': 2,
        'berth_proxy_request_seconds_sum{protocol="grpc"}': 100_000.005,
        'berth_proxy_body_bytes_total{direction="received",protocol="rest"}': 10,
        'berth_proxy_body_bytes_total{direction="sent",protocol="rest"}': 20,
        'berth_proxy_body_bytes_total{direction="received",protocol="grpc"}': 1000,
        'berth_proxy_body_bytes_total{direction="sent",protocol="grpc"}': 2000,
        'berth_proxy_client_connections{protocol="rest"}': 30,
        'berth_proxy_client_connections{protocol="grpc"}': 3000,
        "berth_proxy_running_requests": 1,
        "berth_proxy_waiting_requests": 2,
        "berth_proxy_model_ready": 1,
        "queue_average_concurrent_requests": 3.5,
        "queue_requests_per_second": 4.5,
    }
    for protocol in ("rest", "grpc"):
        counts = {
            name.partition('le="')[2].partition('"')[0]: count
            for name, count in buckets.items()
            if protocol in name
        }
        bounds = [float(bound) for bound in counts]
        assert bounds == sorted(set(bounds))
        assert bounds[0] > 0
        assert bounds[-1] == float("inf")
        # A bound is part of its bucket; what is slower than all of them is in the last alone.
        assert [count for bound, count in counts.items() if float(bound) < 0.005] == [0, 0]
        assert {count for bound, count in counts.items() if 0.005 <= float(bound) < 1000} == {1}
        assert counts["+Inf"] == 2


def test_the_longest_request_has_a_bucket() -> None:
    assert BUCKETS[-1] == ProxyOptions.request_timeout


def test_what_has_not_happened_is_reported_as_zero() -> None:
    """A counter that appears only with its first event has no rate at that event."""
    seen = scraped(Figures())
    assert seen.pop("berth_proxy_model_ready") == 1
    assert set(seen.values()) == {0}
    assert not any("berth_proxy_requests_total" in name for name in seen)  # its codes are not known before
    assert scraped(Figures(model_ready=False))["berth_proxy_model_ready"] == 0


def test_the_figures_of_several_processes_add_up() -> None:
    total = Figures()
    for scale in (1, 2):
        told = json.dumps(figures(scale).to_json())  # as a worker tells them
        read = Figures.from_json(json.loads(told))
        assert read == figures(scale)
        total.add(read)
    seen, (one, two) = scraped(total), (scraped(figures(scale)) for scale in (1, 2))
    assert seen.pop("berth_proxy_model_ready") == 1
    assert seen == pytest.approx({name: one[name] + two[name] for name in seen})
    assert total.busy_connections == 15


@pytest.mark.parametrize("first", [True, False])
def test_one_process_without_the_model_is_enough_to_be_unready(first: bool) -> None:
    total = Figures()
    total.add(figures(ready=first))
    total.add(figures(ready=not first))
    assert not total.model_ready
