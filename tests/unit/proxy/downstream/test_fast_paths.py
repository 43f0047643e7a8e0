"""What most requests are like goes the quick way, on which the proxy's cost was measured.

Nothing else would show that it is not taken: the slower way gives the same bytes.
"""

import gc
import math
import random
import weakref
from typing import Any

import pytest

from proxy.downstream.grpc import connection as grpc_client
from proxy.downstream.grpc.call import Call
from proxy.downstream.grpc.connection import GrpcConnection
from proxy.downstream.rest import connection as rest_client
from proxy.policy.names import Names
from proxy.request.messages import INFER, STREAM_INFER, MessageReader, framed
from proxy.wire.http1 import HEADER_LENGTH
from proxy.wire.protobuf import encode_bytes
from tests.fakes.data_plane import RestPair
from tests.fakes.grpc_peers import Both, Connect, request
from tests.unit.proxy.downstream.test_connection import OK, drive, infer


@pytest.fixture(autouse=True)
def _no_timeslice_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(grpc_client, "TIMESLICE_SECONDS", math.inf)


def forbid(monkeypatch: pytest.MonkeyPatch, cls: type[Any], *names: str) -> None:
    def slow(*_: object, **__: object) -> None:
        raise AssertionError(f"the slow way: {names}")

    for name in names:
        monkeypatch.setattr(cls, name, slow)


def call(both: Both, method: str = INFER, size: int = 3) -> int:
    stream = both.client.call(method)
    both.client.send(stream, framed(request(size=size)), end=method == INFER)
    both.exchange()
    return stream


def answered(both: Both, stream: int) -> None:
    both.triton.answer(stream, b"fine")
    both.exchange()
    assert (both.client.status(stream), both.client.data[stream]) == (0, framed(b"fine"))


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("size", [0, 3, 15_000])
async def test_a_call_like_the_one_before_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, limit: int, size: int
) -> None:
    both = connect(limit=limit, depth=0)
    for _ in range(3):
        answered(both, call(both))
    forbid(monkeypatch, GrpcConnection, "_take", "_begin")
    forbid(monkeypatch, Call, "take", "take_whole", "_opened", "answer_began", "answer_data", "answer_ended")
    for number in range(3):
        stream = both.client.call(traceparent=f"00-{number:032x}-01", grpc_timeout=f"{number + 1}S")
        both.client.send(stream, framed(request(size=size)), end=True)
        both.exchange()
        answered(both, stream)
    assert both.pair.running == 0
    assert both.pair.replica.grpc.codes == {"OK": 6}


@pytest.mark.parametrize("cut", [False, True])
async def test_an_answered_call_leaves_nothing_to_the_garbage_collector(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    both, made = connect(), []
    init = Call.__init__

    def noted(one: Call, *of: Any) -> None:
        made.append(weakref.ref(one))
        init(one, *of)

    monkeypatch.setattr(Call, "__init__", noted)
    answered(both, call(both))
    gc.disable()
    try:
        for _ in range(3):
            stream = both.client.call()
            if cut:
                both.exchange()
            both.client.send(stream, framed(request()), end=True)
            both.exchange()
            answered(both, stream)
        assert [one() for one in made[1:]] == [None] * 3
    finally:
        gc.enable()


async def test_a_message_of_a_stream_in_one_frame(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    both = connect(limit=1, depth=0)
    answered(both, call(both))
    stream = call(both, STREAM_INFER)
    both.triton.h2.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    both.exchange()
    forbid(monkeypatch, GrpcConnection, "_rest")
    for _ in range(3):
        both.triton.h2.send_data(stream, framed(b"fine"))
        both.exchange()
        assert both.pair.running == 0
        both.client.send(stream, framed(request()))
        both.exchange()
    assert both.triton.messages(stream) == [request()] * 4
    assert both.client.data[stream] == framed(b"fine") * 3


async def test_the_middle_of_a_long_tensor_is_not_looked_at(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, message = connect(), framed(request(size=600_000))
    stream = both.client.call()
    for at in range(0, 80_000, 16_000):
        both.client.h2.send_data(stream, message[at : at + 16_000])
        both.exchange()
    forbid(monkeypatch, MessageReader, "push", "pull")
    for at in range(80_000, 592_000, 16_000):
        both.client.h2.send_data(stream, message[at : at + 16_000])
        both.exchange()
    assert both.triton.data[stream] == message[:592_000]
    monkeypatch.undo()


async def test_a_rest_request_like_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with RestPair.triton_at_hand():
        for route, body in (("infer", infer()), ("generate", infer(b'{"text":"x"}', route="generate"))):
            pair = RestPair(limit=1, depth=0)
            await drive(pair, body)
            with monkeypatch.context() as patch:
                forbid(patch, rest_client.RestConnection, "_take")
                forbid(patch, rest_client.RestRequest, "begin", "connected", "answer_began", "answer_ended")
                for _ in range(3):
                    await drive(pair, body)
            assert pair.to_client.sent == OK * 4, route
            assert pair.downstream.replica.admissions.running == 0
            assert pair.downstream.replica.rest.received_bytes % 4 == 0


UNUSUAL = {
    "no whole body": infer()[:-1],
    "more than its body": infer() + b"\r\n",
    "tensors behind it": infer(b'{"inputs":[]}xx', "own", f"{HEADER_LENGTH}: 13"),
    "packed": infer(b"", "own", "Content-Encoding: gzip"),
    "the last": infer(infer()[-1:], "own", "Connection: close"),
    "100-continue": infer(b"{}", "own", "Expect: 100-continue"),
    "no JSON": infer(b"{", "own"),
}


@pytest.mark.parametrize("case", UNUSUAL)
async def test_a_rest_request_that_is_not_usual_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    with RestPair.triton_at_hand():
        pair = RestPair()
        for _ in range(2):
            looked: list[bytes] = []
            take = rest_client.RestConnection._take

            def noted(
                one: rest_client.RestConnection, data: bytes, looked: Any = looked, take: Any = take
            ) -> None:
                looked.append(data)
                take(one, data)

            client = RestPair(downstream=pair.downstream)
            with monkeypatch.context() as patch:
                patch.setattr(rest_client.RestConnection, "_take", noted)
                client.client.data_received(UNUSUAL[case])
            assert looked == [UNUSUAL[case]]


@pytest.mark.parametrize("seed", range(10))
async def test_many_usual_calls_with_unusual_ones_between(connect: Connect, seed: int) -> None:
    rng, both = random.Random(seed), connect(limit=3, depth=100)
    streams = {}
    for _ in range(40):
        size = rng.choice([0, 3, 20_000])
        streams[call(both, size=size)] = size
        for ready in [one for one in streams if one in both.triton.ended and one not in both.client.ended]:
            if rng.random() < 0.7:
                assert both.triton.messages(ready) == [request(size=streams[ready])]
                answered(both, ready)
    while left := [one for one in streams if one not in both.client.ended]:
        answered(both, next(one for one in left if one in both.triton.ended))
    assert (both.pair.running, both.pair.buffered_bytes) == (0, 0)


async def test_calls_and_answers_that_came_together_are_taken_in_part(connect: Connect) -> None:
    """However many one read holds, others are served between."""
    both = connect()
    answered(both, call(both))
    streams = []
    for _ in range(50):
        streams.append(both.client.call())
        both.client.send(streams[-1], framed(request()), end=True)
    both.pair.client.data_received(both.client.h2.data_to_send())
    assert both.pair.running == GrpcConnection.most_at_once
    both.exchange()
    assert both.pair.running == 50
    for stream in streams:
        both.triton.h2.send_headers(both.triton.own(stream), [(":status", "200")])
        both.triton.h2.send_data(both.triton.own(stream), framed(b"fine"))
        both.triton.h2.send_headers(both.triton.own(stream), [("grpc-status", "0")], end_stream=True)
    triton = both.pair.tritons[0]
    triton.data_received(both.triton.h2.data_to_send())
    assert both.pair.running == 50 - triton.most_at_once
    both.exchange()
    assert both.pair.running == 0


@pytest.mark.parametrize("server", [b"own", b"own-of-pod-1"])
async def test_the_messages_of_a_stream_go_on_at_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, server: bytes
) -> None:
    """As they would by the long way, which takes those that have to wait."""

    async def outcome_of(**quick: Any) -> tuple[bytes, dict[str, int], int]:
        with monkeypatch.context() as patched:
            for name, value in quick.items():
                patched.setattr(Call, name, value)
            both = connect(limit=2, depth=1, names=Names(b"own", server))
            stream = call(both, STREAM_INFER)
            if not quick:
                forbid(patched, MessageReader, "push")
            both.client.send(stream, framed(request(size=7)))
            both.exchange()
            patched.undo()
            for size in (8, 9):  # one waits for a slot, one behind it
                both.client.send(stream, framed(request(size=size)))
                both.exchange()
            assert (both.pair.running, both.pair.waiting) == (2, 1)
            both.triton.h2.send_headers(both.triton.own(stream), [(":status", "200")])
            for _ in range(4):
                assert both.pair.running
                both.triton.h2.send_data(both.triton.own(stream), framed(encode_bytes(2, b"")))
                both.exchange()
            assert (both.pair.running, both.pair.waiting) == (0, 0)
            both.client.send(stream, b"", end=True)
            both.exchange()
            return both.triton.data[stream], dict(both.pair.replica.grpc.codes), len(both.client.data[stream])

    def slowly(*_: Any) -> bool:
        return False

    assert await outcome_of() == await outcome_of(_takes_fast_path=slowly)
