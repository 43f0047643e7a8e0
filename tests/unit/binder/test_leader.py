"""What a replica answers over HTTP that does not lead, and how the leader is found in its Lease."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from berth.contract.errors import InvalidValue
from binder.api.leader import LeaderOnly, extender_url_of, identity, schedulable_url_of

E, S = "http://10.0.0.7:8481", "http://10.0.0.7:8482/"


@pytest.mark.parametrize("extender", [None, E])
@pytest.mark.parametrize("schedulable", [None, S])
def test_the_identity_tells_where_the_leader_answers(extender: str | None, schedulable: str | None) -> None:
    found = identity("host-1-ab", extender_url=extender, schedulable_url=schedulable)
    assert found.startswith("host-1-ab")
    assert extender_url_of(found) == (extender or "")
    assert schedulable_url_of(found) == (schedulable or "").rstrip("/")


async def served(_: web.Request) -> web.Response:
    return web.json_response("served")


async def invalid(_: web.Request) -> web.Response:
    raise InvalidValue("no such thing")


@pytest.mark.parametrize(
    ("leads", "leader", "handler", "status", "header", "body"),
    [
        (True, "", served, 200, "", "served"),
        (True, "http://old", invalid, 400, "", {"error": "no such thing"}),
        (False, "http://leader", served, 307, "http://leader/ask", None),
        (False, "", served, 503, "", {"error": "no replica of the binder leads"}),
    ],
)
async def test_only_the_leader_serves(
    leads: bool, leader: str, handler: object, status: int, header: str, body: object
) -> None:
    app = web.Application()
    app.router.add_post("/ask", LeaderOnly(lambda: leads, lambda: leader).guard(handler))  # type: ignore[arg-type]
    async with TestClient(TestServer(app)) as client:
        answer = await client.post("/ask", allow_redirects=False)
        assert (answer.status, answer.headers.get("Location", "")) == (status, header)
        assert answer.headers.get("Retry-After", "") == ("1" if status == 503 else "")
        if body is not None:
            assert await answer.json() == body
