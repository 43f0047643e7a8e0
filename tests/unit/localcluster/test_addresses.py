"""Ports for tests and local clusters."""

import socket
from pathlib import Path

import pytest

from localcluster import addresses
from localcluster.addresses import free_ports

HOST = "127.0.0.1"


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
