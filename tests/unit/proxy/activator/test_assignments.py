"""What a message of the scaler changes, and which clients may call."""

from typing import Any

from berth.contract.activation import RouteMode
from berth.contract.scaling import ModelKey
from berth.v1 import scaler_pb2 as pb
from proxy.activator.assignments import FORWARD_SECONDS, Assignments

M, N = ModelKey("a", "m"), ModelKey("b", "n")


def assigned(model: ModelKey = M, version: int = 1, **more: Any) -> pb.ModelAssignment:
    fields: dict[str, Any] = {
        "public_name": model.name,
        "mode": pb.ROUTE_MODE_PROXY,
        "rest_port": 20000,
        "grpc_port": 20001,
        "clients": ["a"],
    }
    return pb.ModelAssignment(version=version, namespace=model.namespace, name=model.name, **fields | more)


def snapshot(*assignments: pb.ModelAssignment, **namespaces: str) -> pb.ControlResponse:
    addresses = {key.replace("_", ".").strip("ip"): value for key, value in namespaces.items()}
    return pb.ControlResponse(snapshot=True, assignments=assignments, client_addresses=addresses)


def change(*assignments: pb.ModelAssignment, addresses: dict[str, str] | None = None) -> pb.ControlResponse:
    return pb.ControlResponse(assignments=assignments, client_addresses=addresses or {})


def test_only_who_is_known_may_call_and_only_its_own() -> None:
    assignments = Assignments()
    assert not assignments.allows(M, "10.0.0.1")
    assignments.take(snapshot(assigned(), assigned(N, clients=["b"]), ip10_0_0_1="a", ip10_0_0_2="b"), 0)
    table = {(M, "10.0.0.1"): True, (M, "10.0.0.2"): False, (N, "10.0.0.1"): False, (N, "10.0.0.2"): True}
    assert {key: assignments.allows(*key) for key in table} == table
    assert assignments.allows(M, "::ffff:10.0.0.1")
    for stranger in ("10.0.0.3", "", "a"):
        assert not assignments.allows(M, stranger)
    assignments.take(change(addresses={"10.0.0.1": "b", "10.0.0.2": ""}), 0)
    assert (assignments.allows(M, "10.0.0.1"), assignments.allows(N, "10.0.0.2")) == (False, False)
    assignments.take(change(assigned(version=2, clients=["*"])), 0)
    assert assignments.allows(M, "10.9.9.9")
    # A namespace that is no name lets nobody in whose address is not known.
    assignments.take(change(assigned(version=3, clients=[""])), 0)
    assert not assignments.allows(M, "10.9.9.9")


def test_a_new_stream_forgets_the_addresses_of_the_last() -> None:
    assignments = Assignments()
    assignments.take(snapshot(assigned(), ip10_0_0_1="a"), 0)
    assignments.take(snapshot(assigned()), 0)
    assert not assignments.allows(M, "10.0.0.1")


def test_an_older_version_is_none_but_a_new_stream_counts_anew() -> None:
    assignments = Assignments()
    assert [one.version for one in assignments.take(snapshot(assigned(version=5)), 0).apply] == [5]
    assert assignments.take(change(assigned(version=5), assigned(version=4)), 0).apply == []
    assert [one.version for one in assignments.take(change(assigned(version=6)), 0).apply] == [6]
    # A scaler whose clock is behind the last one's.
    assert [one.version for one in assignments.take(snapshot(assigned(version=2)), 0).apply] == [2]
    assert [one.version for one in assignments.take(change(assigned(version=3)), 0).apply] == [3]


def test_what_a_new_stream_does_not_name_is_passed_on_for_a_while() -> None:
    assignments = Assignments()
    assignments.take(snapshot(assigned(), assigned(N)), 0)
    changes = assignments.take(snapshot(assigned(version=2)), 10)
    assert {one.model: one.mode for one in changes.apply} == {M: RouteMode.PROXY, N: RouteMode.SERVE}
    assert changes.remove == []
    assert assignments.expire(10 + FORWARD_SECONDS - 0.1).remove == []
    # Another stream in between does not begin the time anew.
    assignments.take(snapshot(assigned(version=3)), 40)
    assert assignments.expire(10 + FORWARD_SECONDS).remove == [N]
    assert (len(assignments), assignments.get(N)) == (1, None)


def test_one_that_is_named_again_stays() -> None:
    assignments = Assignments()
    assignments.take(snapshot(assigned(), assigned(N)), 0)
    assignments.take(snapshot(assigned(version=2)), 10)
    # The last stream's version of it is nothing to this one, whose clock may be behind.
    assert [one.mode for one in assignments.take(change(assigned(N)), 20).apply] == [RouteMode.PROXY]
    assert assignments.take(change(assigned(N)), 20).apply == []
    assert assignments.expire(1000).remove == []


def test_gone_is_gone_at_once() -> None:
    assignments = Assignments()
    assignments.take(snapshot(assigned(), assigned(N)), 0)
    gone = pb.ModelAssignment(namespace="a", name="m", removed=True)
    assert assignments.take(change(gone), 0).remove == [M]
    assert assignments.take(change(gone), 0).remove == []
    assert not assignments.allows(M, "10.0.0.1")
    assert [one.version for one in assignments.take(change(assigned(version=1)), 0).apply] == [1]


def test_a_removed_model_that_no_stream_named_is_removed_once() -> None:
    assignments = Assignments()
    assignments.take(snapshot(assigned(), assigned(N)), 0)
    assignments.take(snapshot(assigned(version=2)), 10)
    removal = pb.ModelAssignment(namespace="b", name="n", removed=True)
    assert assignments.take(change(removal), 20).remove == [N]
    assert assignments.expire(1000).remove == []


def test_an_assignment_that_cannot_be_read_is_ignored_and_the_rest_counts() -> None:
    assignments = Assignments()
    changes = assignments.take(snapshot(assigned(mode=0), assigned(N)), 0)
    assert [one.model for one in changes.apply] == [N]
    assert assignments.has_snapshot


def test_what_is_broken_of_a_model_that_is_known_leaves_it_as_it_was() -> None:
    assignments = Assignments()
    assignments.take(snapshot(assigned()), 0)
    changes = assignments.take(snapshot(assigned(version=2, mode=0)), 10)
    assert (changes.apply, changes.remove) == ([], [])
    told = assignments.get(M)
    assert told is not None
    assert told.mode is RouteMode.PROXY
