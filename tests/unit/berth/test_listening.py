"""Sockets that listen."""

import pytest

from berth.contract.endpoint import Endpoint


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_brackets_take_both_families(host: str) -> None:
    """As `--agent=[$(HOST_IP)]:8470` in a pod: which family it is its author does not know."""
    endpoint = Endpoint.parse(f"[{host}]:8470")
    assert endpoint == Endpoint(host, 8470)
    assert Endpoint.parse(str(endpoint)) == endpoint
