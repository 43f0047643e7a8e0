"""Which replica a request goes to, and what becomes of it when replicas go."""

import asyncio
import ssl
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import uvloop

from berth.contract.activation import ReplicaEndpoint
from berth.contract.endpoint import Endpoint
from berth.contract.scaling import ModelKey
from proxy.activator import probe_schedule
from proxy.activator import tls_tunnel as tunnels
from proxy.upstream.http1 import UpstreamHttp, UpstreamPool
from proxy.upstream.queries import Silent
from tests.fakes.certificates import Authority
from tests.fakes.eventually import until
from tests.fakes.pods import FakePod
from tests.loopback.activator.clients import asking, channel, infer, post, raw, request, stub
from tests.loopback.activator.conftest import OWN, Place, free_port
from tests.loopback.proxy.test_resets import Ends, break_off


async def test_no_request_goes_to_a_replica_that_is_not_ready(place: Place) -> None:
    """As it says itself: what the cluster says of it comes late, both ways."""
    pod = await place.pod()
    pod.is_ready = False
    await place.serve(pod)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(post(session, place))
        await until(lambda: pod.probes > 2)
        assert (place.own.throttler.buffered, pod.inside) == (1, 0)
        pod.is_ready = True
        assert (await asked)[0] == 200
        pod.is_ready = False
        await until(lambda: not place.own.pods.any_open)
        again = asyncio.create_task(post(session, place))
        await until(lambda: place.own.throttler.buffered == 1)
        assert place.own.report(time.monotonic()).cold_start
        pod.is_ready = True
        assert (await again)[0] == 200


async def test_a_replica_is_found_as_soon_as_it_serves(place: Place) -> None:
    pod = FakePod()
    pod.rest_port, pod.grpc_port = free_port(), free_port()
    place.pods.append(pod)
    await place.serve(pod)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(post(session, place))
        await until(lambda: place.own.throttler.buffered == 1)
        await asyncio.sleep(0.2)
        await pod.start()
        assert (await asked)[0] == 200


async def test_a_replica_whose_model_is_loaded_is_asked_without_a_rest_until_it_serves(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_schedule, "_SOON_SECONDS", 60.0)
    monkeypatch.setattr(probe_schedule, "_OPEN_SECONDS", 0.05)
    pod = await place.pod()
    pod.is_ready = False
    await place.serve(pod)
    await until(lambda: pod.probes == 1)
    await place.assign(endpoints=(pod.as_endpoint(nearly_ready=True),))
    await until(lambda: pod.probes > 3)
    pod.is_ready = True
    await until(lambda: place.own.pods.any_open)


async def test_requests_go_to_the_replica_with_the_most_free_slots(place: Place) -> None:
    pods = [await place.pod(name, slots=slots) for name, slots in (("p", 1), ("q", 3), ("r", 4))]
    for pod in pods:
        pod.may_answer.clear()
    await place.serve(*pods)
    await until(lambda: place.own.throttler.slots == 8)
    async with aiohttp.ClientSession() as session, channel(place) as over:
        asked = [asyncio.create_task(post(session, place)) for _ in range(4)]
        await until(lambda: sum(pod.inside for pod in pods) == 4)
        called = [asking(stub(over).ModelInfer(request())) for _ in range(6)]
        await until(lambda: place.own.throttler.buffered == 2)
        await until(lambda: [pod.inside for pod in pods] == [1, 3, 4])
        for pod in pods:
            pod.may_answer.set()
        assert {(await one)[0] for one in asked} == {200}
        await asyncio.gather(*called)
    assert [pod.most_inside for pod in pods] == [1, 3, 4]


async def test_several_activators_share_a_replicas_slots(place: Place) -> None:
    await place.assign(activators=3)
    pods = [await place.pod("p", slots=7), await place.pod("q", slots=1)]
    await place.serve(*pods)
    await until(lambda: place.own.throttler.slots == 3)


async def test_a_request_whose_replica_cannot_be_reached_goes_to_another(place: Place) -> None:
    gone, pod = await place.pod("gone", slots=100), await place.pod("p", slots=100)
    await place.serve(gone, pod)
    await until(lambda: place.own.throttler.slots == 200)
    server, gone._server = gone._server, None
    assert server is not None
    server.close()  # it takes no connections; those that it has stay
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        answers = await asyncio.gather(*(post(session, place) for _ in range(50)))
    assert Counter((status, answer["pod"]) for status, answer, _ in answers) == {(200, "p"): 50}
    assert gone.served == 0


class Slamming(FakePod):
    """It answers on its first connection, which is the one that asks whether it serves, and ends all others unread."""

    slammed = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.connections:
            self.slammed += 1
            writer.close()
        else:
            await super()._serve(reader, writer)


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_request_whose_replica_ends_its_connection_as_it_is_made_goes_to_another(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = UpstreamPool._connection

    async def late(pool: UpstreamPool, endpoint: Endpoint, *more: Any) -> UpstreamHttp:
        """As on a busy machine: the end is known before anything can be written."""
        upstream = await connection(pool, endpoint, *more)
        if slamming.connections and endpoint.port == slamming.rest_port and pool is not questions():
            await until(lambda: upstream.transport is not None and upstream.transport.is_closing())
        return upstream

    def questions() -> UpstreamPool:
        return next(pod.queries for pod in place.own.pods if pod.endpoint.name == "slamming")

    async def main() -> None:
        await place.start()
        place.pods.append(await slamming.start())
        await place.serve(slamming)
        await until(lambda: place.own.pods.any_open)
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(post(session, place))
            await until(lambda: slamming.slammed)
            good = await place.pod("good")
            await place.serve(slamming, good)
            status, answer, _ = await asyncio.wait_for(asked, 20)
            assert (status, answer.get("pod")) == (200, "good")
            assert (len(good.hashes), slamming.hashes) == (1, [])
        await place.close()

    monkeypatch.setattr(UpstreamPool, "_connection", late)
    place, slamming = Place(), Slamming("slamming", slots=100)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


async def test_a_request_whose_only_replica_cannot_be_reached_waits_for_the_next(place: Place) -> None:
    gone = await place.pod("gone")
    await place.serve(gone)
    await until(lambda: place.own.pods.any_open)
    await gone.die()
    # Before anybody has noticed.
    (pod,) = place.own.pods
    pod._set_open(True)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(post(session, place))
        await until(lambda: place.own.throttler.buffered == 1)
        await until(lambda: place.cold_starts)
        report = place.own.report(time.monotonic() + 1)
        assert (report.buffered, report.cold_start) == (1, True)
        await place.serve(await place.pod("next"))
        status, answer, _ = await asked
        assert (status, answer["pod"]) == (200, "next")
    assert place.own.throttler.buffered == 0


async def lost(place: Place) -> None:
    """Its only replica is gone, and nobody has noticed."""
    gone = await place.pod("gone")
    await place.serve(gone)
    await until(lambda: place.own.pods.any_open)
    await gone.die()
    (pod,) = place.own.pods
    pod._task.cancel()
    pod._set_open(True)


@pytest.mark.parametrize("why", ["late", "unavailable", "removed"])
async def test_a_request_that_waits_for_a_replica_again_times_out_when_none_comes(
    place: Place, why: str
) -> None:
    await lost(place)
    own = place.own
    await place.limits(seconds=0.5 if why == "late" else 300.0)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(post(session, place))
        await until(lambda: own.throttler.retrying == 1)
        status, answer, _ = await ended(place, why, asked)
    assert (status, answer["error"]) == (503, TOLD[why])
    assert (own.throttler.buffered, own.throttler.running) == (0, 0)


@pytest.mark.parametrize("why", ["late", "unavailable", "removed"])
async def test_a_call_that_waits_for_a_replica_again_times_out_when_none_comes(
    place: Place, why: str
) -> None:
    await lost(place)
    own = place.own
    await place.limits(seconds=0.5 if why == "late" else 300.0)
    async with channel(place) as over:
        called = asking(stub(over).ModelInfer(request()))
        await until(lambda: own.throttler.retrying == 1)
        with pytest.raises(grpc.aio.AioRpcError, match=TOLD[why]) as failed:
            await ended(place, why, called)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (own.throttler.buffered, own.throttler.running) == (0, 0)


TOLD = {
    "late": "no replica of the model has come",
    "unavailable": "never",
    "removed": "the model is gone",
}


async def ended(place: Place, why: str, asked: "asyncio.Future[Any]") -> Any:
    if why == "unavailable":
        await place.assign(unavailable="never")
    elif why == "removed":
        await place.models.remove(OWN)
    async with asyncio.timeout(20):
        return await asked


@pytest.mark.parametrize("by_grpc", [False, True])
async def test_who_waits_for_a_replica_again_may_leave(place: Place, by_grpc: bool) -> None:
    await lost(place)
    _, writer = await raw(place)
    async with channel(place) as over:
        if by_grpc:
            called = stub(over).ModelInfer(request())
            asked = asking(called)
        else:
            writer.write(infer())
        await until(lambda: place.own.throttler.retrying == 1)
        if by_grpc:
            called.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        writer.close()
        await until(lambda: place.own.throttler.buffered == 0)
    assert not place.own.report(time.monotonic()).cold_start


async def test_a_replica_that_is_too_busy_to_say_is_what_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took it out would send its load to the others."""
    asked = 0

    async def silent(*args: object, **more: object) -> None:
        nonlocal asked
        asked += 1
        raise Silent("Triton does not answer")

    pod = await place.pod()
    await place.serve(pod)
    await until(lambda: place.own.pods.any_open)
    monkeypatch.setattr("proxy.activator.pod.fetch", silent)
    (known,) = place.own.pods
    known.probe_now()
    await until(lambda: asked)
    await asyncio.sleep(0)
    assert known.is_open
    await place.serve(await place.pod("new"))
    (known,) = place.own.pods
    await until(lambda: asked > 2)
    assert not known.is_open


async def test_a_replica_serves_when_both_its_ports_do(place: Place) -> None:
    pod = await place.pod()
    await place.assign(endpoints=(replace(pod.as_endpoint(), grpc_port=free_port()),))
    await until(lambda: pod.probes > 2)
    assert not place.own.pods.any_open
    await place.serve(pod)
    await until(lambda: place.own.pods.any_open)


async def test_what_a_replica_had_fails_with_it_and_what_waits_goes_to_the_next(place: Place) -> None:
    pod = await place.pod("p", slots=2)
    pod.may_answer.clear()
    await place.serve(pod)
    await until(lambda: place.own.pods.any_open)
    async with aiohttp.ClientSession() as session, channel(place) as over:
        had = asyncio.create_task(post(session, place))
        called = asking(stub(over).ModelInfer(request()))
        await until(lambda: pod.inside == 2)
        waits = [asyncio.create_task(post(session, place)) for _ in range(5)]
        waits_too = asking(stub(over).ModelInfer(request(id="9")))
        await until(lambda: place.own.throttler.buffered == 6)
        await pod.die()
        assert (await had)[0] == 503
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await called
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: not place.own.pods.any_open)
        await place.serve(await place.pod("q"))
        assert {(await one)[1]["pod"] for one in waits} == {"q"}
        assert (await waits_too).id == "9"
    await until(lambda: place.own.throttler.running == 0)


async def test_what_runs_in_a_replica_that_is_taken_away_runs_to_its_end(place: Place) -> None:
    old, new = await place.pod("old"), await place.pod("new")
    old.may_answer.clear()
    await place.serve(old)
    await until(lambda: place.own.pods.any_open)
    async with aiohttp.ClientSession() as session, channel(place) as over:
        had, called = (
            asyncio.create_task(post(session, place)),
            asking(stub(over).ModelInfer(request(id="1"))),
        )
        stream = stub(over).ModelStreamInfer()
        await stream.write(request(id="0"))
        await until(lambda: old.inside == 3)
        await place.serve(new)
        await until(lambda: place.own.pods.any_open)
        assert (await post(session, place))[1]["pod"] == "new"
        old.may_answer.set()
        assert (await had)[1]["pod"] == "old"
        assert (await called).model_version == "old"
        assert (await stream.read()).infer_response.model_version == "old"
        await stream.write(request(id="1"))
        assert (await stream.read()).infer_response.model_version == "old"
        await stream.done_writing()
    await until(lambda: not place.own.pods._retired)


async def test_models_share_no_connection(place: Place) -> None:
    pod = await place.pod()
    await place.serve(pod)
    other = place.assignment.__class__(
        **{
            **{name: getattr(place.assignment, name) for name in place.assignment.__dataclass_fields__},
            "model": OWN._replace(name="other"),
            "rest_port": free_port(),
            "grpc_port": free_port(),
        }
    )
    await place.models.apply(other)
    model = place.models.get(other.model)
    assert model is not None
    await until(lambda: place.own.pods.any_open and model.pods.any_open)
    async with aiohttp.ClientSession() as session:
        await post(session, place)
        url = f"http://127.0.0.1:{other.rest_port}/v2/models/own/infer"
        async with session.post(url, data=b'{"inputs":[]}') as answer:
            assert answer.status == 200
    assert sorted(count for count in pod.connections if count) == [1, 1]


async def test_a_replica_without_rest_is_believed_when_it_is_said_to_be_ready(place: Place) -> None:
    pod = await place.pod(rest=False)
    await place.assign(endpoints=(pod.as_endpoint(ready=False),), rest_port=0)
    async with channel(place) as over:
        called = asking(stub(over).ModelInfer(request()))
        await until(lambda: place.own.throttler.buffered == 1)
        await asyncio.sleep(0.15)
        assert pod.inside == 0
        await place.assign(endpoints=(pod.as_endpoint(),))
        await called


# TLS.


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_tls_is_held_from_its_hello_and_passed_on_as_it_is(place: Place, authority: Authority) -> None:
    await place.assign(tls=True)
    cert, key = authority.issue("server")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    client = ssl.create_default_context(cafile=str(authority.file))
    client.check_hostname = False
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client, limit=0)) as session:

        async def ask() -> tuple[int, str]:
            url = f"https://127.0.0.1:{place.assignment.rest_port}/v2/models/own/infer"
            async with session.post(url, data=b"x" * 100_000) as answer:
                return answer.status, (await answer.json(content_type=None))["pod"]

        asked = [asyncio.create_task(ask()) for _ in range(30)]
        await until(lambda: place.own.throttler.buffered == 30)
        assert len(place.cold_starts) == 1
        pods = [FakePod("p", slots=1), FakePod("q", slots=1)]
        for pod in pods:
            place.pods.append(await pod.start(ssl=server))
        await place.serve(*pods)
        answers = Counter(await asyncio.gather(*asked))
        assert sum(answers.values()) == 30
        assert all(count > 5 for count in answers.values()), "they are spread"
        assert len(answers) == 2
        report = place.own.report(time.monotonic() + 1)
        assert (report.buffered, report.forwarded) == (0, 30)
    await until(lambda: place.models.bounds.connections.used_bytes == 0)
    assert [pod.tunnels for pod in place.own.pods] == [0, 0]


async def test_tls_clients_that_say_nothing_make_room_for_who_does(
    place: Place, authority: Authority
) -> None:
    await place.assign(tls=True)
    place.own._room.limit_bytes = 3
    idle = [await raw(place) for _ in range(3)]
    await until(lambda: place.own._room.used_bytes == 3)
    client = ssl.create_default_context(cafile=str(authority.file))

    async def ask() -> None:
        await asyncio.open_connection(
            "127.0.0.1", place.assignment.rest_port, ssl=client, server_hostname="server"
        )

    asked = [asyncio.create_task(ask()) for _ in range(3)]
    await until(lambda: place.own.throttler.buffered == 3)
    # Who waits is not ended for who comes.
    with pytest.raises(ConnectionError):
        await ask()
    assert place.own.throttler.buffered == 3
    await place.assign(unavailable="never")
    for one in asked:
        with pytest.raises(ConnectionError):
            await one
    assert place.own._room.used_bytes == 0
    for _, writer in idle:
        writer.close()


async def test_a_tls_client_whose_replica_has_just_gone_waits_for_the_next(
    place: Place, authority: Authority
) -> None:
    await place.assign(tls=True)
    client = ssl.create_default_context(cafile=str(authority.file))
    client.check_hostname = False
    cert, key = authority.issue("server")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    gone = await FakePod("gone").start(ssl=server)
    await place.assign(endpoints=(gone.as_endpoint(),))
    await until(lambda: place.own.pods.any_open)
    await gone.die()  # and the cluster says that it is ready still
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client)) as session:
        url = f"https://127.0.0.1:{place.assignment.rest_port}/v2/models/own/infer"

        async def ask() -> str:
            async with session.post(url, data=b"x") as answer:
                return str((await answer.json(content_type=None))["pod"])

        asked = asyncio.create_task(ask())
        await until(lambda: place.own.throttler.buffered == 1)
        for _ in range(30):  # it waits in peace
            await asyncio.sleep(0.01)
            assert (place.own.throttler.buffered, place.own.pods.any_open) == (1, False)
        assert len(place.cold_starts) == 1
        pod = FakePod("next")
        place.pods.append(await pod.start(ssl=server))
        await place.serve(pod)
        assert await asked == "next"


async def test_a_tls_replica_that_breaks_off_at_once_is_not_there(
    place: Place, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(tunnels._Begun):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()

    monkeypatch.setattr(tunnels, "_Begun", Lost)
    await place.assign(tls=True)
    replica = await place.pod("copy")
    await place.serve(replica)
    await until(lambda: place.own.pods.any_open)
    writer = await says_hello(place, authority)
    await until(lambda: place.own.throttler.buffered == 1)
    assert all(pod.tunnels == 0 for pod in place.own.pods)
    writer.close()


async def test_a_tls_client_that_goes_while_it_waits_leaves_its_place(
    place: Place, authority: Authority
) -> None:
    await place.assign(tls=True)
    writer = await says_hello(place, authority)
    await until(lambda: place.own.throttler.buffered == 1)
    writer.close()
    await until(lambda: place.own.throttler.buffered == 0)


async def test_a_tls_client_that_is_reset_is_reset_at_its_replica(place: Place, authority: Authority) -> None:
    """data-plane D4: the activator passes bytes on as a pod's proxy does."""
    ends = Ends()
    replica = await asyncio.start_server(ends.serve, "127.0.0.1", 0)
    async with replica:
        await place.assign(tls=True)
        place.own._tunnels[0].port_of = lambda _: replica.sockets[0].getsockname()[1]
        await place.serve(await place.pod("copy"))
        writer = await says_hello(place, authority)
        await asyncio.wait_for(ends.reached.wait(), 30)
        break_off(writer)
        await until(lambda: ends.seen, seconds=30)
        assert ends.seen == ["reset"]


async def test_what_a_tls_client_says_while_it_waits_is_not_kept_without_end(
    place: Place, authority: Authority
) -> None:
    await place.assign(tls=True)
    writer = await says_hello(place, authority)
    await until(lambda: place.own.throttler.buffered == 1)
    (client,) = place.own._tunnels[0]._clients
    writer.write(bytes(8 * 1024**2))
    await until(lambda: client._transport is not None and not client._transport.is_reading())
    assert len(client._hello) < 1024**2
    writer.transport.abort()


async def says_hello(place: Place, authority: Authority) -> asyncio.StreamWriter:
    """A client of TLS that has said its first word."""
    _, writer = await asyncio.open_connection("127.0.0.1", place.assignment.rest_port)
    said, context = ssl.MemoryBIO(), ssl.create_default_context(cafile=str(authority.file))
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="localhost").do_handshake()
    writer.write(said.read())
    return writer


async def test_what_is_no_tls_is_ended_and_wakes_nobody(place: Place) -> None:
    await place.assign(tls=True)
    for sent in (
        infer(),
        b"\x16\x03\x01\x00\x03\x02aa",
        b"\x16\x03\x01\xff\xff\x01",
        b"\x17\x03\x03",
        b"\x00",
    ):
        reader, writer = await raw(place)
        writer.write(sent)
        async with asyncio.timeout(5):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
    assert not place.cold_starts
    assert place.own.report(time.monotonic()).arrived == 0


async def test_half_a_hello_wakes_nobody_and_does_not_stay(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.activator.tls_tunnel._HELLO_SECONDS", 0.1)
    await place.assign(tls=True)
    reader, writer = await raw(place)
    writer.write(b"\x16\x03\x01\x01\x00\x01" + bytes(100))
    with suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    assert not place.cold_starts


async def test_tls_clients_are_bounded_and_told_by_an_end(place: Place, authority: Authority) -> None:
    await place.assign(tls=True)
    await place.limits(requests=2, seconds=0.5)
    client = ssl.create_default_context(cafile=str(authority.file))

    async def ask() -> None:
        await asyncio.open_connection(
            "127.0.0.1", place.assignment.rest_port, ssl=client, server_hostname="server"
        )

    asked = [asyncio.create_task(ask()) for _ in range(2)]
    await until(lambda: place.own.throttler.buffered == 2)
    with pytest.raises(ConnectionError):
        await ask()
    for one in asked:
        with pytest.raises(ConnectionError):
            await one
    assert place.own.throttler.buffered == 0
    again = asyncio.create_task(ask())
    await until(lambda: place.own.throttler.buffered == 1)
    await place.assign(unavailable="never")
    with pytest.raises(ConnectionError):
        await again


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 4_000 + b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n" + bytes(4_000_000),
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000,
    ],
    ids=["chunks", "long", "never"],
)
async def test_a_pod_that_says_too_much_when_it_is_asked_does_not_serve(place: Place, answer: bytes) -> None:
    """Its image is its tenant's own, and all others' requests wait in the same process."""
    asked = 0

    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            asked += 1
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(talks, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        endpoint = ReplicaEndpoint(
            uid="u", name="p", address="127.0.0.1", rest_port=port, grpc_port=0, slots=4, ready=True
        )
        await place.assign(endpoints=(endpoint,))
        await until(lambda: asked > 2)
        assert not place.own.pods.any_open
        await place.assign(endpoints=())


async def test_however_many_replicas_a_tenant_has_that_do_not_serve_to_ask_them_costs_no_more(
    place: Place,
) -> None:
    nowhere = free_port()
    away = [
        ReplicaEndpoint(
            uid=f"u{number}",
            name="p",
            address="127.0.0.1",
            rest_port=nowhere,
            grpc_port=0,
            slots=4,
            ready=False,
        )
        for number in range(160)
    ]
    second = replace(
        place.assignment, model=ModelKey("a", "second"), rest_port=free_port(), grpc_port=free_port()
    )
    others = replace(second, model=ModelKey("b", "other"), rest_port=free_port(), grpc_port=free_port())
    pod = await place.pod()
    await place.assign(endpoints=(*away, pod.as_endpoint()))
    await place.models.apply(replace(second, endpoints=tuple(away[:1])))
    await place.models.apply(replace(others, endpoints=tuple(away[:1])))
    await until(lambda: place.own.pods.any_open)
    models = {model.key.name: model for model in place.models.all()}
    looks = models["own"].pods._parts.probe_load
    assert models["second"].pods._parts.probe_load is looks
    assert models["other"].pods._parts.probe_load.probed == 1
    assert looks.probed == 161, "the one that serves is none of them"
    await place.assign(endpoints=())
    assert looks.probed == 1
    await place.models.remove(ModelKey("a", "second"))
    await until(lambda: looks.probed == 0)


async def test_a_model_that_breaks_at_its_look_ends_no_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModelKey("a", "other")
    assigned = replace(place.assignment, model=other, rest_port=free_port(), grpc_port=free_port())
    await place.models.apply(assigned)
    looked = []

    async def breaks(now: float) -> None:
        raise ZeroDivisionError

    async def looks(now: float) -> None:
        looked.append(now)

    found = place.models.get(other)
    assert found is not None
    monkeypatch.setattr(place.own, "tick", breaks)
    monkeypatch.setattr(found, "tick", looks)
    await place.models.tick(1.0)
    assert 1.0 in looked
