"""Arrivals and departures: what share of the demand is refused when the cluster stays about full.

By Little's law a cluster holds arrival rate x mean lifetime. Arrivals are a Poisson process whose rate
gives the requested load, lifetimes are the trace's own (deletion - creation) or exponential.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

from bench.packing.cluster import Packed, strategy_of
from bench.packing.trace import GPU_BYTES, Task

# Of mean lifetimes: until the policy has made the cluster its own, and how long is measured then.
_WARM_UP, _MEASURED = 0.5, 2.0
_GPUS, _GPU_SECONDS = "GPUs", "GPU-seconds"


class Refusals:
    """What was requested and what could not be scheduled: in GPUs, in GPU-seconds, which is what the
    cluster would have served, and in GPU-seconds class by class."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def note(self, task: Task, life: float, *, placed: bool) -> None:
        if not task.gpus:
            return
        for measure, amount in (
            (_GPUS, task.gpus),
            (_GPU_SECONDS, task.gpus * life),
            (f"{_GPU_SECONDS}: {_class_of(task)}", task.gpus * life),
        ):
            self._asked[measure] += amount
            self._refused[measure] += 0 if placed else amount

    def percent(self) -> dict[str, float]:
        return {
            measure: 100 * self._refused[measure] / self._asked[measure] for measure in sorted(self._asked)
        }


def refused_percent(
    nodes: list[Any], tasks: list[Task], strategy: str, seed: int, load: float, lifetimes: str
) -> dict[str, float]:
    """Share of the demand that was refused, once the cluster is warm, by measure."""
    random, cluster = Random(seed), Packed(nodes, strategy_of(strategy, tasks, seed))
    ends: list[tuple[float, str, Task]] = []
    refusals = Refusals()
    for number, (now, task, life) in enumerate(_arrivals(tasks, random, load * cluster.gpus, lifetimes)):
        while ends and ends[0][0] <= now:
            _, uid, ended = heapq.heappop(ends)
            cluster.release(ended, uid)
        placed = cluster.offer(task, f"t{number}")
        if placed:
            heapq.heappush(ends, (now + life, f"t{number}", task))
        if now >= _WARM_UP:
            refusals.note(task, life, placed=placed)
    return refusals.percent()


def _class_of(task: Task) -> str:
    if task.gpu_count == 1 and task.gpu_bytes < GPU_BYTES:
        return "part of a GPU"
    return f"{task.gpu_count} GPU{'s' if task.gpu_count > 1 else ''}"


def _arrivals(
    tasks: list[Task], random: Random, gpus: float, lifetimes: str
) -> Iterator[tuple[float, Task, float]]:
    """(time, task, lifetime), in units of the mean lifetime; together they ask for `gpus` on average."""
    lives = [task.deleted - task.created for task in tasks]
    mean_life = sum(lives) / len(lives)
    share = [life / mean_life if lifetimes == "trace" else 1.0 for life in lives]
    used = sum(task.gpus * life for task, life in zip(tasks, share, strict=True)) / len(tasks)
    # Those who would be there already: the longer one lives the likelier, and some of it is over.
    for chosen in random.choices(range(len(tasks)), share, k=round(gpus / used)):
        life = random.random() * share[chosen] if lifetimes == "trace" else random.expovariate(1.0)
        yield 0.0, tasks[chosen], life
    now = 0.0
    while True:
        now += random.expovariate(gpus / used)
        if now > _WARM_UP + _MEASURED:
            return
        chosen = random.randrange(len(tasks))
        life = share[chosen] if lifetimes == "trace" else random.expovariate(1.0)
        yield now, tasks[chosen], life
