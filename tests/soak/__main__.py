"""Mixed clients at several replicas of a node for a long time: nothing stalls, nothing is left over, nothing grows.

    python -m tests.soak [--seconds N] [--json FILE]

Sidecars, gateway and Triton are real. It ends non-zero, and says why, where a call has not ended by its deadline, a
slot or a window is missing after the last client has gone, or the gateway or a sidecar has grown.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.soak.run import soak

_SECONDS = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=_SECONDS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of it for programs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="berth-soak-") as directory:
        result = asyncio.run(soak(Path(directory), options.seconds))
    text = json.dumps(result.to_json(), indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    for fault in result.faults:
        print(f"tests.soak: {fault}", file=sys.stderr)
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
