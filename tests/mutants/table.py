"""Which tests run which lines, how long each takes, and whether it passes: one run of the unit tests under
coverage.py, kept in build/mutants. A file of tests is run again only when it, or a file that its tests have run,
has changed.
"""

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest

FLAGS = (
    "--quiet",
    "--confcutdir=tests/unit",  # the clusters of tests/conftest.py are of no use here
    "-pno:cacheprovider",
    "-otimeout=0",
)
# The parameters of one test function have this time in all, so that thousands of histories do not decide how
# long everything takes: those that come later are not used.
FUNCTION_SECONDS = 10.0


@dataclass
class Test:
    # Of CPU time: the clock's depends on what else runs, and with it which tests a change is given.
    seconds: float
    # Lines that it runs, by file.
    lines: dict[str, list[int]]


@dataclass
class Tested:
    """What is known of one file of tests."""

    # By file that the tests have run, and their own: its hash then.
    hashes: dict[str, str] = field(default_factory=dict)
    tests: dict[str, Test] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class Table:
    def __init__(self, root: Path, packages: Iterable[str]) -> None:
        self._root, self._packages = root, tuple(packages)
        self._file = root / "build" / "mutants" / "table.json"
        self._tested: dict[str, Tested] = {}
        # Lines that are run when a file is imported.
        self._imports: dict[str, set[int]] = {}
        if self._file.exists():
            said = json.loads(self._file.read_text())
            self._imports = {file: set(lines) for file, lines in said["imports"].items()}
            for name, one in said["tested"].items():
                tests = {test: Test(**of) for test, of in one.pop("tests").items()}
                self._tested[name] = Tested(tests=tests, **one)

    def stale(self) -> list[str]:
        """Files of tests to run. What is no longer there is forgotten."""
        found = {
            path.relative_to(self._root).as_posix()
            for package in self._packages
            for path in (self._root / "tests" / "unit" / package).rglob("test_*.py")
        }
        now = {
            file: self._hash(file) for file in {f for t in self._tested.values() for f in t.hashes} | found
        }
        fresh = {
            name
            for name, of in self._tested.items()
            if name in found and all(now[file] == was for file, was in of.hashes.items())
        }
        self._tested = {name: of for name, of in self._tested.items() if name in fresh}
        return sorted(found - fresh)

    def run(self, files: list[str]) -> None:
        """Run these files of tests in this process, which has imported nothing of the project yet."""
        include = [str(self._root / name / "*") for name in (*self._packages, "tests")]
        cover = coverage.Coverage(data_file=None, config_file=False, include=include)
        watch = _Watch(cover.switch_context)
        cover.start()
        code = pytest.main([*FLAGS, *files], plugins=[watch])
        cover.stop()
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            sys.exit(code)
        self._record(files, watch, cover.get_data())

    def _record(self, files: list[str], watch: "_Watch", data: Any) -> None:
        lines: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for path in data.measured_files():
            file = Path(path).relative_to(self._root).as_posix()
            for line, tests in data.contexts_by_lineno(path).items():
                for test in tests:
                    lines[test][file].append(line)
        for file, them in lines[""].items():
            self._imports[file] = self._imports.get(file, set()) | set(them)  # others' imports run others
        for name in files:
            tested = self._tested[name] = Tested(hashes={name: self._hash(name)})
            for test, seconds in watch.seconds.items():
                if test.partition("::")[0] == name:
                    tested.hashes |= {file: self._hash(file) for file in lines[test]}
                    of_project = {f: them for f, them in lines[test].items() if not f.startswith("tests/")}
                    tested.tests[test] = Test(seconds, of_project)
            tested.failed = [test for test in watch.failed if test.partition("::")[0] == name]
        self._save()

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        said = {
            "imports": {file: sorted(lines) for file, lines in self._imports.items()},
            "tested": self._tested,
        }
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(said, default=vars))
        new.replace(self._file)

    def _hash(self, file: str) -> str:
        path = self._root / file
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""

    def failed(self) -> list[str]:
        return [test for of in self._tested.values() for test in of.failed]

    def tests_of(self, file: str, lines: Iterable[int], at_import: bool) -> dict[str, float]:
        """The tests that run one of these lines and how long each takes, the fastest first. Lines that are run
        on import concern every test of the package."""
        wanted = set(lines)
        package = f"tests/unit/{file.partition('/')[0]}/"
        everywhere = at_import or bool(wanted & self._imports.get(file, set()))
        found = {
            name: test.seconds
            for tests in self._tested.values()
            for name, test in tests.tests.items()
            if (everywhere and name.startswith(package)) or not wanted.isdisjoint(test.lines.get(file, ()))
        }
        return dict(sorted(found.items(), key=lambda one: (one[1], one[0])))


class _Watch:
    """A pytest plugin: tells coverage which test runs, and notes how long it takes."""

    def __init__(self, switch: Callable[[str], object]) -> None:
        self._switch = switch
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._spent: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._spent[_function(item.nodeid)] > FUNCTION_SECONDS:
            pytest.skip("enough of these")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._switch(item.nodeid)
        begun = time.process_time()
        try:
            return (yield)
        finally:
            took = time.process_time() - begun
            self._spent[_function(item.nodeid)] += took
            self._switch("")
            if item.nodeid in self.seconds:
                self.seconds[item.nodeid] = took

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            self.seconds.pop(report.nodeid, None)
        elif report.when == "call" and report.passed:
            self.seconds[report.nodeid] = 0.0
            progress(f"{len(self.seconds)} tests")


def _function(test: str) -> str:
    return test.partition("[")[0]


def up_to_date(root: Path, packages: tuple[str, ...]) -> Table:
    """The table, after a process of its own has run what has changed since."""
    if stale := Table(root, packages).stale():
        print(f"running {len(stale)} files of tests to see which lines they run", file=sys.stderr)
        process = multiprocessing.get_context("spawn").Process(target=_fill, args=(root, packages))
        process.start()
        process.join()
    table = Table(root, packages)
    if table.stale():
        sys.exit("the unit tests could not be run: try `python -m pytest tests/unit`")
    for test in table.failed():
        print(f"not used, as it fails without a change: {test}", file=sys.stderr)
    return table


def _fill(root: Path, packages: tuple[str, ...]) -> None:
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    table = Table(root, packages)
    table.run(table.stale())


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
