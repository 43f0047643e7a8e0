"""Ends everything that a local cluster started once the cluster's own process is gone, however it went.

Runs as a process of its own (`python -m localcluster.guard CLUSTER_ID DIRECTORY`) with a pipe to the
cluster as its standard input. The pipe ends when its other end closes, which the kernel does even for
`kill -9`. Then every process that carries the cluster's id in its environment is killed, and again
until none is left, so that a child forked in between does not slip through. Last, what a cluster
that could not end in order has left on disk is removed.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from localcluster.processes import CLUSTER_ID_VARIABLE
from localcluster.triton import remove_shared_memory, shm_prefix

KEEP_FILE = "keep"
"""Its presence in the work directory keeps the logs."""

_ROUNDS, _PAUSE_SECONDS = 100, 0.05


def processes_of(cluster_id: str) -> list[int]:
    """Every living process that was started under this cluster, but the caller."""
    mark = f"{CLUSTER_ID_VARIABLE}={cluster_id}".encode()
    return [pid for pid in _all_pids() if pid != os.getpid() and mark in _environment(pid)]


def end_all(cluster_id: str) -> None:
    for _ in range(_ROUNDS):
        pids = processes_of(cluster_id)
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_PAUSE_SECONDS)


def remove_leftovers(cluster_id: str, directory: Path) -> None:
    """The work directory, unless its logs are to be kept, and the Tritons' shared memory."""
    if not (directory / KEEP_FILE).exists():
        shutil.rmtree(directory, ignore_errors=True)
    remove_shared_memory(shm_prefix(cluster_id))


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        # A zombie's environment reads as empty.
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    # Ctrl-C in a terminal reaches the whole foreground group; the guard must outlive it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_all(sys.argv[1])
    remove_leftovers(sys.argv[1], Path(sys.argv[2]))
