"""Which copy a request goes to, and what becomes of it when copies go."""

import asyncio
import ssl
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp
import grpc.aio
import pytest

from tests.fakes.pods import FakePod
from tests.loopback.activator.clients import asking, channel, infer, post, raw, request, stub
from tests.loopback.activator.conftest import OWN, Place, free_port, until
from tests.loopback.proxy.test_process import Authority


async def test_no_request_goes_to_a_copy_that_is_not_ready(place: Place) -> None:
    """As it says itself: what the cluster says of it comes late, both ways."""
    pod = await place.pod()
    pod.is_ready = False
    await place.serve(pod)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(post(session, place))
        await until(lambda: pod.probes > 2)
        assert (place.own.hold.held, pod.inside) == (1, 0)
        pod.is_ready = True
        assert (await asked)[0] == 200
        pod.is_ready = False
        await until(lambda: not place.own.pods.any_open)
        again = asyncio.create_task(post(session, place))
        await until(lambda: place.own.hold.held == 1)
        assert place.own.report(time.monotonic()).wake
        pod.is_ready = True
        assert (await again)[0] == 200


async def test_a_copy_is_found_as_soon_as_it_serves(place: Place) -> None:
    pod = FakePod()
    pod.rest_port, pod.grpc_port = free_port(), free_port()
    place.pods.append(pod)
    await place.serve(pod)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(post(session, place))
        await until(lambda: place.own.hold.held == 1)
        await asyncio.sleep(0.2)
        await pod.start()
        assert (await asked)[0] == 200


async def test_requests_go_to_the_copy_with_the_most_free_slots(place: Place) -> None:
    pods = [await place.pod(name, slots=slots) for name, slots in (("p", 1), ("q", 3), ("r", 4))]
    for pod in pods:
        pod.may_answer.clear()
    await place.serve(*pods)
    await until(lambda: place.own.hold.slots == 8)
    async with aiohttp.ClientSession() as session, channel(place) as over:
        asked = [asyncio.create_task(post(session, place)) for _ in range(4)]
        await until(lambda: sum(pod.inside for pod in pods) == 4)
        called = [asking(stub(over).ModelInfer(request())) for _ in range(6)]
        await until(lambda: place.own.hold.held == 2)
        await until(lambda: [pod.inside for pod in pods] == [1, 3, 4])
        for pod in pods:
            pod.may_answer.set()
        assert {(await one)[0] for one in asked} == {200}
        await asyncio.gather(*called)
    assert [pod.most_inside for pod in pods] == [1, 3, 4]


async def test_several_activators_share_a_copys_slots(place: Place) -> None:
    await place.tell(share=3)
    pods = [await place.pod("p", slots=7), await place.pod("q", slots=1)]
    await place.serve(*pods)
    await until(lambda: place.own.hold.slots == 3)


async def test_a_request_whose_copy_cannot_be_reached_goes_to_another(place: Place) -> None:
    gone, pod = await place.pod("gone", slots=100), await place.pod("p", slots=100)
    await place.serve(gone, pod)
    await until(lambda: place.own.hold.slots == 200)
    server, gone._server = gone._server, None
    assert server is not None
    server.close()  # it takes no connections; those that it has stay
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        answers = await asyncio.gather(*(post(session, place) for _ in range(50)))
    assert Counter((status, answer["pod"]) for status, answer, _ in answers) == {(200, "p"): 50}
    assert gone.served == 0


async def test_a_request_whose_only_copy_cannot_be_reached_waits_for_the_next(place: Place) -> None:
    gone = await place.pod("gone")
    await place.serve(gone)
    await until(lambda: place.own.pods.any_open)
    await gone.die()
    # Before anybody has noticed.
    (pod,) = place.own.pods
    pod._set_open(True)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(post(session, place))
        await until(lambda: place.own.hold.held == 1)
        await until(lambda: place.woken)
        report = place.own.report(time.monotonic() + 1)
        assert (report.held, report.wake) == (1, True)
        await place.serve(await place.pod("next"))
        status, answer, _ = await asked
        assert (status, answer["pod"]) == (200, "next")
    assert place.own.hold.held == 0


async def test_what_a_copy_had_fails_with_it_and_what_waits_goes_to_the_next(place: Place) -> None:
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
        await until(lambda: place.own.hold.held == 6)
        await pod.die()
        assert (await had)[0] == 503
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await called
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: not place.own.pods.any_open)
        await place.serve(await place.pod("q"))
        assert {(await one)[1]["pod"] for one in waits} == {"q"}
        assert (await waits_too).id == "9"
    await until(lambda: place.own.hold.running == 0)


async def test_what_runs_in_a_copy_that_is_taken_away_runs_to_its_end(place: Place) -> None:
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
    other = place.told.__class__(
        **{
            **{name: getattr(place.told, name) for name in place.told.__dataclass_fields__},
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


async def test_a_copy_without_rest_is_believed_when_it_is_said_to_be_ready(place: Place) -> None:
    pod = await place.pod(rest=False)
    await place.tell(endpoints=(pod.told(ready=False),), rest_port=0)
    async with channel(place) as over:
        called = asking(stub(over).ModelInfer(request()))
        await until(lambda: place.own.hold.held == 1)
        await asyncio.sleep(0.15)
        assert pod.inside == 0
        await place.tell(endpoints=(pod.told(),))
        await called


# TLS.


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_tls_is_held_from_its_hello_and_passed_on_as_it_is(place: Place, authority: Authority) -> None:
    await place.tell(tls=True)
    cert, key = authority.issue("server")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    client = ssl.create_default_context(cafile=str(authority.file))
    client.check_hostname = False
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client, limit=0)) as session:

        async def ask() -> tuple[int, str]:
            url = f"https://127.0.0.1:{place.told.rest_port}/v2/models/own/infer"
            async with session.post(url, data=b"x" * 100_000) as answer:
                return answer.status, (await answer.json(content_type=None))["pod"]

        asked = [asyncio.create_task(ask()) for _ in range(30)]
        await until(lambda: place.own.hold.held == 30)
        assert len(place.woken) == 1
        pods = [FakePod("p", slots=1), FakePod("q", slots=1)]
        for pod in pods:
            place.pods.append(await pod.start(ssl=server))
        await place.serve(*pods)
        answers = Counter(await asyncio.gather(*asked))
        assert sum(answers.values()) == 30
        assert all(count > 5 for count in answers.values()), "they are spread"
        assert len(answers) == 2
        report = place.own.report(time.monotonic() + 1)
        assert (report.held, report.forwarded) == (0, 30)
    await until(lambda: place.models.bounds.connections.used_bytes == 0)
    assert [pod.spliced for pod in place.own.pods] == [0, 0]


async def test_what_is_no_tls_is_ended_and_wakes_nobody(place: Place) -> None:
    await place.tell(tls=True)
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
    assert not place.woken
    assert place.own.report(time.monotonic()).arrived == 0


async def test_half_a_hello_wakes_nobody_and_does_not_stay(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.activator.passing._HELLO_SECONDS", 0.1)
    await place.tell(tls=True)
    reader, writer = await raw(place)
    writer.write(b"\x16\x03\x01\x01\x00\x01" + bytes(100))
    with suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    assert not place.woken


async def test_tls_clients_are_bounded_and_told_by_an_end(place: Place, authority: Authority) -> None:
    await place.tell(tls=True)
    await place.limits(requests=2, seconds=0.5)
    client = ssl.create_default_context(cafile=str(authority.file))

    async def ask() -> None:
        await asyncio.open_connection("127.0.0.1", place.told.rest_port, ssl=client, server_hostname="server")

    asked = [asyncio.create_task(ask()) for _ in range(2)]
    await until(lambda: place.own.hold.held == 2)
    with pytest.raises(ConnectionError):
        await ask()
    for one in asked:
        with pytest.raises(ConnectionError):
            await one
    assert place.own.hold.held == 0
    again = asyncio.create_task(ask())
    await until(lambda: place.own.hold.held == 1)
    await place.tell(hopeless="never")
    with pytest.raises(ConnectionError):
        await again
