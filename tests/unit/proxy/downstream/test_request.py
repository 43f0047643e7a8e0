"""What a REST client gets: Triton's answers in every form that HTTP/1.1 knows, our own, and what comes of both."""

import asyncio
import gzip
import json
import random
import time
import zlib
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from proxy.downstream.rest import connection as rest_client
from proxy.policy.names import Names
from proxy.policy.refusal import NotServed
from proxy.policy.routes import HIDDEN_EXTENSIONS
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.replica import Replica
from proxy.upstream import http1 as rest_upstream
from proxy.upstream.http1 import UpstreamHttp, UpstreamPool
from proxy.upstream.queries import Answer
from proxy.wire.http1 import FIELD_BYTES, HEAD_BYTES, HEADER_LENGTH, BadChunks, ChunkReader
from tests.fakes.data_plane import RestPair, Wire, own_replica, settle
from tests.unit.proxy.downstream.test_connection import BODY, OK, Connect, chunked, drive, infer, seen

HEAD = "HTTP/1.1 200 OK\r\n"
BROKEN = b"HTTP/1.1 503 Service Unavailable\r\n"


@pytest.fixture
async def connect() -> Any:
    with RestPair.triton_at_hand():
        yield RestPair


def ask(line: str, *lines: str, host: bool = True, version: str = "1.1") -> bytes:
    fields = ["Host: h", *lines] if host else list(lines)
    return "\r\n".join([f"{line} HTTP/{version}", *fields, "", ""]).encode()


async def answered(first: RestPair, client: RestPair) -> None:
    """One request of a client of the first one's front end."""
    client.client.data_received(infer())
    await settle()
    first.tritons[-1].data_received(OK)
    assert client.to_client.take() == OK


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


async def asked(pair: RestPair, request: bytes | None = None) -> UpstreamHttp:
    pair.client.data_received(request or infer())
    await settle()
    assert pair.tritons[-1].request is not None
    return pair.tritons[-1]


# Triton's answers.

FORMS: dict[str, tuple[bytes, bytes]] = {
    "a length": (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", b""),
    "nothing": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    "an early hint": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "two early hints": (b"HTTP/1.1 100 Continue\r\n\r\n" * 2 + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", b"abc"),
    "chunks and trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n3\r\nabc\r\n0\r\nX: 1\r\n\r\n", b"abc"),
    "an unknown status": (b"HTTP/1.1 299 Odd\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_answer_arrives_however_it_is_cut(connect: Connect, form: str) -> None:
    """And its connection serves the next request."""
    answer, body = FORMS[form]
    status = answer.rpartition(b"HTTP/1.1 ")[2][:3]
    for cut in range(1, len(answer)):
        pair = connect(limit=1, depth=0)
        upstream = await asked(pair)
        upstream.data_received(answer[:cut])
        assert pair.downstream.replica.admissions.running == 1
        upstream.data_received(answer[cut:])
        sent = pair.to_client.take()
        assert sent.startswith(b"HTTP/1.1 %s " % status)
        assert sent.count(b"HTTP/1.1") == 1  # hints are not for clients that did not ask
        got = body_of(sent)
        assert got == (body_of(answer.rpartition(b"HTTP/1.1")[2]) if b"chunked" in answer else body)
        assert b"Connection" not in sent
        assert pair.downstream.replica.rest.codes == {status.decode(): 1}
        assert pair.downstream.replica.admissions.running == 0
        assert await asked(pair) is upstream


@pytest.mark.parametrize("form", FORMS)
async def test_a_client_of_http_1_0_gets_no_chunks_and_then_the_end(connect: Connect, form: str) -> None:
    answer, body = FORMS[form]
    for pieces in ([answer], [answer[:-4], answer[-4:]]):
        pair = connect()
        request = infer().replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        upstream = await asked(pair, request)
        for piece in pieces:
            upstream.data_received(piece)
        sent = pair.to_client.sent
        assert body_of(sent) == body
        for unknown in (b"Transfer-Encoding", b"Trailer"):
            assert unknown not in sent
        assert b"Connection: close" in sent
        assert pair.to_client.ended
        assert pair.downstream.shared.pool.has_idle


async def test_a_body_that_ends_with_its_connection(connect: Connect) -> None:
    for error, whole in ((None, True), (OSError("reset"), False)):
        pair = connect()
        upstream = await asked(pair)
        upstream.data_received(b"HTTP/1.1 200 OK\r\n\r\nab")
        upstream.data_received(b"c")
        assert pair.client.is_busy
        upstream.connection_lost(error)
        assert pair.to_client.sent == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc"
        assert pair.downstream.replica.rest.codes == {"200" if whole else "502": 1}
        # A client that was promised no length must see the difference: an end, or a reset.
        assert (pair.to_client.ended, pair.to_client.open) == (whole, False)
        assert not pair.downstream.shared.pool.has_idle


@pytest.mark.parametrize("last", ["Connection: close", "HTTP/1.0"])
async def test_a_connection_that_triton_ends_serves_no_other_request(connect: Connect, last: str) -> None:
    pair = connect()
    upstream = await asked(pair)
    answer = OK.replace(b"HTTP/1.1", b"HTTP/1.0") if last == "HTTP/1.0" else OK.replace(b"\r\n\r\n", b"\r\n%b\r\n\r\n" % last.encode())  # fmt: skip
    upstream.data_received(answer)
    assert body_of(pair.to_client.sent) == b"{}"
    assert not pair.to_triton[0].open
    assert not pair.downstream.shared.pool.has_idle


@pytest.mark.parametrize(
    "rest",
    [
        b"4\r\nabcde\r\n",  # a chunk that is longer than it says
        b"zz\r\n",
        b"3\r\nabc\r\n0\r\n\r\nmore",
        b"0\r\nno trailer\r\n\r\n",
        b"1\r\nx\r\n" * 10_000,  # so many at once that no other client is served meanwhile
    ],
    ids=lambda rest: rest[:20],
)
@pytest.mark.parametrize("begun", [True, False])
async def test_chunks_that_cannot_be_read_are_cut_off(connect: Connect, rest: bytes, begun: bool) -> None:
    """Told with a status where nothing has gone out, else by the cut: it cannot be taken for a whole answer."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pair = connect(limit=1, depth=0)
    upstream = await asked(pair)
    if begun:
        upstream.data_received(head + b"1\r\na\r\n")
        upstream.data_received(rest)
        assert pair.to_client.sent.endswith(b"1\r\na\r\n")
        assert not pair.to_client.open
        assert pair.downstream.replica.rest.codes == {"502": 1}
    else:
        upstream.data_received(head + rest)
        assert pair.to_client.sent.startswith(BROKEN)
    assert not pair.to_triton[0].open
    assert pair.downstream.replica.admissions.running == 0


async def test_more_than_was_promised_is_not_the_next_answer(connect: Connect) -> None:
    for later in (True, False):
        pair = connect()
        upstream = await asked(pair)
        upstream.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\na")
        upstream.data_received(b"bc" if later else b"bcHTTP/1.1 200 OK\r\n")
        if later:
            upstream.data_received(b"HTTP/1.1 200 OK\r\n")  # it answers no request
            assert body_of(pair.to_client.sent) == b"abc"
        assert not pair.to_triton[0].open


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_answer_that_is_ever_yet_to_come_is_none(connect: Connect, at_once: bool) -> None:
    pair = connect(limit=1, depth=0)
    upstream = await asked(pair)
    for _ in range(1 if at_once else 20_000):
        upstream.data_received(b"HTTP/1.1 100 Continue\r\n\r\n" * (10_000 if at_once else 1))
        if not pair.to_triton[0].open:
            break
    assert pair.to_client.sent.startswith(BROKEN)
    assert not pair.to_triton[0].open
    assert pair.downstream.replica.admissions.running == 0


async def test_many_small_chunks_are_a_long_piece_after_which_others_have_their_turn(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = connect()
    upstream = await asked(
        pair, infer().replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    )  # such a client gets the content alone
    upstream.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
    waited: list[object] = []
    monkeypatch.setattr(pair.downstream, "later", waited.append)
    upstream.data_received(b"4\r\nabcd\r\n" * 8000)
    assert len(waited) == 1


async def test_a_head_without_end_is_no_answer(connect: Connect) -> None:
    pair = connect()
    upstream = await asked(pair)
    upstream.data_received(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(HEAD_BYTES // 1024 + 1):
        if pair.to_client.sent:
            break
        upstream.data_received(b"x" * 1024)
    assert pair.to_client.sent.startswith(BROKEN)
    assert b"too long" in pair.to_client.sent
    assert not pair.to_triton[0].open


async def test_tritons_control_headers_and_hops_stay_here(connect: Connect) -> None:
    pair = connect()
    upstream = await asked(pair)
    lines = b"Keep-Alive: 5\r\nendpoint-load-metrics: x\r\nEndpoint-Load-Metrics-Format: x\r\nX-Kept: yes\r\n"
    upstream.data_received(b"HTTP/1.1 200 OK\r\n" + lines + b"Content-Length: 2\r\n\r\n{}")
    assert b"X-Kept: yes" in pair.to_client.sent
    assert b"Keep-Alive" not in pair.to_client.sent
    assert b"Endpoint-Load-Metrics-Format" not in pair.to_client.sent


@pytest.mark.parametrize("began", [False, True])
async def test_triton_breaks_off(connect: Connect, began: bool) -> None:
    pair = connect(limit=1, depth=1)
    upstream = await asked(pair)
    if began:
        upstream.data_received(OK[:-1])
    upstream.connection_lost(OSError("reset by peer"))
    assert pair.downstream.replica.admissions.running == 0
    if began:
        assert pair.to_client.sent == OK[:-1]
        assert not pair.to_client.open
        assert pair.downstream.replica.rest.codes == {"502": 1}
    else:
        assert pair.to_client.sent.startswith(BROKEN)
        assert b"Triton broke off (reset by peer)" in pair.to_client.sent
        assert b"Retry-After: 1" in pair.to_client.sent
        await drive(pair, infer())
        assert pair.to_client.sent.endswith(OK)


async def test_an_idle_connection_that_triton_closes_is_forgotten(connect: Connect) -> None:
    pair = connect()
    await drive(pair, infer())
    assert pair.downstream.shared.pool.has_idle
    pair.tritons[0].connection_lost(None)
    assert not pair.downstream.shared.pool.has_idle
    await drive(pair, infer())
    assert len(pair.tritons) == 2
    assert pair.to_client.sent == OK * 2


async def test_only_so_many_connections_are_kept(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_upstream, "_KEPT_CONNECTIONS", 2)
    pair = connect()
    others = [RestPair(downstream=pair.downstream) for _ in range(3)]
    for one in (pair, *others):
        one.client.data_received(infer())
    await settle()
    for upstream in list(pair.tritons):
        upstream.data_received(OK)
    assert [wire.open for wire in pair.to_triton] == [True, True, False, False]


async def test_a_long_answer_is_read_piece_by_piece_in_its_replicas_turns(connect: Connect) -> None:
    """Hundreds of them may be here at once, and others are served in between."""
    pair = connect()
    later: list[Callable[[], None]] = []
    pair.downstream.later = later.append
    pair.client.data_received(infer())
    await settle()
    (triton,), (wire,) = pair.tritons, pair.to_triton
    size = 256 * 1024
    triton.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (3 * size))
    for _ in range(2):
        triton.data_received(b"x" * size)
        assert wire.paused
        assert len(later) == 1
        pair.client.pause_writing()
        later.pop()()
        assert wire.paused, "the client's own wish"
        pair.client.resume_writing()
        assert not wire.paused
    triton.data_received(b"x" * size)
    assert not wire.paused, "it is free for the next request"
    assert not later
    assert pair.to_client.sent.endswith(b"x" * 3 * size)


# The connections themselves.


class Asks:
    """Who waits for a connection to Triton."""

    takes_chunks = wants_connection = True
    whose = "own"

    def __init__(self) -> None:
        self.upstream: UpstreamHttp | None = None
        self.lost = ""
        self.losses: list[str] = []
        self.is_over = asyncio.Event()

    def connected(self, upstream: UpstreamHttp) -> None:
        self.upstream = upstream
        self.is_over.set()

    def answer_broke(self, reason: str) -> None:
        self.lost = reason
        self.losses.append(reason)
        self.is_over.set()


async def test_connections_are_made_where_triton_is_and_end_with_the_pool() -> None:
    ended = asyncio.Event()

    async def triton(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(triton, "127.0.0.1", 0)
    here = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    pool, asks = UpstreamPool(UpstreamCluster(UpstreamEndpoint(here, here))), Asks()
    assert pool.take(asks) is None  # type: ignore[arg-type]
    await asyncio.wait_for(asks.is_over.wait(), 5)
    assert asks.upstream is not None
    assert asks.upstream.transport is not None
    assert asks.upstream.transport.get_write_buffer_limits()[1] >= 64 * 1024
    await pool.close()
    await asyncio.wait_for(ended.wait(), 5)
    assert not asks.lost
    server.close()
    await server.wait_closed()
    refused = Asks()
    assert pool.take(refused) is None  # type: ignore[arg-type]
    await asyncio.wait_for(refused.is_over.wait(), 5)
    assert refused.lost.startswith("Triton cannot be reached: ")
    waits = Asks()
    pool.take(waits)  # type: ignore[arg-type]
    await pool.close()  # with one on its way
    assert not waits.is_over.is_set()


ENDS: dict[str, Callable[[UpstreamHttp, Wire], None]] = {
    "is about to be lost": lambda upstream, wire: wire.close(),
    "has been lost": lambda upstream, wire: (wire.close(), upstream.connection_lost(None))[-1],
    "speaks before it is asked": lambda upstream, wire: upstream.data_received(OK),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_a_connection_that_ends_as_it_is_made_was_not_made(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[UpstreamHttp, Wire], None]
) -> None:
    """Triton has read nothing: the request may go to another connection, and its replica is not suspected."""

    async def made(make: Callable[[], UpstreamHttp], *_: object) -> tuple[Wire, UpstreamHttp]:
        wire, upstream = Wire(), make()
        upstream.connection_made(wire)  # type: ignore[arg-type]
        end(upstream, wire)
        return wire, upstream

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", made)
    here, blamed = Endpoint("127.0.0.1", 1), list[object]()
    pool, asks = UpstreamPool(UpstreamCluster(UpstreamEndpoint(here, here)), lost=blamed.append), Asks()
    pool.take(asks)  # type: ignore[arg-type]
    await asyncio.wait_for(asks.is_over.wait(), 5)
    await settle()
    assert asks.upstream is None
    assert asks.losses == ["Triton cannot be reached: it ended the connection at once"]
    assert (pool.in_use, blamed) == (0, [])


async def test_a_request_that_waits_gets_no_connection_that_is_about_to_be_lost(connect: Connect) -> None:
    """One that is idle when another's end makes room."""
    pair = connect()
    first, second = RestPair(downstream=pair.downstream), RestPair(downstream=pair.downstream)
    for client in (first, second):
        client.client.data_received(infer())
    await settle()
    pair.tritons[1].data_received(OK)
    pair.to_triton[1].close()
    pool, waits = pair.downstream.shared.pool, Asks()
    pool._waiting["own"] = deque([waits])  # type: ignore[list-item]
    pair.tritons[0].abort()
    pair.tritons[0].connection_lost(None)
    await asyncio.wait_for(waits.is_over.wait(), 5)
    assert waits.upstream is pair.tritons[2]


async def test_a_triton_that_takes_no_connection_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rest_upstream, "_CONNECT_SECONDS", 0.01)

    async def hangs(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", hangs)
    nowhere = Endpoint("127.0.0.1", 1)
    pool, asks = UpstreamPool(UpstreamCluster(UpstreamEndpoint(nowhere, nowhere))), Asks()
    pool.take(asks)  # type: ignore[arg-type]
    await asyncio.wait_for(asks.is_over.wait(), 5)
    assert asks.lost == "Triton cannot be reached: no answer"


async def test_a_download_is_no_faster_than_its_client_takes_it(connect: Connect) -> None:
    pair = connect()
    upstream = await asked(pair)
    pair.to_client.stall(pair.client)
    upstream.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + b"x" * 600_000)
    assert pair.to_triton[0].paused
    pair.to_client.drain()
    assert not pair.to_triton[0].paused
    upstream.data_received(b"x" * 300_000)  # its end: the next request on the connection may read
    assert not pair.to_triton[0].paused
    waits = RestPair(downstream=pair.downstream)
    waits.client.data_received(infer())
    await settle()
    upstream.data_received(OK)
    assert waits.to_client.sent == OK


async def test_an_answer_to_a_slow_client_is_not_read_before_it_has_taken_the_one_before(
    connect: Connect,
) -> None:
    pair = connect()
    pair.to_client.stall(pair.client)
    pair.client.data_received(infer() * 2)
    await settle()
    pair.to_client.write(b"x" * 300_000)  # what it has not taken yet
    assert pair.to_triton[0].paused
    pair.to_client.drain()
    assert not pair.to_triton[0].paused


# What is answered here.


class Triton:
    """What the own model's Triton says of itself."""

    def __init__(self, pair: RestPair) -> None:
        self.asked: list[str] = []
        self.answer: Answer | Exception = Answer(200, b"{}")
        self.gate: asyncio.Event | None = None
        pair.downstream._ask = self.fetch  # type: ignore[method-assign]

    async def fetch(self, path: str) -> Answer:
        self.asked.append(path)
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def response_to(pair: RestPair, request: bytes) -> tuple[int, bytes]:
    """By a reference client (h11), which raises on what is not HTTP/1.1."""
    pair.client.data_received(request)
    await settle()
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "h")]))
    client.send(h11.EndOfMessage())
    client.receive_data(pair.to_client.take())
    head, body = client.next_event(), b""
    assert isinstance(head, h11.Response)
    assert head.reason == HTTPStatus(head.status_code).phrase.encode()
    assert dict(head.headers)[b"content-type"] == b"application/json"
    while isinstance(data := client.next_event(), h11.Data):
        body += bytes(data.data)
    assert isinstance(data, h11.EndOfMessage)
    assert client.trailing_data[0] == b""
    return head.status_code, body


async def test_health_is_answered_here(connect: Connect) -> None:
    pair = connect()
    live, ready = ask("GET /v2/health/live"), ask("GET /v2/health/ready")
    model = ask("GET /v2/models/own/ready")
    assert (await response_to(pair, live), await response_to(pair, ready)) == ((200, b""), (200, b""))
    pair.downstream.replica.withheld = "broken"
    assert (await response_to(pair, live), await response_to(pair, ready)) == ((200, b""), (400, b""))
    assert await response_to(pair, model) == (400, b'{"error":"Model version not ready"}')
    assert not pair.tritons
    assert pair.downstream.replica.admissions.running == 0
    pair.downstream.replica.withheld = None
    await drive(pair, model)
    assert pair.to_client.sent == OK


async def test_the_index_has_the_own_models_rows(connect: Connect) -> None:
    pair = connect()
    triton = Triton(pair)
    triton.answer = Answer(200, b'{"versions":["1","3"]}')
    all_rows, ready_rows = (
        infer(body, route="x").replace(b"/v2/models/own/x", b"/v2/repository/index")
        for body in (b"", b'{"ready":true}')
    )
    status, rows = await response_to(pair, all_rows)
    assert status == 200
    served = [{"name": "own", "version": version, "state": "READY"} for version in "13"]
    assert json.loads(rows) == served
    assert json.loads((await response_to(pair, ready_rows))[1]) == served
    for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        packed = infer(pack(b'{"ready":true}'), "own", f"Content-Encoding: {encoding}")
        status, rows = await response_to(
            pair, packed.replace(b"/v2/models/own/infer", b"/v2/repository/index")
        )
        assert (status, json.loads(rows)) == (200, served)
    asked = len(triton.asked)
    pair.downstream.replica.triton_says("gone")
    reason = {"name": "own", "state": "UNAVAILABLE", "reason": "not ready"}
    assert json.loads((await response_to(pair, all_rows))[1]) == [reason]
    assert json.loads((await response_to(pair, ready_rows))[1]) == []
    assert len(triton.asked) == asked


async def test_the_server_tells_of_itself_what_can_be_used_here(connect: Connect) -> None:
    pair = connect()
    triton = Triton(pair)
    shown = {"name": "triton", "extensions": ["classification", *sorted(HIDDEN_EXTENSIONS)]}
    triton.answer = Answer(200, json.dumps(shown).encode())
    status, text = await response_to(pair, ask("GET /v2"))
    assert (status, json.loads(text)) == (200, {"name": "triton", "extensions": ["classification"]})
    for odd in (b'{"name":"triton"}', b'{"extensions":7}', b"[1]"):
        triton.answer = Answer(200, odd)
        assert json.loads((await response_to(pair, ask("GET /v2")))[1]) == json.loads(odd)
    assert set(triton.asked) == {"/v2"}


async def test_all_statistics_are_those_of_the_own_model(connect: Connect) -> None:
    pair = connect()
    triton = Triton(pair)
    triton.answer = Answer(400, b'{"error":"x"}')
    assert await response_to(pair, ask("GET /v2/models/stats")) == (400, b'{"error":"x"}')
    assert triton.asked == ["/v2/models/own/stats"]


@pytest.mark.parametrize(
    ("error", "status", "said"), [(NotServed("away"), 503, "away"), (KeyError("x"), 500, "the proxy failed")]
)
async def test_a_question_that_fails_is_answered_with_the_failure(
    connect: Connect, error: Exception, status: int, said: str
) -> None:
    pair = connect()
    Triton(pair).answer = error
    assert await response_to(pair, ask("GET /v2")) == (
        status,
        json.dumps({"error": said}, separators=(",", ":")).encode(),
    )
    assert pair.downstream.replica.rest.codes == {str(status): 1}
    assert (await response_to(pair, ask("GET /v2/health/live")))[0] == 200


async def test_a_question_about_triton_has_its_time_and_ends_with_its_client(connect: Connect) -> None:
    for leaves in (False, True):
        pair = connect()
        triton = Triton(pair)
        triton.gate = asyncio.Event()
        pair.client.data_received(ask("GET /v2"))
        await settle()
        if leaves:
            pair.client.connection_lost(None)
        else:
            pair.client.tick(time.monotonic() + 301)
            assert pair.to_client.take().startswith(b"HTTP/1.1 504 ")
        triton.gate.set()
        await settle()
        assert not pair.to_client.sent
        assert pair.downstream.replica.rest.codes == {"499" if leaves else "504": 1}


# What is refused here.

REFUSED: dict[str, tuple[bytes, int, str]] = {
    "another method": (ask("DELETE /v2/models/own/infer"), 405, "Method Not Allowed"),
    "no such route": (ask("GET /metrics"), 404, "Not Found"),
    "beyond the model": (ask("POST /v2/repository/models/own/unload"), 403, "beyond the model"),
    "another model": (ask("GET /v2/models/other"), 404, "unknown model: 'other'"),
    "another model's statistics": (ask("GET /v2/models/other/stats"), 400, "requested model 'other'"),
    "another model's readiness": (ask("GET /v2/models/other/ready"), 400, "Model version not ready"),
    "a coding that is not taken": (infer(BODY, "own", "Content-Encoding: br"), 415, "'br'"),
    "two codings": (infer(BODY, "own", "Content-Encoding: gzip", "Content-Encoding: gzip"), 415, "gzip,gzip"),
    "not what its coding says": (infer(BODY, "own", "Content-Encoding: gzip"), 400, "is not gzip"),
    "two streams in one body": (
        infer(gzip.compress(BODY) * 2, "own", "Content-Encoding: gzip"),
        400,
        "is not one whole gzip stream",
    ),
    "half a stream": (infer(zlib.compress(BODY)[:-1], "own", "Content-Encoding: deflate"), 400, "not one whole"),
    "unpacks to too much": (infer(gzip.compress(b" " * 70_000), "own", "Content-Encoding: gzip"), 413, "64 KiB"),
    "too much JSON": (infer(b" " * 65_537), 413, "taken up to 64 KiB"),
    "too much JSON before tensors": (infer(b" " * 66_000, "own", f"{HEADER_LENGTH}: 65537"), 413, "64 KiB"),
    "a JSON header behind the body": (infer(BODY, "own", f"{HEADER_LENGTH}: {len(BODY) + 1}"), 400, "is above"),
    "the same in a packed body": (
        infer(gzip.compress(BODY), "own", f"{HEADER_LENGTH}: {len(BODY) + 1}", "Content-Encoding: gzip"),
        400,
        "is above the body's length",
    ),
    "the same in a chunked body": (
        infer(chunked(BODY, 9), "own", f"{HEADER_LENGTH}: {len(BODY) + 1}", "Transfer-Encoding: chunked", length=False),
        400,
        "is above the body's length",
    ),
    "a JSON header that is no number": (infer(BODY, "own", f"{HEADER_LENGTH}: x"), 400, "is not a number"),
    "a JSON header twice": (infer(BODY, "own", *[f"{HEADER_LENGTH}: 1"] * 2), 400, "more than one"),
    "JSON that is none": (infer(b"{"), 400, ""),
    "no JSON": (infer(b""), 400, ""),
    "no JSON to generate from": (infer(b"[", route="generate"), 400, ""),
    "a head of more than is read": (ask("GET /v2", *["X: " + "x" * 8000] * 9)[:-2], 431, "65536 bytes"),
    "a header's long name": (ask("GET /v2/models/own", "x" * (FIELD_BYTES + 1) + ": y"), 431, str(FIELD_BYTES)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_a_refusal_has_its_status_and_text_and_leaves_nothing(connect: Connect, case: str) -> None:
    request, status, text = REFUSED[case]
    pair = connect(limit=1, depth=0)
    got, said = await response_to(pair, request)
    assert (got, list(json.loads(said))) == (status, ["error"])
    assert text in json.loads(said)["error"]
    assert not pair.tritons
    assert (pair.downstream.replica.budget.used_bytes, pair.downstream.replica.admissions.running) == (0, 0)
    assert pair.downstream.replica.rest.codes == {str(status): 1}


async def test_another_method_is_refused_with_those_that_are_allowed(connect: Connect) -> None:
    pair = connect()
    pair.client.data_received(ask("DELETE /v2/trace/setting"))
    assert b"Allow: GET, POST\r\n" in pair.to_client.sent


@pytest.mark.parametrize("size", [65_536, 65_537])
@pytest.mark.parametrize("form", ["a length", "chunks", "gzip"])
async def test_json_is_taken_up_to_the_limit_in_every_form(connect: Connect, size: int, form: str) -> None:
    body = BODY.ljust(size)
    request = {
        "a length": infer(body),
        "chunks": infer(chunked(body, 10_000), "own", "Transfer-Encoding: chunked", length=False),
        "gzip": infer(gzip.compress(body), "own", "Content-Encoding: gzip"),
    }[form]
    pair = connect()
    await drive(pair, request)
    if size == 65_536:
        assert pair.to_client.sent == OK
        assert seen(pair)[0][2] == BODY
    else:
        assert pair.to_client.sent.startswith(b"HTTP/1.1 413 ")
        assert not pair.tritons
    assert pair.downstream.replica.budget.used_bytes == 0


async def test_a_request_that_waited_is_refused_while_triton_is_nowhere(connect: Connect) -> None:
    """It gets the slot, and has nowhere to go with it."""
    pair = connect(limit=1, depth=1)
    upstream, waits = await asked(pair), RestPair(downstream=pair.downstream)
    waits.client.data_received(infer())
    pair.downstream.shared.cluster.endpoint = None
    upstream.data_received(OK)
    assert waits.to_client.sent.startswith(BROKEN)
    assert b"Retry-After: 1\r\n" in waits.to_client.sent
    replica = pair.downstream.replica
    assert (replica.admissions.running, replica.admissions.waiting, replica.budget.used_bytes) == (0, 0, 0)


@pytest.mark.parametrize("size", [60_000, 70_000])
@pytest.mark.parametrize("pieces", [1, 7])
async def test_the_body_of_a_refused_request_is_read_up_to_a_size(
    connect: Connect, size: int, pieces: int
) -> None:
    """Then the connection is worth less than its rest."""
    data = infer(b"x" * size, "other") + infer()
    pair, step = connect(), len(data) // pieces + 1
    for at in range(0, len(data), step):
        await drive(pair, data[at : at + step])
    small = size < 65_536
    assert pair.to_client.sent.count(b"HTTP/1.1 ") == (2 if small else 1)
    assert (b"Connection: close" in pair.to_client.sent) is not small
    assert pair.to_client.sent.endswith(OK) is small
    assert pair.downstream.replica.rest.received_bytes == (len(BODY) if small else 0)


async def test_the_chunked_body_of_a_refused_request_ends_the_connection(connect: Connect) -> None:
    """Nobody knows how much it will be."""
    pair = connect()
    request = infer(chunked(BODY, 9), "other", "Transfer-Encoding: chunked", length=False)
    await drive(pair, request[:-5])
    assert pair.to_client.sent.startswith(b"HTTP/1.1 404 ")
    assert b"Connection: close" in pair.to_client.sent
    await drive(pair, request[-5:] + infer())
    assert pair.to_client.sent.count(b"HTTP/1.1 ") == 1


# Time.


async def test_each_part_of_a_request_has_its_end(connect: Connect) -> None:
    """Whatever it waits for: the body, a slot, Triton, the rest of an answer."""
    now = time.monotonic()
    half = infer()[:-1]
    for begun, code in ((half, "504"), (infer(), "504")):
        pair = connect(limit=1, depth=1)
        pair.client.data_received(begun)
        await settle()
        pair.client.tick(now + 299)
        assert not pair.to_client.sent
        pair.client.tick(now + 301)
        assert pair.to_client.sent.startswith(b"HTTP/1.1 504 ")
        assert b"Connection: close" in pair.to_client.sent
        assert pair.downstream.replica.rest.codes == {code: 1}
        assert pair.downstream.replica.budget.used_bytes == 0
        assert pair.downstream.replica.admissions.running == len(
            pair.tritons
        )  # Triton works on it all the same
        for upstream in pair.tritons:
            upstream.data_received(OK)
        assert pair.downstream.replica.admissions.running == 0
    cut = connect()
    (await asked(cut)).data_received(OK[:-1])
    cut.client.tick(now + 301)
    assert cut.to_client.sent == OK[:-1]  # a second head would be read as its body
    assert not cut.to_client.open
    assert cut.downstream.replica.rest.codes == {"504": 1}
    swallows = connect()
    swallows.client.data_received(infer(b"x" * 1000, "other")[:-1])
    swallows.client.tick(now + 301)
    assert not swallows.to_client.open
    assert swallows.downstream.replica.rest.codes == {"404": 1}


async def test_events_have_their_time_between_them_and_other_answers_in_all(connect: Connect) -> None:
    for route, lives in (("generate_stream", True), ("generate", False)):
        pair = connect(replica=own_replica(request_timeout_seconds=0.2))
        now = time.monotonic()
        upstream = await asked(pair, infer(b"{}", route=route))
        upstream.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.sleep(0.1)
        upstream.data_received(b"data: 1\n\n")
        pair.client.tick(now + 0.25)
        assert pair.to_client.open is lives


async def test_an_abandoned_request_keeps_its_slot_for_as_long_as_triton_works(connect: Connect) -> None:
    """Whatever time its client gave it. What is not done within an hour never will be."""
    pair, now = connect(limit=1, depth=0), time.monotonic()
    await asked(pair)
    pair.client.connection_lost(None)
    pair.downstream.tick(now + 3500)
    assert pair.downstream.replica.admissions.running == 1
    pair.downstream.tick(now + 3700)
    assert pair.downstream.replica.admissions.running == 0
    assert not pair.to_triton[0].open
    assert pair.downstream.replica.rest.codes == {"499": 1}
    assert not pair.downstream.given_up


async def test_a_client_that_leaves_between_requests_is_not_counted(connect: Connect) -> None:
    pair = connect()
    await answered(pair, pair)
    pair.client.connection_lost(None)
    assert pair.downstream.replica.rest.codes == {"200": 1}


async def test_a_client_that_leaves_in_an_upload_ends_its_connection_to_triton(connect: Connect) -> None:
    pair = connect()
    header = b'{"inputs":[{"name":"I","datatype":"UINT8","shape":[300000],"parameters":{"binary_data_size":300000}}]}'
    pair.client.data_received(infer(header + bytes(300_000), "own", f"{HEADER_LENGTH}: {len(header)}")[:-3])
    await settle()
    pair.client.connection_lost(None)
    assert not pair.to_triton[0].open
    assert pair.downstream.replica.rest.codes == {"499": 1}


async def test_the_last_answer_is_not_taken_away_by_a_reset(connect: Connect) -> None:
    """While the client still sends, its end is waited for a little; a client that has said all is let go."""
    pair, now = connect(), time.monotonic()
    pair.client.data_received(infer(b"x" * 70_000, "other")[:-1])
    assert (pair.to_client.ended, pair.to_client.open) == (True, True)
    pair.client.data_received(b"more")  # and nothing comes of it
    pair.client.tick(now + 1)
    assert pair.to_client.open
    pair.client.tick(now + 10)
    assert not pair.to_client.open
    said_all = connect()
    await drive(said_all, infer(BODY, "own", "Connection: close"))
    assert not said_all.to_client.open


@pytest.mark.parametrize("when", ["before its head", "in a body", "whole"])
async def test_what_is_half_said_at_the_clients_end_gets_no_answer(connect: Connect, when: str) -> None:
    pair = connect()
    request = {"before its head": infer()[:9], "in a body": infer()[:-1], "whole": infer()}[when]
    pair.client.data_received(request)
    await settle()
    if not pair.client.eof_received():
        pair.to_client.close()  # as the loop does
        pair.client.connection_lost(None)
    assert pair.to_client.ended is (when != "whole")
    assert not pair.to_client.sent


async def test_an_end_of_the_proxy_ends_idle_clients_and_lets_the_others_finish(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_client, "_NEXT_SECONDS", 0.0)
    first = connect()
    idle, begun = RestPair(downstream=first.downstream), RestPair(downstream=first.downstream)
    await answered(first, idle)
    begun.client.data_received(infer()[:20])
    upstream = await asked(first)
    first.downstream.stop_accepting()
    assert (idle.to_client.open, begun.to_client.open) == (False, True)
    upstream.data_received(OK)
    assert b"Connection: close" in first.to_client.sent
    assert not first.to_client.open
    begun.client.data_received(infer()[20:])
    await settle()
    first.tritons[-1].data_received(OK)
    assert b"Connection: close" in begun.to_client.sent
    other = RestPair(downstream=first.downstream)
    other.client.tick(time.monotonic())
    assert not other.to_client.open
    first.downstream.close()


async def test_all_clients_end_with_the_front_end(connect: Connect) -> None:
    pair = connect()
    await asked(pair)
    pair.downstream.close()
    assert not pair.to_client.open


@pytest.mark.parametrize("lines", [b"", b"Server: other\r\nConnection: keep-alive\r\n"])
@pytest.mark.parametrize("names", [Names(b"own", b"own"), Names(b"own", b"own-0123456789ab")])
async def test_a_whole_answer_is_one_write_and_the_same_as_in_pieces(
    connect: Connect, lines: bytes, names: Names
) -> None:
    body = b'{"model_name":"%b","outputs":[{"name":"OUT","data":[1]}]}' % names.server
    answer = b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (lines, len(body), body)
    sent = []
    for cut in (len(answer), len(answer) - 7):
        replica = Replica(names, ReplicaLimits())
        replica.triton_says(None)
        pair = connect(replica=replica)
        writes: list[bytes] = []
        pair.client.write = writes.append
        upstream = await asked(pair)
        upstream.data_received(answer[:cut])
        assert len(writes) == 1
        if cut < len(answer):
            upstream.data_received(answer[cut:])
        assert pair.downstream.shared.pool.has_idle
        assert (replica.rest.sent_bytes, replica.rest.codes) == (len(body), {"200": 1})
        sent.append(b"".join(writes))
    assert sent[0] == sent[1]
    assert b'"model_name":"own"' in sent[0]


@pytest.mark.parametrize("seed", range(20))
def test_chunks_that_come_whole_are_read_as_those_in_bytes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        pieces = [
            bytes(rng.choices(b"a\r\n0;", k=size)) for size in rng.choices([1, 2, 5, 17], k=rng.randrange(6))
        ]
        ends = [b"0\r\n\r\n", b"0\r\nA: b\r\n\r\nrest", b"", b"x"]
        words = [
            b"%x%b\r\n%b%b"
            % (len(p), rng.choice([b"", b"", b";a", b" "]), p, rng.choice([b"\r\n"] * 9 + [b"xx"]))
            for p in pieces
        ]
        body = b"".join(words) + rng.choice(ends)
        assert read_chunks([body]) == read_chunks([body[at : at + 1] for at in range(len(body))])


def read_chunks(pieces: list[bytes]) -> tuple[bytes, int, bool] | None:
    """Content, size and whether it has ended; None: it is not chunked as it should be."""
    reader, content, size = ChunkReader(), b"", 0
    try:
        for piece in pieces:
            more, took = reader.feed(piece)
            content, size = content + more, size + took
    except BadChunks:
        return None
    return content, size, reader.is_done
