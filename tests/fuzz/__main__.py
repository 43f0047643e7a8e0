"""Coverage-guided fuzzing of the proxy's parsers by atheris.

    python -m tests.fuzz TARGET [libFuzzer's options, such as -max_total_time=60]

New inputs that reach new code are added to tests/fuzz/corpus/TARGET, which every test run replays.
"""

import sys
from pathlib import Path

import atheris  # not among the locked dependencies: `make fuzz` installs it

CORPUS = Path(__file__).parent / "corpus"

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    with atheris.instrument_imports(include=["proxy"]):
        from tests.fuzz.targets import TARGETS
    if name not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz {{{','.join(TARGETS)}}} [options]")
    atheris.Setup([sys.argv[0], *sys.argv[2:], str(CORPUS / name)], TARGETS[name])
    atheris.Fuzz()
