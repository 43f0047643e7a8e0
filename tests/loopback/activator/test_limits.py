"""What starts a model at zero and what does not; what it says of itself; what is refused, and when."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb

from berth.contract.activation import RouteMode
from berth.contract.scaling import ModelKey
from proxy.activator.bounds import Bounds, TokenBucket
from proxy.request.budget import Budget
from proxy.request.messages import INFER
from proxy.wire.h2 import frames, hpack
from tests.fakes.eventually import until
from tests.fakes.pods import METADATA
from tests.loopback.activator.clients import BODY, asking, channel, get, infer, post, raw, request, stub
from tests.loopback.activator.conftest import Place, free_port


async def status_of(call: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", dict(error.trailing_metadata() or ())
    return grpc.StatusCode.OK, "", {}


# What starts no model.


@pytest.mark.parametrize(
    "sent",
    [
        infer(model="other"),
        infer(b"{"),
        infer(b'{"inputs":[{"name":"IN","datatype":"UINT8","shape":[3],"data":[1,2,}]}'),
        infer(more="Inference-Header-Content-Length: 9999\r\n"),
        infer(more="Content-Encoding: br\r\n"),
        infer(more="Transfer-Encoding: chunked\r\n"),
        b"POST /v2/repository/models/own/load HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /v2/systemsharedmemory/status HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2/models/other HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2/models/other/ready HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v2/models/own/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01garbage" * 3000,
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
async def test_what_is_refused_wakes_nobody(place: Place, sent: bytes) -> None:
    reader, writer = await raw(place)
    writer.write(sent)
    async with asyncio.timeout(20):
        answered = await reader.read(100)
    assert answered.split(b" ")[1] in (
        b"400",
        b"403",
        b"404",
        b"405",
        b"413",
        b"415",
        b"431",
        b"501",
        b"505",
    ), answered
    writer.close()
    assert place.own.throttler.buffered == 0
    assert not place.cold_starts
    report = place.own.report(time.monotonic())
    assert (report.arrived, report.cold_start) == (0, False)


async def test_calls_that_are_refused_wake_nobody(place: Place) -> None:
    async with channel(place) as over:
        made = stub(over)
        code, text, _ = await status_of(made.ModelInfer(request(model="other")))
        assert (code, "other" in text) == (grpc.StatusCode.NOT_FOUND, True)
        code, _, _ = await status_of(
            made.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="own"))
        )
        assert code is grpc.StatusCode.PERMISSION_DENIED
        code, _, _ = await status_of(over.unary_unary("/x.Y/Z")(b""))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        stream = made.ModelStreamInfer()
        await stream.write(request(model="other"))
        assert "other" in (await stream.read()).error_message
        await asyncio.sleep(0.05)
        stream.cancel()
    assert not place.cold_starts
    assert place.own.report(time.monotonic()).arrived == 0


async def test_a_stream_in_which_nothing_was_said_wakes_nobody(place: Place) -> None:
    async with channel(place) as over:
        stream = stub(over).ModelStreamInfer()
        await asyncio.sleep(0.1)
        assert not place.cold_starts
        stream.cancel()


# What a model at zero says of itself.


async def test_a_model_at_zero_is_ready_and_readiness_does_not_start_it(place: Place) -> None:
    assert await get(place, "/v2/health/live") == (200, b"")
    assert await get(place, "/v2/health/ready") == (200, b"")
    assert await get(place, "/v2/models/own/ready") == (200, b"")
    status, body = await get(place, "/v2/models/own")
    assert (status, b"a request for inference starts a replica" in body) == (503, True)
    async with channel(place) as over:
        made = stub(over)
        assert (await made.ServerLive(pb.ServerLiveRequest())).live
        assert (await made.ServerReady(pb.ServerReadyRequest())).ready
        assert (await made.ModelReady(pb.ModelReadyRequest(name="own"))).ready
        assert not (await made.ModelReady(pb.ModelReadyRequest(name="other"))).ready
        code, text, _ = await status_of(made.ModelMetadata(pb.ModelMetadataRequest(name="own")))
        assert (code, "starts a replica" in text) == (grpc.StatusCode.UNAVAILABLE, True)
        index = await made.RepositoryIndex(pb.RepositoryIndexRequest())
        assert [(row.name, row.state) for row in index.models] == [("own", "READY")]
    assert not place.cold_starts
    assert place.own.throttler.buffered == 0


async def test_a_model_that_is_at_zero_again_reports_what_its_replica_did(place: Place) -> None:
    await place.serve(await place.pod())
    await until(lambda: place.own.pods.any_open)
    assert await get(place, "/v2/models/own/config") == (200, b'{"name": "own"}')
    await until(lambda: place.own._at_zero.answers._answers.keys() == set(place.own._at_zero.answers.paths))
    await place.serve()
    await until(lambda: not place.own.pods.any_open)
    status, body = await get(place, "/v2/models/own")
    assert (status, json.loads(body)) == (200, METADATA)
    assert await get(place, "/v2/models/own/config") == (200, b'{"name": "own"}')
    assert json.loads((await get(place, "/v2"))[1])["name"] == "triton"
    assert (await get(place, "/v2/models/own/stats"))[0] == 503
    async with channel(place) as over:
        made = stub(over)
        answered = await made.ModelMetadata(pb.ModelMetadataRequest(name="own"))
        assert (answered.name, list(answered.versions), answered.platform) == ("own", ["3"], "python")
        assert list(answered.outputs[0].shape) == [-1, 4]
        assert (await made.ServerMetadata(pb.ServerMetadataRequest())).version == "2.51.0"
        index = await made.RepositoryIndex(pb.RepositoryIndexRequest())
        assert [(row.name, row.version) for row in index.models] == [("own", "3")]
    assert not place.cold_starts


async def test_a_failed_model_says_why_and_is_not_started(place: Place) -> None:
    async with aiohttp.ClientSession() as session, channel(place) as over:
        buffered = asyncio.create_task(post(session, place))
        called = asyncio.ensure_future(status_of(stub(over).ModelInfer(request())))
        await until(lambda: place.own.throttler.buffered == 2)
        woken = len(place.cold_starts)
        await place.assign(unavailable="no GPU is large enough")
        status, answer, headers = await buffered
        assert (status, answer["error"], headers["Retry-After"]) == (503, "no GPU is large enough", "1")
        code, text, _ = await called
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "no GPU is large enough")
        assert (await post(session, place))[0] == 503
        assert (await status_of(stub(over).ModelInfer(request())))[1] == "no GPU is large enough"
        assert (await get(place, "/v2/models/own/ready"))[0] == 400
        assert not (await stub(over).ModelReady(pb.ModelReadyRequest(name="own"))).ready
        assert len(place.cold_starts) == woken
        assert not place.own.report(time.monotonic()).cold_start
        await place.assign(unavailable="")
        again = asyncio.create_task(post(session, place))
        await place.serve(await place.pod())
        assert (await again)[0] == 200


async def test_a_failed_model_is_served_by_the_replicas_that_it_has(place: Place) -> None:
    """It can have no other: its annotations are broken, or it fits nowhere any more."""
    await place.assign(unavailable="never again")
    pod = await place.pod()
    await place.serve(pod)
    await until(lambda: place.own.pods.any_open)
    async with aiohttp.ClientSession() as session:
        assert (await post(session, place))[0] == 200
        await place.assign(unavailable="never, says another")  # while a replica serves
        assert (await post(session, place))[0] == 200
        pod.is_ready = False
        await until(lambda: not place.own.pods.any_open)
        status, answer, _ = await post(session, place)
        assert (status, answer["error"]) == (503, "never, says another")
        assert not place.cold_starts
        pod.is_ready = True
        await until(lambda: place.own.pods.any_open)
        assert (await post(session, place))[0] == 200


async def test_who_watches_a_models_health_sees_that_it_has_failed(place: Place) -> None:
    serving, not_serving = b"\x08\x01", b"\x08\x02"
    async with channel(place) as over:
        anything: Any = over
        watch = anything.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == serving
        await place.assign(unavailable="never")
        assert await watch.read() == not_serving
        await place.assign(unavailable="")
        assert await watch.read() == serving
        watch.cancel()
    assert not place.cold_starts


async def test_a_sleeping_model_tells_nothing_of_a_version_that_it_may_not_have(place: Place) -> None:
    await place.serve(await place.pod())
    await until(lambda: place.own._at_zero.answers._answers.keys() == set(place.own._at_zero.answers.paths))
    await place.serve()
    await until(lambda: not place.own.pods.any_open)
    assert (await get(place, "/v2/models/own"))[0] == 200
    assert (await get(place, "/v2/models/own/versions/1"))[0] == 503
    assert not place.cold_starts


# Bounds.


async def test_bytes_that_all_models_hold_are_bounded() -> None:
    place = Place(bounds=Bounds(memory=Budget(300_000)))
    await place.start()
    try:
        long = BODY.replace(b"1,2,3", b"1," * 50_000 + b"1").replace(b"[3]", b"[50001]")
        async with aiohttp.ClientSession() as session:
            buffered = asyncio.create_task(post(session, place, long))
            await until(lambda: place.own.throttler.buffered == 1)
            status, answer, headers = await post(session, place, long)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "all models" in answer["error"] or "memory" in answer["error"], answer
            await place.serve(await place.pod())
            assert (await buffered)[0] == 200
        assert place.models.bounds.memory.used_bytes == 0
    finally:
        await place.close()


async def test_a_model_that_may_hold_more_may_have_more_connections(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.activator.model._IDLE_CONNECTIONS", 1)
    for requests in (3, 1):
        await place.limits(requests=requests)
        writers = [(await raw(place))[1] for _ in range(9)]
        await asyncio.sleep(0.1)
        assert len(list(place.own.rest.clients)) == requests + 1
        for writer in writers:
            writer.close()
        await until(lambda: not list(place.own.rest.clients))


async def test_what_is_too_much_for_a_model_is_refused_at_once(place: Place) -> None:
    await place.limits(requests=3)
    async with aiohttp.ClientSession() as session, channel(place) as over:
        buffered = [asyncio.create_task(post(session, place)) for _ in range(3)]
        await until(lambda: place.own.throttler.buffered == 3)
        status, answer, headers = await post(session, place)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert answer["error"] == "3 requests wait for a replica of the model already (hold-requests)"
        code, text, trailers = await status_of(stub(over).ModelInfer(request()))
        assert (code, trailers["retry-after"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1")
        assert "hold-requests" in text
        report = place.own.report(time.monotonic() + 1)
        assert (report.buffered, report.forwarded) == (3, 0), "the refused ones arrived, and went nowhere"
        await place.serve(await place.pod())
        assert [(await one)[0] for one in buffered] == [200] * 3


async def test_bytes_that_are_held_are_bounded(place: Place) -> None:
    await place.limits(bytes=300_000)
    long = BODY.replace(b"1,2,3", b"1," * 50_000 + b"1").replace(b"[3]", b"[50001]")
    async with aiohttp.ClientSession() as session:
        buffered = [asyncio.create_task(post(session, place, long)) for _ in range(2)]
        await until(lambda: place.own.throttler.buffered == 2)
        status, answer, headers = await post(session, place, long)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "hold-bytes" in answer["error"]
        assert place.own.report(time.monotonic()).buffered_bytes >= 200_000
        await place.serve(await place.pod())
        assert [(await one)[0] for one in buffered] == [200] * 2


async def test_who_waits_too_long_for_a_gate_is_told_of_it(place: Place) -> None:
    """elastic 3.2: the refusal after hold-timeout says that a scheduling gate buffers the model back."""
    await place.limits(seconds=0.3)
    await place.assign(waiting_for="scheduling gates hold 1 of its pods back")
    said = "no replica of the model has taken the request within hold-timeout: scheduling gates hold 1 of its pods back"
    async with aiohttp.ClientSession() as session, channel(place) as over:
        (status, answer, _), (code, text, _) = await asyncio.gather(
            post(session, place), status_of(stub(over).ModelInfer(request()))
        )
        assert (status, answer["error"]) == (503, said)
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, said)
        await place.assign(waiting_for="")
        assert (await post(session, place))[1]["error"] == said.partition(":")[0]


async def test_who_waits_too_long_is_told(place: Place) -> None:
    await place.limits(seconds=0.3)
    async with aiohttp.ClientSession() as session, channel(place) as over:
        stream = stub(over).ModelStreamInfer()
        await stream.write(request())
        (status, answer, headers), (code, text, _), _ = await asyncio.gather(
            post(session, place), status_of(stub(over).ModelInfer(request())), status_of(stream.read())
        )
        assert (status, headers["Retry-After"]) == (503, "1")
        assert answer["error"] == text == "no replica of the model has taken the request within hold-timeout"
        assert code is await stream.code() is grpc.StatusCode.UNAVAILABLE
        # Whose own time is over first is told that.
        code, _, _ = await status_of(stub(over).ModelInfer(request(), timeout=0.1))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: place.own.throttler.buffered == 0)


async def test_who_does_not_send_all_of_its_request_is_told(place: Place) -> None:
    await place.limits(seconds=0.3)
    reader, writer = await raw(place)
    writer.write(infer()[:-10])
    grpc_reader, grpc_writer = await asyncio.open_connection("127.0.0.1", place.assignment.grpc_port)
    head = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", INFER.encode()),
        (b":authority", b"h"),
        (b"content-type", b"application/grpc"),
    ]
    begun = (
        frames.headers(1, hpack.encode(head), end_stream=False) + frames.head(3, frames.DATA, 0, 1) + bytes(3)
    )
    grpc_writer.write(frames.PREFACE + frames.settings({}) + begun)
    async with asyncio.timeout(20):
        assert (await reader.read(100)).startswith(b"HTTP/1.1 504 ")
        answered = b""
        while b"request timeout" not in answered:
            answered += await grpc_reader.read(1000)
    writer.close()
    grpc_writer.close()
    assert not place.cold_starts


async def test_who_has_its_slot_is_not_bound_by_the_time_that_it_may_be_held(place: Place) -> None:
    await place.limits(seconds=0.3)
    pod = await place.pod(seconds=1.0)
    await place.serve(pod)
    async with aiohttp.ClientSession() as session, channel(place) as over:
        asked, called = asyncio.create_task(post(session, place)), asking(stub(over).ModelInfer(request()))
        assert (await asked)[0] == 200
        await called


async def test_a_model_is_not_started_too_often(place: Place) -> None:
    """By clients that ask and leave."""
    await place.limits(cold_starts_per_second=0.001, cold_start_burst=3)
    for count in range(1, 4):
        _, writer = await raw(place)
        writer.write(infer())
        await until(lambda count=count: len(place.cold_starts) == count)
        writer.close()
        await until(lambda: place.own.throttler.buffered == 0)
    async with aiohttp.ClientSession() as session:
        status, answer, headers = await post(session, place)
        assert (status, answer["error"]) == (503, "the model is started from zero too often")
        assert headers["Retry-After"] == "1"
    assert len(place.cold_starts) == 3
    # A replica that is there needs no waking.
    await place.serve(await place.pod())
    await until(lambda: place.own.pods.any_open)
    async with aiohttp.ClientSession() as session:
        assert (await post(session, place))[0] == 200


async def test_what_all_models_hold_is_bounded_and_one_leaves_room_for_the_others() -> None:
    place = Place(bounds=Bounds(places=Budget(10), memory=Budget(10**8), connections=Budget(1000)))
    await place.start()
    other = place.assignment.__class__(
        **{**_fields(place.assignment), "model": place.assignment.model._replace(name="other")}
    )
    other = _with(other, rest_port=free_port(), grpc_port=free_port())
    try:
        await place.models.apply(other)
        writers = []
        for _ in range(10):
            _, writer = await raw(place)
            writer.write(infer())
            writers.append(writer)
        await until(lambda: place.own.throttler.buffered == 5)
        model = place.models.get(other.model)
        assert model is not None
        _, writer = await asyncio.open_connection("127.0.0.1", other.rest_port)
        writer.write(infer())
        await until(lambda: model.throttler.buffered == 1)
        writer.close()
        for one in writers:
            one.close()
        await until(lambda: place.own.throttler.buffered == 0 and model.throttler.buffered == 0)
        assert place.models.bounds.places.used_bytes == 0
    finally:
        await place.close()


async def test_what_a_namespace_holds_is_bounded_however_many_models_it_has() -> None:
    place = Place(bounds=Bounds(places=Budget(9)))
    await place.start()
    names = [("a", "second"), ("a", "third"), ("b", "other")]
    others = [
        _with(place.assignment, model=ModelKey(*name), rest_port=free_port(), grpc_port=free_port())
        for name in names
    ]
    writers = []
    try:
        for one in others:
            await place.models.apply(one)
        for answered in (place.assignment, *others):
            for _ in range(9):
                _, writer = await asyncio.open_connection("127.0.0.1", answered.rest_port)
                writer.write(infer())
                writers.append(writer)
            await asyncio.sleep(0.1)
        buffered = {model.key.name: model.throttler.buffered for model in place.models.all()}
        assert buffered == {"own": 4, "second": 2, "third": 0, "other": 1}
    finally:
        for writer in writers:
            writer.close()
        await place.close()


def _fields(answered: Any) -> dict[str, Any]:
    return {name: getattr(answered, name) for name in answered.__dataclass_fields__}


def _with(answered: Any, **changes: Any) -> Any:
    return answered.__class__(**{**_fields(answered), **changes})


async def test_idle_connections_are_bounded_and_make_room_for_who_asks() -> None:
    place = Place(bounds=Bounds(connections=Budget(200)))
    await place.start()
    try:
        idle = [await raw(place) for _ in range(150)]
        assert place.models.bounds.connections.used_bytes <= 100, "as many are left for other models"
        _, grpc_writer = await asyncio.open_connection("127.0.0.1", place.assignment.grpc_port)
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(post(session, place))
            await until(lambda: place.own.throttler.buffered == 1)
            await place.serve(await place.pod())
            assert (await asked)[0] == 200
        for _, writer in idle:
            writer.close()
        grpc_writer.close()
        await until(lambda: place.models.bounds.connections.used_bytes == 0)
    finally:
        await place.close()


async def test_a_busy_client_is_not_ended_for_a_new_one() -> None:
    place = Place(bounds=Bounds(connections=Budget(20)))
    await place.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            buffered = [asyncio.create_task(post(session, place)) for _ in range(10)]
            await until(lambda: place.own.throttler.buffered == 10)
            with pytest.raises(aiohttp.ClientError):
                await post(session, place)
            await place.serve(await place.pod())
            assert [(await one)[0] for one in buffered] == [200] * 10
    finally:
        await place.close()


async def test_who_may_not_call_is_refused_before_it_is_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.activator.port._UNKNOWN_SECONDS", 0.3)
    place.refused_sources.add("127.0.0.1")
    reader, writer = await raw(place)
    writer.write(infer())
    with suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    async with channel(place) as over:
        code, _, _ = await status_of(stub(over).ModelInfer(request(), timeout=30))
        assert code is grpc.StatusCode.UNAVAILABLE
    assert not place.cold_starts
    assert place.own.replica.calls == 0
    assert place.own.rest_port.refused >= 1
    assert place.own.rest_port.pending_clients is place.own.grpc_port.pending_clients
    place.refused_sources.clear()
    assert (await get(place, "/v2/health/ready"))[0] == 200


# States.


async def test_while_the_service_leads_elsewhere_clients_are_asked_to_leave(place: Place) -> None:
    pod = await place.pod()
    await place.serve(pod)
    async with aiohttp.ClientSession() as session, channel(place) as over:
        _, _, headers = await post(session, place)
        assert "Connection" not in headers
        await stub(over).ModelInfer(request())
        (before,) = place.own.grpc.clients
        await place.assign(mode=RouteMode.SERVE)
        status, _, headers = await post(session, place)
        assert (status, headers["Connection"]) == (200, "close")
        await until(lambda: before not in list(place.own.grpc.clients))
        await stub(over).ModelInfer(request(id="after"))
        await place.assign(mode=RouteMode.PROXY)
        assert "Connection" not in (await post(session, place))[2]


async def test_a_model_that_is_gone_tells_who_waits_and_ends_what_runs(place: Place) -> None:
    pod = await place.pod(slots=1)
    pod.may_answer.clear()
    await place.serve(pod)
    async with aiohttp.ClientSession() as session:
        runs = asyncio.create_task(post(session, place))
        await until(lambda: pod.inside == 1)
        waits = asyncio.create_task(post(session, place))
        await until(lambda: place.own.throttler.buffered == 1)
        await place.models.remove(place.assignment.model)
        status, answer, _ = await waits
        assert (status, answer["error"]) == (503, "the model is gone")
        with pytest.raises(ConnectionRefusedError):
            await raw(place)
        assert len(place.models) == 0
        pod.may_answer.set()
        assert (await runs)[0] == 200


async def test_a_port_that_is_taken_is_reported_and_tried_again(place: Place) -> None:
    taken = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    await place.assign(rest_port=port)
    assert place.own.report(time.monotonic()).rest_port == 0
    taken.close()
    await taken.wait_closed()
    await until(lambda: place.own.has_news)
    assert place.own.report(time.monotonic()).rest_port == port


async def test_a_new_scaler_is_believed_whatever_its_clock_says(place: Place) -> None:
    """Versions come from the clock of whoever leads. Which one is older of a stream, `Assignments` knows."""
    await place.assign(endpoints=())
    answered = replace(place.assignment, version=1, rest_port=free_port())
    await place.models.apply(answered)
    report = place.own.report(time.monotonic())
    assert (report.version, report.rest_port) == (1, answered.rest_port)


def test_a_bucket_gives_so_many_at_once_and_so_many_a_second() -> None:
    bucket = TokenBucket(2.0, 3)
    taken = 0
    for _ in range(5):
        if bucket.has_one(10.0):
            bucket.take()
            taken += 1
    assert taken == 3
    assert not bucket.has_one(10.4)
    assert bucket.has_one(10.5)
    bucket.take()
    assert not bucket.has_one(0.0), "a clock that goes back gives nothing"


async def test_an_activator_that_ends_takes_nobody_new_and_answers_whom_it_holds(place: Place) -> None:
    async with aiohttp.ClientSession() as session, channel(place) as over:
        buffered, called = asyncio.create_task(post(session, place)), asking(stub(over).ModelInfer(request()))
        await until(lambda: place.own.throttler.buffered == 2)
        draining = asyncio.create_task(place.models.drain())
        await until(lambda: not place.own.rest_port.number)
        with pytest.raises(ConnectionRefusedError):
            await raw(place)
        report = place.own.report(time.monotonic())
        assert (report.buffered, report.cold_start, report.rest_port, report.grpc_port) == (2, True, 0, 0)
        await place.serve(await place.pod())
        with pytest.raises(ConnectionRefusedError):  # what is told meanwhile opens nothing
            await raw(place)
        status, _, headers = await buffered
        assert (status, headers["Connection"]) == (200, "close")
        await called
        await draining
