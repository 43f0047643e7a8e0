"""Ends a real node once its owner is gone, however that went: processes, cgroups, the work directory.

Runs as a process of its own, outside the node (`python -m localcluster.node.guard NAME DIRECTORY`), with
a pipe to the owner as its standard input; the kernel closes the pipe's other end even for `kill -9`.
The mounts and the network end with the last process in their namespaces.
"""

import shutil
import signal
import sys
from pathlib import Path

from localcluster.guard import KEEP_FILE
from localcluster.node import cgroups


def end(name: str, directory: Path) -> None:
    """Everything of the node `name`; the logs in `directory` stay if they are to be kept."""
    places = [hierarchy.own / name for hierarchy in cgroups.hierarchies()]
    cgroups.end_all(places)
    cgroups.remove(places)
    if not (directory / KEEP_FILE).exists():
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    # Ctrl-C in a terminal reaches the whole foreground group; the guard must outlive it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("watching", flush=True)
    sys.stdin.buffer.read()
    end(sys.argv[1], Path(sys.argv[2]))
