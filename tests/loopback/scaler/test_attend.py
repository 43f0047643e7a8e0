"""Both ends of the stream between scaler and activators, over a real gRPC server: what is told, what is believed, and
what becomes of either when the other goes."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.scaling import Assignment, HoldLimits, HoldState, ModelKey, PodEndpoint, Report
from berth.kube.errors import KubeUnreachable
from berth.v1 import scaler_pb2 as pb
from berth.v1.scaler_pb2_grpc import ScalerStub
from proxy.activator.assign import Assigned
from proxy.activator.attend import Link, _Away
from scaler.activation import attend
from scaler.activation.callers import NotAllowed, TooMany, Unauthenticated
from scaler.activation.ports import PortPair
from scaler.activation.sources import keep_source
from tests.fakes.eventually import until
from tests.fakes.scaler import HERE, MODEL, OTHER, PAIR, Core, Scaler, assignment, scaler


class Talker:
    """An activator that says whatever it is told to."""

    whole: pb.AttendResponse

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        stub: Any = ScalerStub(channel)  # type: ignore[no-untyped-call]
        self.call: Any = stub.Attend(metadata=(("authorization", f"Bearer {token}"),))

    async def hello(self, address: str = HERE, *, leaving: bool = False) -> None:
        """One whose call has been refused already says nothing; `refusal` tells."""
        said = pb.ActivatorHello(address=address, leaving=leaving)
        with suppress(asyncio.InvalidStateError):
            await self.call.write(pb.AttendRequest(hello=said))

    async def report(self, *reports: dict[str, Any]) -> None:
        said = [pb.HoldReport(**one) for one in reports]
        await self.call.write(pb.AttendRequest(reports=pb.HoldReports(reports=said)))

    async def hear(self, *, beats: bool = False) -> pb.AttendResponse:
        """`beats`: an empty message is one, too."""
        async with asyncio.timeout(10):
            message: pb.AttendResponse = await self.call.read()
            while message == pb.AttendResponse() and not beats:
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
async def attached(at: Scaler, token: str = "berth-system/act-1") -> AsyncIterator[Talker]:
    async with talker(at, token) as one:
        await one.hello()
        one.whole = await one.hear()
        yield one


def said(model: ModelKey, version: int, **more: Any) -> dict[str, Any]:
    return {"version": version, "namespace": model.namespace, "name": model.name, **more}


# What is told.


async def test_an_activator_is_told_all_at_first_and_then_what_changes() -> None:
    pod = PodEndpoint(
        uid="u", name="p", address="10.0.0.9", rest_port=9000, grpc_port=9001, slots=4, ready=True, soon=True
    )
    whole = assignment(
        endpoints=(pod,),
        limits=HoldLimits(requests=5, bytes=6, seconds=7.5),
        hopeless="",
        waits_for="a gate",
        tls=True,
        share=2,
    )
    async with scaler(wanted={MODEL: whole, OTHER: assignment(OTHER)}) as at, attached(at) as one:
        first = one.whole
        assert first.whole
        assert {(told.namespace, told.name) for told in first.assignments} == {MODEL, OTHER}
        # As the activator reads it.
        assigned = Assigned()
        assigned.take(first, 0.0)
        told = assigned.get(MODEL)
        assert told is not None
        assert replace(told, version=0) == whole
        # The same again is nothing; another is a newer version.
        at.core.tell(MODEL)
        at.core.wanted[MODEL] = replace(whole, state=HoldState.FORWARD)
        at.core.tell(MODEL)
        change = await one.hear()
        assert not change.whole
        assert [(c.name, c.state, c.version > told.version) for c in change.assignments] == [
            ("m", pb.HOLD_STATE_FORWARD, True)
        ]
        del at.core.wanted[MODEL]
        at.core.tell(MODEL)
        (gone,) = (await one.hear()).assignments
        assert (gone.namespace, gone.name, gone.gone) == ("a", "m", True)


async def test_what_cannot_be_said_of_one_model_is_left_out_and_the_others_are_told() -> None:
    """Whatever a tenant has found to write: no activator is without its stream for that."""
    beyond = PodEndpoint(
        uid="u", name="p", address="10.0.0.9", rest_port=2**40, grpc_port=9001, slots=4, ready=True
    )
    broken = assignment(endpoints=(beyond,))
    async with scaler(wanted={MODEL: broken, OTHER: assignment(OTHER)}) as at, attached(at) as one:
        assert [(told.namespace, told.name) for told in one.whole.assignments] == [OTHER]
        at.core.wanted = {
            MODEL: replace(broken, share=2),
            OTHER: assignment(OTHER, state=HoldState.FORWARD),
        }
        at.core.tell_all()
        assert [told.state for told in (await one.hear()).assignments] == [pb.HOLD_STATE_FORWARD]
        at.core.wanted[MODEL] = assignment()
        at.core.tell(MODEL)
        assert [told.name for told in (await one.hear()).assignments] == [MODEL.name]


async def test_who_has_nothing_to_say_says_so() -> None:
    async with scaler() as at, attached(at) as one:
        assert [await one.hear(beats=True) for _ in range(3)] == [pb.AttendResponse()] * 3


async def test_versions_grow_over_a_restart_of_the_scaler() -> None:
    at = Scaler(Core(wanted={MODEL: assignment()}))
    async with at.up(), attached(at) as one:
        before = one.whole.assignments[0].version
    at.anew()
    async with at.up(), attached(at) as one:
        assert one.whole.assignments[0].version > before


async def test_a_slow_reader_costs_one_word_of_each_model() -> None:
    """It reads nothing, while everything changes thousands of times."""
    names = [ModelKey("a", f"m{n}") for n in range(50)]
    async with scaler(wanted={name: assignment(name) for name in names}) as at, attached(at) as one:
        for n in range(200):
            for name in names:
                hopeless = "x" * 2000 + str(n)
                at.core.wanted[name] = assignment(name, hopeless=hopeless)
                at.core.tell(name)
            if n % 10 == 0:
                await asyncio.sleep(0)
        (session,) = at.attendance._sessions.values()
        assert len(session._news) <= len(names)
        # When it reads, it soon has the newest of each.
        newest: dict[str, str] = {}
        async with asyncio.timeout(20):
            while len(newest) < 50 or any(not text.endswith("x199") for text in newest.values()):
                for told in (await one.hear()).assignments:
                    newest[told.name] = told.hopeless


async def test_one_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_WRITE_SECONDS", 0.3)
    async with scaler(wanted={MODEL: assignment()}) as at, attached(at):
        for n in range(100):
            at.core.wanted[MODEL] = assignment(hopeless=str(n) * 1_000_000)
            at.core.tell(MODEL)
            await asyncio.sleep(0.02)
            if at.core.ended:
                break
        await until(lambda: at.core.ended)


async def test_it_hears_whose_addresses_are_of_the_namespaces_that_it_needs() -> None:
    def pod(namespace: str, address: str) -> dict[str, Any]:
        meta = {"uid": address, "namespace": namespace, "name": "p"}
        return keep_source({"metadata": meta, "status": {"podIP": address}})

    async with scaler(wanted={MODEL: assignment()}) as at:
        for namespace, address in (("a", "10.1.0.1"), ("b", "10.1.0.2"), ("c", "10.1.0.3")):
            at.sources.set_pod(pod(namespace, address))
        async with attached(at) as one, attached(at, "a/own") as own:
            assert one.whole.sources == {"10.1.0.1": "a"}
            at.core.wanted[MODEL] = assignment(clients=frozenset({"a", "b", "*"}))
            at.core.tell(MODEL)
            assert (await one.hear()).sources == {"10.1.0.2": "b"}
            at.sources.pod_gone(pod("a", "10.1.0.1"))
            at.sources.set_pod(pod("c", "10.1.0.4"))
            at.attendance.sources_changed()
            assert (await one.hear()).sources == {"10.1.0.1": ""}
            # A tenant's own activator hears of no other tenant's pods, whatever its models let in.
            assert own.whole.sources == {"10.1.0.1": "a"}
            heard = [await own.hear(), await own.hear()]
            assert [dict(message.sources) for message in heard] == [{}, {"10.1.0.1": ""}]


# Who may call.


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (Unauthenticated("no token"), grpc.StatusCode.UNAUTHENTICATED),
        (NotAllowed("no activator"), grpc.StatusCode.PERMISSION_DENIED),
        (TooMany("too many calls"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (KubeUnreachable("the API server is away"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_strangers_are_told_nothing(refusal: Exception, code: grpc.StatusCode) -> None:
    async with scaler(wanted={MODEL: assignment()}) as at, talker(at) as one:
        at.callers.refusal = refusal
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
    async with scaler() as at, attached(at) as one:
        at.core.leads, at.core.leader = False, "10.0.0.7:9093"
        at.attendance.end()
        assert (await one.refusal())[0] is grpc.StatusCode.UNAVAILABLE
        assert ("leader", "10.0.0.7:9093") in [tuple(pair) for pair in await one.call.trailing_metadata()]


async def test_a_namespaces_activators_take_no_other_namespaces_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_MOST_OF_ONE", 1)
    monkeypatch.setattr(attend, "_MOST_SCOPED", 2)
    async with scaler() as at, attached(at, "a/1"), talker(at, "a/2") as more:
        await more.hello()
        assert (await more.refusal())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with attached(at, "b/1"), talker(at, "c/1") as third, attached(at):
            await third.hello()
            assert (await third.refusal())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: at.attendance._open["b"] == 0)
        async with attached(at, "c/1"):
            assert len(at.activators) == 2


async def test_the_systems_own_have_room_of_their_own_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_MOST_SYSTEM", 1)
    async with scaler() as at, attached(at), talker(at, "berth-system/2") as more, attached(at, "a/1"):
        await more.hello()
        assert (await more.refusal())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_one_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_HELLO_SECONDS", 0.1)
    async with scaler() as at, talker(at) as one:
        assert await one.refusal() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the stream came without a hello",
        )


async def test_its_token_is_looked_at_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_STREAM_SECONDS", 0.1)
    async with scaler() as at, attached(at) as one:
        assert (await one.refusal())[0] is grpc.StatusCode.OK
        assert [one.detached_ns is None for one in at.activators] == [False]


async def test_an_activator_that_dials_anew_is_one_activator() -> None:
    """What its older stream says no more, the newer one does."""
    async with scaler(wanted={MODEL: assignment()}) as at, attached(at) as old, attached(at) as new:
        assert (await old.refusal())[0] is grpc.StatusCode.OK
        assert len(at.activators) == 1
        await until(lambda: at.attendance._open[None] == 1)
        at.core.wanted[MODEL] = assignment(state=HoldState.FORWARD)
        at.core.tell(MODEL)
        assert [one.state for one in (await new.hear()).assignments] == [pb.HOLD_STATE_FORWARD]
        assert len(at.sources._followers) == 1
    await until(lambda: not at.sources._followers)


async def test_one_that_leaves_already_when_it_dials_is_led_nobody() -> None:
    async with scaler(wanted={MODEL: assignment()}) as at, talker(at) as one:
        await one.hello(leaving=True)
        await one.hear()
        assert not at.activators.chosen(MODEL)
        at.core.news.clear()
        await one.hello()
        await until(lambda: at.core.news == [MODEL])
        assert at.activators.chosen(MODEL)


# What is believed.


async def test_reports_are_of_the_models_that_were_told_and_within_their_bounds() -> None:
    told = assignment(limits=HoldLimits(requests=10, bytes=100))
    async with scaler(wanted={MODEL: told}) as at, attached(at) as one:
        version = one.whole.assignments[0].version
        await one.report(
            said(OTHER, version, held=1, wake=True, rest_port=20000),
            said(MODEL, version + 1, held=1),
            said(MODEL, 0, held=1),
            said(MODEL, version, average_held=float("nan"), held=1),
            said(MODEL, version, arrived=-1.0, held=1),
            said(MODEL, version, held=1, forwarded=float("inf")),
        )
        await one.report(
            said(MODEL, version, held=4_000_000, average_held=1e9, held_bytes=10**12, arrived=3, wake=True)
        )
        await until(lambda: at.core.reports)
        ((uid, report),) = at.core.reports
        assert uid == "berth-system/act-1"
        assert (report.held, report.average_held, report.held_bytes, report.arrived) == (10, 10.0, 100, 3)
        assert (report.rest_port, report.grpc_port) == (0, 0)
        assert (at.attendance.figures.reports, at.attendance.figures.left_aside) == (7, 6)
        (shown,) = at.attendance.attached()
        assert (shown.name, shown.held) == ("berth-system/act-1", 10)
        assert 0 <= shown.seconds < 60
        await one.report(said(MODEL, version, held=0))
        await until(lambda: [shown.held for shown in at.attendance.attached()] == [0])
    await until(lambda: not at.attendance.attached())


async def test_a_port_is_open_when_it_is_the_models_own() -> None:
    async with scaler(wanted={MODEL: assignment()}) as at, attached(at) as one:
        (known,) = at.activators
        version = one.whole.assignments[0].version
        await one.report(said(MODEL, version, rest_port=22, grpc_port=PAIR.grpc))
        await until(lambda: known.has_told)
        assert known.open == {MODEL: PortPair(0, PAIR.grpc)}
        await one.report(said(MODEL, version, rest_port=PAIR.rest, grpc_port=PAIR.grpc))
        await until(lambda: known.open == {MODEL: PAIR})
        assert at.core.reports == []  # a proof is no load
        # What is not told any more is not open, whatever comes late.
        del at.core.wanted[MODEL]
        at.core.tell(MODEL)
        assert known.open == {}
        await one.report(said(MODEL, version, rest_port=PAIR.rest, grpc_port=PAIR.grpc))
        at.core.wanted[MODEL] = assignment()
        at.core.tell(MODEL)
        before = at.attendance.figures.left_aside
        await one.report(said(MODEL, version, rest_port=PAIR.rest, grpc_port=PAIR.grpc))
        await until(lambda: at.attendance.figures.left_aside > before)
        assert known.open == {}


async def test_the_first_that_an_activator_says_is_news_of_all_that_it_was_told() -> None:
    """That it has nothing open, too: until then it might have been on its way from another scaler."""
    async with scaler(wanted={MODEL: assignment()}) as at, attached(at) as one:
        version = one.whole.assignments[0].version
        at.core.news.clear()
        await one.report()
        await until(lambda: at.core.news == [MODEL])
        await one.report(said(MODEL, version))
        await one.report(said(MODEL, version, held=1))
        await until(lambda: at.core.reports)
        assert at.core.news == [MODEL]


async def test_the_end_of_holding_is_told_once() -> None:
    async with scaler(wanted={MODEL: assignment()}) as at, attached(at) as one:
        version = one.whole.assignments[0].version
        for held in (2, 0, 0, 0):
            await one.report(said(MODEL, version, held=held))
        await one.report(said(MODEL, version, held=1))
        await until(lambda: len(at.core.reports) == 3)
        assert [report.held for _, report in at.core.reports] == [2, 0, 1]


async def garbage(one: Talker) -> None:
    await one.report(said(MODEL, 1))


async def no_hello_again(one: Talker) -> None:
    await one.hello()
    await one.hear()
    await one.hello("10.0.0.1")


async def nothing(one: Talker) -> None:
    await one.call.done_writing()


async def empty(one: Talker) -> None:
    await one.call.write(pb.AttendRequest())


async def too_many(one: Talker) -> None:
    await one.hello()
    await one.hear()
    await one.report(*[{"version": 1}] * 10_001)


@pytest.mark.parametrize("say", [garbage, no_hello_again, nothing, empty, too_many])
async def test_what_the_contract_does_not_allow_ends_the_stream(say: Callable[[Talker], Any]) -> None:
    async with scaler() as at, talker(at) as one, attached(at, "berth-system/other"):
        await say(one)
        assert (await one.refusal())[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert len(at.activators) == 1


async def test_bytes_that_are_no_message_end_the_stream_and_no_other() -> None:
    async with scaler() as at, attached(at) as good:
        async with grpc.aio.insecure_channel(str(at.endpoint)) as channel:
            raw: Any = channel.stream_stream("/berth.v1.Scaler/Attend")  # type: ignore[call-arg]
            call = raw(metadata=(("authorization", "Bearer berth-system/bad"),))
            await call.write(b"\xff" * 100)
            async with asyncio.timeout(10):
                assert await call.code() is not grpc.StatusCode.OK
        at.core.wanted[MODEL] = assignment()
        at.core.tell(MODEL)
        assert (await good.hear()).assignments


async def test_a_flood_is_read_slowly_and_holds_up_nobody_else() -> None:
    async with (
        scaler(wanted={MODEL: assignment()}) as at,
        attached(at) as good,
        attached(at, "berth-system/b") as bad,
    ):
        version = good.whole.assignments[0].version

        async def flood() -> None:
            while True:
                await bad.report(*[said(OTHER, version)] * 500)

        flooding = asyncio.create_task(flood())
        try:
            await until(lambda: at.attendance.figures.slowed > 3)
            began = at.attendance.figures.reports
            await asyncio.sleep(0.5)
            # 200 messages a second, of which twenty reports are as much as one more.
            assert at.attendance.figures.reports - began < 200 * 20 * 2
            await good.report(said(MODEL, version, held=1, wake=True))
            await until(lambda: at.core.reports, seconds=2)
        finally:
            flooding.cancel()


# Both ends together.


class Plane:
    """Opens every port at once, and notes what it is told."""

    def __init__(self) -> None:
        self.told: dict[ModelKey, Assignment] = {}
        self.removed: list[ModelKey] = []
        self.held: dict[ModelKey, int] = {}
        self.broken: set[ModelKey] = set()

    async def apply(self, assignment: Assignment) -> None:
        if assignment.model in self.broken:
            raise RuntimeError("nobody has thought of this")
        self.told[assignment.model] = assignment

    async def remove(self, key: ModelKey) -> None:
        self.told.pop(key, None)
        self.removed.append(key)

    def reports(self, now: float, *, whole: bool = False) -> list[Report]:
        return [self.report(key) for key in self.told if whole or self.held.get(key)]

    def report(self, key: ModelKey, *, wake: bool = False) -> Report:
        told, held = self.told[key], self.held.get(key, 0)
        is_open = told.state is not HoldState.OFF
        return Report(
            version=told.version,
            model=key,
            held=held,
            average_held=float(held),
            arrived=float(held),
            forwarded=0.0,
            held_bytes=0,
            oldest_seconds=0.0,
            wake=wake,
            rest_port=told.rest_port * is_open,
            grpc_port=told.grpc_port * is_open,
        )


class Dialler:
    """The activator's end, with a plane that is none."""

    def __init__(self, at: Endpoint, directory: Path, name: str = "act-1") -> None:
        self.token = directory / name
        self.token.write_text(f"berth-system/{name}\n")
        self.assigned, self.plane = Assigned(), Plane()
        self.link = Link(at, self.token, HERE, self.assigned, self.plane)

    @asynccontextmanager
    async def up(self) -> AsyncIterator["Dialler"]:
        task = asyncio.create_task(self.link.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_told_opened_proven_woken(tmp_path: Path) -> None:
    async with scaler(wanted={MODEL: assignment()}) as at, Dialler(at.endpoint, tmp_path).up() as one:
        await until(lambda: at.activators.listening(at.activators, MODEL, PAIR) == {HERE})
        one.plane.held[MODEL] = 1
        one.link.wake(one.plane.report(MODEL, wake=True))
        await until(lambda: at.core.reports)
        assert at.core.reports[0][1].wake
        one.plane.held[MODEL] = 3
        one.link.turn()
        await until(lambda: len(at.core.reports) == 2)
        assert at.core.reports[1][1].average_held == 3.0
        # It leaves: the scaler leads nobody there any more, and the stream goes on.
        one.link.leave()
        await until(lambda: not at.activators.chosen(MODEL))
        at.core.wanted[OTHER] = assignment(OTHER, rest_port=20002, grpc_port=20003)
        at.core.tell(OTHER)
        await until(lambda: OTHER in one.plane.told)


async def test_the_activator_goes_on_without_a_scaler_and_attaches_to_the_next(tmp_path: Path) -> None:
    at = Scaler(
        Core(wanted={MODEL: assignment(), OTHER: assignment(OTHER, rest_port=20002, grpc_port=20003)})
    )
    async with at.up():
        one = Dialler(at.endpoint, tmp_path)
        running = one.up()
        await running.__aenter__()
        await until(lambda: len(one.plane.told) == 2)
    try:
        await until(lambda: not one.link.is_attached)
        one.plane.held[MODEL] = 7
        one.link.wake(one.plane.report(MODEL, wake=True))
        one.link.turn()
        assert set(one.plane.told) == {MODEL, OTHER}
        assert one.assigned.allows(MODEL, "10.1.0.1") is False
        # The next one names one of the two: the other is passed on for a while. What waits is told at once.
        at.anew()
        del at.core.wanted[OTHER]
        async with at.up():
            await until(lambda: at.core.reports)
            assert at.core.reports[0][1].held == 7
            await until(lambda: at.activators.listening(at.activators, MODEL, PAIR) == {HERE})
            await until(lambda: one.plane.told[OTHER].state is HoldState.FORWARD)
            assert one.plane.removed == []
    finally:
        await running.__aexit__(None, None, None)


async def test_it_follows_the_leader_at_once_and_asks_those_that_name_each_other_slowly(
    tmp_path: Path,
) -> None:
    async with scaler(wanted={MODEL: assignment()}) as leader, scaler(leads=False) as other:
        other.core.leader = str(leader.endpoint)
        async with Dialler(other.endpoint, tmp_path).up() as one:
            await until(lambda: MODEL in one.plane.told, seconds=2)
        leader.core.leads, leader.core.leader = False, str(other.endpoint)
        async with Dialler(other.endpoint, tmp_path, "act-2").up():
            await asyncio.sleep(1.0)
            assert 2 <= len(leader.callers.asked) + len(other.callers.asked) < 15
        # One that leads no more sends it on.
        leader.core.leads, other.core.leader = True, str(leader.endpoint)
        async with Dialler(other.endpoint, tmp_path, "act-3").up() as one:
            await until(lambda: one.link.is_attached)
            leader.core.leads, leader.core.leader, other.core.leads = False, str(other.endpoint), True
            other.core.wanted = {OTHER: assignment(OTHER)}
            leader.attendance.end()
            await until(lambda: OTHER in one.plane.told)
            assert one.plane.told[MODEL].state is HoldState.FORWARD


async def test_a_leader_that_is_not_there_is_left_for_the_service(tmp_path: Path) -> None:
    async with (
        scaler(leads=False, leader="127.0.0.1:1", wanted={MODEL: assignment()}) as at,
        Dialler(at.endpoint, tmp_path).up() as one,
    ):
        await until(lambda: len(at.callers.asked) >= 2)
        for leader in ("nonsense", "", "127.0.0.1:99999"):
            at.core.leader = leader
            await asyncio.sleep(0.05)
        at.core.leads = True
        await until(lambda: MODEL in one.plane.told)


async def test_one_that_takes_no_connection_is_given_up_before_tcp_does(tmp_path: Path) -> None:
    """As an address of a pod that is gone, to which a Service may lead for a while."""
    with socket.create_server((HERE, 0), backlog=0) as full:
        crowd = [socket.socket() for _ in range(3)]
        for one in crowd:
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect(full.getsockname())
        link = Dialler(Endpoint(HERE, full.getsockname()[1]), tmp_path).link
        async with asyncio.timeout(4):
            with pytest.raises(_Away):
                await link._attend(link._scaler)
        for one in crowd:
            one.close()


async def test_a_stream_was_a_good_one_for_as_long_as_it_told(tmp_path: Path) -> None:
    async with scaler(leads=False) as at:
        link = Dialler(at.endpoint, tmp_path).link
        with pytest.raises(_Away):
            await link._attend(at.endpoint)
        assert link._lasted_seconds == 0
        at.core.leads = True
        stream = asyncio.create_task(link._attend(at.endpoint))
        await until(lambda: link.is_attached)
        await asyncio.sleep(0.2)
        at.core.leads = False
        at.attendance.end()
        await asyncio.gather(stream, return_exceptions=True)
        assert link._lasted_seconds >= 0.2


async def test_the_token_is_read_anew_for_each_stream(tmp_path: Path) -> None:
    async with scaler() as at:
        one = Dialler(at.endpoint, tmp_path)
        one.token.unlink()
        async with one.up():
            await asyncio.sleep(0.3)
            assert at.callers.asked == []
            one.token.write_text("berth-system/renewed")
            await until(lambda: at.callers.asked == ["berth-system/renewed"])
            await until(lambda: one.link.is_attached)


async def test_an_activator_that_is_killed_is_out_of_the_way_at_once(tmp_path: Path) -> None:
    """Its port refuses. One whose stream alone breaks off keeps its place for a while."""
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), HERE, 0)
    port = listener.sockets[0].getsockname()[1]
    told = assignment(rest_port=port, grpc_port=0)
    async with scaler(wanted={MODEL: told}) as at:
        async with attached(at) as one:
            version = one.whole.assignments[0].version
            await one.report(said(MODEL, version, rest_port=port))
            await until(lambda: next(iter(at.activators)).open)
        await until(lambda: at.core.ended)
        await asyncio.sleep(0.2)
        assert [one.uid for one in at.activators] == ["berth-system/act-1"]
        assert len(at.activators) == 0  # of those that are attached
        async with attached(at) as one:
            version = one.whole.assignments[0].version
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
            await until(lambda: one.link.is_attached)
            at.core.wanted = {MODEL: assignment(), OTHER: assignment(OTHER)}
            at.core.tell_all()
            await until(lambda: OTHER in one.plane.told)
            assert one.link.is_attached


def test_a_crowd_of_reports_goes_in_messages_that_are_read(tmp_path: Path) -> None:
    """A tenant may have thousands of models with the longest names there are."""
    one = Dialler(Endpoint("127.0.0.1", 1), tmp_path)
    models = [ModelKey("a" * 63, f"m{n}".ljust(253, "x")) for n in range(5000)]
    one.plane.told = {model: assignment(model, version=time.time_ns() // 1000) for model in models}
    one.plane.held = dict.fromkeys(models, 10**6)
    one.link._note(one.plane.reports(0.0, whole=True))
    told = 0
    while (message := one.link._message()).reports.reports:
        told += len(message.reports.reports)
        assert len(message.reports.reports) <= attend._MOST_REPORTS
        assert message.ByteSize() < 0.95 * attend._MESSAGE_BYTES
    assert told == len(models)


def test_what_is_open_of_a_usual_crowd_is_told_at_once(tmp_path: Path) -> None:
    """Until it is told the next scaler does not know of it."""
    one = Dialler(Endpoint("127.0.0.1", 1), tmp_path)
    models = [ModelKey("team-of-people", f"a-usual-name-of-a-model-{n}") for n in range(5000)]
    one.plane.told = {model: assignment(model) for model in models}
    one.link._note(one.plane.reports(0.0, whole=True))
    assert len(one.link._message().reports.reports) == len(models)
