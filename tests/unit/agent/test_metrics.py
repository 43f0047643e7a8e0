"""What Prometheus sees of a node."""

import math

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from agent.metrics import AgentMetrics
from berth.contract.report import Failure, ModelState
from tests.fakes.objects import GIB, gpu, listed, report


class Seen:
    """A node's metrics and what a scrape finds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = AgentMetrics(self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"berth_agent_{name}", labels)


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_a_gpus_series_follow_the_report(seen: Seen) -> None:
    models = (
        listed("p1", requested=3 * GIB, measured=4 * GIB),
        listed("p2", requested=2 * GIB),
        listed("p3", on="GPU-b"),
    )
    a = gpu("GPU-a", total=16 * GIB, other_use_bytes=GIB, headroom_bytes=GIB)
    seen.metrics.reported(report(a, gpu("GPU-b", index=1, total=8 * GIB), models=models))
    for uuid, total, other_use, free in (("GPU-a", 16, 1, 8), ("GPU-b", 8, 0, 7)):
        assert seen.value("gpu_total_bytes", gpu=uuid) == total * GIB
        assert seen.value("gpu_other_use_bytes", gpu=uuid) == other_use * GIB
        assert seen.value("gpu_free_bytes", gpu=uuid) == free * GIB
        assert seen.value("gpu_healthy", gpu=uuid) == 1


def test_what_is_unknown_is_no_number(seen: Seen) -> None:
    seen.metrics.reported(report(gpu("GPU-a", total=None, other_use_bytes=None, healthy=False)))
    for name in ("gpu_total_bytes", "gpu_other_use_bytes", "gpu_free_bytes"):
        assert math.isnan(seen.value(name, gpu="GPU-a") or 0), name
    assert seen.value("gpu_healthy", gpu="GPU-a") == 0


def test_the_series_of_a_gpu_go_with_it(seen: Seen) -> None:
    seen.metrics.reported(report(gpu("GPU-a"), gpu("GPU-b", index=1)))
    seen.metrics.reported(report(gpu("GPU-b")))
    for name in ("gpu_total_bytes", "gpu_other_use_bytes", "gpu_free_bytes", "gpu_healthy"):
        assert seen.value(name, gpu="GPU-a") is None, name
        assert seen.value(name, gpu="GPU-b") is not None, name
    seen.metrics.reported(report(gpu("GPU-a")))  # it is back
    assert seen.value("gpu_healthy", gpu="GPU-a") == 1


def test_models_are_counted_by_state_also_those_that_none_is_in(seen: Seen) -> None:
    seen.metrics.reported(report(models=(listed("p1"), listed("p2"))))
    assert {state: seen.value("models", state=state.value) for state in ModelState} == {
        **dict.fromkeys(ModelState, 0),
        ModelState.READY: 2,
    }
    seen.metrics.reported(report())
    assert seen.value("models", state="ready") == 0
    assert seen.value("reports_total") == 2


def test_what_happens_is_counted_under_its_kind(seen: Seen) -> None:
    for seconds in (0.4, 70.0, 4000.0):
        seen.metrics.loaded(seconds)
    seen.metrics.load_failed(Failure.CAPACITY.value)
    seen.metrics.loop_failed("reconcile")
    seen.metrics.staged(5)
    seen.metrics.called("Stage", "OK")
    assert seen.value("load_failures_total", kind="capacity") == 1
    assert seen.value("loop_errors_total", loop="reconcile") == 1
    assert seen.value("staged_bytes_total") == 5
    assert seen.value("calls_total", method="Stage", code="OK") == 1
    assert (seen.value("load_seconds_count"), seen.value("load_seconds_sum")) == (3, 4070.4)
    # From what a small model takes to the longest that a load may take by default.
    for bound, loads in (("0.5", 1), ("60.0", 1), ("120.0", 2), ("600.0", 2), ("+Inf", 3)):
        assert seen.value("load_seconds_bucket", le=bound) == loads


def test_every_series_has_its_help(seen: Seen) -> None:
    helps = [
        line for line in generate_latest(seen.registry).decode().splitlines() if line.startswith("# HELP")
    ]
    assert len(helps) > 10
    assert all(len(line.split(" ", 3)[3]) > 3 for line in helps)
