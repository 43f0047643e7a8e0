"""A model at zero is started by a request, which is answered by the replica that comes, whatever it is."""

import asyncio
import hashlib
import time
from collections import Counter

import aiohttp
import grpc
import pytest

from tests.fakes.eventually import until
from tests.loopback.activator.clients import (
    BODY,
    MIB,
    asking,
    channel,
    infer,
    pattern,
    post,
    raw,
    request,
    stub,
    tensor,
)
from tests.loopback.activator.conftest import OWN, Place


async def test_a_request_starts_its_model_and_is_answered_by_the_replica_that_comes(place: Place) -> None:
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(post(session, place))
        await until(lambda: place.cold_starts)
        (endpoint,) = place.cold_starts
        assert (endpoint.model, endpoint.buffered, endpoint.cold_start, endpoint.arrived) == (OWN, 1, True, 1)
        assert (endpoint.rest_port, endpoint.grpc_port) == (
            place.assignment.rest_port,
            place.assignment.grpc_port,
        )
        await place.serve(await place.pod())
        status, answer, _ = await asked
        assert (status, answer["pod"]) == (200, "p")
        assert answer["hash"] == hashlib.sha256(BODY).hexdigest()


async def test_a_call_starts_its_model_and_is_answered_by_the_replica_that_comes(place: Place) -> None:
    async with channel(place) as over:
        asked = asking(stub(over).ModelInfer(request(id="7")))
        await until(lambda: place.cold_starts)
        assert place.cold_starts[0].cold_start
        await place.serve(await place.pod())
        answer = await asked
        assert (answer.id, answer.raw_output_contents[0]) == ("7", pattern(3))


async def test_a_thousand_first_requests_are_all_answered_within_the_replicas_slots(place: Place) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, channel(place) as over:
        asked = [asyncio.create_task(post(session, place)) for _ in range(700)]
        called = [asking(stub(over).ModelInfer(request(id=str(i)))) for i in range(300)]
        await until(lambda: place.own.throttler.buffered == 1000)
        assert len(place.cold_starts) == 1
        pods = [
            await place.pod(name, slots=slots, seconds=0.002)
            for name, slots in (("p", 2), ("q", 4), ("r", 8))
        ]
        await place.serve(*pods)
        answers = await asyncio.gather(*asked)
        calls = await asyncio.gather(*called)
    assert Counter(status for status, _, _ in answers) == {200: 700}
    assert [call.id for call in calls] == [str(i) for i in range(300)]
    for pod in pods:
        assert 0 < pod.most_inside <= pod.slots
    served = [pod.served for pod in pods]
    assert sum(served) == 1000
    assert served[0] < served[2], "a copy with more slots has more of them"
    report = place.own.report(time.monotonic())
    assert (report.buffered, report.cold_start, report.buffered_bytes) == (0, False, 0)


async def test_calls_of_one_connection_keep_their_order(place: Place) -> None:
    pod = await place.pod(slots=1)
    async with channel(place) as over:
        called = []
        for i in range(50):  # a client may send what it is asked for at once in any order
            called.append(asking(stub(over).ModelInfer(request(id=str(i)))))
            await until(lambda: place.own.throttler.buffered == len(called))
        await place.serve(pod)
        await asyncio.gather(*called)
    assert pod.ids == [str(i) for i in range(50)]


async def test_requests_that_were_sent_ahead_are_answered_in_their_order(place: Place) -> None:
    reader, writer = await raw(place)
    bodies = [BODY.replace(b"1,2,3", b"1,2,%d" % i) for i in range(20)]
    writer.write(b"".join(map(infer, bodies)))
    await until(lambda: place.own.throttler.buffered == 1)
    pod = await place.pod()
    await place.serve(pod)
    for body in bodies:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        assert hashlib.sha256(body).hexdigest() in (await reader.readexactly(size)).decode()
    assert pod.most_inside == 1
    writer.close()


async def test_a_long_tensor_goes_through_hold_and_hand_over_unharmed(place: Place) -> None:
    body, headers = tensor(64 * MIB)
    async with aiohttp.ClientSession() as session, channel(place) as over:
        message = request(size=64 * MIB)
        posted = asyncio.create_task(post(session, place, body, **headers))
        called = asking(stub(over).ModelInfer(message))
        await until(lambda: place.own.throttler.buffered == 2)
        await asyncio.sleep(0.2)
        assert place.own.replica.budget.used_bytes < 4 * MIB, "the rest waits with its senders"
        await place.serve(await place.pod())
        status, answer, _ = await posted
        assert (status, answer["hash"]) == (200, hashlib.sha256(body).hexdigest())
        echoed = (await called).raw_output_contents[0]
        assert hashlib.sha256(echoed).digest() == hashlib.sha256(message.raw_input_contents[0]).digest()
    assert place.own.replica.budget.used_bytes == 0


async def test_a_stream_of_events_goes_through(place: Place) -> None:
    async with aiohttp.ClientSession() as session:
        url = f"{place.url}/v2/models/own/generate_stream"

        async def ask() -> bytes:
            async with session.post(url, data=b'{"text_input":"x"}') as answer:
                assert answer.headers["Content-Type"] == "text/event-stream"
                return await answer.read()

        asked = asyncio.create_task(ask())
        await until(lambda: place.cold_starts)
        await place.serve(await place.pod())
        assert (await asked).count(b"data: ") == 20


async def test_a_stream_of_calls_is_buffered_and_goes_on_with_its_replica(place: Place) -> None:
    pods = [await place.pod(name) for name in "pq"]
    async with channel(place) as over:
        stream = stub(over).ModelStreamInfer()
        await stream.write(request(id="0"))
        await until(lambda: place.cold_starts)
        await place.serve(*pods)
        names = set()
        for i in range(20):
            answer = await stream.read()
            assert answer.infer_response.id == str(i)
            assert answer.infer_response.raw_output_contents[0] == pattern(3)
            names.add(answer.infer_response.model_version)
            await stream.write(request(id=str(i + 1)))
        assert len(names) == 1
        await stream.done_writing()
        assert (await stream.read()).infer_response.id == "20"
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_client_that_leaves_while_it_is_held_is_no_longer_counted(place: Place) -> None:
    _, writer = await raw(place)
    writer.write(infer())
    async with channel(place) as over:
        called = stub(over).ModelInfer(request())
        asked = asking(called)
        await until(lambda: place.own.throttler.buffered == 2)
        writer.close()
        called.cancel()
        await until(lambda: place.own.throttler.buffered == 0)
        with pytest.raises(asyncio.CancelledError):
            await asked
    assert place.own.replica.budget.used_bytes == 0
    assert place.own.report(time.monotonic()).buffered_bytes == 0


async def test_what_is_held_and_what_goes_on_is_reported(place: Place) -> None:
    """Held: its time; forwarded: once, when it goes. Who counts both sees each request once."""
    async with aiohttp.ClientSession() as session:
        asked = [asyncio.create_task(post(session, place)) for _ in range(3)]
        await until(lambda: place.own.throttler.buffered == 3)
        began = time.monotonic()
        first = place.own.report(began + 2.0)
        assert (first.buffered, first.arrived, first.forwarded, first.cold_start) == (3, 2, 0, True)
        assert 1.0 < first.average_buffered <= 3.0
        pod = await place.pod(slots=3)
        await place.serve(pod)
        await asyncio.gather(*asked)
        for _ in range(5):
            await post(session, place)
        second = place.own.report(began + 1000.0)
        assert (second.buffered, second.arrived, second.forwarded) == (0, 5, 8)
        assert place.own.has_news, "that nothing is buffered any more"
        place.own.report(began + 1001.0)
        assert not place.own.has_news
