"""Loopback addresses: each cluster takes a 127.X.0.0/16 of its own, each node a /24 of it.

Node i is 127.X.i.1 and its pods are 127.X.i.2 to 127.X.i.254, so the same ports serve everywhere.
"""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# 127.0 belongs to everybody, 127.1 is what people type.
_FIRST, _LAST = 20, 250


class NoFreeNetwork(Exception):
    """Every 127.X.0.0/16 is taken by a living cluster."""


@contextmanager
def cluster_network() -> Iterator[str]:
    """`127.X` for this cluster alone while the block lasts, and no longer than the process lives."""
    directory = Path(tempfile.gettempdir()) / f"berth-localcluster-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    for second in range(_FIRST, _LAST):
        with (directory / f"127.{second}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield f"127.{second}"
            return
    raise NoFreeNetwork(f"all of 127.{_FIRST} to 127.{_LAST - 1} are taken; end another local cluster")


def free_port(host: str) -> int:
    """A port that nobody listens on at this moment."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
