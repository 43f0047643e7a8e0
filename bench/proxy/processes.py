"""Processes under measurement: started, watched, and what they cost."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_START_SECONDS = 30.0


@dataclass(frozen=True)
class Running:
    """What is measured: started programs and all their descendants."""

    pids: tuple[int, ...]

    def cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self.pids))

    def rss_bytes(self) -> int:
        return sum(map(rss_bytes, self.pids))

    def peak_rss_bytes(self) -> int:
        return sum(map(peak_rss_bytes, self.pids))

    def __add__(self, other: "Running") -> "Running":
        return Running(self.pids + other.pids)


@contextmanager
def started(
    command: Sequence[str],
    *,
    log: Path,
    ports: Sequence[tuple[str, int]],
    env: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Run a program until the block ends; wait until its ports answer. Raises RuntimeError."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    try:
        for host, port in ports:
            _until_open(process, host, port, log)
        yield Running((process.pid,))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time so far of a process and its descendants."""
    return sum(_cpu(one) for one in tree(pid)) * _TICK_SECONDS


def rss_bytes(pid: int) -> int:
    """Of a process and its descendants, now."""
    return sum(_status(one, "VmRSS:") for one in tree(pid))


def peak_rss_bytes(pid: int) -> int:
    """The sum of the high-water marks of a process and its descendants."""
    return sum(_status(one, "VmHWM:") for one in tree(pid))


def tree(pid: int) -> list[int]:
    found = [pid]
    for known in found:
        for task in Path(f"/proc/{known}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def _cpu(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _status(pid: int, what: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    return 0


def _until_open(process: subprocess.Popen[bytes], host: str, port: int, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex((host, port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not serve {host}:{port}:\n{log.read_text()[-2000:]}")
