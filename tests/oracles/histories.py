"""Random histories of models, as lines of `berth scaler --replay`: what a day brings, and what it had better not.

Loads come in steps, bursts, ramps and silences, from several reporters a second, late, early, not at all, sometimes of a
size that nobody has seen. Copies come and go. Annotations change in the middle, windows with them, and some are refused.
Clocks have fractions, stand still and jump. A seed makes the same history everywhere.
"""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

GROUP = "autoscaling.knative.dev/"
_STARTS = (4_000, 100_000, 1_700_000_000, 1_755_555_555, 2**31 - 60, 4_000_000_000)
_WINDOWS = (6, 7, 10, 12, 30, 60, 61, 120, 600)
_EXTREMES = (1e15, 1e300, 1.7e308, 1e-9, 5e-324, 2147483647.0, 2147483648.0, 1e9, -1.0, -1e300)
# Annotations that may stand there, by what makes one.
_CHOICES: dict[str, Callable[[Random], object]] = {
    "class": lambda r: "kpa.autoscaling.knative.dev",
    "metric": lambda r: r.choice(("concurrency", "rps", "rps")),
    "metric-aggregation-algorithm": lambda r: r.choice(("linear", "weighted-exponential", "weightedExponential")),
    "target": lambda r: r.choice((1, 2, 4, 10, 100, 0.01, 0.333333, 0.142857, 0.090909, round(r.uniform(0.02, 30), 3))),
    "target-utilization-percentage": lambda r: r.choice((100, 100, 50, 70, 1, 33.3)),
    "target-burst-capacity": lambda r: r.choice((0, -1, 1, 211, 0.5, 10, 1e12)),
    "window": lambda r: f"{r.choice(_WINDOWS)}s",
    "panic-window-percentage": lambda r: r.choice((1, 10, 33.3, 50, 51, 100)),
    "panic-threshold-percentage": lambda r: r.choice((110, 150, 200, 200, 300, 1000)),
    "scale-down-delay": lambda r: f"{r.choice((0, 1, 2, 3, 10, 60))}s",
    "activation-scale": lambda r: r.choice((2, 3, 5)),
    "initial-scale": lambda r: r.choice((1, 2, 5)),
    "max-scale": lambda r: r.choice((0, 5, 20)),
}  # fmt: skip
# One part in three, seven, eleven: what six decimals make of it is less.
_JUST_BELOW = ("0.333333", "0.142857", "0.090909", "0.111111", "0.076923")
_REFUSED = (
    ("window", "5s"), ("window", "6500ms"), ("target", "0"), ("target", "ten"), ("metric", "cpu"),
    ("panic-threshold-percentage", "109.9"), ("scale-down-delay", "1500ms"), ("activation-scale", "1"),
)  # fmt: skip
_CONFIG: dict[str, Callable[[Random], object]] = {
    "max-scale-up-rate": lambda r: r.choice((1.1, 2, 10, 1000)),
    "max-scale-down-rate": lambda r: r.choice((1.1, 2, 3, 10)),
    "stable-window": lambda r: f"{r.choice(_WINDOWS)}s",
    "container-concurrency-target-percentage": lambda r: r.choice((100, 70, 0.5)),
    "target-burst-capacity": lambda r: r.choice((0, -1, 100)),
    "scale-down-delay": lambda r: f"{r.choice((0, 3, 10))}s",
}


class History:
    """Of one model. `decisions` is how many are asked for."""

    def __init__(self, chance: Random, name: str) -> None:
        self._chance, self._name = chance, name
        self._now = float(chance.choice(_STARTS)) + chance.choice((0, 0, 0.5, 0.25, chance.random()))
        # Knative's delay window ends when its clock goes back.
        self._clock_goes_back = chance.random() < 0.1
        self._ready = chance.choice((0, 1, 1, 2, 3, 20, 1000))
        self._load = self._target = 1.0
        self._window = 60
        # Averages of a few small numbers lie where six decimals decide.
        self._small = chance.random() < 0.15
        self._reporters = chance.choice((1, 1, 1, 2, 3))
        self._whole = chance.random() < 0.6

    def lines(self, decisions: int) -> Iterator[str]:
        yield self._configuration("new")
        while decisions > 0:
            if self._chance.random() < 0.1:
                yield from self._change()
            for _ in range(min(decisions, self._chance.choice((3, 10, 30)))):
                yield from self._tick()
                decisions -= 1
            self._next_phase()
            if decisions > 0 and self._chance.random() < 0.1:
                yield from self._silence()
                decisions -= 1

    def _silence(self) -> Iterator[str]:
        """As long as a window, or about so."""
        self._now += self._window + self._chance.choice((-1, 0, 0, 1))
        yield _line(op="scale", id=self._name, t=self._now, ready=self._ready)

    def _change(self) -> Iterator[str]:
        if self._chance.random() < 0.2:
            yield _line(op="del", id=self._name)
            yield self._configuration("new")
        else:
            yield self._configuration("update")

    def _configuration(self, op: str) -> str:
        chance = self._chance
        annotations = {
            GROUP + key: str(make(chance)) for key, make in _CHOICES.items() if chance.random() < 0.3
        }
        config = {key: str(make(chance)) for key, make in _CONFIG.items() if chance.random() < 0.2}
        if self._small:
            annotations[GROUP + "target"] = chance.choice(_JUST_BELOW)
            annotations[GROUP + "target-utilization-percentage"] = "100"
        self._window = int(annotations.get(GROUP + "window", config.get("stable-window", "60s"))[:-1])
        self._target = float(str(annotations.get(GROUP + "target", 100)))
        if chance.random() < (0.2 if op == "update" else 0.01):
            key, value = chance.choice(_REFUSED)
            annotations[GROUP + key] = value
        if self._clock_goes_back:
            annotations.pop(GROUP + "scale-down-delay", None)
            config.pop("scale-down-delay", None)
        return _line(
            op=op, id=self._name, t=self._now, ready=self._ready, config=config, annotations=annotations,
            containerConcurrency=chance.choice((0, 0, 1, 4, 50)),
            unreachable=chance.random() < 0.1, scrape=chance.random() < 0.8,
        )  # fmt: skip

    def _next_phase(self) -> None:
        chance = self._chance
        few, many = self._target * max(self._ready, 1), self._target * chance.choice((2, 3, 10, 100))
        self._load = chance.choice((0, 0, few, few * 2, few / 2, many, chance.uniform(0, many), self._load))
        if chance.random() < 0.02:
            self._load = chance.choice(_EXTREMES)
        if chance.random() < 0.15:
            self._now += chance.choice((3, 8, 70, *_WINDOWS))
        if self._clock_goes_back and chance.random() < 0.2:
            self._now -= chance.choice((1, 3, 59))

    def _tick(self) -> Iterator[str]:
        for _ in range(self._chance.choice((1, 2, 2))):
            self._now += self._chance.choice((1, 1, 1, 1, 1, 0.5, 0))
            yield from self._stats()
        self._walk()
        yield _line(op="scale", id=self._name, t=self._now, ready=self._ready)

    def _stats(self) -> Iterator[str]:
        chance = self._chance
        for _ in range(self._reporters):
            if chance.random() < 0.1:
                continue
            moment = self._now
            if chance.random() < 0.05:
                moment += chance.choice((-1, -2, -2, -5, -61, 1, 2))
            load = chance.choice((0, 1, 1, 2)) if self._small else self._load
            value = load / self._reporters * chance.choice((1, 1, 1, chance.uniform(0.5, 1.5)))
            value = float(round(value)) if self._whole and abs(value) < 1e15 else value
            proxied = chance.choice((0, 0, 0, value / 2, 1))
            yield _line(op="stat", id=self._name, t=moment, c=value, pc=proxied, n=value * 2, pn=proxied)

    def _walk(self) -> None:
        step = self._chance.choice((0, 0, 0, 0, 1, -1, 1, -1, self._ready, -self._ready // 2, 30))
        self._ready = min(max(self._ready + step, 0), 2_000_000_000)


def histories(seed: str, decisions: int, of_one: int = 60) -> Iterator[list[str]]:
    """So many decisions in all, as many of each history."""
    parts = [*range(0, decisions, of_one), decisions]
    for number, (begin, end) in enumerate(pairwise(parts)):
        yield [*History(Random(f"{seed} {number}"), f"m{number}").lines(end - begin)]


def _line(**fields: Any) -> str:
    return json.dumps({key: _finite(value) for key, value in fields.items()}, separators=(",", ":")) + "\n"


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    return 0.0 if isinstance(value, float) and value - value != 0 else value
