"""What the activator tells of its models and their wakes, phase by phase."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from berth.contract.activation import Report
from berth.contract.scaling import ModelKey
from proxy.activator.bounds import Bounds
from proxy.activator.metrics import ActivatorCollector, ActivatorStats, Connection

M, N = ModelKey("a", "m"), ModelKey("b", "n")
REPORT = Report(
    version=1,
    model=M,
    buffered=3,
    average_buffered=2.0,
    arrived=4,
    forwarded=1,
    buffered_bytes=900,
    oldest_seconds=0.5,
    cold_start=True,
    rest_port=20000,
    grpc_port=20001,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def observed(stats: ActivatorStats) -> dict[str, tuple[int, float]]:
    return {phase: (sum(one.counts), round(one.total, 3)) for phase, one in stats.phases.items()}


def test_a_wake_is_timed_phase_by_phase() -> None:
    clock = Clock()
    stats = ActivatorStats(clock)
    stats.cold_start_began(M)
    stats.observe(M, replicas=0, serves=False, buffers=True)
    assert observed(stats) == {"placed": (0, 0), "started": (0, 0), "forwarded": (0, 0)}
    clock.now += 0.2
    stats.observe(M, replicas=1, serves=False, buffers=True)
    clock.now += 3.0
    stats.cold_start_began(M)  # another request of the same wake does not begin it anew
    stats.observe(M, replicas=1, serves=False, buffers=True)
    stats.observe(M, replicas=1, serves=True, buffers=True)
    clock.now += 0.05
    stats.observe(M, replicas=1, serves=True, buffers=False)
    assert observed(stats) == {"placed": (1, 0.2), "started": (1, 3.0), "forwarded": (1, 0.05)}
    assert stats.cold_starting == []
    assert stats.models[M].cold_starts == 2


def test_a_phase_that_was_skipped_is_not_told() -> None:
    """Its replica was there before the first request."""
    clock = Clock()
    stats = ActivatorStats(clock)
    stats.cold_start_began(M)
    clock.now += 1.0
    stats.observe(M, replicas=1, serves=True, buffers=True)
    stats.observe(M, replicas=1, serves=True, buffers=False)
    assert observed(stats) == {"placed": (0, 0), "started": (1, 1.0), "forwarded": (1, 0.0)}


def test_a_wake_that_was_given_up_has_no_time() -> None:
    stats = ActivatorStats(Clock())
    stats.cold_start_began(M)
    stats.observe(M, replicas=0, serves=False, buffers=False)
    assert (stats.cold_starting, observed(stats)["forwarded"]) == ([], (0, 0))
    stats.observe(M, replicas=1, serves=True, buffers=False)  # there is no cold start
    assert observed(stats)["forwarded"] == (0, 0)


def test_a_model_that_is_gone_takes_its_figures_along() -> None:
    stats = ActivatorStats(Clock())
    for model in (M, N):
        stats.reported(replace(REPORT, model=model))
        stats.cold_start_began(model)
    stats.keep([N])
    assert (list(stats.models), stats.cold_starting) == ([N], [N])


class Model:
    key = M

    @property
    def refusals(self) -> dict[str, int]:
        return {
            "NO_ROOM": 2,
            "QUEUE_FULL": 1,
            "COLD_STARTS": 4,
            "NOT_SERVED": 5,
            "unknown-client": 6,
            "NEW": 7,
        }


def test_what_is_scraped() -> None:
    stats = ActivatorStats(Clock())
    stats.reported(REPORT)
    stats.reported(
        replace(REPORT, buffered=1, buffered_bytes=300, oldest_seconds=1.5, arrived=2, forwarded=2)
    )
    registry = CollectorRegistry()
    registry.register(
        ActivatorCollector(stats, lambda: [Model()], lambda: Connection(True, 3), Bounds().buffered_seconds)
    )
    lines = set(generate_latest(registry).decode().splitlines())
    model = 'model="m",namespace="a"'
    assert lines >= {
        f"berth_activator_buffered_requests{{{model}}} 1.0",
        f"berth_activator_buffered_bytes{{{model}}} 300.0",
        f"berth_activator_oldest_buffered_seconds{{{model}}} 1.5",
        f"berth_activator_requests_total{{{model}}} 6.0",
        f"berth_activator_forwarded_requests_total{{{model}}} 3.0",
        f'berth_activator_refused_requests_total{{{model},reason="full"}} 3.0',
        f'berth_activator_refused_requests_total{{{model},reason="cold-starts"}} 4.0',
        f'berth_activator_refused_requests_total{{{model},reason="unavailable"}} 5.0',
        f'berth_activator_refused_requests_total{{{model},reason="unknown-client"}} 6.0',
        "berth_activator_scaler_connected 1.0",
        "berth_activator_scaler_streams_total 3.0",
    }
