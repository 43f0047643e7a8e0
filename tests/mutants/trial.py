"""One change on trial: a process of its own imports the changed file and runs the tests that concern it, until
one fails. Nothing is written to the tree.

The processes are forked from a server that has imported what the project imports from others, which takes longer
than most tests.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tests.mutants.changes import Change
from tests.mutants.table import FLAGS

# It costs only time if one is missing.
PRELOAD = (
    "_pytest.python",
    "aiohttp.web",
    "grpc.aio",
    "kubernetes.client",
    "numpy",
    __name__,
)
# A change is given its fastest tests until they have taken this long: what none of them notices is rarely worth the
# slower ones.
TESTS_SECONDS = 10.0
# A test that takes this much longer than without the change has noticed it: seconds and a factor, of CPU time for
# one that does not end, of the clock for one that waits for what never comes.
CPU, CLOCK, FACTOR = 2.0, 10.0, 3.0
START_SECONDS = 30.0
MEMORY_BYTES = 8 << 30
_NO_TESTS = 5


@dataclass(frozen=True)
class Outcome:
    change: Change
    tests: int
    # The test that has noticed the change, or how else it showed; "" if nothing did.
    noticed_by: str = ""
    cpu_seconds: float = 0.0

    @property
    def noticed(self) -> bool:
        return bool(self.noticed_by)


class Court:
    """Tries changes, several at a time (from several threads)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))

    def run(self, change: Change, tests: dict[str, float]) -> Outcome:
        if not tests:
            return Outcome(change, 0)
        chosen = _in_time(tests)
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_trial, args=(self._root, change, chosen, sender))
        process.start()
        sender.close()
        with receiver:
            try:
                noticed_by, cpu = receiver.recv()
            except EOFError:
                noticed_by, cpu = "", 0.0
        process.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # what its tests have left
        if process.exitcode:
            noticed_by = (
                f"ended by {signal.Signals(-process.exitcode).name}" if process.exitcode < 0 else "crash"
            )
        return Outcome(change, len(chosen), noticed_by, cpu)


def _in_time(tests: dict[str, float]) -> dict[str, float]:
    spent = 0.0
    chosen: dict[str, float] = {}
    for test, seconds in tests.items():
        if spent > TESTS_SECONDS:
            break
        spent += seconds
        chosen[test] = seconds
    return chosen


def _trial(root: Path, change: Change, tests: dict[str, float], sender: Connection) -> None:
    os.setsid()
    os.chdir(root)
    with open(os.devnull, "r+b") as null:
        for stream in range(3):
            os.dup2(null.fileno(), stream)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, _Changed(root, change))
    watch = _Watch(tests)
    watch.limit(START_SECONDS)
    code = pytest.main([*FLAGS, "-x", *sorted({test.partition("::")[0] for test in tests})], plugins=[watch])
    noticed_by = watch.failed or (
        "" if code == pytest.ExitCode.OK else f"pytest: {pytest.ExitCode(code).name}"
    )
    sender.send((noticed_by, time.process_time()))
    sender.close()
    os._exit(0)


class _Changed:
    """Finds the changed module before anything else does; others it leaves to the others."""

    def __init__(self, root: Path, change: Change) -> None:
        parts = Path(change.file).with_suffix("").parts
        self._name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self._path = root / change.file
        self._code = change.apply(self._path.read_bytes())

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(
            name, self._path, loader=_Loader(name, str(self._path), self._code)
        )


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Watch:
    """A pytest plugin: the chosen tests in their order, each with its time limit."""

    def __init__(self, tests: dict[str, float]) -> None:
        self._tests = tests
        self._order = {test: place for place, test in enumerate(tests)}
        self.failed = ""

    def limit(self, cpu: float, clock: float = 0.0) -> None:
        """The process ends when this is over, wherever it is."""
        for kind, end, seconds in (
            (signal.ITIMER_PROF, signal.SIGPROF, cpu),
            (signal.ITIMER_REAL, signal.SIGALRM, clock),
        ):
            signal.signal(end, signal.SIG_DFL)
            signal.setitimer(kind, seconds)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = {item.nodeid: item for item in items if item.nodeid in self._order}
        items[:] = sorted(chosen.values(), key=lambda item: self._order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        usual = self._tests[item.nodeid] * FACTOR
        self.limit(CPU + usual, CLOCK + usual)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
