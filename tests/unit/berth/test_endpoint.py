"""Addresses as text."""

import pytest

from berth.contract.endpoint import Endpoint, UnixSocket, parse_address
from berth.contract.errors import InvalidValue


def test_an_address_is_a_port_or_a_socket() -> None:
    for text, meant in (
        ("127.0.0.1:80", Endpoint("127.0.0.1", 80)),
        ("unix:/run/t.sock:8001", UnixSocket("/run/t.sock:8001")),
        ("unix:8001", Endpoint("unix", 8001)),
        ("[::1]:80", Endpoint("::1", 80)),
    ):
        assert parse_address(text) == meant
        assert str(meant) == text


@pytest.mark.parametrize(
    "text", ["unix:", "unix:run/t", "unix:/run/", "unix:/" + "x" * 107, "/run/t", "unix:/a\0b"]
)
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("h:0", Endpoint("h", 0)),
        ("127.0.0.1:65535", Endpoint("127.0.0.1", 65535)),
        ("[::1]:80", Endpoint("::1", 80)),
        ("[h]:1", Endpoint("h", 1)),
    ],
)
def test_addresses(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(text) == endpoint
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize("text", ["h", "h:", ":80", "::1:80", "[::1:80", "::1]:80", "h:65536", "h:²", "h:+1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidValue, match="is not HOST:PORT"):
        Endpoint.parse(text)


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:x", "a:65536", "::1:80", "a:-1", "a:٣"])
def test_not_an_endpoint(text: str) -> None:
    with pytest.raises(InvalidValue, match="not HOST:PORT"):
        Endpoint.parse(text)


def test_an_ipv6_address_without_brackets_is_shown_with_them() -> None:
    with pytest.raises(InvalidValue, match=r"brackets: \[fd00::1\]:8470$"):
        Endpoint.parse("fd00::1:8470")


def test_endpoints() -> None:
    assert str(Endpoint.parse("[::1]:80")) == "[::1]:80"
    assert Endpoint.parse("h:0") == Endpoint("h", 0)
