"""`python -m bench.packing --nodes FILE --pods FILE`: how much of all GPUs is given out at last.

The experiment of "Beware of Fragmentation" (USENIX ATC'23): the trace's tasks, shuffled, then drawn
again until 1.3 times the cluster's GPUs are requested, are offered one by one; what does not fit is
dropped, and nothing departs. With `--churn` tasks also end, and what counts is the share of the demand
that was refused, in GPUs, in GPU-seconds and class by class.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from bench.packing.churn import refused_percent
from bench.packing.cluster import FGD, Packed, strategy_of
from bench.packing.trace import GPU_BYTES, Task, read_nodes, read_tasks
from binder.engine.score import STRATEGIES

_MARKS = (1.0, 1.3)


def main() -> None:
    options = _options()
    if options.churn == "trace" and not any(t.deleted > t.created for t in read_tasks(options.pods)):
        raise SystemExit(f"{options.pods} does not say how long its tasks lived: take --churn random")
    seeds = _seeds(options.seeds)
    with ProcessPoolExecutor() as workers:
        runs = list(workers.map(_run, [(options, seed) for seed in seeds]))
    result: dict[str, Any] = {"strategy": options.strategy, "seeds": seeds, "pods": options.pods.name}
    for key in runs[0]:
        result[key] = {name: round(mean(run[key][name] for run in runs), 2) for name in runs[0][key]}
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


def _run(job: tuple[argparse.Namespace, int]) -> dict[str, dict[str, float]]:
    options, seed = job
    nodes, tasks = read_nodes(options.nodes, options.gpu_bytes), read_tasks(options.pods)
    if options.churn:
        done = {
            f"refused_percent at load {load:g}": refused_percent(
                nodes, tasks, options.strategy, seed, load, options.churn
            )
            for load in options.loads
        }
    else:
        done = {"allocated_percent": allocated_percent(nodes, tasks, options.strategy, seed, options.loading)}
    print(f"seed {seed}: {done}", file=sys.stderr, flush=True)
    return done


def allocated_percent(
    nodes: list[Any], tasks: list[Task], strategy: str, seed: int, loading: int
) -> dict[str, float]:
    """Share of all GPUs that is given out when 100 % and 130 % of them have been requested."""
    cluster = Packed(nodes, strategy_of(strategy, tasks, seed), loading=loading)
    offered, marks, result = 0.0, list(_MARKS), {}
    for number, task in enumerate(_inflow(tasks, Random(seed))):
        offered += task.gpus
        while marks and offered > marks[0] * cluster.gpus:
            result[f"{marks.pop(0):.0%}".rstrip("%")] = 100 * cluster.allocated / cluster.gpus
        if not marks:
            break
        cluster.offer(task, f"t{number}")
    return result


def _inflow(tasks: list[Task], random: Random) -> Iterator[Task]:
    """All of them in random order, then any of them for ever."""
    order = tasks[:]
    random.shuffle(order)
    yield from order
    while True:
        yield random.choice(tasks)


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.packing", description=__doc__)
    parser.add_argument("--nodes", type=Path, required=True, help="CSV: sn,cpu_milli,memory_mib,gpu,model")
    parser.add_argument("--pods", type=Path, required=True, help="CSV of tasks in the openb format")
    parser.add_argument("--strategy", choices=(*STRATEGIES, FGD), default=STRATEGIES[0])
    parser.add_argument("--seeds", default="42-51", help="one, or a range (default: 42-51)")
    parser.add_argument(
        "--loading", type=int, default=0, help="so many of the last tasks are still being loaded (default: 0)"
    )
    parser.add_argument("--json", type=Path, help="write the result here, too")
    parser.add_argument(
        "--churn", choices=("trace", "random"), help="tasks end: after the trace's own times, or random ones"
    )
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0.9, 0.95, 1.0, 1.05],
        help="with --churn (default: 0.9 to 1.05)",
    )
    parser.add_argument(
        "--gpu-bytes",
        type=int,
        nargs="+",
        default=[GPU_BYTES],
        help="memory of the nodes' GPUs by turns; a task asks in thousandths of 1000 (default: 1000)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
