"""Loopback addresses: each cluster takes a 127.X.0.0/16 of its own, each node a /24 of it.

Node i is 127.X.i.1 and its pods are 127.X.i.2 to 127.X.i.254, so the same ports serve everywhere.
"""

import errno
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

# 127.0 belongs to everybody, 127.1 is what people type.
_FIRST, _LAST = 20, 250
# Below those of connections that go out (net.ipv4.ip_local_port_range), above those that people choose.
_FREE_PORTS, _TRIES = (12_000, 28_000), 100
# Not the one that tests give seeds to: processes that run side by side would try the same ports.
_chance = random.SystemRandom()


class NoFreeNetwork(Exception):
    """Every 127.X.0.0/16 is taken by a living cluster."""


@contextmanager
def cluster_network() -> Iterator[str]:
    """`127.X` for this cluster alone while the block lasts, and no longer than the process lives.

    The lock is an abstract unix socket: of all users and whatever their TMPDIR, and of one network namespace, as the
    loopback addresses are.
    """
    for second in range(_FIRST, _LAST):
        with socket.socket(socket.AF_UNIX) as lock:
            try:
                lock.bind(f"\0berth-localcluster-127.{second}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            yield f"127.{second}"
            return
    raise NoFreeNetwork(f"all of 127.{_FIRST} to 127.{_LAST - 1} are taken; end another local cluster")


def free_port(*hosts: str) -> int:
    """As `free_ports`, one that is free on each of these hosts."""
    return _free_ports(hosts, 1)[0]


def free_ports(host: str, count: int) -> list[int]:
    """Ports without a listener at this moment, nor that the system gives to a connection that goes out:
    who listens there, ends, and listens again finds them free. No two are the same."""
    return _free_ports((host,), count)


def _free_ports(hosts: Sequence[str], count: int) -> list[int]:
    found: list[int] = []
    for port in _chance.sample(range(*_FREE_PORTS), _TRIES):
        with suppress(OSError), ExitStack() as listening:
            for host in hosts:
                listening.enter_context(socket.create_server((host, port)))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(
        errno.EADDRINUSE,
        f"no {count} free ports on {', '.join(hosts)} from {_FREE_PORTS[0]} to {_FREE_PORTS[1]}",
    )
