"""`python -m bench.scaler COMMAND`: see bench/README.md."""

import argparse
import asyncio
import sys

from bench.proxy.peers import BERTH
from bench.scaler import activator
from bench.scaler.cold_starts import cold_starts, table
from bench.scaler.counting import Fates
from bench.scaler.decisions import SPECS, microseconds
from bench.scaler.knative_activator import KNATIVE
from bench.scaler.lost import CYCLES, lost
from bench.scaler.lost import table as lost_table
from bench.scaler.scrape import core_share
from bench.scaler.ticks import cost


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaler", description=__doc__)
    commands = parser.add_subparsers(required=True)
    speed = commands.add_parser("decisions", help="CPU time of decisions and of what they are made from")
    speed.add_argument("--models", type=int, default=1000)
    speed.add_argument("--ticks", type=int, default=100)
    speed.add_argument("--rounds", type=int, default=3, help="whose least counts")
    speed.set_defaults(run=_decisions)
    asking = commands.add_parser("scrape", help="CPU time of asking all gateways of a cluster once a second")
    asking.add_argument("--nodes", type=int, default=200)
    asking.add_argument("--replicas", type=int, default=50)
    asking.add_argument("--seconds", type=float, default=15.0)
    asking.set_defaults(run=_scrape)
    ticks = commands.add_parser(
        "ticks", help="CPU of a leader's decisions, all that comes of them included, but for I/O"
    )
    ticks.add_argument("--models", type=int, default=1000)
    ticks.add_argument("--replicas", type=int, default=2, help="of each model")
    ticks.add_argument("--seconds", type=int, default=20)
    ticks.add_argument("--rounds", type=int, default=3, help="whose least counts")
    ticks.set_defaults(run=_ticks)
    forwarding = commands.add_parser(
        "forwarding", help="CPU time of requests through the activator, beside the data plane and Knative's"
    )
    forwarding.add_argument("--seconds", type=float, default=5.0)
    forwarding.add_argument("--rounds", type=int, default=5)
    forwarding.set_defaults(run=_forwarding)
    buffered = commands.add_parser("buffered", help="memory of requests that the activator buffers")
    buffered.add_argument("--requests", type=int, default=10_000)
    buffered.set_defaults(run=_buffered)
    first = commands.add_parser("cold-starts", help="how long a model's first request waits, by phase")
    first.add_argument("--models", type=int, default=20)
    first.set_defaults(run=_cold_starts)
    missing = commands.add_parser("lost", help="what becomes of all requests while replicas come and go")
    missing.add_argument("--cycles", type=int, default=50, help="of each kind")
    missing.add_argument(
        "--rate", type=float, default=500.0, help="requests a second, of all models together"
    )
    missing.add_argument("--models", type=int, default=4, help="so many go through cycles at once")
    missing.add_argument("--only", nargs="+", choices=[*CYCLES, "kill"], default=[*CYCLES, "kill"])
    missing.set_defaults(run=_lost)
    options = parser.parse_args()
    sys.exit(options.run(options))


def _decisions(options: argparse.Namespace) -> int:
    print("| | µs per decision | µs per report |\n|---|---|---|")
    for name, annotations in SPECS.items():
        rounds = [microseconds(annotations, options.models, options.ticks) for _ in range(options.rounds)]
        decision, report = map(min, zip(*rounds, strict=True))
        print(f"| {name} | {decision:.1f} | {report:.1f} |")
    return 0


def _scrape(options: argparse.Namespace) -> int:
    share, results = core_share(options.nodes, options.replicas, options.seconds)
    print(
        f"{options.nodes} nodes of {options.replicas} replicas: {share:.1%} of a core, questions: {dict(results)}"
    )
    return 0


def _ticks(options: argparse.Namespace) -> int:
    rounds = [cost(options.models, options.replicas, options.seconds) for _ in range(options.rounds)]
    found = [min(parts) for parts in zip(*rounds, strict=True)]
    print(
        "| models × replicas | reports | seconds closed | decisions | all, % of a core |\n|---|---|---|---|---|"
    )
    parts = " | ".join(f"{100 * part:.2f}" for part in (*found, sum(found)))
    print(f"| {options.models} × {options.replicas} | {parts} |")
    return 0


def _forwarding(options: argparse.Namespace) -> int:
    print("| CPU µs/request | activator | data plane | Knative's activator |\n|---|---|---|---|")
    for name, figures in activator.forwarding(options.seconds, options.rounds).items():
        through = figures[activator.ACTIVATOR.name]
        others = (
            f"{figures[peer.name]:.1f} (×{through / figures[peer.name]:.2f})" for peer in (BERTH, KNATIVE)
        )
        print(f"| {name} | {through:.1f} | {' | '.join(others)} |")
    return 0


def _buffered(options: argparse.Namespace) -> int:
    count, before, then = activator.buffered(options.requests)
    print(f"{count} requests of 1 KiB buffered in {then:.0f} MiB, {before:.0f} of which without them")
    return 0 if count == options.requests else 1


def _cold_starts(options: argparse.Namespace) -> int:
    print(table(asyncio.run(cold_starts(options.models))))
    return 0


def _lost(options: argparse.Namespace) -> int:
    found: dict[str, Fates] = {}
    try:
        asyncio.run(lost(options.only, options.cycles, options.rate, options.models, found))
    finally:
        print(lost_table(found))
    return 1 if any(fates.lost for fates in found.values()) else 0


if __name__ == "__main__":
    main()
