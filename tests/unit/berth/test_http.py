"""Requests to an admin port."""

import pytest

from berth.runtime.admin import Reply, Request
from berth.runtime.admin.http import HEAD_BYTES, read_head


@pytest.mark.parametrize(
    ("head", "read"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: h\r\n\r\n", Request("/livez")),
        (b"GET /livez?verbose=1 HTTP/1.0\r\n\r\n", Request("/livez")),
        (b"HEAD /livez HTTP/1.1\r\n\r\n", Request("/livez", with_body=False)),
        (b"GET /s HTTP/1.1\r\nACCEPT: text/plain\r\n\r\n", Request("/s", "text/plain")),
        (b"GET /s HTTP/1.1\r\n\r\naccept: x\r\n", Request("/s")),
        (b"GET /s HTTP/1.1\r\n" + b"a" * (HEAD_BYTES - 17) + b"\r\n\r\n", Request("/s")),
        (b"GET /s HTTP/1.1\r\n", None),
        (b"a" * HEAD_BYTES, None),
        (b"", None),
        (b"a" * (HEAD_BYTES + 1), 431),
        (b"GET /s HTTP/1.1\r\n" + b"a" * (HEAD_BYTES - 16) + b"\r\n\r\n", 431),
        (b"POST /livez HTTP/1.1\r\n\r\n", 405),
        (b"GET livez HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (b"GET /livez HTTP/2.0\r\n\r\n", 400),
    ],
)
def test_a_head_is_read_or_what_is_wrong_with_it_is_reported(head: bytes, read: object) -> None:
    found = read_head(head)
    assert (found.status if isinstance(found, Reply) else found) == read
