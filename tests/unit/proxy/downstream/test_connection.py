"""REST at the level of bytes: what comes from a client, and what a reference parser (h11) makes of what Triton gets."""

import gzip
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import h11
import pytest

from proxy.downstream.rest import connection as rest_client
from proxy.wire.http1 import HEADER_LENGTH, BadRequest, RequestChunks, read_request
from tests.fakes.data_plane import RestPair, settle

MIB = 1024**2
LARGE = 600_000
TENSOR = {"name": "I", "datatype": "INT32", "shape": [2], "data": [1, 2]}
BODY = json.dumps({"inputs": [TENSOR]}, separators=(",", ":")).encode()
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def infer(
    body: bytes = BODY, model: str = "own", *lines: str, length: bool = True, route: str = "infer"
) -> bytes:
    head = [f"POST /v2/models/{model}/{route} HTTP/1.1", "Host: h", *lines]
    if length:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.fixture
async def connect() -> Any:
    with RestPair.triton_at_hand():
        yield RestPair


Connect = Callable[..., RestPair]


class Seen:
    """The requests on one connection to Triton, by h11, which raises on what is not HTTP/1.1."""

    def __init__(self, data: bytes) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.is_partial = False
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(data)
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                self.is_partial = bool(data) and connection.their_state is h11.SEND_BODY
                return
            if isinstance(event, h11.Request):
                headers = {n.decode().lower(): v.decode("latin-1") for n, v in event.headers}
                names = [n for n, _ in event.headers]
                assert names.count(HEADER_LENGTH.lower().encode()) <= 1
                self.requests.append((event.target.decode(), headers, b""))
            elif isinstance(event, h11.Data):
                target, headers, body = self.requests[-1]
                self.requests[-1] = (target, headers, body + bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
            else:
                return


async def drive(pair: RestPair, data: bytes, *, answer: bytes = OK) -> None:
    """Deliver bytes and answer every request that comes out on the other side."""
    if pair.to_client.open:
        pair.client.data_received(data)
    answered = getattr(pair, "answered", 0)
    for _ in range(50):
        await settle()
        done = [u for u in pair.tritons if u.request is not None and u.request_done]
        if not done:
            break
        for upstream in done:
            answered += 1
            upstream.data_received(answer)
    pair.answered = answered  # type: ignore[attr-defined]


def seen(pair: RestPair) -> list[tuple[str, dict[str, str], bytes]]:
    return [request for wire in pair.to_triton for request in Seen(wire.sent).requests]


async def test_a_request_goes_on_with_the_nodes_key_and_without_control(connect: Connect) -> None:
    pair = connect()
    lines = (
        "X-Request-Id: 7",
        "Berth-Inference-Key: stolen",
        "Connection: X-Hop",
        "X-Hop: 1",
        "TE: trailers",
    )
    await drive(pair, infer(BODY, "own", *lines))
    ((target, headers, body),) = seen(pair)
    assert (target, body) == ("/v2/models/own/infer", BODY)
    assert headers == {
        "host": "127.0.0.1:1",
        "x-request-id": "7",
        "berth-inference-key": "k",
        "content-length": str(len(BODY)),
    }
    assert pair.to_client.sent == OK


@pytest.mark.parametrize("route", ["infer", "generate"])
@pytest.mark.parametrize("name", ["Content-Type", "cOnTeNt-tYpE"])
async def test_triton_is_never_sent_a_content_type(connect: Connect, name: str, route: str) -> None:
    pair = connect()
    body = BODY if route == "infer" else b'{"text":"x"}'
    await drive(pair, infer(body, "own", f"{name}: application/x-www-form-urlencoded", route=route))
    ((_, headers, through),) = seen(pair)
    assert (through, "content-type" in headers) == (body, False)


async def test_split_at_every_byte(connect: Connect) -> None:
    data = (
        infer()
        + infer(b'{"text":"x"}', route="generate")
        + infer(chunked(BODY, 7), "own", "Transfer-Encoding: chunked", length=False)
    )
    for cut in range(1, len(data)):
        pair = connect()
        await drive(pair, data[:cut])
        await drive(pair, data[cut:])
        assert [(target, body) for target, _, body in seen(pair)] == [
            ("/v2/models/own/infer", BODY),
            ("/v2/models/own/generate", b'{"text":"x"}'),
            ("/v2/models/own/infer", BODY),
        ], cut
        assert pair.to_client.sent == OK * 3


@pytest.mark.parametrize("seed", range(20))
async def test_a_binary_tensor_streams_through_in_any_pieces(connect: Connect, seed: int) -> None:
    rng, pair = random.Random(seed), connect()
    header = b'{"inputs":[{"name":"I","datatype":"UINT8","shape":[500000],"parameters":{"binary_data_size":500000}}]}'
    tensor = rng.randbytes(500_000)
    data = infer(header + tensor, "own", f"{HEADER_LENGTH}: {len(header)}") + infer()
    while data:
        size = rng.choice([1, 100, 9_000, 65_536])
        await drive(pair, data[:size])
        data = data[size:]
    assert [body for _, _, body in seen(pair)] == [header + tensor, BODY]
    assert not pair.client._input


AMBIGUOUS = {
    "two lengths": infer(BODY, "own", "Content-Length: 3"),
    "the same length twice": infer(BODY, "own", f"Content-Length: {len(BODY)}"),
    "length and chunked": infer(BODY, "own", "Transfer-Encoding: chunked"),
    "a folded line": infer(BODY, "own", "X: a", "  b"),
    "a folded line by tab": infer(BODY, "own", "Content-Length: 1", "\t0"),
    "bare LF": infer().replace(b"\r\n", b"\n", 1),
    "bare CR": infer(BODY, "own", "X: a\rb"),
    "NUL": infer(BODY, "own", "X: a\0b"),
    "space before the colon": infer(BODY, "own", "X : a"),
    "no name": infer(BODY, "own", ": a"),
    "absolute form": infer().replace(b"/v2", b"http://h/v2", 1),
    "authority form": b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n",
    "asterisk form": b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n",
    "encoded": infer().replace(b"own", b"%6fwn", 1),
    "dotted": infer().replace(b"/own", b"/x/../own", 1),
    "an empty step": infer().replace(b"/own", b"//own", 1),
    "a fragment": infer().replace(b"/infer", b"/infer#x", 1),
    "HTTP/0.9": b"GET /v2/models/own\r\n\r\n",
    "HTTP/1.10": infer().replace(b"HTTP/1.1", b"HTTP/1.10", 1),
    "HTTP/2.0": infer().replace(b"HTTP/1.1", b"HTTP/2.0", 1),
    "two spaces": infer().replace(b" /v2", b"  /v2", 1),
    "a lower-case method": infer().replace(b"POST", b"post", 1),
    "no host": infer().replace(b"Host: h\r\n", b"", 1),
    "two hosts": infer(BODY, "own", "Host: g"),
    "a length in hexadecimal": infer(length=False).replace(b"Host", b"Content-Length: 0x5\r\nHost"),
    "a signed length": infer(length=False).replace(b"Host", b"Content-Length: +5\r\nHost"),
    "a coding besides chunked": infer(BODY, "own", "Transfer-Encoding: gzip, chunked", length=False),
    "identity coding": infer(BODY, "own", "Transfer-Encoding: identity", length=False),
    "chunked twice": infer(BODY, "own", *["Transfer-Encoding: chunked"] * 2, length=False),
    "chunked spelt otherwise": infer(BODY, "own", "Transfer-Encoding: xchunked", length=False),
    "chunked in HTTP/1.0": infer(chunked(BODY, 9), "own", "Transfer-Encoding: chunked", length=False).replace(
        b"HTTP/1.1", b"HTTP/1.0", 1
    ),
    "a chunk size with a sign": infer(
        b"+3\r\nabc\r\n0\r\n\r\n", "own", "Transfer-Encoding: chunked", length=False
    ),
    "a chunk size that wraps": infer(
        b"10000000000000003\r\nabc\r\n0\r\n\r\n", "own", "Transfer-Encoding: chunked", length=False
    ),
    "a chunk that is too long": infer(
        b"3\r\nabcd\r\n0\r\n\r\n", "own", "Transfer-Encoding: chunked", length=False
    ),
    "bare LF between chunks": infer(b"3\nabc\n0\n\n", "own", "Transfer-Encoding: chunked", length=False),
}


@pytest.mark.parametrize("case", sorted(AMBIGUOUS))
async def test_what_could_be_read_in_two_ways_is_refused_and_the_connection_closed(
    connect: Connect, case: str
) -> None:
    pair = connect()
    await drive(pair, AMBIGUOUS[case] + infer(BODY, "other"))
    assert pair.to_client.sent.startswith(b"HTTP/1.1 400 "), case
    assert pair.to_client.sent.count(b"HTTP/1.1 4") == 1
    assert b"Connection: close" in pair.to_client.sent
    assert not any(wire.sent for wire in pair.to_triton)


@pytest.mark.parametrize("seed", range(400))
async def test_whatever_bytes_come_only_the_own_model_is_reached(connect: Connect, seed: int) -> None:
    rng = random.Random(seed)
    requests = [
        infer(BODY, rng.choice(["own", "other"])),
        infer(chunked(BODY, 11), rng.choice(["own", "other"]), "Transfer-Encoding: chunked", length=False),
        b"GET /v2/models/%s HTTP/1.1\r\nHost: h\r\n\r\n" % rng.choice([b"own", b"other"]),
    ]
    data = bytearray(b"".join(rng.choices(requests, k=3)))
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.choice(b"\r\n\t :;,\x00%/.09azAZ\xff")
            case 1:
                del data[at : at + rng.randrange(1, 6)]
            case 2:
                data[at:at] = rng.choice([b"\r\n", b"\n", b"Content-Length: 5\r\n", b"0\r\n\r\n", b" "])
            case _:
                data[at:at] = data[rng.randrange(len(data)) :][: rng.randrange(40)]
    pair = connect()
    await drive(pair, bytes(data))
    for wire in pair.to_triton:
        for target, headers, _ in Seen(wire.sent).requests:  # h11 raises on what is not HTTP
            assert re.fullmatch(r"/v2/models/own(/versions/[0-9]+)?(/[a-z_]+)?", target), target
            assert headers["berth-inference-key"] == "k"
    assert pair.downstream.replica.admissions.running == len(
        [u for u in pair.tritons if u.request is not None]
    )


@pytest.mark.parametrize("lines", [(), ("Transfer-Encoding: chunked",), ("Content-Encoding: gzip",)])
async def test_a_binary_header_hides_nothing_in_a_generate_request(
    connect: Connect, lines: tuple[str, ...]
) -> None:
    body = b'{"text_input":"x"}' + b"[" * 1000
    packed = {(): body, ("Content-Encoding: gzip",): gzip.compress(body)}.get(lines, chunked(body, 100))
    is_chunked = "Transfer-Encoding: chunked" in lines
    pair = connect()
    head = (f"{HEADER_LENGTH}: 18", *lines)
    await drive(pair, infer(packed, "own", *head, length=not is_chunked, route="generate"))
    assert pair.to_client.sent.startswith(b"HTTP/1.1 400")
    assert not pair.tritons


async def test_pipelined_requests_go_on_one_by_one(connect: Connect) -> None:
    pair = connect()
    pair.client.data_received(infer() + infer(BODY, "other") + infer())
    await settle()
    assert len(seen(pair)) == 1
    pair.tritons[0].data_received(OK)
    await settle()
    assert len(seen(pair)) == 2
    pair.tritons[0].data_received(OK)
    answers = pair.to_client.sent.split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"404", b"200"]
    assert len(pair.tritons) == 1


async def test_requests_that_are_answered_here_take_turns_with_whatever_else_there_is(
    connect: Connect,
) -> None:
    pair = connect()
    later: list[Callable[[], None]] = []
    pair.downstream.later = later.append
    count = 2000
    pair.client.data_received(b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n" * count)
    assert pair.to_client.paused, "more than can be looked at soon is not read"
    for answered in range(1, count):
        assert pair.to_client.sent.count(b"HTTP/1.1 200") == answered
        assert len(later) == 1
        later.pop()()
    assert pair.to_client.sent.count(b"HTTP/1.1 200") == count
    assert not later
    assert not pair.to_client.paused


async def test_expect_is_answered_here_and_only_where_the_body_is_wanted(connect: Connect) -> None:
    pair = connect()
    head, _, body = infer(BODY, "own", "Expect: 100-continue").partition(b"\r\n\r\n")
    await drive(pair, head + b"\r\n\r\n")
    assert pair.to_client.take() == b"HTTP/1.1 100 Continue\r\n\r\n"
    await drive(pair, body)
    assert pair.to_client.take() == OK
    ((_, headers, _),) = seen(pair)
    assert "expect" not in headers
    foreign = connect()
    await drive(foreign, infer(BODY, "other", "Expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    assert foreign.to_client.sent.startswith(b"HTTP/1.1 404")
    strange = connect()
    await drive(strange, infer(BODY, "own", "Expect: tea"))
    assert strange.to_client.sent.startswith(b"HTTP/1.1 417")


async def test_a_head_request_has_the_head_and_no_body(connect: Connect) -> None:
    pair = connect()
    await drive(pair, b"HEAD /v2/models/own HTTP/1.1\r\nHost: h\r\n\r\n" + infer())
    assert pair.to_client.sent == OK[:-2] + OK


async def test_a_stream_of_events_ends_with_its_client(connect: Connect) -> None:
    """Triton ends one whose connection ends; it is not informed of any other."""
    pair = connect(limit=1, depth=2)
    pair.client.data_received(infer(b"{}", route="generate_stream"))
    await settle()
    pair.client.connection_lost(None)
    assert pair.downstream.replica.admissions.running == 0
    assert not pair.to_triton[0].open


async def test_an_early_answer_ends_the_upload_and_the_connection(connect: Connect) -> None:
    pair = connect()
    header = b'{"inputs":[{"name":"I","datatype":"UINT8","shape":[300000],"parameters":{"binary_data_size":300000}}]}'
    data = infer(header + b"x" * 300_000, "own", f"{HEADER_LENGTH}: {len(header)}")
    pair.client.data_received(data[:100_000])
    await settle()
    pair.tritons[0].data_received(OK.replace(b"200 OK", b"400 Bad Request"))
    assert b"Connection: close" in pair.to_client.sent
    assert not pair.to_triton[0].open
    pair.client.data_received(data[100_000:] + infer())
    await settle()
    assert len(pair.tritons) == 1


async def test_answers_that_cannot_be_read_are_not_passed_on(connect: Connect) -> None:
    for answer in (
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
    ):
        pair = connect()
        pair.client.data_received(infer())
        await settle()
        pair.tritons[0].data_received(answer)
        assert pair.to_client.sent.startswith(b"HTTP/1.1 503")
        assert not pair.to_triton[0].open


class Clock:
    """The time as a connection sees it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def test_a_head_has_its_time_however_it_is_cut(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then does not give it more, and the next head has a time of its own."""
    clock = Clock()
    monkeypatch.setattr("proxy.downstream.rest.connection.time", clock)
    pair = connect()
    await drive(pair, infer()[:20])
    clock.now += 9
    await drive(pair, infer()[20:])
    clock.now += 9
    pair.client.tick(clock.now)
    assert pair.to_client.sent == OK
    for byte in infer()[:10]:
        pair.client.data_received(bytes([byte]))
        clock.now += 1
        pair.client.tick(clock.now)
        assert pair.to_client.sent == OK
    pair.client.data_received(b"/")
    pair.client.tick(clock.now + 0.5)
    assert pair.to_client.sent.startswith(OK + b"HTTP/1.1 408")


async def test_an_empty_line_begins_no_head(connect: Connect) -> None:
    """Some clients send one after a body (RFC 9112, 2.2), and may then say nothing for a while."""
    pair = connect()
    await drive(pair, infer() + b"\r\n")
    pair.client.tick(time.monotonic() + 20)
    await drive(pair, b"\r\n")
    pair.client.tick(time.monotonic() + 20)
    await drive(pair, infer())
    assert pair.to_client.sent == OK * 2
    assert pair.to_client.open


async def test_idle_connections_end(connect: Connect) -> None:
    idle = connect()
    idle.client.tick(time.monotonic() + 299)
    assert idle.to_client.open
    idle.client.tick(time.monotonic() + 301)
    assert not idle.to_client.open


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /v2 HTTP/1.1\nHost: h\n\n",
        b"GET /v2 HTTP/1.1\n",
        b"\n",
        b"GET /v2 HTTP/1.1\r\nHost: h\n",
        b"GET /v2 HTTP/1.1\rHost",
        b"GET /v2 HTTP/1.1\r\nHost: \0",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
async def test_what_can_become_no_head_is_refused_at_once(connect: Connect, begun: bytes) -> None:
    pair = connect()
    pair.client.data_received(begun)
    assert pair.to_client.sent.startswith(b"HTTP/1.1 400 ")
    bytewise = connect()
    for byte in begun + b"x":
        if not bytewise.to_client.sent:
            bytewise.client.data_received(bytes([byte]))
    assert bytewise.to_client.sent.startswith(b"HTTP/1.1 400 ")


async def test_a_header_that_triton_would_break_off_at_is_too_large(connect: Connect) -> None:
    pair = connect()
    await drive(pair, infer(BODY, "own", "Cookie: " + "c" * 8192))
    assert pair.to_client.sent.startswith(b"HTTP/1.1 431 ")
    assert b"Cookie" in pair.to_client.sent
    assert not pair.tritons
    fits = connect()
    await drive(fits, infer(BODY, "own", "Cookie: " + "c" * 8191, "Keep-Alive: " + "k" * 9000))
    assert fits.to_client.sent == OK


@pytest.mark.parametrize("requests", [1, 3])
async def test_a_half_closed_client_gets_its_answers_and_then_the_end(
    connect: Connect, requests: int
) -> None:
    pair = connect()
    pair.client.data_received(infer() * requests)
    await settle()
    assert pair.client.eof_received()
    for _ in range(requests):
        pair.tritons[0].data_received(OK)
        await settle()
    assert pair.to_client.sent.count(b"HTTP/1.1 200 OK") == requests
    assert pair.to_client.sent.count(b"Connection: close") == 1
    assert pair.to_client.sent.endswith(b"{}")
    assert pair.to_client.ended
    late = connect()
    late.client.data_received(infer())
    await settle()
    late.tritons[0].data_received(OK[:-1])
    assert late.client.eof_received()  # its answer's head has gone out, and says nothing of an end
    late.tritons[0].data_received(OK[-1:])
    assert late.to_client.sent == OK
    assert late.to_client.ended
    half = connect()
    half.client.data_received(infer()[:-1])
    assert not half.client.eof_received()  # its rest will never come


ANSWERED_HERE = {
    "by the head": infer(BODY, "other"),
    "by the body": infer(b"{"),
    "by the body in chunks": infer(chunked(b"{", 9), "own", "Transfer-Encoding: chunked", length=False),
    "without a body": b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n",
}


@pytest.mark.parametrize("last", [b"", b"\r\n", infer()[:9], infer()[:-1]])
@pytest.mark.parametrize("request_", ANSWERED_HERE.values(), ids=ANSWERED_HERE.keys())
async def test_a_half_closed_client_gets_every_answer_that_is_made_here(
    connect: Connect, request_: bytes, last: bytes
) -> None:
    pair = connect()
    pair.client.data_received(request_ * 4 + last)
    pair.client.eof_received()
    for _ in range(9):
        await settle()
    assert pair.to_client.sent.count(b"HTTP/1.1") == 4
    assert pair.to_client.ended
    assert not pair.client._input


@pytest.mark.parametrize("last", [infer(BODY, "own", "Connection: close"), b"no request\r\n\r\n"])
async def test_a_half_closed_client_is_not_waited_for_behind_its_last_answer(
    connect: Connect, last: bytes
) -> None:
    pair = connect()
    pair.client.data_received(infer(BODY, "other") + last)
    pair.client.eof_received()
    await drive(pair, b"")
    assert len(re.findall(rb"HTTP/1.1 \d", pair.to_client.sent)) == 2
    assert not pair.to_client.open


@pytest.mark.parametrize("rest", [b"\r\n", infer()[:9], infer()[:-1]])
async def test_a_half_closed_client_that_has_begun_another_request_is_not_waited_for(
    connect: Connect, rest: bytes
) -> None:
    pair = connect()
    pair.client.data_received(infer() + rest)
    await settle()
    assert pair.client.eof_received()
    pair.tritons[0].data_received(OK)
    await settle()
    await settle()
    assert pair.to_client.sent.startswith(OK)
    assert pair.to_client.ended


async def test_a_half_closed_client_whose_body_is_not_whole_holds_no_slot(connect: Connect) -> None:
    first = connect(limit=1, depth=9)
    half = connect()
    half.downstream = half.client._downstream = first.downstream
    await drive(first, infer(), answer=b"")
    head = b'{"inputs":[{"name":"I","datatype":"UINT8","shape":[300000],"parameters":{"binary_data_size":300000}}]}'
    half.client.data_received(infer(head + b"x" * 300_000, "own", f"{HEADER_LENGTH}: {len(head)}")[:-1])
    assert half.client.eof_received()  # it waits for its slot, and then there is an answer to give, perhaps
    first.tritons[0].data_received(OK)
    await settle()
    assert half.to_client.ended
    half.client.connection_lost(None)
    assert first.downstream.replica.admissions.running == 0


async def test_a_client_that_takes_no_answers_is_asked_for_no_more(connect: Connect) -> None:
    pair = connect()
    pair.to_client.stall(pair.client)
    request = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"
    sent = 0
    while not pair.to_client.paused:
        pair.client.data_received(request * 1000)
        sent += 1000
        assert sent < 50_000
    assert pair.to_client.get_write_buffer_size() < 300_000
    while pair.to_client.get_write_buffer_size():
        pair.to_client.drain()
        await settle()
    assert not pair.to_client.paused
    assert pair.to_client.sent.count(b"HTTP/1.1 200 OK") == sent
    await drive(pair, infer())
    pair.to_client.drain()
    assert pair.to_client.sent.endswith(OK)


async def test_a_usual_request_waits_too_while_answers_are_not_taken(connect: Connect) -> None:
    pair = connect()
    await drive(pair, infer())
    await drive(pair, infer())
    pair.to_client.stall(pair.client)
    pair.to_client.write(b"x" * 300_000)
    await drive(pair, infer())
    assert len(seen(pair)) == 2
    pair.to_client.drain()
    await drive(pair, b"")
    assert len(seen(pair)) == 3


async def test_an_upload_is_no_faster_than_triton_takes_it(connect: Connect) -> None:
    pair = connect()
    await drive(pair, infer())
    pair.to_triton[0].stall(pair.tritons[0])
    head = (
        b'{"inputs":[{"name":"I","datatype":"UINT8","shape":[900000],"parameters":{"binary_data_size":900000}}]'
        + b" " * 2000
        + b"}"
    )
    data = infer(head + b"x" * 900_000, "own", f"{HEADER_LENGTH}: {len(head)}")
    pair.tritons[0].transport.set_write_buffer_limits(high=50)  # type: ignore[union-attr]
    pair.client.data_received(data[:100_000])
    await settle()
    assert pair.to_client.paused
    pair.to_triton[0].drain()
    assert not pair.to_client.paused
    pair.client.data_received(data[100_000:-1])
    assert pair.to_client.paused
    pair.to_triton[0].drain()
    assert not pair.to_client.paused
    await drive(pair, data[-1:])
    assert pair.to_client.sent == OK * 2


def long_upload(size: int = 4 * MIB) -> bytes:
    head = (
        b'{"inputs":[{"name":"I","datatype":"UINT8","shape":[%d],"parameters":{"binary_data_size":%d}}]}'
        % (size, size)
    )
    return infer(head + bytes(size), "own", f"{HEADER_LENGTH}: {len(head)}")


@pytest.mark.parametrize("cut", [2, 50_000])
async def test_a_response_before_the_end_of_its_request_closes_the_connection_to_triton(
    connect: Connect, cut: int
) -> None:
    """The end still waits for its slot, and must not be taken for another request."""
    first = connect(limit=1, depth=9)
    second, upload = RestPair(downstream=first.downstream), long_upload(LARGE)
    first.client.data_received(upload[:-cut])
    await settle()
    upstream, to_triton = first.tritons[0], first.to_triton[0]
    second.client.data_received(infer())
    await settle()
    first.client.data_received(upload[-cut:] + infer())
    body = upload.partition(b"\r\n\r\n")[2]
    assert to_triton.sent.endswith(body[-50_000:-1])
    assert not to_triton.sent.endswith(body)
    upstream.data_received(OK)
    assert first.to_client.sent == OK
    assert not to_triton.open
    for _ in range(3):
        await drive(first, b"")
    assert (first.to_client.sent, second.to_client.sent) == (OK * 2, OK)
    admissions = first.downstream.replica.admissions
    assert (admissions.running, admissions.waiting, admissions.bytes.used_bytes) == (0, 0, 0)
    assert first.downstream.replica.budget.used_bytes == 0


async def test_an_upload_that_triton_does_not_take_is_not_too_slow(connect: Connect) -> None:
    first = connect(limit=1, depth=9)
    second = RestPair(downstream=first.downstream)
    first.client.data_received(long_upload()[:100_000])
    await settle()
    room = first.downstream.replica.admissions.bytes
    room.limit_bytes = room.used_bytes
    second.client.data_received(infer())
    first.tritons[0].pause_writing()
    now = time.monotonic()
    for second_of in range(60):
        first.client.tick(now + second_of)
    assert not first.to_client.sent
    first.tritons[0].resume_writing()
    for second_of in range(60, 72):
        first.client.tick(now + second_of)
    assert first.to_client.sent.startswith(b"HTTP/1.1 408 ")
    assert b"Connection: close" in first.to_client.sent
    assert not first.to_triton[0].open  # Triton never begins what is not whole


async def test_all_clients_together_hold_so_much_and_no_more(connect: Connect) -> None:
    first, pairs = connect(limit=1, depth=9), [connect() for _ in range(4)]
    downstream = first.downstream
    downstream.replica.budget.limit_bytes = 2 * len(BODY) + 40
    for pair in pairs:
        pair.downstream = pair.client._downstream = downstream
    first.client.data_received(infer())
    await settle()
    assert downstream.replica.budget.used_bytes == 0  # it has gone on
    pairs[0].client.data_received(infer())  # it waits for its slot
    pairs[1].client.data_received(
        infer(chunked(BODY, 9), "own", "Transfer-Encoding: chunked", length=False)[:-1]
    )
    assert downstream.replica.budget.used_bytes == 2 * len(BODY)
    pairs[2].client.data_received(infer())
    assert pairs[2].to_client.sent.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1" in pairs[2].to_client.sent
    pairs[1].client.connection_lost(None)
    assert downstream.replica.budget.used_bytes == len(BODY)
    pairs[3].client.data_received(infer())
    first.tritons[0].data_received(OK)
    await settle()
    assert downstream.replica.budget.used_bytes == len(BODY)
    for tick in (0, 400):
        pairs[3].client.tick(time.monotonic() + tick)
    assert pairs[3].to_client.sent.startswith(b"HTTP/1.1 504 ")
    assert downstream.replica.budget.used_bytes == 0


async def test_a_last_answer_is_delivered_as_long_as_the_client_takes_of_it(connect: Connect) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000
    for is_draining in (False, True):
        pair, now = connect(), time.monotonic()
        pair.to_client.stall(pair.client)
        await drive(pair, infer(BODY, "own", *([] if is_draining else ["Connection: close"])), answer=answer)
        if is_draining:
            pair.downstream.stop_accepting()
            pair.client.end_if_idle()  # as it does with each client of its listener
        for second in range(100):
            assert pair.client.is_busy
            pair.client.tick(now + 50 * second)
            assert pair.to_client.open, second
            pair.to_client.drain(1900)
        pair.to_client.drain()
        assert not pair.client.is_busy
        pair.client.tick(now + 5000)
        pair.client.tick(now + 5003)
        assert not pair.to_client.open


async def test_at_the_end_a_request_that_is_on_its_way_is_answered(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_new in (True, False):
        pair = connect()
        if not is_new:
            await drive(pair, infer())
        pair.downstream.stop_accepting()
        pair.client.end_if_idle()  # as it does with each client of its listener
        assert pair.client.is_busy
        assert pair.to_client.open
        await drive(pair, infer())
        assert pair.to_client.sent.count(b"200 OK") == 2 - is_new
        assert b"Connection: close" in pair.to_client.sent
        assert not pair.client.is_busy
    monkeypatch.setattr(rest_client, "_NEXT_SECONDS", 0.0)
    idle = connect()
    await drive(idle, infer())
    idle.downstream.stop_accepting()
    idle.client.end_if_idle()
    assert not idle.client.is_busy
    assert not idle.to_client.open


@pytest.mark.parametrize("lines", [(), ("Connection: close",)])
async def test_a_client_that_takes_nothing_is_given_up(connect: Connect, lines: tuple[str, ...]) -> None:
    pair, now = connect(), time.monotonic()
    pair.to_client.stall(pair.client)
    await drive(pair, infer(BODY, "own", *lines))
    pair.client.tick(now + 1)
    pair.client.tick(now + 59)
    assert pair.to_client.open
    pair.client.tick(now + 62)
    assert not pair.to_client.open


@pytest.mark.parametrize(
    "named", ["inference-header-content-length", "Content-Length, host", "content-encoding"]
)
async def test_a_client_cannot_take_from_triton_what_tells_of_the_body(connect: Connect, named: str) -> None:
    header = b'{"inputs":[{"name":"I","datatype":"UINT8","shape":[4],"parameters":{"binary_data_size":4}}]}'
    pair = connect()
    lines = (f"{HEADER_LENGTH}: {len(header)}", f"Connection: keep-alive, {named}")
    await drive(pair, infer(header + b"[[[[", "own", *lines))
    ((_, headers, body),) = seen(pair)
    assert body == header + b"[[[["
    assert headers[HEADER_LENGTH.lower()] == str(len(header))
    assert headers["content-length"] == str(len(body))


async def test_triton_gets_what_was_understood_however_it_was_said(connect: Connect) -> None:
    said = b' {"x":{"y":[1]}, "in\\u0070uts":[{"name" : "I","shape":[2],"datatype":"INT32","z":1,"data":[1, 2]}]}\n'
    for times in (1, 3):  # also where the head has been seen before
        pair = connect()
        await drive(pair, infer(said) * times)
        assert [body for _, _, body in seen(pair)] == [BODY.replace(b"[1,2]", b"[1, 2]")] * times
    header = b'{ "inputs":[{"name":"I","datatype":"UINT8","shape":[4],"parameters":{"binary_data_size":4}}] }'
    packed = connect()
    body = gzip.compress(header + b"\0\1\2\3")
    await drive(packed, infer(body, "own", f"{HEADER_LENGTH}: {len(header)}", "Content-Encoding: gzip"))
    ((_, headers, got),) = seen(packed)
    assert got == header.replace(b" ", b"") + b"\0\1\2\3"
    assert headers[HEADER_LENGTH.lower()] == str(len(got) - 4)
    assert "content-encoding" not in headers


def mutations(text: bytes) -> Iterator[bytes]:
    for at in range(len(text)):
        for byte in (b"\r", b"\n", b"\0", b" ", b"\t", b":", b"x", b"\x80"):
            yield text[:at] + byte + text[at + 1 :]


def test_every_damaged_head_is_refused_or_read_as_h11_reads_it() -> None:
    head = b"POST /v2/models/own/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\nX-A: b\r\n\r\n"
    agreed = 0
    for damaged in mutations(head):
        if not damaged.endswith(b"\r\n\r\n") or damaged.index(b"\r\n\r\n") + 4 != len(damaged):
            continue
        try:
            mine = read_request(damaged)
        except BadRequest:
            continue
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(damaged)
        event = connection.next_event()
        assert isinstance(event, h11.Request), damaged
        lengths = [int(value) for name, value in event.headers if name == b"content-length"]
        assert (lengths or [None]) == [mine.length], damaged
        assert event.target.decode().partition("?")[0].startswith("/"), damaged
        agreed += 1
    assert agreed > 100


@pytest.mark.parametrize("seed", range(50))
def test_chunks_are_read_alike_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    body = rng.randbytes(rng.randrange(200))
    data, out = chunked(body, rng.randrange(1, 50)) + b"NEXT", b""
    reader = RequestChunks()
    while not reader.is_done:
        piece = data[: rng.randrange(1, 20)]
        content, size = reader.feed(piece)
        out += content
        data = data[size:]
    assert (out, data) == (body, b"NEXT")
