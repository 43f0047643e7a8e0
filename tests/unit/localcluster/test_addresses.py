"""Ports for tests and local clusters."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from localcluster import addresses
from localcluster.addresses import free_port, free_ports

HOST = "127.0.0.1"

TAKES = """
import sys
from localcluster.addresses import cluster_network
with cluster_network() as network:
    print(network, flush=True)
    sys.stdin.read()
"""


def test_clusters_with_other_temporary_directories_take_other_networks(tmp_path: Path) -> None:
    """node D8: the lock was a file in TMPDIR."""
    with ExitStack() as stack:
        taken = set()
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", TAKES],
                    env={**os.environ, "TMPDIR": str(tmp_path / name)},
                    cwd=Path(addresses.__file__).parent.parent,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            taken.add(process.stdout.readline().decode().strip())
        assert len(taken) == 2


def test_no_connection_that_goes_out_can_have_one() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_ports(HOST, 20)) < first


def test_no_two_are_the_same_and_none_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = free_ports(HOST, 1)
    monkeypatch.setattr(addresses, "_FREE_PORTS", (taken - 2, taken + 3))
    monkeypatch.setattr(addresses, "_TRIES", 5)
    with socket.create_server((HOST, taken)):
        found = free_ports(HOST, 2)
        assert len({*found, taken}) == 3
        with pytest.raises(OSError, match="no 5 free ports"):
            free_ports(HOST, 5)


def test_a_port_of_two_hosts_is_free_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "127.0.0.2"
    port = free_port(HOST, other)
    monkeypatch.setattr(addresses, "_FREE_PORTS", (port, port + 1))
    monkeypatch.setattr(addresses, "_TRIES", 1)
    with socket.create_server((other, port)):
        assert free_port(HOST) == port
        with pytest.raises(OSError, match=f"no 1 free ports on {HOST}, {other}"):
            free_port(HOST, other)
