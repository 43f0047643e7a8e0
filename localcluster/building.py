"""What every build that is made once and cached has in common: a lock, and a word now and then."""

import fcntl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BuildFailed(Exception):
    """Something could not be built; the message holds the end of what the builder said."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Two that want the same build wait for each other instead of building twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def progress(started: float) -> Iterator[None]:
    """A line now and then, so that a long build is not taken for a hang."""
    done = threading.Event()

    def tick() -> None:
        while not done.wait(20):
            say(f"  … still building, {time.monotonic() - started:.0f} s so far")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
