"""What a run has found, and the table of it."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_EVENTS = "events written meanwhile, per 100 pods"
_NOT_BOUND, _OTHERS = "not bound, pods", "machine taken by others, %"
_NO_RATIOS = (_EVENTS, _NOT_BOUND, _OTHERS)

Table = dict[str, dict[str, float]]
"""The median figure by measure and scheduler."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """`bound` is less than `pods` where the measure was broken off. CPU is the scheduler's alone;
    `events`: those written by then, which are load too; `others_share`: what other processes took of the machine."""

    pods: int
    bound: int
    seconds: float
    first_bound_seconds: float
    cpu_seconds: float
    peak_rss_mib: float
    events: int
    others_share: float

    @property
    def pods_per_second(self) -> float:
        return self.bound / self.seconds

    @property
    def cpu_seconds_per_1000_pods(self) -> float:
        return self.cpu_seconds / self.bound * 1000


@dataclass(frozen=True, slots=True)
class Latency:
    """Created to bound. A pod that was not bound counts with the time that it had waited at the end."""

    pods: int
    not_bound: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class PodChange:
    """One scheduler's measures of one round."""

    scheduler: str
    round: int
    throughput: Throughput
    latency: Latency


def medians(turns: Sequence[PodChange]) -> Table:
    """By measure and scheduler."""
    measures: dict[str, Callable[[PodChange], float]] = {
        "pods bound per second": lambda turn: turn.throughput.pods_per_second,
        "CPU s per 1000 pods": lambda turn: turn.throughput.cpu_seconds_per_1000_pods,
        "peak RSS, MiB": lambda turn: turn.throughput.peak_rss_mib,
        _EVENTS: lambda turn: turn.throughput.events / turn.throughput.bound * 100,
        "created to bound p50, ms": lambda turn: turn.latency.p50_ms,
        "created to bound p99, ms": lambda turn: turn.latency.p99_ms,
        _NOT_BOUND: _missing,
        _OTHERS: lambda turn: 100 * turn.throughput.others_share,
    }
    names = list(dict.fromkeys(turn.scheduler for turn in turns))
    return {
        measure: {
            name: statistics.median(figure(turn) for turn in turns if turn.scheduler == name)
            for name in names
        }
        for measure, figure in measures.items()
    }


def render(table: Table, names: Sequence[str]) -> str:
    """A Markdown table: figures, and berth's over each other's."""
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for measure, figures in table.items():
        lines.append(f"| {measure} | {' | '.join(_cell(measure, figures, name) for name in names)} |")
    return "\n".join(lines)


def _cell(measure: str, figures: dict[str, float], name: str) -> str:
    figure, berth = figures[name], figures.get("berth")
    text = f"{figure:.0f}" if figure >= 100 or figure == int(figure) else f"{figure:.1f}"
    if name == "berth" or berth is None or measure in _NO_RATIOS or not figure:
        return text
    return f"{text} (×{berth / figure:.2f})"


def _missing(turn: PodChange) -> int:
    """Of both measures: where it is not 0, the figures above flatter."""
    return turn.throughput.pods - turn.throughput.bound + turn.latency.not_bound
