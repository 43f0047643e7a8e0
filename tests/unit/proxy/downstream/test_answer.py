"""Two names of one model: clients read the public one, Triton the server's, in every form of an answer."""

import json
import random
from typing import Any

import pytest

from proxy.downstream.rest.answer import AsItComes, InPlace, Way, way_of
from proxy.policy.names import Names
from proxy.policy.routes import Route
from proxy.wire.http1 import HEADER_LENGTH
from tests.fakes.data_plane import RestPair, own_replica, settle
from tests.unit.proxy.downstream.test_connection import chunked, infer, seen
from tests.unit.proxy.downstream.test_request import ask, body_of

NAMES = Names(b"own", b"own-0123456789ab")
SERVER, PUBLIC = NAMES.server.decode(), NAMES.public.decode()


@pytest.fixture
async def connect() -> Any:
    with RestPair.triton_at_hand():
        yield lambda: RestPair(replica=own_replica(names=NAMES))


def answer(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    head = [f"HTTP/1.1 {status}", *lines]
    if "Transfer-Encoding: chunked" not in lines:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def served(pair: RestPair, request: bytes, said: bytes, cut: int | None = None) -> bytes:
    """What a client gets of Triton's answer, which comes in two pieces."""
    pair.client.data_received(request)
    await settle()
    upstream = pair.tritons[-1]
    for piece in (said[:cut], said[cut:]) if cut is not None else (said,):
        upstream.data_received(piece)
    return pair.to_client.take()


TENSORS = (
    b'{"model_name":"own-0123456789ab","model_version":"1","outputs":[{"name":"O","datatype":"BYTES",'
    b'"shape":[1],"data":["{\\"model_name\\":\\"x\\"}"]}]}'
)


async def test_triton_is_asked_by_its_own_name_and_packs_nothing(connect: Any) -> None:
    pair = connect()
    await served(pair, infer(infer()[-70:], "own", "accept-encoding: gzip", "X-A: b"), answer(TENSORS))
    for line in ("GET /v2/models/own", "GET /v2/models/own/versions/2/stats"):
        await served(pair, ask(line), answer(b"{}"))
    targets = [
        (target, headers.get("accept-encoding"), headers.get("x-a")) for target, headers, _ in seen(pair)
    ]
    assert targets == [
        (f"/v2/models/{SERVER}/infer", None, "b"),
        (f"/v2/models/{SERVER}", None, None),
        (f"/v2/models/{SERVER}/versions/2/stats", None, None),
    ]


@pytest.mark.parametrize("name", [SERVER, "other", "own-"])
async def test_every_other_name_is_unknown_also_the_servers(connect: Any, name: str) -> None:
    pair = connect()
    pair.client.data_received(infer(model=name))
    got = pair.to_client.take()
    assert got.startswith(b"HTTP/1.1 404")
    assert json.loads(body_of(got)) == {"error": f"Request for unknown model: '{name}' is not found"}
    assert not pair.tritons


async def test_tensors_keep_their_length_however_they_are_cut(connect: Any) -> None:
    said = answer(TENSORS, "Content-Type: application/json")
    expected = said.replace(NAMES.server_member, NAMES.public_member)
    assert json.loads(body_of(expected))["model_name"] == "own"
    for cut in (None, *range(1, len(said))):
        assert await served(connect(), infer(), said, cut) == expected


async def test_what_follows_the_json_of_a_binary_answer_is_left_alone(connect: Any) -> None:
    head = b'{"model_name":"own-0123456789ab","outputs":[]}'
    tensors = NAMES.server_member * 3
    said = answer(head + tensors, f"{HEADER_LENGTH}: {len(head)}")
    for cut in (None, *range(1, len(said))):
        got = await served(connect(), infer(), said, cut)
        assert len(got) == len(said)
        body = body_of(got)
        assert json.loads(body[: len(head)])["model_name"] == "own"
        assert body[len(head) :] == tensors


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(
    "line",
    ["GET /v2/models/own", "GET /v2/models/own/config", "GET /v2/models/own/stats", "HEAD /v2/models/own"],
)
async def test_small_answers_are_rewritten_whole(connect: Any, line: str, is_chunked: bool) -> None:
    body = json.dumps({"name": SERVER, "more": [SERVER, {"x": f"{SERVER}:1"}]}).encode()
    lines = ["Transfer-Encoding: chunked"] if is_chunked else []
    said = answer(chunked(body, 7) if is_chunked else body, *lines)
    expected = body.replace(NAMES.server, NAMES.public)
    for cut in (None, 20, len(said) - 30):
        got = await served(connect(), ask(line), said, cut)
        assert b"Content-Length: %d\r\n" % len(expected) in got
        assert b"chunked" not in got
        assert body_of(got) == (b"" if line.startswith("HEAD") else expected)


async def test_errors_carry_the_public_name_and_the_connection_goes_on(connect: Any) -> None:
    pair = connect()
    body = json.dumps({"error": f"in ensemble '{SERVER}', no version of {SERVER}"}).encode()
    for cut in (None, 5, 60, len(body)):
        got = await served(pair, infer(), answer(body, status="400 Bad Request"), cut)
        assert got.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert json.loads(body_of(got)) == {"error": "in ensemble 'own', no version of own"}
    assert len(pair.tritons) == 1
    assert pair.downstream.replica.rest.codes == {"400": 4}


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_events_carry_the_public_name_however_they_are_cut(connect: Any, version: bytes) -> None:
    events = b"".join(
        b"data: %b\n\n" % json.dumps(one).encode()
        for one in ({"model_name": SERVER, "text": "a"}, {"error": f"{SERVER} broke"}, {"x": "own-0123"})
    )
    said = answer(chunked(events, 40), "Transfer-Encoding: chunked", "Content-Type: text/event-stream")
    request = infer(b"{}", route="generate_stream").replace(b"HTTP/1.1", b"HTTP/" + version, 1)
    for cut in (None, *range(90, len(said))):
        got = await served(connect(), request, said, cut)
        content, left = b"", body_of(got)
        if version == b"1.0":
            content = left
        else:
            while True:
                size, _, left = left.partition(b"\r\n")
                if not int(size, 16):
                    break
                content, left = content + left[: int(size, 16)], left[int(size, 16) + 2 :]
        assert content == events.replace(NAMES.server, NAMES.public)


async def test_events_come_as_they_are_said_though_the_first_is_an_error(connect: Any) -> None:
    """Triton takes an answer's status from its first event; the others may be a long time in coming."""
    more = ("Transfer-Encoding: chunked", "Content-Type: text/event-stream")
    said = answer(
        chunked(b'data: {"error":"%b broke"}\n\n' % NAMES.server, 40), *more, status="400 Bad Request"
    )
    begun = said.removesuffix(b"0\r\n\r\n")
    got = await served(connect(), infer(b"{}", route="generate_stream"), begun, None)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert b'data: {"error":"own broke"}\n\n' in got


async def test_an_answer_that_is_too_long_to_be_rewritten_is_no_answer(connect: Any) -> None:
    pair = connect()
    got = await served(pair, ask("GET /v2/models/own/config"), answer(b"x" * (4 * 1024**2 + 1)), 100)
    assert got.startswith(b"HTTP/1.1 502 ")
    assert not pair.to_triton[0].open
    assert not pair.downstream.shared.pool.has_idle


@pytest.mark.parametrize("is_last", [True, False])
async def test_an_answer_that_is_no_answer_keeps_its_slot_until_its_last_byte_is_here(
    connect: Any, is_last: bool
) -> None:
    """Triton has the rest of it. The piece that was too much may be the last one."""
    pair = connect()
    said = answer(b"x" * 5 * 1024**2, status="400 Bad Request")
    end = len(said) if is_last else len(said) - 1
    assert (await served(pair, infer(), said[:end], cut=1024**2)).startswith(b"HTTP/1.1 502 ")
    admissions = pair.downstream.replica.admissions
    assert len(pair.downstream.given_up) == (not is_last)
    assert bool(admissions.bytes.used_bytes) is not is_last
    if not is_last:
        pair.tritons[0].data_received(said[end:])
    assert (admissions.running, admissions.bytes.used_bytes, len(pair.downstream.given_up)) == (0, 0, 0)


async def test_own_answers_are_renamed_too(connect: Any) -> None:
    pair = connect()
    body = json.dumps({"model_stats": [{"name": SERVER}]}).encode()
    pair.client.data_received(ask("GET /v2/models/stats"))
    await settle()
    pair.tritons[0].data_received(answer(body))
    await settle()
    assert json.loads(body_of(pair.to_client.take())) == {"model_stats": [{"name": "own"}]}
    assert seen(pair)[0][0] == f"/v2/models/{SERVER}/stats"


def test_each_answer_has_its_way() -> None:
    assert way_of(Route.INFER, 200, 9, is_chunked=False) is Way.IN_PLACE
    assert way_of(Route.GENERATE_STREAM, 200, None, is_chunked=True) is Way.AS_IT_COMES
    assert way_of(Route.GENERATE_STREAM, 400, None, is_chunked=True) is Way.AS_IT_COMES
    assert way_of(Route.GENERATE_STREAM, 400, 9, is_chunked=False) is Way.WHOLE
    assert way_of(Route.INFER, 400, 9, is_chunked=False) is Way.WHOLE
    assert way_of(Route.CONFIG, 200, 9, is_chunked=False) is Way.WHOLE
    assert way_of(Route.MODEL_READY, 200, 0, is_chunked=False) is None


@pytest.mark.parametrize("seed", range(50))
def test_pieces_make_no_difference(seed: int) -> None:
    rng = random.Random(seed)
    words = [
        NAMES.server,
        NAMES.server_member,
        NAMES.server[:-1],
        b"own-",
        b'"model_name":"',
        b"x",
        b"own-0own-",
    ]
    text = b"".join(rng.choice(words) for _ in range(rng.randrange(1, 12)))
    limit = rng.choice([None, rng.randrange(len(text) + 1)])
    part, rest = (text, b"") if limit is None else (text[:limit], text[limit:])
    for one, expected in (
        (AsItComes(NAMES), text.replace(NAMES.server, NAMES.public)),
        (InPlace(NAMES, limit), part.replace(NAMES.server_member, NAMES.public_member, 1) + rest),
    ):
        out, left = b"", text
        while left:
            size = rng.randrange(1, 9)
            out, left = out + one.feed(left[:size]), left[size:]
        assert out + one.rest() == expected
