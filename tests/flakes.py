"""The same tests again and again, in random order, beside busy loops: a test that is red once is a defect, of the
test or of what it tests.

    python -m tests.flakes [--times N] [--busy N] [--seed N] [--output DIRECTORY] [PATH ...]

Each round is a pytest of its own with the next seed; files are shuffled, and the tests within each. Ends with 1 where
any test was red, and says in which rounds and how to see it again; each round's output is kept.
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

PATHS: Final = ("tests/unit", "tests/loopback")
OUTPUT: Final = Path("build", "flakes")
# A process that computes until its parent has gone, however that ended.
_BUSY: Final = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
# pytest's status where all tests passed, and where some failed: any other says that it did not run them.
_RAN: Final = (0, 1)


def command(seed: int, paths: Sequence[str], report: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--random-order", f"--random-order-seed={seed}", f"--junitxml={report}"),
        *paths,
    ]


def red(report: Path) -> list[str]:
    """The tests of a JUnit report that failed, or whose set-up or end did, as pytest takes them on its command line but
    for the separators of modules and classes."""
    return sorted(
        {
            f"{case.get('classname', '')}::{case.get('name', '')}"
            for case in ElementTree.parse(report).iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        }
    )


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that compute meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rounds(times: int, seed: int, paths: Sequence[str], output: Path) -> dict[str, list[int]]:
    """The seeds with which each test was red. Raises SystemExit where pytest could not run them."""
    found: dict[str, list[int]] = {}
    output.mkdir(parents=True, exist_ok=True)
    for one in range(seed, seed + times):
        report = output / f"{one}.xml"
        with (output / f"{one}.log").open("wb") as log:
            status = subprocess.run(
                command(one, paths, report), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            ).returncode
        if status not in _RAN:
            raise SystemExit(f"flakes: pytest ended with {status}: see {log.name}")
        now = red(report)
        for test in now:
            found.setdefault(test, []).append(one)
        print(f"flakes: seed {one}: {f'{len(now)} red' if now else 'green'}", flush=True)
    return found


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flakes", description=__doc__.partition("\n\n")[0])
    parser.add_argument("paths", nargs="*", default=PATHS, help=f"tests (default: {' '.join(PATHS)})")
    parser.add_argument("--times", type=positive, default=50, help="rounds (default: 50)")
    parser.add_argument("--busy", type=int, default=1, help="processes that compute meanwhile (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="the first round's; the next ones count up")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"for logs (default: {OUTPUT})")
    given = parser.parse_args(arguments)
    with busy(given.busy):
        found = rounds(given.times, given.seed, given.paths, given.output)
    for test, seeds in sorted(found.items(), key=lambda one: -len(one[1])):
        print(f"{len(seeds):4} of {given.times} red: {test}   (--seed {seeds[0]} --times 1)")
    print(f"flakes: {len(found)} tests were red in {given.times} rounds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
