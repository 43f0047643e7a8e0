"""Both ends of the stream between scaler and activators, over a real gRPC server: what is told, what is believed, and
what becomes of either when the other goes."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from berth.contract.activation import Assignment, Report, RouteMode
from berth.contract.endpoint import Endpoint
from berth.contract.scaling import ModelKey
from berth.kube.errors import KubeUnreachable
from berth.v1 import scaler_pb2 as pb
from berth.v1.scaler_pb2_grpc import ScalerStub
from proxy.activator.assignments import Assignments
from proxy.activator.control_client import ControlClient, ScalerAway
from scaler.activation import control_server
from scaler.activation.authentication import PermissionDenied, TooManyCalls, Unauthenticated
from tests.fakes.eventually import until
from tests.fakes.scaler import HERE, MODEL, OTHER, PAIR, Core, Scaler, assignment, scaler


class Talker:
    """An activator that says whatever it is told to."""

    snapshot: pb.ControlResponse

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        stub: Any = ScalerStub(channel)  # type: ignore[no-untyped-call]
        self.call: Any = stub.Control(metadata=(("authorization", f"Bearer {token}"),))

    async def hello(self, address: str = HERE, *, draining: bool = False) -> None:
        """One whose call has been refused already says nothing; `refusal` tells."""
        said = pb.ActivatorHello(address=address, draining=draining)
        with suppress(asyncio.InvalidStateError):
            await self.call.write(pb.ControlRequest(hello=said))

    async def report(self, *reports: dict[str, Any]) -> None:
        said = [pb.ModelReport(**one) for one in reports]
        await self.call.write(pb.ControlRequest(reports=pb.ModelReports(reports=said)))

    async def hear(self, *, heartbeats: bool = False) -> pb.ControlResponse:
        """`heartbeats`: an empty message is one, too."""
        async with asyncio.timeout(10):
            message: pb.ControlResponse = await self.call.read()
            while message == pb.ControlResponse() and not heartbeats:
                message = await self.call.read()
        return message

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        async with asyncio.timeout(10):
            with suppress(grpc.aio.AioRpcError):
                while await self.call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    pass
            return await self.call.code(), await self.call.details()


@asynccontextmanager
async def talker(at: Scaler, token: str = "berth-system/act-1") -> AsyncIterator[Talker]:
    async with grpc.aio.insecure_channel(str(at.endpoint)) as channel:
        one = Talker(channel, token)
        try:
            yield one
        finally:
            one.call.cancel()


@asynccontextmanager
async def connected(at: Scaler, token: str = "berth-system/act-1") -> AsyncIterator[Talker]:
    async with talker(at, token) as one:
        await one.hello()
        one.snapshot = await one.hear()
        yield one


def said(model: ModelKey, version: int, **more: Any) -> dict[str, Any]:
    return {"version": version, "namespace": model.namespace, "name": model.name, **more}


# What is told.


async def test_who_has_nothing_to_say_says_so() -> None:
    async with scaler() as at, connected(at) as one:
        assert [await one.hear(heartbeats=True) for _ in range(3)] == [pb.ControlResponse()] * 3


async def test_one_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "_WRITE_SECONDS", 0.3)
    async with scaler(wanted={MODEL: assignment()}) as at, connected(at):
        for n in range(100):
            at.core.wanted[MODEL] = assignment(unavailable=str(n) * 1_000_000)
            at.core.assign(MODEL)
            await asyncio.sleep(0.02)
            if at.core.ended:
                break
        await until(lambda: at.core.ended)


# Who may call.


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (Unauthenticated("no token"), grpc.StatusCode.UNAUTHENTICATED),
        (PermissionDenied("no activator"), grpc.StatusCode.PERMISSION_DENIED),
        (TooManyCalls("too many calls"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (KubeUnreachable("the API server is away"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_strangers_get_no_details(refusal: Exception, code: grpc.StatusCode) -> None:
    async with scaler(wanted={MODEL: assignment()}) as at, talker(at) as one:
        at.authenticator.refusal = refusal
        await one.hello()
        assert await one.refusal() == (code, str(refusal))
        assert not len(at.activators)


async def test_nobody_leads_requests_to_an_address_that_is_not_its_own() -> None:
    async with scaler() as at, talker(at) as one:
        await one.hello("10.0.0.2")
        assert (await one.refusal())[0] is grpc.StatusCode.PERMISSION_DENIED


async def test_a_replica_that_does_not_lead_names_the_one_that_does() -> None:
    async with scaler(leads=False, leader="10.0.0.7:9093") as at, talker(at) as one:
        await one.hello()
        assert (await one.refusal())[0] is grpc.StatusCode.UNAVAILABLE
        assert ("leader", "10.0.0.7:9093") in [tuple(pair) for pair in await one.call.trailing_metadata()]


async def test_one_that_leads_no_more_sends_everybody_on() -> None:
    async with scaler() as at, connected(at) as one:
        at.core.leads, at.core.leader = False, "10.0.0.7:9093"
        at.sessions.end()
        assert (await one.refusal())[0] is grpc.StatusCode.UNAVAILABLE
        assert ("leader", "10.0.0.7:9093") in [tuple(pair) for pair in await one.call.trailing_metadata()]


async def test_a_namespaces_activators_take_no_other_namespaces_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "_MOST_OF_ONE", 1)
    monkeypatch.setattr(control_server, "_MOST_SCOPED", 2)
    async with scaler() as at, connected(at, "a/1"), talker(at, "a/2") as more:
        await more.hello()
        assert (await more.refusal())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with connected(at, "b/1"), talker(at, "c/1") as third, connected(at):
            await third.hello()
            assert (await third.refusal())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: at.control_server._open["b"] == 0)
        async with connected(at, "c/1"):
            assert len(at.activators) == 2


async def test_the_systems_own_have_room_of_their_own_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "_MOST_SYSTEM", 1)
    async with scaler() as at, connected(at), talker(at, "berth-system/2") as more, connected(at, "a/1"):
        await more.hello()
        assert (await more.refusal())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_one_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "_HELLO_SECONDS", 0.1)
    async with scaler() as at, talker(at) as one:
        assert await one.refusal() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the stream came without a hello",
        )


async def test_its_token_is_looked_at_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "_STREAM_SECONDS", 0.1)
    async with scaler() as at, connected(at) as one:
        assert (await one.refusal())[0] is grpc.StatusCode.OK
        assert [one.disconnected_ns is None for one in at.activators] == [False]


async def test_an_activator_that_dials_anew_is_one_activator() -> None:
    """What its older stream says no more, the newer one does."""
    async with scaler(wanted={MODEL: assignment()}) as at, connected(at) as old, connected(at) as new:
        assert (await old.refusal())[0] is grpc.StatusCode.OK
        assert len(at.activators) == 1
        await until(lambda: at.control_server._open[None] == 1)
        at.core.wanted[MODEL] = assignment(mode=RouteMode.SERVE)
        at.core.assign(MODEL)
        assert [one.mode for one in (await new.hear()).assignments] == [pb.ROUTE_MODE_SERVE]
        assert len(at.sessions._addresses._subscriptions) == 1
    await until(lambda: not at.sessions._addresses._subscriptions)


async def test_one_that_leaves_already_when_it_dials_is_led_nobody() -> None:
    async with scaler(wanted={MODEL: assignment()}) as at, talker(at) as one:
        await one.hello(draining=True)
        await one.hear()
        assert not at.activators.chosen(MODEL)
        at.core.news.clear()
        await one.hello()
        await until(lambda: at.core.news == [MODEL])
        assert at.activators.chosen(MODEL)


# What is believed.


async def garbage(one: Talker) -> None:
    await one.report(said(MODEL, 1))


async def no_hello_again(one: Talker) -> None:
    await one.hello()
    await one.hear()
    await one.hello("10.0.0.1")


async def nothing(one: Talker) -> None:
    await one.call.done_writing()


async def empty(one: Talker) -> None:
    await one.call.write(pb.ControlRequest())


async def too_many(one: Talker) -> None:
    await one.hello()
    await one.hear()
    await one.report(*[{"version": 1}] * 10_001)


@pytest.mark.parametrize("say", [garbage, no_hello_again, nothing, empty, too_many])
async def test_what_the_contract_does_not_allow_ends_the_stream(say: Callable[[Talker], Any]) -> None:
    async with scaler() as at, talker(at) as one, connected(at, "berth-system/other"):
        await say(one)
        assert (await one.refusal())[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert len(at.activators) == 1


async def test_bytes_that_are_no_message_end_the_stream_and_no_other() -> None:
    async with scaler() as at, connected(at) as good:
        async with grpc.aio.insecure_channel(str(at.endpoint)) as channel:
            raw: Any = channel.stream_stream("/berth.v1.Scaler/Control")  # type: ignore[call-arg]
            call = raw(metadata=(("authorization", "Bearer berth-system/bad"),))
            await call.write(b"\xff" * 100)
            async with asyncio.timeout(10):
                assert await call.code() is not grpc.StatusCode.OK
        at.core.wanted[MODEL] = assignment()
        at.core.assign(MODEL)
        assert (await good.hear()).assignments


async def test_a_flood_is_read_slowly_and_holds_up_nobody_else() -> None:
    async with (
        scaler(wanted={MODEL: assignment()}) as at,
        connected(at) as good,
        connected(at, "berth-system/b") as bad,
    ):
        version = good.snapshot.assignments[0].version

        async def flood() -> None:
            while True:
                await bad.report(*[said(OTHER, version)] * 500)

        flooding = asyncio.create_task(flood())
        try:
            await until(lambda: at.control_server.stats.throttled > 3)
            began = at.control_server.stats.reports
            await asyncio.sleep(0.5)
            # 200 messages a second, of which twenty reports are as much as one more.
            assert at.control_server.stats.reports - began < 200 * 20 * 2
            await good.report(said(MODEL, version, buffered=1, cold_start=True))
            await until(lambda: at.core.reports, seconds=2)
        finally:
            flooding.cancel()


# Both ends together.


class Plane:
    """Opens every port at once, and notes what it is told."""

    def __init__(self) -> None:
        self.received: dict[ModelKey, Assignment] = {}
        self.removed: list[ModelKey] = []
        self.buffered: dict[ModelKey, int] = {}
        self.broken: set[ModelKey] = set()

    async def apply(self, assignment: Assignment) -> None:
        if assignment.model in self.broken:
            raise RuntimeError("nobody has thought of this")
        self.received[assignment.model] = assignment

    async def remove(self, key: ModelKey) -> None:
        self.received.pop(key, None)
        self.removed.append(key)

    def reports(self, now: float, *, whole: bool = False) -> list[Report]:
        return [self.report(key) for key in self.received if whole or self.buffered.get(key)]

    def report(self, key: ModelKey, *, cold_start: bool = False) -> Report:
        received, buffered = self.received[key], self.buffered.get(key, 0)
        return Report(
            version=received.version,
            model=key,
            buffered=buffered,
            average_buffered=float(buffered),
            arrived=float(buffered),
            forwarded=0.0,
            buffered_bytes=0,
            oldest_seconds=0.0,
            cold_start=cold_start,
            rest_port=received.rest_port,
            grpc_port=received.grpc_port,
        )


class Dialler:
    """The activator's end, with a plane that is none."""

    def __init__(self, at: Endpoint, directory: Path, name: str = "act-1") -> None:
        self.token = directory / name
        self.token.write_text(f"berth-system/{name}\n")
        self.assigned, self.plane = Assignments(), Plane()
        self.client = ControlClient(at, self.token, HERE, self.assigned, self.plane)

    @asynccontextmanager
    async def up(self) -> AsyncIterator["Dialler"]:
        task = asyncio.create_task(self.client.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_assigned_opened_proven_started(tmp_path: Path) -> None:
    async with scaler(wanted={MODEL: assignment()}) as at, Dialler(at.endpoint, tmp_path).up() as one:
        await until(lambda: at.activators.listening(at.activators, MODEL, PAIR) == {HERE})
        one.plane.buffered[MODEL] = 1
        one.client.report_now(one.plane.report(MODEL, cold_start=True))
        await until(lambda: at.core.reports)
        assert at.core.reports[0][1].cold_start
        one.plane.buffered[MODEL] = 3
        one.client.tick()
        await until(lambda: len(at.core.reports) == 2)
        assert at.core.reports[1][1].average_buffered == 3.0
        # It leaves: the scaler leads nobody there any more, and the stream goes on.
        one.client.drain()
        await until(lambda: not at.activators.chosen(MODEL))
        at.core.wanted[OTHER] = assignment(OTHER, rest_port=20002, grpc_port=20003)
        at.core.assign(OTHER)
        await until(lambda: OTHER in one.plane.received)


async def test_the_activator_goes_on_without_a_scaler_and_attaches_to_the_next(tmp_path: Path) -> None:
    at = Scaler(
        Core(wanted={MODEL: assignment(), OTHER: assignment(OTHER, rest_port=20002, grpc_port=20003)})
    )
    async with at.up():
        one = Dialler(at.endpoint, tmp_path)
        running = one.up()
        await running.__aenter__()
        await until(lambda: len(one.plane.received) == 2)
    try:
        await until(lambda: not one.client.is_connected)
        one.plane.buffered[MODEL] = 7
        one.client.report_now(one.plane.report(MODEL, cold_start=True))
        one.client.tick()
        assert set(one.plane.received) == {MODEL, OTHER}
        assert one.assigned.allows(MODEL, "10.1.0.1") is False
        # The next one names one of the two: the other is passed on for a while. What waits is told at once.
        at.anew()
        del at.core.wanted[OTHER]
        async with at.up():
            await until(lambda: at.core.reports)
            assert at.core.reports[0][1].buffered == 7
            await until(lambda: at.activators.listening(at.activators, MODEL, PAIR) == {HERE})
            await until(lambda: one.plane.received[OTHER].mode is RouteMode.SERVE)
            assert one.plane.removed == []
    finally:
        await running.__aexit__(None, None, None)


async def test_it_follows_the_leader_at_once_and_asks_those_that_name_each_other_slowly(
    tmp_path: Path,
) -> None:
    async with scaler(wanted={MODEL: assignment()}) as leader, scaler(leads=False) as other:
        other.core.leader = str(leader.endpoint)
        async with Dialler(other.endpoint, tmp_path).up() as one:
            await until(lambda: MODEL in one.plane.received, seconds=2)
        leader.core.leads, leader.core.leader = False, str(other.endpoint)
        async with Dialler(other.endpoint, tmp_path, "act-2").up():
            await asyncio.sleep(1.0)
            assert 2 <= len(leader.authenticator.asked) + len(other.authenticator.asked) < 15
        # One that leads no more sends it on.
        leader.core.leads, other.core.leader = True, str(leader.endpoint)
        async with Dialler(other.endpoint, tmp_path, "act-3").up() as one:
            await until(lambda: one.client.is_connected)
            leader.core.leads, leader.core.leader, other.core.leads = False, str(other.endpoint), True
            other.core.wanted = {OTHER: assignment(OTHER)}
            leader.sessions.end()
            await until(lambda: OTHER in one.plane.received)
            assert one.plane.received[MODEL].mode is RouteMode.SERVE


async def test_a_leader_that_is_not_there_is_left_for_the_service(tmp_path: Path) -> None:
    async with (
        scaler(leads=False, leader="127.0.0.1:1", wanted={MODEL: assignment()}) as at,
        Dialler(at.endpoint, tmp_path).up() as one,
    ):
        await until(lambda: len(at.authenticator.asked) >= 2)
        for leader in ("nonsense", "", "127.0.0.1:99999"):
            at.core.leader = leader
            await asyncio.sleep(0.05)
        at.core.leads = True
        await until(lambda: MODEL in one.plane.received)


async def test_one_that_takes_no_connection_is_given_up_before_tcp_does(tmp_path: Path) -> None:
    """As an address of a pod that is gone, to which a Service may lead for a while."""
    with socket.create_server((HERE, 0), backlog=0) as full:
        many = [socket.socket() for _ in range(3)]
        for one in many:
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect(full.getsockname())
        client = Dialler(Endpoint(HERE, full.getsockname()[1]), tmp_path).client
        async with asyncio.timeout(4):
            with pytest.raises(ScalerAway):
                await client._connect(client._scaler)
        for one in many:
            one.close()


async def test_the_token_is_read_anew_for_each_stream(tmp_path: Path) -> None:
    async with scaler() as at:
        one = Dialler(at.endpoint, tmp_path)
        one.token.unlink()
        async with one.up():
            await asyncio.sleep(0.3)
            assert at.authenticator.asked == []
            one.token.write_text("berth-system/renewed")
            await until(lambda: at.authenticator.asked == ["berth-system/renewed"])
            await until(lambda: one.client.is_connected)


async def test_an_activator_that_is_killed_is_out_of_the_way_at_once(tmp_path: Path) -> None:
    """Its port refuses. One whose stream alone breaks off keeps its place for a while."""
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), HERE, 0)
    port = listener.sockets[0].getsockname()[1]
    received = assignment(rest_port=port, grpc_port=0)
    async with scaler(wanted={MODEL: received}) as at:
        async with connected(at) as one:
            version = one.snapshot.assignments[0].version
            await one.report(said(MODEL, version, rest_port=port))
            await until(lambda: next(iter(at.activators)).open)
        await until(lambda: at.core.ended)
        await asyncio.sleep(0.2)
        assert [one.uid for one in at.activators] == ["berth-system/act-1"]
        assert len(at.activators) == 0  # of those that are attached
        async with connected(at) as one:
            version = one.snapshot.assignments[0].version
            await one.report(said(MODEL, version, rest_port=port))
            await until(lambda: next(iter(at.activators)).open)
            listener.close()
            await listener.wait_closed()
            at.core.news.clear()
        await until(lambda: not list(at.activators))
        assert at.core.news == [MODEL]


async def test_an_assignment_that_breaks_the_plane_holds_up_no_other(tmp_path: Path) -> None:
    async with scaler() as at:
        one = Dialler(at.endpoint, tmp_path)
        one.plane.broken = {MODEL}
        async with one.up():
            await until(lambda: one.client.is_connected)
            at.core.wanted = {MODEL: assignment(), OTHER: assignment(OTHER)}
            at.core.assign_all()
            await until(lambda: OTHER in one.plane.received)
            assert one.client.is_connected
