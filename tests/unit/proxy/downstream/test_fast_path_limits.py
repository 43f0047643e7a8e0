"""Whatever limits a replica has by now, what goes the quick way is answered as by the long one.

A quick way is found by what was seen before the limits were lowered: each case sees a request first, sets limits, and
asks again, once as it comes and once with the quick ways shut.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import h2.settings
import pytest

from proxy.downstream.grpc import connection as grpc_client
from proxy.downstream.grpc.call import Call
from proxy.downstream.grpc.connection import GrpcConnection
from proxy.downstream.rest.connection import RestConnection
from proxy.policy import cost
from proxy.request.messages import STREAM_INFER, framed
from tests.fakes.data_plane import RestPair, own_replica, settle
from tests.fakes.grpc_peers import Both, Connect, request
from tests.unit.proxy.downstream.test_connection import OK, drive, infer, seen

WIDE = {"max_request_bytes": 10**6, "max_json_bytes": 10**6, "max_inflight_bytes": 10**9}
REST_BODY = b'{"inputs":[{"name":"I","datatype":"INT32","shape":[3000],"data":[%b]}]}' % b",".join(
    [b"1"] * 3000
)
GRPC_MESSAGE = request(size=3000)


@pytest.fixture(autouse=True)
def _no_timeslice_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(grpc_client, "TIMESLICE_SECONDS", math.inf)


def around(*sizes: int) -> Iterator[int]:
    for size in sizes:
        yield from (size - 1, size, size + 1)


def cases(body: int, cost_bytes: int, held: int) -> list[tuple[str, float]]:
    """Every limit of a replica, at the values where something ends to go."""
    return [
        *(("max_request_bytes", value) for value in (1, *around(body))),
        *(("max_json_bytes", value) for value in (1, *around(body))),
        *(("max_inflight_bytes", value) for value in (1, *around(body, held, cost_bytes))),
        *(("container_concurrency", value) for value in (0, 1, 2)),
        *(("queue_depth", value) for value in (0, 1)),
        *(("request_timeout_seconds", value) for value in (10.0, 60.0)),
    ]


REST_CASES = cases(len(REST_BODY), cost.of_json(REST_BODY), len(REST_BODY))
GRPC_CASES = cases(len(GRPC_MESSAGE), cost.of_short_message(len(GRPC_MESSAGE)), len(GRPC_MESSAGE) + 5 + 1024)


def lowered(replica: Any, limit: str, value: float) -> None:
    replica.set_limits(replace(replica.limits, **{"container_concurrency": 3, limit: value}))


def shut(_: object, *__: object) -> bool:
    return False


async def rest_responses(route: str, limit: str, value: float) -> tuple[Any, ...]:
    """What client and Triton get of a second request, of one beside it, and when the first one's time is up."""
    sent = infer(REST_BODY if route == "infer" else b'{"text":"%b"}' % bytes(REST_BODY[:5900]).replace(b'"', b"'"),
                 route=route)  # fmt: skip
    pair = RestPair(replica=own_replica(3, 0, **WIDE))
    await drive(pair, sent)
    lowered(pair.downstream.replica, limit, value)
    pair.client.data_received(sent)
    beside = RestPair(downstream=pair.downstream)
    beside.client.data_received(sent)
    await settle()
    passed = [len(body) for _, _, body in seen(pair)]
    pair.client.tick(time.monotonic() + 20.0)
    for upstream in pair.tritons:
        if upstream.request is not None and upstream.request_done:
            upstream.data_received(OK)
    await settle()
    replica = pair.downstream.replica
    return (
        pair.to_client.sent,
        beside.to_client.sent,
        passed,
        dict(replica.rest.codes),
        (replica.admissions.running, replica.admissions.bytes.used_bytes, replica.budget.used_bytes),
    )


@pytest.mark.parametrize("route", ["infer", "generate"])
@pytest.mark.parametrize(("limit", "value"), REST_CASES)
async def test_a_rest_request_seen_before(
    monkeypatch: pytest.MonkeyPatch, route: str, limit: str, value: float
) -> None:
    """It once left out max-request-bytes and max-json-bytes."""
    with RestPair.triton_at_hand():
        quick = await rest_responses(route, limit, value)
        monkeypatch.setattr(RestConnection, "_take_fast_path", shut)
        assert quick == await rest_responses(route, limit, value)


@pytest.mark.parametrize("limit", ["max_request_bytes", "max_json_bytes"])
async def test_a_rest_body_above_a_limit_that_was_lowered(limit: str) -> None:
    """A body of 6 068 bytes once got 200 after its limit had become 2 048, as its head was known."""
    with RestPair.triton_at_hand():
        pair = RestPair(replica=own_replica(**WIDE))
        await drive(pair, infer(REST_BODY))
        assert pair.to_client.sent == OK
        lowered(pair.downstream.replica, limit, 2048)
        await drive(pair, infer(REST_BODY))
        assert pair.to_client.sent.removeprefix(OK).startswith(b"HTTP/1.1 413 ")
        assert len(seen(pair)) == 1


async def test_a_body_that_comes_after_its_limit_was_lowered_teaches_no_quick_way() -> None:
    """Its head has passed the limits before; the next one has not."""
    with RestPair.triton_at_hand():
        pair = RestPair(replica=own_replica(**WIDE))
        sent = infer(REST_BODY)
        pair.client.data_received(sent[:-10])
        lowered(pair.downstream.replica, "max_request_bytes", 2048)
        await drive(pair, sent[-10:])
        assert pair.to_client.sent == OK
        await drive(pair, sent)
        assert pair.to_client.sent.removeprefix(OK).startswith(b"HTTP/1.1 413 ")


async def test_bodies_that_are_coming_leave_no_room_to_a_quick_one() -> None:
    """As they leave none to one that has not been seen before."""
    with RestPair.triton_at_hand():
        pair = RestPair(replica=own_replica(**WIDE))
        await drive(pair, infer(REST_BODY))
        pair.downstream.replica.budget.charge(10**9)
        await drive(pair, infer(REST_BODY))
        assert pair.to_client.sent.removeprefix(OK).startswith(b"HTTP/1.1 503 ")


def unary(both: Both) -> int:
    stream = both.client.call()
    both.client.send(stream, framed(GRPC_MESSAGE), end=True)
    both.exchange()
    return stream


def answer(both: Both, stream: int) -> None:
    both.triton.answer(stream, b"fine")
    both.exchange()


def response_to(both: Both, *streams: int) -> list[Any]:
    client = both.client
    return [
        (client.status(one), dict(client.headers.get(one, [])).get(b"grpc-message"), client.data.get(one))
        for one in streams
    ]


def grpc_responses(connect: Connect, limit: str, value: float) -> tuple[Any, ...]:
    both = connect(limit=3, depth=0, **WIDE)
    answer(both, unary(both))
    lowered(both.pair.replica, limit, value)
    first, beside = unary(both), unary(both)
    passed = {one: both.triton.messages(one) for one in (first, beside)}
    both.pair.client.tick(time.monotonic() + 20.0)
    both.exchange()
    for one in (first, beside):
        if one in both.triton.ended:
            answer(both, one)
    replica = both.pair.replica
    return (
        response_to(both, first, beside),
        passed,
        dict(replica.grpc.codes),
        (replica.admissions.running, replica.admissions.bytes.used_bytes, replica.budget.used_bytes),
    )


@pytest.mark.parametrize(("limit", "value"), GRPC_CASES)
async def test_a_unary_call_like_one_before(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    quick = grpc_responses(connect, limit, value)
    monkeypatch.setattr(GrpcConnection, "_take_fast_path", shut)
    assert quick == grpc_responses(connect, limit, value)


def stream_responses(connect: Connect, limit: str, value: float) -> tuple[Any, ...]:
    both = connect(limit=3, depth=0, **WIDE)
    stream = both.client.call(STREAM_INFER)
    both.client.send(stream, framed(GRPC_MESSAGE))
    both.exchange()
    both.triton.begin(stream)
    both.triton.send(stream, framed(b""))
    both.exchange()
    lowered(both.pair.replica, limit, value)
    for _ in range(2):
        if stream not in both.client.ended:
            both.client.send(stream, framed(GRPC_MESSAGE))
            both.exchange()
    passed = both.triton.messages(stream)
    both.pair.client.tick(time.monotonic() + 20.0)
    both.exchange()
    replica = both.pair.replica
    return (
        response_to(both, stream),
        passed,
        dict(replica.grpc.codes),
        (replica.admissions.running, replica.admissions.bytes.used_bytes, replica.budget.used_bytes),
    )


@pytest.mark.parametrize(("limit", "value"), GRPC_CASES)
async def test_a_message_of_a_stream(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    quick = stream_responses(connect, limit, value)
    monkeypatch.setattr(Call, "_takes_fast_path", shut)
    assert quick == stream_responses(connect, limit, value)


async def test_calls_and_bodies_that_are_here_leave_no_room_to_a_quick_call(connect: Connect) -> None:
    """As they leave none to one that has not been seen before."""
    both = connect(**WIDE)
    answer(both, unary(both))
    stream = both.client.call(STREAM_INFER)
    both.client.send(stream, framed(GRPC_MESSAGE))
    both.exchange()
    both.pair.replica.budget.charge(10**9)
    both.client.send(stream, framed(GRPC_MESSAGE))
    both.exchange()
    refused = unary(both)
    assert [both.client.status(one) for one in (stream, refused)] == [8, 8]
    assert len(both.triton.messages(stream)) == 1


@pytest.mark.parametrize("is_whole", [True, False])
async def test_answers_that_are_not_read_end_where_there_is_no_room_for_them(
    connect: Connect, is_whole: bool
) -> None:
    """An answer that comes in one piece was kept however much was kept already."""
    both = connect(max_inflight_bytes=300_000)
    both.client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    both.exchange()
    streams = []
    for _ in range(30):
        streams.append(both.client.call())
        both.client.send(streams[-1], framed(request()), end=True)
        both.exchange()
    for stream in streams:
        both.triton.begin(stream)
        if not is_whole:
            both.triton.exchange()
        both.triton.h2.send_data(both.triton.own(stream), framed(bytes(15_000)))
        both.triton.h2.send_headers(both.triton.own(stream), [("grpc-status", "0")], end_stream=True)
        both.exchange()
        assert both.pair.replica.budget.used_bytes <= 300_000
    assert set(both.client.resets.values()) == {11}
    codes = both.pair.replica.grpc.codes
    assert codes["OK"] + codes["RESOURCE_EXHAUSTED"] == 30
    both.pair.client.connection_lost(None)
    assert both.pair.replica.budget.used_bytes == 0
