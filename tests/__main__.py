"""The tests of a change, in lanes side by side: those on clusters mostly wait, most others compute.

    python -m tests [PYTEST-ARGUMENT …]
    python -m tests --nightly               those that are marked `nightly`, too

Each group of tests is a pytest of its own, whose output is kept in `build/tests` and shown when it has ended; what
each came to is said once more at the very end. Arguments go to one pytest instead.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

# What is in no group of its own.
OTHERS: Final = "all others"
# In the order in which lanes take them. The two longest first; beside what waits for clusters always something that
# computes, for there are two cores; what is short last, so that all lanes end at about the same time.
GROUPS: Final = (
    "tests/e2e",
    "tests/node",
    OTHERS,
    "tests/unit/binder",
    "tests/scaling",
    "tests/loopback/agent",
    "tests/cluster",
    "tests/loopback/proxy",
    "tests/loopback/clients",
    "tests/unit/proxy",
)
_LANES: Final = 3
_LOGS: Final = Path("build", "tests")
_PYTEST: Final = (sys.executable, "-m", "pytest")
_FLAGS: Final = ("-p", "no:cacheprovider", "--durations=20", "--durations-min=1")
# For a pytest that is told to end, with its clusters.
_GRACE_SECONDS: Final = 30.0


def commands(*, nightly: bool = False) -> dict[str, Sequence[str]]:
    """By the group's name, in order."""
    marked = () if nightly else ("-m", "not nightly")
    named = [group for group in GROUPS if group != OTHERS]
    paths = {group: (group,) for group in named}
    paths[OTHERS] = ("tests", *(f"--ignore={group}" for group in named))
    return {group: (*_PYTEST, *_FLAGS, *marked, *paths[group]) for group in GROUPS}


async def run(groups: Mapping[str, Sequence[str]], *, lanes: int, logs: Path) -> dict[str, int]:
    """The exit status of each group."""
    left, statuses = iter(groups.items()), dict[str, int]()

    async def lane() -> None:
        for name, command in left:
            log = logs / f"{name.removeprefix('tests/').replace('/', '-').replace(' ', '-')}.log"
            print(f"tests: {name} begins", flush=True)
            began = time.monotonic()
            statuses[name] = await _output_to(log, command)
            print(log.read_text(errors="replace"), end="")
            print(f"tests: {name} took {time.monotonic() - began:.0f} s", flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(lanes):
            group.create_task(lane())
    for name, status in statuses.items():
        print(f"tests: {name} {f'FAILED with status {status}' if status else 'passed'}")
    return statuses


async def _output_to(log: Path, command: Sequence[str]) -> int:
    """The exit status. Who is cancelled leaves no process."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT
        )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                process.send_signal(signal.SIGINT)
                await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _all(*, nightly: bool) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    shutil.rmtree(_LOGS, ignore_errors=True)
    _LOGS.mkdir(parents=True)
    statuses = await run(commands(nightly=nightly), lanes=_LANES, logs=_LOGS)
    return 1 if any(statuses.values()) else 0


def main(arguments: Sequence[str]) -> int:
    nightly = list(arguments) == ["--nightly"]
    if arguments and not nightly:
        os.execv(sys.executable, [*_PYTEST, *arguments])
    try:
        return asyncio.run(_all(nightly=nightly))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
