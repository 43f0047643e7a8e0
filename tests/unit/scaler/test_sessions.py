"""What an activator is sent on its stream, and which of its reports are believed."""

from dataclasses import replace
from typing import Any

import pytest

from berth.contract.activation import Assignment, BufferLimits, ReplicaEndpoint, RouteMode
from berth.contract.activation_codec import decode_assignment
from berth.contract.errors import InvalidValue
from berth.contract.ids import PodUid
from berth.contract.scaling import ModelKey
from berth.v1 import scaler_pb2 as pb
from scaler.activation.activators import Activators
from scaler.activation.addresses import keep_client
from scaler.activation.ports import PortPair
from scaler.activation.sessions import Session, Sessions
from scaler.go import SECOND_NS
from tests.fakes.scaler import MODEL, OTHER, PAIR, assignment

T0 = 1_700_000_000 * SECOND_NS
ADDRESS = "10.0.1.1"


class Scaler:
    """With the streams that a test opens; `calls` notes who was to send, or to end."""

    def __init__(self) -> None:
        self.now = T0
        self.activators = Activators(began_ns=T0)
        self.sessions = Sessions(self.activators, lambda: self.now)
        self.calls: list[str] = []

    def connect(self, name: str = "act", scope: str | None = None) -> Session:
        activator = self.activators.connect(PodUid(name), name, ADDRESS, scope)
        return self.sessions.begin(
            activator,
            notify=lambda: self.calls.append(f"{name} sends"),
            end=lambda: self.calls.append(f"{name} ends"),
        )

    def assign(self, wanted: Assignment, *to: Session) -> None:
        self.sessions.assign(wanted.model, {one.activator.uid: wanted for one in to})

    def pod(self, namespace: str, address: str) -> dict[str, Any]:
        meta = {"uid": address, "namespace": namespace, "name": "p"}
        return keep_client({"metadata": meta, "status": {"podIP": address}})


@pytest.fixture
def scaler() -> Scaler:
    return Scaler()


def report(session: Session, model: ModelKey = MODEL, **fields: Any) -> pb.ModelReport:
    version = session.assigned[model].version if model in session.assigned else 1
    return pb.ModelReport(**{"version": version, "namespace": model.namespace, "name": model.name, **fields})


# What is sent.


def test_a_snapshot_first_then_what_changes(scaler: Scaler) -> None:
    session = scaler.connect()
    scaler.assign(assignment(), session)
    scaler.assign(assignment(OTHER), session)
    first = session.message(snapshot=True)
    assert first.snapshot
    assert {ModelKey(one.namespace, one.name) for one in first.assignments} == {MODEL, OTHER}
    assert replace(decode_assignment(first.assignments[0]), version=0) == assignment()
    scaler.calls.clear()
    # The same again is no change; another is a newer version.
    scaler.assign(assignment(), session)
    assert scaler.calls == []
    scaler.assign(assignment(mode=RouteMode.SERVE), session)
    assert scaler.calls == ["act sends"]
    (change,) = session.message(snapshot=False).assignments
    assert (change.mode, change.version > first.assignments[0].version) == (pb.ROUTE_MODE_SERVE, True)
    scaler.assign(assignment())
    (removal,) = session.message(snapshot=False).assignments
    assert (removal.namespace, removal.name, removal.removed) == ("a", "m", True)
    assert session.message(snapshot=False) == pb.ControlResponse()


def test_a_model_that_was_never_assigned_is_not_removed(scaler: Scaler) -> None:
    session = scaler.connect()
    scaler.assign(assignment())
    assert (scaler.calls, session.message(snapshot=False)) == ([], pb.ControlResponse())


def test_a_removal_needs_no_place_in_a_snapshot(scaler: Scaler) -> None:
    session = scaler.connect()
    scaler.assign(assignment(), session)
    scaler.assign(assignment())
    assert session.message(snapshot=True) == pb.ControlResponse(snapshot=True)


def test_only_the_newest_of_each_model_waits_to_be_sent(scaler: Scaler) -> None:
    session = scaler.connect()
    for n in range(50):
        scaler.assign(assignment(unavailable=str(n)), session)
    (sent,) = session.message(snapshot=False).assignments
    assert sent.unavailable == "49"


def test_an_assignment_that_no_message_holds_does_not_hold_back_the_others(scaler: Scaler) -> None:
    """Whatever a tenant has found to write."""
    beyond = ReplicaEndpoint(
        uid="u", name="p", address="10.0.0.9", rest_port=2**40, grpc_port=9001, slots=4, ready=True
    )
    session = scaler.connect()
    scaler.assign(assignment(endpoints=(beyond,)), session)
    scaler.assign(assignment(OTHER), session)
    assert [one.name for one in session.message(snapshot=True).assignments] == [OTHER.name]
    scaler.assign(assignment(), session)
    assert [one.name for one in session.message(snapshot=False).assignments] == [MODEL.name]


def test_versions_grow_over_a_restart_and_within_a_microsecond(scaler: Scaler) -> None:
    session = scaler.connect()
    scaler.assign(assignment(), session)
    scaler.assign(assignment(tls=True), session)
    one = session.assigned[MODEL].version
    assert one == T0 // 1000 + 1
    later = Scaler()
    later.now += SECOND_NS
    session = later.connect()
    later.assign(assignment(), session)
    assert session.assigned[MODEL].version > one


def test_an_activator_gets_the_addresses_of_the_namespaces_that_it_needs(scaler: Scaler) -> None:
    for namespace, address in (("a", "10.1.0.1"), ("b", "10.1.0.2"), ("c", "10.1.0.3")):
        scaler.sessions.set_client(scaler.pod(namespace, address))
    system, own = scaler.connect(), scaler.connect("own", scope="a")
    wanted = assignment(clients=frozenset({"a", "b", "*"}))
    scaler.assign(wanted, system, own)
    assert dict(system.message(snapshot=True).client_addresses) == {"10.1.0.1": "a", "10.1.0.2": "b"}
    # A tenant's own activator gets no other tenant's addresses, whatever its models let in.
    assert dict(own.message(snapshot=True).client_addresses) == {"10.1.0.1": "a"}
    scaler.calls.clear()
    scaler.sessions.delete_client(scaler.pod("a", "10.1.0.1"))
    assert scaler.calls == ["act sends", "own sends"]
    scaler.sessions.set_client(scaler.pod("c", "10.1.0.4"))
    assert dict(system.message(snapshot=False).client_addresses) == {"10.1.0.1": ""}
    # Once no model lets a namespace in, its addresses are removed.
    scaler.assign(assignment(), system, own)
    assert dict(system.message(snapshot=False).client_addresses) == {"10.1.0.2": ""}


# What is believed.


def test_reports_are_of_assigned_models_and_within_their_limits(scaler: Scaler) -> None:
    session = scaler.connect()
    scaler.assign(assignment(limits=BufferLimits(requests=10, bytes=100)), session)
    version = session.assigned[MODEL].version
    taken = session.take(
        [
            report(session, OTHER, buffered=1, cold_start=True, rest_port=20000),
            report(session, version=version + 1, buffered=1),
            report(session, version=0, buffered=1),
            report(session, average_buffered=float("nan"), buffered=1),
        ]
    )
    assert (taken.reports, taken.rejected) == ([], 4)
    taken = session.take(
        [report(session, buffered=4_000_000, average_buffered=1e9, buffered_bytes=10**12, arrived=3)]
    )
    (believed,) = taken.reports
    assert (believed.buffered, believed.average_buffered, believed.buffered_bytes) == (10, 10.0, 100)
    assert (believed.arrived, believed.rest_port, believed.grpc_port) == (3, 0, 0)
    (connected,) = scaler.sessions.connected()
    assert (connected.name, connected.seconds, connected.buffered) == ("act", 0.0, 10)
    scaler.now += SECOND_NS
    assert [one.seconds for one in scaler.sessions.connected()] == [1.0]


def test_a_port_is_open_when_it_is_the_models_own(scaler: Scaler) -> None:
    session = scaler.connect()
    scaler.assign(assignment(), session)
    session.take([report(session, rest_port=22, grpc_port=PAIR.grpc)])
    assert session.activator.open == {MODEL: PortPair(0, PAIR.grpc)}
    taken = session.take([report(session, rest_port=PAIR.rest, grpc_port=PAIR.grpc)])
    assert (taken.changed, taken.reports) == ([MODEL], [])  # open ports are no load
    assert session.activator.open == {MODEL: PAIR}
    assert session.take([report(session, rest_port=PAIR.rest, grpc_port=PAIR.grpc)]).changed == []
    # A model that is removed has no open ports, whatever comes late of the assignment before.
    late = report(session, rest_port=PAIR.rest, grpc_port=PAIR.grpc)
    scaler.assign(assignment())
    assert session.activator.open == {}
    assert session.take([late]).rejected == 1
    scaler.now += SECOND_NS
    scaler.assign(assignment(), session)
    assert session.take([late]).rejected == 1
    assert session.activator.open == {}


def test_a_report_of_an_earlier_version_of_the_same_assignment_counts(scaler: Scaler) -> None:
    session = scaler.connect()
    scaler.assign(assignment(), session)
    earlier = report(session, buffered=2)
    scaler.assign(assignment(mode=RouteMode.SERVE), session)
    assert [one.buffered for one in session.take([earlier]).reports] == [2]


def test_the_first_reports_are_news_of_all_models(scaler: Scaler) -> None:
    """That none of them is open, too: until then another scaler may have known more."""
    session = scaler.connect()
    scaler.assign(assignment(), session)
    scaler.assign(assignment(OTHER), session)
    assert set(session.take([]).changed) == {MODEL, OTHER}
    assert session.take([]).changed == []
    assert session.activator.has_reported


def test_the_end_of_buffering_is_reported_once(scaler: Scaler) -> None:
    session = scaler.connect()
    scaler.assign(assignment(), session)
    seen = [session.take([report(session, buffered=n)]).reports for n in (2, 0, 0, 1)]
    assert [[one.buffered for one in reports] for reports in seen] == [[2], [0], [], [1]]
    # What arrived and was forwarded between two reports counts, too.
    session.take([report(session)])
    assert session.take([report(session, arrived=1)]).reports
    assert session.take([report(session, average_buffered=0.1)]).reports


def test_a_hello_says_again_whether_it_drains_and_never_another_address(scaler: Scaler) -> None:
    session = scaler.connect()
    assert session.greeted(pb.ActivatorHello(address=ADDRESS, draining=True))
    assert session.activator.draining
    assert not session.greeted(pb.ActivatorHello(address=ADDRESS, draining=True))
    with pytest.raises(InvalidValue):
        session.greeted(pb.ActivatorHello(address="10.0.1.2"))


# Streams.


def test_a_new_stream_of_an_activator_ends_the_one_before(scaler: Scaler) -> None:
    before = scaler.connect()
    now = scaler.connect()
    assert scaler.calls == ["act ends"]
    assert not scaler.sessions.leave(before)
    assert len(scaler.activators) == 1
    scaler.assign(assignment(), now)
    assert (before.assigned, set(now.assigned)) == ({}, {MODEL})
    assert scaler.sessions.leave(now)
    assert (len(scaler.activators), "act" in scaler.sessions) == (0, False)


def test_a_stream_that_has_ended_gets_no_address(scaler: Scaler) -> None:
    session = scaler.connect()
    scaler.assign(assignment(), session)
    session.message(snapshot=True)
    scaler.sessions.leave(session)
    scaler.sessions.set_client(scaler.pod("a", "10.1.0.1"))
    assert dict(session.message(snapshot=False).client_addresses) == {}


def test_all_streams_end_with_the_lead(scaler: Scaler) -> None:
    scaler.connect("one")
    scaler.connect("other")
    scaler.sessions.end()
    assert scaler.calls == ["one ends", "other ends"]
