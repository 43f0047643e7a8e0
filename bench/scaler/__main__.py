"""`python -m bench.scaler COMMAND`: see bench/README.md."""

import argparse
import sys

from bench.scaler.equality import compare, told


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaler", description=__doc__)
    commands = parser.add_subparsers(required=True)
    equality = commands.add_parser("equality", help="Berth's decisions against Knative's own")
    equality.add_argument("--decisions", type=int, default=1_000_000)
    equality.add_argument("--seed", default="nightly")
    equality.set_defaults(run=_equality)
    options = parser.parse_args()
    sys.exit(options.run(options))


def _equality(options: argparse.Namespace) -> int:
    result = compare(options.seed, options.decisions)
    print(told(result))
    return 1 if result.differences else 0


if __name__ == "__main__":
    main()
