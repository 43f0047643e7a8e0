"""What the binder costs.

    python -m bench.binder core [--nodes N] [--json FILE]
    python -m bench.binder schedulable [--nodes N] [--json FILE]
    python -m bench.binder cluster [--nodes N] [--json FILE] …

`core` times decisions without any I/O, `schedulable` answers to the scaler; `cluster` sets the whole binder beside kube-scheduler, on one
real API server.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    # Only the chosen one: the other's parts need not work, nor be paid for.
    bench = importlib.import_module(f"bench.binder.{options.bench}")
    return bench.run(options) or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.binder", description=__doc__.partition("\n")[0])
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="write the figures for programs")
    benches = parser.add_subparsers(dest="bench", required=True)
    core = benches.add_parser("core", parents=[common], help="decisions alone")
    core.add_argument("--nodes", type=int, metavar="N", help="one size (default: 100, 1000, 5000, 20000)")
    asked = benches.add_parser("schedulable", parents=[common], help="answers to the scaler")
    asked.add_argument("--nodes", type=int, metavar="N", help="one size (default: 100, 1000, 5000)")
    _cluster_options(benches.add_parser("cluster", parents=[common], help="beside kube-scheduler"))
    return parser


def _cluster_options(parser: argparse.ArgumentParser) -> None:
    def number(flag: str, default: int, text: str) -> None:
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default {default})")

    number("--nodes", 1000, "GPU nodes")
    number("--pods", 5000, "pods of the throughput measure")
    number("--rounds", 2, "turns of each scheduler; the medians are shown")
    number("--limit-seconds", 300, "a throughput measure that takes longer is broken off")
    number("--rate", 50, "pods per second of the latency measure")
    number("--latency-seconds", 20, "how long pods are created at that rate")
    parser.add_argument(
        "--score-all",
        action="store_true",
        help="measure kube-scheduler also with percentageOfNodesToScore: 100, for it looks at a part of the nodes",
    )
    parser.add_argument("--only", metavar="NAME", help="one scheduler alone, e.g. berth, while working on it")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="cProfile of berth's last throughput measure (it slows it)",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
