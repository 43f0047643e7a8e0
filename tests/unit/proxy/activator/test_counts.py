"""What the activator tells of its models and their wakes, phase by phase."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from berth.contract.scaling import ModelKey, Report
from proxy.activator.attend import _together
from proxy.activator.hold import Bounds
from proxy.activator.metrics import ActivatorCollector, Counts

M, N = ModelKey("a", "m"), ModelKey("b", "n")
REPORT = Report(
    version=1,
    model=M,
    held=3,
    average_held=2.0,
    arrived=4,
    forwarded=1,
    held_bytes=900,
    oldest_seconds=0.5,
    wake=True,
    rest_port=20000,
    grpc_port=20001,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def observed(counts: Counts) -> dict[str, tuple[int, float]]:
    return {phase: (sum(one.counts), round(one.total, 3)) for phase, one in counts.phases.items()}


def test_a_wake_is_timed_phase_by_phase() -> None:
    clock = Clock()
    counts = Counts(clock)
    counts.woken(M)
    counts.seen(M, copies=0, serves=False, held=True)
    assert observed(counts) == {"placed": (0, 0), "started": (0, 0), "forwarded": (0, 0)}
    clock.now += 0.2
    counts.seen(M, copies=1, serves=False, held=True)
    clock.now += 3.0
    counts.woken(M)  # another request of the same wake does not begin it anew
    counts.seen(M, copies=1, serves=False, held=True)
    counts.seen(M, copies=1, serves=True, held=True)
    clock.now += 0.05
    counts.seen(M, copies=1, serves=True, held=False)
    assert observed(counts) == {"placed": (1, 0.2), "started": (1, 3.0), "forwarded": (1, 0.05)}
    assert counts.waking == []
    assert counts.models[M].wakes == 2


def test_a_phase_that_was_skipped_is_not_told() -> None:
    """Its copy was there before the first request."""
    clock = Clock()
    counts = Counts(clock)
    counts.woken(M)
    clock.now += 1.0
    counts.seen(M, copies=1, serves=True, held=True)
    counts.seen(M, copies=1, serves=True, held=False)
    assert observed(counts) == {"placed": (0, 0), "started": (1, 1.0), "forwarded": (1, 0.0)}


def test_a_wake_that_was_given_up_has_no_time() -> None:
    counts = Counts(Clock())
    counts.woken(M)
    counts.seen(M, copies=0, serves=False, held=False)
    assert (counts.waking, observed(counts)["forwarded"]) == ([], (0, 0))
    counts.seen(M, copies=1, serves=True, held=False)  # nobody wakes it
    assert observed(counts)["forwarded"] == (0, 0)


def test_a_model_that_is_gone_takes_its_figures_along() -> None:
    counts = Counts(Clock())
    for model in (M, N):
        counts.reported(replace(REPORT, model=model))
        counts.woken(model)
    counts.forget([N])
    assert (list(counts.models), counts.waking) == ([N], [N])


class Held:
    key = M

    @property
    def refusals(self) -> dict[str, int]:
        return {"NO_ROOM": 2, "QUEUE_FULL": 1, "WAKES": 4, "NOT_SERVED": 5, "stranger": 6, "NEW": 7}


def test_what_is_scraped() -> None:
    counts = Counts(Clock())
    counts.reported(REPORT)
    counts.reported(replace(REPORT, held=1, held_bytes=300, oldest_seconds=1.5, arrived=2, forwarded=2))
    registry = CollectorRegistry()
    registry.register(ActivatorCollector(counts, lambda: [Held()], lambda: (True, 3), Bounds().buffered))
    lines = set(generate_latest(registry).decode().splitlines())
    model = 'model="m",namespace="a"'
    assert lines >= {
        f"berth_activator_held_requests{{{model}}} 1.0",
        f"berth_activator_held_bytes{{{model}}} 300.0",
        f"berth_activator_oldest_seconds{{{model}}} 1.5",
        f"berth_activator_requests_total{{{model}}} 6.0",
        f"berth_activator_forwarded_requests_total{{{model}}} 3.0",
        f'berth_activator_refused_requests_total{{{model},reason="full"}} 3.0',
        f'berth_activator_refused_requests_total{{{model},reason="wakes"}} 4.0',
        f'berth_activator_refused_requests_total{{{model},reason="hopeless"}} 5.0',
        f'berth_activator_refused_requests_total{{{model},reason="stranger"}} 6.0',
        "berth_activator_scaler_attached 1.0",
        "berth_activator_scaler_streams_total 3.0",
    }


def test_two_reports_that_were_not_told_yet_are_one_in_which_nothing_is_lost() -> None:
    later = replace(
        REPORT, held=0, average_held=0.5, arrived=2, forwarded=5, wake=False, version=2, rest_port=0
    )
    assert _together(REPORT, later) == replace(later, average_held=2.0, arrived=6, forwarded=6, wake=True)
    assert _together(later, REPORT).average_held == 2.0
