"""Mutation testing: change one thing in the code, run the unit tests that run it, see whether one fails.

    python -m tests.mutants [--count N] [--seed N] [--jobs N] [PACKAGE ...]     a random sample
    python -m tests.mutants --at binder/loop/queue.py:40                             every change of a line
    python -m tests.mutants --again build/mutants/result.json                   what nothing noticed last time
    python -m tests.mutants --since REVISION [PACKAGE ...]                      a sample of the lines that are new since

`changes` says what is changed and what is left alone. Nothing is written but build/mutants. Changes that no user
could see are in equivalent.toml, each with its reason; they are counted apart.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.mutants.changes import Change, changes_of, sample
from tests.mutants.table import Table, progress, up_to_date
from tests.mutants.trial import Court, Outcome

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "berth", "binder", "loader", "proxy", "scaler")
EQUIVALENT = Path(__file__).parent / "equivalent.toml"
_HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")
_GENERATED = ("berth/v1/", "berth/triton/wire/")


def sources(root: Path, package: str) -> list[str]:
    found = sorted(path.relative_to(root).as_posix() for path in (root / package).rglob("*.py"))
    return [file for file in found if not file.startswith(_GENERATED)]


def all_changes(root: Path, package: str) -> list[Change]:
    return [change for file in sources(root, package) for change in changes_of(root, file)]


def new_lines(diff: str) -> dict[str, frozenset[int]]:
    """By file, of what `git diff --unified=0` says: the numbers of the lines that were added."""
    found: dict[str, set[int]] = {}
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ ").removeprefix("b/")
        elif hunk := _HUNK.match(line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            found.setdefault(file, set()).update(range(first, first + count))
    return {name: frozenset(lines) for name, lines in found.items()}


def since(root: Path, revision: str) -> dict[str, frozenset[int]]:
    command = ("git", "diff", "--unified=0", "--no-color", "--no-ext-diff", revision, "--", "*.py")
    return new_lines(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)


def equivalents(text: str) -> dict[tuple[str, str, str, str], str]:
    """The reason for each change that no user could see, by the change's key."""
    entries = tomllib.loads(text).get("equivalent", [])
    return {(one["file"], one["function"], one["before"], one["after"]): one["reason"] for one in entries}


def choose(arguments: argparse.Namespace) -> list[Change]:
    if arguments.at:
        file, _, line = arguments.at.partition(":")
        return [change for change in changes_of(ROOT, file) if change.line == int(line)]
    if arguments.again:
        survived = {
            tuple(one["key"]) for one in json.loads(arguments.again.read_text()) if not one["noticed_by"]
        }
        there = (change for package in PACKAGES for change in all_changes(ROOT, package))
        return list({one.key: one for one in there if one.key in survived}.values())
    new = None if arguments.since is None else since(ROOT, arguments.since)
    each, more = divmod(arguments.count, len(arguments.packages))
    return [
        change
        for place, package in enumerate(arguments.packages)
        for change in sample(
            [one for one in all_changes(ROOT, package) if new is None or one.line in new.get(one.file, ())],
            each + (place < more),
            f"{arguments.seed} {package}",
        )
    ]


def try_all(changes: list[Change], table: Table, jobs: int, show: Callable[[Outcome], None]) -> list[Outcome]:
    court = Court(ROOT)
    done: list[Outcome] = []
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed(
            pool.submit(court.run, change, table.tests_of(change.file, change.lines, change.at_import))
            for change in changes
        ):
            done.append(future.result())
            show(done[-1])
            progress(f"{len(done)} of {len(changes)} changes, {sum(one.noticed for one in done)} noticed")
    finally:
        pool.shutdown(cancel_futures=True)
    progress("")
    return sorted(done, key=lambda one: (one.change.file, one.change.start, one.change.after))


def survivors(outcomes: list[Outcome]) -> str:
    lines = []
    for outcome in outcomes:
        if not outcome.noticed:
            one = outcome.change
            how = f"tests that run it: {outcome.tests}"
            lines += [f"{one.file}:{one.line}  {one.function}  ({one.kind}, {how})"]
            lines += [f"    {one.before}", f"    → {one.after}"]
    return "\n".join(lines)


def shares(outcomes: list[Outcome], same: list[Change]) -> str:
    lines = ["package    changes  noticed  share  equivalent"]
    packages = sorted({one.package for one in [*same, *(outcome.change for outcome in outcomes)]})
    for package in [*packages, "all"]:
        tried = [one.noticed for one in outcomes if package in (one.change.package, "all")]
        left = sum(package in (one.package, "all") for one in same)
        share = f"{sum(tried) / len(tried):>5.0%}" if tried else "    –"
        lines.append(f"{package:<10} {len(tried):>7}  {sum(tried):>7}  {share}  {left:>10}")
    if cpu := [one.cpu_seconds for one in outcomes if one.cpu_seconds]:
        lines.append(f"CPU time of a change: median {statistics.median(cpu):.1f} s, most {max(cpu):.1f} s")
    return "\n".join(lines)


def as_json(outcome: Outcome) -> dict[str, object]:
    change = outcome.change
    return {
        "key": change.key,
        "line": change.line,
        "kind": change.kind,
        "tests": outcome.tests,
        "noticed_by": outcome.noticed_by,
        "cpu_seconds": round(outcome.cpu_seconds, 2),
    }


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PACKAGES)}; all of them"
    )
    parser.add_argument("--count", type=int, default=200, help="changes in all, as many of each package")
    parser.add_argument("--seed", type=int, default=1, help="another seed is another sample")
    parser.add_argument("--jobs", type=int, default=2, help="changes at a time")
    parser.add_argument("--at", metavar="FILE:LINE", help="every change of this line instead of a sample")
    parser.add_argument("--again", type=Path, metavar="JSON", help="only what survived in an earlier result")
    parser.add_argument("--since", metavar="REVISION", help="a sample of the lines that are new since then")
    parser.add_argument("-o", "--output", type=Path, metavar="JSON", help="the outcome of each change")
    arguments = parser.parse_args(argv)
    arguments.packages = arguments.packages or PACKAGES
    if wrong := [one for one in arguments.packages if one not in PACKAGES]:
        parser.error(f"{wrong[0]!r} is not one of {', '.join(PACKAGES)}")
    return arguments


def main() -> None:
    arguments = parsed(*sys.argv[1:])
    changes = choose(arguments)
    known = equivalents(EQUIVALENT.read_text())
    same = [change for change in changes if change.key in known]

    def show(outcome: Outcome) -> None:
        if arguments.at:
            one = outcome.change
            print(f"{one.before}\n    → {one.after}\n    {outcome.noticed_by or 'not noticed'}")

    outcomes = try_all(
        [one for one in changes if one not in same], up_to_date(ROOT, PACKAGES), arguments.jobs, show
    )
    if not arguments.at:
        print(survivors(outcomes))
    print(shares(outcomes, same))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps([as_json(one) for one in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
