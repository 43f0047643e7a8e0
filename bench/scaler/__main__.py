"""`python -m bench.scaler COMMAND`: see bench/README.md."""

import argparse
import sys

from bench.scaler.decisions import SPECS, microseconds
from bench.scaler.equality import compare, told
from bench.scaler.oracle import oracle
from localcluster.building import BuildFailed, say


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaler", description=__doc__)
    commands = parser.add_subparsers(required=True)
    equality = commands.add_parser("equality", help="Berth's decisions against Knative's own")
    equality.add_argument("--decisions", type=int, default=1_000_000)
    equality.add_argument("--seed", default="nightly")
    equality.set_defaults(run=_equality)
    speed = commands.add_parser("decisions", help="CPU time of decisions and of what they are made from")
    speed.add_argument("--models", type=int, default=1000)
    speed.add_argument("--ticks", type=int, default=100)
    speed.set_defaults(run=_decisions)
    build = commands.add_parser("oracle", help="build Knative's decider, if it is not there yet")
    build.set_defaults(run=_oracle)
    options = parser.parse_args()
    sys.exit(options.run(options))


def _equality(options: argparse.Namespace) -> int:
    result = compare(options.seed, options.decisions)
    print(told(result))
    return 1 if result.differences else 0


def _decisions(options: argparse.Namespace) -> int:
    print("| | µs per decision | µs per report |\n|---|---|---|")
    for name, annotations in SPECS.items():
        decision, report = microseconds(annotations, options.models, options.ticks)
        print(f"| {name} | {decision:.1f} | {report:.1f} |")
    return 0


def _oracle(_: argparse.Namespace) -> int:
    try:
        oracle()
    except BuildFailed as error:  # whoever needs it fails, and nobody else
        say(f"bench.scaler: {error}")
    return 0


if __name__ == "__main__":
    main()
