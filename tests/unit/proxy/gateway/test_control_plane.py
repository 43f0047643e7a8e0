"""The control plane without a socket and with the clock in hand."""

import logging

import pytest

from berth.contract.gateway import ReplicaLimits
from proxy.gateway.control_plane import ControlPlane
from proxy.gateway.registry import Ceilings
from proxy.gateway.spec import Spec, Status
from tests.fakes.agent_control import replica_of

CEILINGS = Ceilings(
    request_timeout_seconds=100, max_json_bytes=10, max_request_bytes=20, max_inflight_bytes=40
)


class Workers:
    """Records the specs; reports the statuses that it is given."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self.said = [Status(), Status()]

    def apply(self, spec: Spec) -> None:
        self.specs.append(spec)

    def statuses(self) -> list[Status]:
        return self.said


def control_plane() -> tuple[ControlPlane, Workers]:
    workers = Workers()
    return ControlPlane(workers, CEILINGS), workers


def test_no_spec_before_the_agent_has_listed_and_then_only_one_that_is_new() -> None:
    one, workers = control_plane()
    one.step(0)
    assert workers.specs == []
    assert one.not_ready() is not None
    one.list_replicas([])
    assert one.not_ready() is None
    one.step(1)
    one.step(2)
    assert workers.specs == [Spec()]
    one.list_replicas([replica_of("a")])
    one.step(3)
    one.list_replicas([replica_of("a")])
    one.step(4)
    assert [len(spec.replicas) for spec in workers.specs] == [0, 1]


def test_ceilings() -> None:
    one, workers = control_plane()
    wanted = ReplicaLimits(request_timeout_seconds=1000, max_inflight_bytes=15, max_json_bytes=5)
    one.list_replicas([replica_of("a"), replica_of("b", limits=wanted)])
    one.step(0)
    first, second = (replica.limits for replica in workers.specs[0].replicas)
    assert (first.request_timeout_seconds, first.max_json_bytes) == (100, 10)
    assert (first.max_request_bytes, first.max_inflight_bytes) == (20, 40)
    assert (second.max_json_bytes, second.max_request_bytes, second.max_inflight_bytes) == (5, 15, 15)
    small = CEILINGS.capped(ReplicaLimits(max_json_bytes=9, max_request_bytes=7))
    assert (small.max_json_bytes, small.max_request_bytes) == (7, 7)  # nor does a packed one unpack to more


def test_a_drain_is_over_when_it_is_in_every_process_or_its_time_is_up() -> None:
    one, workers = control_plane()
    one.list_replicas([replica_of("a"), replica_of("b"), replica_of("c")])
    workers.said = [Status(idle=frozenset({"a", "b"})), Status()]
    one.drain("a", 10, now=0)
    one.drain("b", 5, now=0)
    one.step(1)
    assert workers.specs[-1].draining == {"a", "b"}
    assert not one.messages
    assert one.is_draining
    workers.said[1] = Status(idle=frozenset({"a"}))
    one.step(2)
    assert list(one.messages) == [{"drained": "a"}]
    assert workers.specs[-1].drained == {"a"}
    one.step(5)
    assert len(one.messages) == 1
    one.step(5.1)
    assert list(one.messages) == [{"drained": "a"}, {"drained": "b"}]
    assert not one.is_draining
    one.drain("b", 5, now=6)
    one.drain("unknown", 5, now=6)
    one.drain("c", 5, now=6)
    one.drain("c", 100, now=7)  # asked again, it is no later
    one.step(11.1)
    assert one.messages.pop() == {"drained": "c"}
    assert list(one.messages)[2:] == [{"drained": "b"}, {"drained": "unknown"}]


def test_a_pods_proxy_may_ask_for_a_drain_which_the_agent_is_not_told_of() -> None:
    one, workers = control_plane()
    one.list_replicas([replica_of("a")])
    workers.said = [Status(drain_requests=frozenset({"a", "gone"})), Status()]
    one.step(0)
    assert workers.specs[-1].draining == {"a"}
    one.step(10_000)
    assert workers.specs[-1].drained == frozenset()
    workers.said = [
        Status(idle=frozenset({"a"}), drain_requests=frozenset({"a"})),
        Status(idle=frozenset({"a"})),
    ]
    one.step(10_001)
    assert workers.specs[-1].drained == {"a"}
    assert not one.messages
    workers.said = [Status(idle=frozenset({"a"}))] * 2  # the sidecar has gone: it may come again
    one.step(10_002)
    assert (workers.specs[-1].draining, workers.specs[-1].drained) == (frozenset(), frozenset())


def test_a_pods_proxy_that_drains_and_goes_again_and_again_logs_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """data-plane D6. What the agent requests is written each time."""
    caplog.set_level(logging.INFO, logger="proxy.gateway.control_plane")
    one, workers = control_plane()
    one.list_replicas([replica_of("a"), replica_of("b")])

    def lines() -> list[str]:
        return [vars(record)["fields"]["pod_uid"] for record in caplog.records if record.message == "drained"]

    def drains(uid: str, now: float) -> None:
        workers.said = [Status(idle=frozenset({uid}), drain_requests=frozenset({uid}))]
        one.step(now)
        assert workers.specs[-1].drained == {uid}
        workers.said = [Status(idle=frozenset({uid}))]
        one.step(now + 0.05)
        assert workers.specs[-1].drained == frozenset()

    for number in range(300):
        drains("a", number / 10)
    assert lines() == ["a"]
    drains("b", 30)  # another one's is its own
    drains("a", 60)
    assert lines() == ["a", "b", "a"]
    one.drain("a", 10, now=61)
    workers.said = [Status(idle=frozenset({"a"}))]
    one.step(62)
    assert lines() == ["a", "b", "a", "a"]
    one.list_replicas([])
    one.list_replicas([replica_of("a")])
    drains("a", 63)
    assert lines() == ["a", "b", "a", "a", "a"]


def test_all_processes_learn_that_a_pods_proxy_will_end() -> None:
    one, workers = control_plane()
    one.list_replicas([replica_of("a"), replica_of("b")])
    workers.said = [Status(leaving=frozenset({"a", "gone"})), Status()]
    one.step(0)
    assert (workers.specs[-1].leaving, workers.specs[-1].draining) == ({"a"}, frozenset())
    workers.said = [Status(), Status()]
    one.step(1)
    assert workers.specs[-1].leaving == frozenset()


def test_a_pod_that_comes_back_is_not_drained() -> None:
    one, workers = control_plane()
    one.list_replicas([replica_of("a")])
    one.drain("a", 0, now=0)
    one.step(1)
    one.list_replicas([])
    one.list_replicas([replica_of("a")])
    one.step(2)
    assert (workers.specs[-1].draining, workers.specs[-1].drained) == (frozenset(), frozenset())


def test_a_drain_ends_with_the_agent_that_requested_it_and_not_one_of_a_pods_proxy() -> None:
    one, workers = control_plane()
    one.list_replicas([replica_of("a"), replica_of("b"), replica_of("c")])
    for uid in ("a", "b"):
        one.drain(uid, 60, now=0)
    workers.said = [Status(idle=frozenset({"b"}), drain_requests=frozenset({"c"}))]
    one.step(1)
    assert workers.specs[-1].drained == {"b"}
    one.list_replicas([replica_of("a"), replica_of("b"), replica_of("c")], is_new_agent=True)
    one.step(2)
    assert (workers.specs[-1].draining, workers.specs[-1].drained) == ({"c"}, frozenset())


def test_one_crash_is_one_however_many_processes_report_it() -> None:
    one, _ = control_plane()
    one.list_replicas([replica_of("a"), replica_of("b")])
    one.triton_crashed({"a"}, now=100)
    one.step(100.5, settle_seconds=1)
    assert not one.messages
    one.triton_crashed({"b"}, now=100.6)
    one.step(101.1, settle_seconds=1)
    assert list(one.messages) == [{"tritonDied": {"suspects": ["a", "b"]}}]
    one.step(103, settle_seconds=1)
    assert len(one.messages) == 1
    assert one.triton_crashes == 1


def test_a_replica_that_was_alone_in_two_crashes_is_ejected_for_a_time() -> None:
    one, workers = control_plane()
    one.list_replicas([replica_of("a"), replica_of("b")])
    for now in (100, 200):
        one.triton_crashed({"a"}, now=now)
        one.step(now)
    assert set(workers.specs[-1].ejected) == {"a"}
    assert one.ejected == {"a"}
    one.step(259)
    assert set(workers.specs[-1].ejected) == {"a"}
    one.step(260)
    assert not workers.specs[-1].ejected


def test_messages_that_the_agent_has_missed_are_bounded() -> None:
    one, _ = control_plane()
    for number in range(1000):
        one.drain(f"{number}", 1, now=0)
    assert len(one.messages) == 64
