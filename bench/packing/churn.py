"""Arrivals and departures: what share of the demand is refused when the cluster stays about full.

By Little's law a cluster holds arrival rate x mean lifetime. Arrivals are a Poisson process whose rate
gives the load asked for, lifetimes are the trace's own (deletion - creation) or exponential.
"""

import heapq
from collections.abc import Iterator
from random import Random
from typing import Any

from bench.packing.cluster import Packed, strategy_of
from bench.packing.trace import Task

# Of mean lifetimes: until the policy has made the cluster its own, and how long is measured then.
_WARM_UP, _MEASURED = 0.5, 2.0


def refused_percent(
    nodes: list[Any], tasks: list[Task], strategy: str, seed: int, load: float, lifetimes: str
) -> float:
    """Share of the GPUs asked for that no place was found for, once the cluster is warm."""
    random, cluster = Random(seed), Packed(nodes, strategy_of(strategy, tasks, seed))
    ends: list[tuple[float, str, Task]] = []
    offered = refused = 0.0
    for number, (now, task, life) in enumerate(_arrivals(tasks, random, load * cluster.gpus, lifetimes)):
        while ends and ends[0][0] <= now:
            _, uid, ended = heapq.heappop(ends)
            cluster.release(ended, uid)
        placed = cluster.offer(task, f"t{number}")
        if placed:
            heapq.heappush(ends, (now + life, f"t{number}", task))
        if now >= _WARM_UP:
            offered += task.gpus
            refused += 0 if placed else task.gpus
    return 100 * refused / offered


def _arrivals(
    tasks: list[Task], random: Random, gpus: float, lifetimes: str
) -> Iterator[tuple[float, Task, float]]:
    """(time, task, lifetime), in units of the mean lifetime; together they ask for `gpus` on average."""
    lives = [task.deleted - task.created for task in tasks]
    mean_life = sum(lives) / len(lives)
    share = [life / mean_life if lifetimes == "trace" else 1.0 for life in lives]
    held = sum(task.gpus * life for task, life in zip(tasks, share, strict=True)) / len(tasks)
    # Those who would be there already: the longer one lives the likelier, and some of it is over.
    for chosen in random.choices(range(len(tasks)), share, k=round(gpus / held)):
        life = random.random() * share[chosen] if lifetimes == "trace" else random.expovariate(1.0)
        yield 0.0, tasks[chosen], life
    now = 0.0
    while True:
        now += random.expovariate(gpus / held)
        if now > _WARM_UP + _MEASURED:
            return
        chosen = random.randrange(len(tasks))
        life = share[chosen] if lifetimes == "trace" else random.expovariate(1.0)
        yield now, tasks[chosen], life
