"""Programs of other projects that tests ask, each built once from its Go module.

    python -m tests.oracles                                           builds those that are not there yet
    python -m tests.oracles equality [--decisions N] [--seed WORDS]   Berth's decisions beside Knative's own

`equality` shows the first histories that differ, and ends non-zero if there are any.
"""

import argparse
import sys

from localcluster.building import BuildFailed, say
from tests.oracles.equality import compare, told
from tests.oracles.keda import keda_client
from tests.oracles.knative import oracle


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracles", description=__doc__)
    equality = parser.add_subparsers(dest="command").add_parser("equality")
    equality.add_argument("--decisions", type=int, default=1_000_000)
    equality.add_argument("--seed", default="nightly")
    options = parser.parse_args()
    if options.command is None:
        return _build()
    result = compare(options.seed, options.decisions)
    print(told(result))
    return 1 if result.differences else 0


def _build() -> int:
    for build in (oracle, keda_client):
        try:
            build()
        except BuildFailed as error:  # a test that needs it fails, and no other
            say(f"tests.oracles: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
