"""What becomes of clients that are here when their Service leads elsewhere, or the activator ends."""

import asyncio
import time
from contextlib import suppress

import aiohttp
import grpc
import pytest

from berth.contract.activation import RouteMode
from proxy.request.messages import INFER
from proxy.wire.h2 import frames, hpack
from tests.fakes import pods
from tests.fakes.eventually import until
from tests.loopback.activator.clients import MIB, asking, channel, infer, post, raw, request, stub
from tests.loopback.activator.conftest import OWN, Place

HEAD = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", INFER.encode()),
    (b":authority", b"h"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]


class H2Client:
    """One connection, frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        writer.write(frames.PREFACE + frames.settings({}))

    def call(self, stream: int, *, size: int = 3) -> None:
        message = request(id=str(stream), size=size).SerializeToString()
        body = b"\0" + len(message).to_bytes(4) + message
        head = frames.headers(stream, hpack.encode(HEAD), end_stream=False)
        self.writer.write(head + frames.head(len(body), frames.DATA, frames.END_STREAM, stream) + body)

    async def frame(self, kind: int) -> tuple[int, bytes]:
        """The next of a kind: its stream, its payload."""
        async with asyncio.timeout(20):
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3]))
                if head[3] == kind:
                    return int.from_bytes(head[5:]), payload


async def h2(place: Place) -> H2Client:
    return H2Client(*await asyncio.open_connection("127.0.0.1", place.assignment.grpc_port))


async def test_a_call_that_crosses_the_goaway_is_answered(place: Place) -> None:
    """The first GOAWAY leaves none out, the second names the last call that was taken (RFC 9113, 6.8)."""
    await place.serve(await place.pod())
    await until(lambda: place.own.pods.any_open)
    client = await h2(place)
    client.call(1)
    assert (await client.frame(frames.DATA))[0] == 1
    await place.assign(mode=RouteMode.SERVE)
    client.call(3)  # it has not heard yet
    _, first = await client.frame(frames.GOAWAY)
    assert int.from_bytes(first[:4]) == 2**31 - 1
    assert (await client.frame(frames.DATA))[0] == 3
    _, second = await client.frame(frames.GOAWAY)
    assert int.from_bytes(second[:4]) == 3
    async with asyncio.timeout(20):
        await client.reader.read()
    client.writer.close()


async def test_who_comes_while_the_service_leads_elsewhere_is_served_and_asked_to_leave(place: Place) -> None:
    await place.serve(await place.pod())
    await place.assign(mode=RouteMode.SERVE)
    async with channel(place) as over:
        await stub(over).ModelInfer(request())
        await until(lambda: not list(place.own.grpc.clients))
        await stub(over).ModelInfer(request())


async def test_a_client_that_rests_loses_no_request_while_the_service_leads_elsewhere(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends with its next answer, and not just as it asks."""
    monkeypatch.setattr("proxy.downstream.rest.connection._NEXT_SECONDS", 0.1)
    await place.serve(await place.pod())
    await until(lambda: place.own.pods.any_open)
    reader, writer = await raw(place)
    writer.write(infer())
    await reader.readuntil(b"\r\n\r\n")
    await place.assign(mode=RouteMode.SERVE)
    ticks = time.monotonic()
    await until(lambda: time.monotonic() - ticks > 0.5)
    assert len(list(place.own.rest.clients)) == 1
    writer.write(infer())
    async with asyncio.timeout(20):
        rest = await reader.read()
    assert b"HTTP/1.1 200 OK" in rest
    assert b"\r\nconnection: close\r\n" in rest.lower()
    writer.close()


async def test_a_stream_whose_client_has_said_all_is_buffered_and_answered(place: Place) -> None:
    async with channel(place) as over:
        stream = stub(over).ModelStreamInfer()
        await stream.write(request(id="0"))
        await stream.done_writing()
        await until(lambda: place.own.throttler.buffered == 1)
        await place.serve(await place.pod())
        assert (await stream.read()).infer_response.id == "0"
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_client_that_has_closed_its_half_is_not_waited_for(place: Place) -> None:
    """It may have gone: a request that starts a model waits for it."""
    reader, writer = await raw(place)
    writer.write(infer())
    await until(lambda: place.own.throttler.buffered == 1)
    writer.write_eof()
    await until(lambda: place.own.throttler.buffered == 0)
    async with asyncio.timeout(20):
        with suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_a_model_by_another_name_is_another(place: Place) -> None:
    async with aiohttp.ClientSession() as session:
        buffered = asyncio.create_task(post(session, place))
        await until(lambda: place.own.throttler.buffered == 1)
        before = place.own
        await place.assign(public_name="new")
        assert place.own is not before
        status, answer, headers = await buffered
        assert (status, answer["error"], headers["Connection"]) == (503, "the model is gone", "close")
        assert (await post(session, place))[0] == 404
        asked = asyncio.create_task(post(session, place, path="/v2/models/new/infer"))
        await until(lambda: place.own.throttler.buffered == 1)
        asked.cancel()


async def test_the_end_waits_for_what_runs_in_a_model_that_is_gone(place: Place) -> None:
    pod = await place.pod()
    pod.may_answer.clear()
    await place.serve(pod)
    async with aiohttp.ClientSession() as session:
        runs = asyncio.create_task(post(session, place))
        await until(lambda: pod.inside == 1)
        await place.models.remove(OWN)
        draining = asyncio.create_task(place.models.drain())
        await asyncio.sleep(0.2)
        assert not draining.done()
        pod.may_answer.set()
        assert (await runs)[0] == 200
        await draining


async def test_the_end_waits_for_an_answer_that_is_taken_slowly(place: Place) -> None:
    """Its copy is done with it."""
    pod = await place.pod()
    await place.serve(pod)
    await until(lambda: place.own.pods.any_open)
    client = await h2(place)
    client.call(1, size=50_000)
    client.call(3, size=50_000)  # two of them are more than a window
    while (await client.frame(frames.DATA))[1]:
        if pod.served == 2 and not place.own.throttler.running:
            break
    draining = asyncio.create_task(place.models.drain())
    await asyncio.sleep(0.2)
    assert not draining.done()
    client.writer.write(frames.window_update(0, MIB))
    async with asyncio.timeout(20):
        await client.reader.read()
        await draining
    client.writer.close()


async def test_the_end_waits_for_a_long_answer_to_a_question(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no slot."""
    monkeypatch.setitem(pods._SMALL, "/v2/models/own/config", {"name": "x" * 16 * MIB})
    await place.serve(await place.pod())
    await until(lambda: place.own.pods.any_open)
    reader, writer = await raw(place)
    writer.write(b"GET /v2/models/own/config HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    await until(lambda: not place.own.throttler.running)
    draining = asyncio.create_task(place.models.drain())
    await asyncio.sleep(0.2)
    assert not draining.done()
    async with asyncio.timeout(20):
        assert len(await reader.read()) > 16 * MIB
        await draining
    writer.close()


async def test_a_model_that_is_gone_does_not_end_its_requests_for_ever(place: Place) -> None:
    pod = await place.pod()
    pod.may_answer.clear()
    await place.serve(pod)
    async with channel(place) as over:
        runs = asking(stub(over).ModelInfer(request()))
        await until(lambda: pod.inside == 1)
        model = place.own
        await place.models.remove(OWN)
        await place.models.tick(time.monotonic() + 299)
        assert model.is_busy
        await place.models.tick(time.monotonic() + 301)
        await until(lambda: not model.is_busy)
        with suppress(grpc.aio.AioRpcError):
            await runs
