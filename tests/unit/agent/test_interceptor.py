"""The checks before every call: metadata, the size of a request, and what a refused stream has sent."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

import agent.interceptor
from agent.interceptor import REQUEST_BYTES, _parsed, _single, drain_stream, metadata_of, source_of
from berth.contract.errors import InvalidValue
from berth.v1 import node_agent_pb2 as pb

PARSE = pb.LoadRequest.FromString


async def stream(*messages: bytes, then: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
    if then is not None:
        await then.wait()


async def test_the_one_request_of_a_call_is_read_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    request = pb.LoadRequest(model_name="m")
    assert await _single(stream(request.SerializeToString()), PARSE) == request
    assert await _single(stream(b"\x0a\xfc\x7f" + b"m" * (REQUEST_BYTES - 4)), lambda text: len(text)) == (
        REQUEST_BYTES - 1
    )
    for messages, why in (
        ((), "came without a request"),
        ((b"m" * (REQUEST_BYTES + 1),), f"has {REQUEST_BYTES + 1} bytes; at most {REQUEST_BYTES} are read"),
        ((b"\xff",), "not a message of this API"),
    ):
        with pytest.raises(InvalidValue, match=why):
            await _single(stream(*messages), PARSE)
    monkeypatch.setattr(agent.interceptor, "_REQUEST_SECONDS", 0.01)
    with pytest.raises(InvalidValue, match="came without a request"):
        await _single(stream(then=asyncio.Event()), PARSE)


async def test_each_message_of_a_stream_is_checked_before_it_is_parsed() -> None:
    checked: list[int] = []

    def check(message: bytes) -> None:
        checked.append(len(message))
        if message == b"bad":
            raise InvalidValue("refused")

    large = pb.LoadRequest(model_name="m" * REQUEST_BYTES).SerializeToString()
    parsed = _parsed(stream(b"", large, b"bad"), PARSE, check)
    assert [(await anext(parsed)).model_name for _ in range(2)] == ["", "m" * REQUEST_BYTES]
    with pytest.raises(InvalidValue, match="refused"):
        await anext(parsed)
    assert checked == [0, len(large), 3]


async def test_a_refused_stream_is_drained_for_a_moment_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    async def endless() -> AsyncIterator[int]:
        for one in range(100):
            taken.append(one)
            yield one

    await drain_stream(endless())
    assert len(taken) == 8
    await drain_stream(stream(b"1"))  # it ends by itself
    monkeypatch.setattr(agent.interceptor, "_DRAIN_SECONDS", 0.01)
    await drain_stream(stream(then=asyncio.Event()))


@pytest.mark.parametrize(
    ("peer", "source"),
    [("ipv4:10.0.0.9:5555", "ipv4:10.0.0.9"), ("ipv6:%5Bfd00::1%5D:5555", "ipv6:[fd00::1]")],
)
def test_a_caller_is_its_text_metadata_and_its_address_without_the_port(peer: str, source: str) -> None:
    pairs = (("authorization", "Bearer x"), ("trace-bin", b"\x00"))
    context: Any = SimpleNamespace(invocation_metadata=lambda: pairs, peer=lambda: peer)
    assert (metadata_of(context), source_of(context)) == ({"authorization": "Bearer x"}, source)
    context.invocation_metadata = lambda: None
    assert metadata_of(context) == {}
