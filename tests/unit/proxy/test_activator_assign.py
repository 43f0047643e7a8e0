"""What the activator makes of what it is told, and who may call."""

from typing import Any

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.scaling import HoldState, ModelKey
from berth.v1 import scaler_pb2 as pb
from proxy.activator.assign import FORWARD_SECONDS, Assigned, read_assignment

M, N = ModelKey("a", "m"), ModelKey("b", "n")


def said(model: ModelKey = M, version: int = 1, **more: Any) -> pb.HoldAssignment:
    fields: dict[str, Any] = {
        "public_name": model.name,
        "state": pb.HOLD_STATE_HOLD,
        "rest_port": 20000,
        "grpc_port": 20001,
        "clients": ["a"],
    }
    return pb.HoldAssignment(version=version, namespace=model.namespace, name=model.name, **fields | more)


def whole(*assignments: pb.HoldAssignment, **sources: str) -> pb.AttendResponse:
    addresses = {key.replace("_", ".").strip("ip"): value for key, value in sources.items()}
    return pb.AttendResponse(whole=True, assignments=assignments, sources=addresses)


def change(*assignments: pb.HoldAssignment, sources: dict[str, str] | None = None) -> pb.AttendResponse:
    return pb.AttendResponse(assignments=assignments, sources=sources or {})


def test_only_who_is_known_may_call_and_only_its_own() -> None:
    assigned = Assigned()
    assert not assigned.allows(M, "10.0.0.1")
    assigned.take(whole(said(), said(N, clients=["b"]), ip10_0_0_1="a", ip10_0_0_2="b"), 0)
    table = {(M, "10.0.0.1"): True, (M, "10.0.0.2"): False, (N, "10.0.0.1"): False, (N, "10.0.0.2"): True}
    assert {key: assigned.allows(*key) for key in table} == table
    assert assigned.allows(M, "::ffff:10.0.0.1")
    for stranger in ("10.0.0.3", "", "a"):
        assert not assigned.allows(M, stranger)
    assigned.take(change(sources={"10.0.0.1": "b", "10.0.0.2": ""}), 0)
    assert (assigned.allows(M, "10.0.0.1"), assigned.allows(N, "10.0.0.2")) == (False, False)
    assigned.take(change(said(version=2, clients=["*"])), 0)
    assert assigned.allows(M, "10.9.9.9")
    # A namespace that is no name lets nobody in whose address is not known.
    assigned.take(change(said(version=3, clients=[""])), 0)
    assert not assigned.allows(M, "10.9.9.9")


def test_a_new_stream_forgets_the_addresses_of_the_last() -> None:
    assigned = Assigned()
    assigned.take(whole(said(), ip10_0_0_1="a"), 0)
    assigned.take(whole(said()), 0)
    assert not assigned.allows(M, "10.0.0.1")


def test_an_older_version_is_none_but_a_new_stream_counts_anew() -> None:
    assigned = Assigned()
    assert [one.version for one in assigned.take(whole(said(version=5)), 0).apply] == [5]
    assert assigned.take(change(said(version=5), said(version=4)), 0).apply == []
    assert [one.version for one in assigned.take(change(said(version=6)), 0).apply] == [6]
    # A scaler whose clock is behind the last one's.
    assert [one.version for one in assigned.take(whole(said(version=2)), 0).apply] == [2]
    assert [one.version for one in assigned.take(change(said(version=3)), 0).apply] == [3]


def test_what_a_new_stream_does_not_name_is_passed_on_for_a_while() -> None:
    assigned = Assigned()
    assigned.take(whole(said(), said(N)), 0)
    changes = assigned.take(whole(said(version=2)), 10)
    assert {one.model: one.state for one in changes.apply} == {M: HoldState.HOLD, N: HoldState.FORWARD}
    assert changes.remove == []
    assert assigned.expire(10 + FORWARD_SECONDS - 0.1).remove == []
    # Another stream in between does not begin the time anew.
    assigned.take(whole(said(version=3)), 40)
    assert assigned.expire(10 + FORWARD_SECONDS).remove == [N]
    assert (len(assigned), assigned.get(N)) == (1, None)


def test_one_that_is_named_again_stays() -> None:
    assigned = Assigned()
    assigned.take(whole(said(), said(N)), 0)
    assigned.take(whole(said(version=2)), 10)
    # The last stream's version of it is nothing to this one, whose clock may be behind.
    assert [one.state for one in assigned.take(change(said(N)), 20).apply] == [HoldState.HOLD]
    assert assigned.take(change(said(N)), 20).apply == []
    assert assigned.expire(1000).remove == []


def test_gone_is_gone_at_once() -> None:
    assigned = Assigned()
    assigned.take(whole(said(), said(N)), 0)
    gone = pb.HoldAssignment(namespace="a", name="m", gone=True)
    assert assigned.take(change(gone), 0).remove == [M]
    assert assigned.take(change(gone), 0).remove == []
    assert not assigned.allows(M, "10.0.0.1")
    assert [one.version for one in assigned.take(change(said(version=1)), 0).apply] == [1]


@pytest.mark.parametrize(
    "more",
    [
        {"state": 0},
        {"public_name": ""},
        {"rest_port": 19999},
        {"grpc_port": 30000},
        {"grpc_port": 20000},
        {"namespace": ""},
        {"name": "x/y"},
        {"endpoints": [pb.HoldEndpoint(address="example.com")]},
        {"endpoints": [pb.HoldEndpoint(address="")]},
        {"endpoints": [pb.HoldEndpoint(address="10.0.0.1", rest_port=70000)]},
    ],
)
def test_what_cannot_be_read_is_left_aside_and_the_rest_counts(more: dict[str, Any]) -> None:
    bad = said()
    for key, value in more.items():
        if key == "endpoints":
            bad.endpoints.extend(value)
        else:
            setattr(bad, key, value)
    with pytest.raises(InvalidValue):
        read_assignment(bad)
    assigned = Assigned()
    changes = assigned.take(whole(bad, said(N)), 0)
    assert [one.model for one in changes.apply] == [N]
    assert assigned.is_told


def test_what_is_broken_of_a_model_that_is_known_leaves_it_as_it_was() -> None:
    assigned = Assigned()
    assigned.take(whole(said()), 0)
    changes = assigned.take(whole(said(version=2, state=0)), 10)
    assert (changes.apply, changes.remove) == ([], [])
    told = assigned.get(M)
    assert told is not None
    assert told.state is HoldState.HOLD
