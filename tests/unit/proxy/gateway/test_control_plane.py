"""What is told and what is done about it, without a socket and with the clock in hand."""

import logging
import os
from dataclasses import replace
from typing import Any

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.gateway import ReplicaLimits
from proxy.gateway.control_plane import ControlPlane
from proxy.gateway.registry import Ceilings, Registry, read_copies
from proxy.gateway.shared_limit import UNLIMITED, SharedLimit
from proxy.gateway.spec import ReplicaStats, Spec, Status, aggregate
from proxy.request.load import LoadReport
from proxy.request.traffic import Figures
from tests.fakes.agent_control import copy_of

CEILINGS = Ceilings(
    request_timeout_seconds=100, max_json_bytes=10, max_request_bytes=20, max_inflight_bytes=40
)


class Workers:
    """Records the orders; says what it is given to say."""

    def __init__(self) -> None:
        self.orders: list[Spec] = []
        self.said = [Status(), Status()]

    def apply(self, orders: Spec) -> None:
        self.orders.append(orders)

    def statuses(self) -> list[Status]:
        return self.said


def control_plane() -> tuple[ControlPlane, Workers]:
    planes = Workers()
    return ControlPlane(planes, CEILINGS), planes


def test_nothing_is_ordered_before_the_agent_has_told_and_then_only_what_is_news() -> None:
    one, planes = control_plane()
    one.step(0)
    assert planes.orders == []
    assert one.not_ready() is not None
    one.take_copies([])
    assert one.not_ready() is None
    one.step(1)
    one.step(2)
    assert planes.orders == [Spec()]
    one.take_copies([copy_of("a")])
    one.step(3)
    one.take_copies([copy_of("a")])
    one.step(4)
    assert [len(orders.copies) for orders in planes.orders] == [0, 1]


def test_ceilings() -> None:
    one, planes = control_plane()
    wanted = ReplicaLimits(request_timeout_seconds=1000, max_inflight_bytes=15, max_json_bytes=5)
    one.take_copies([copy_of("a"), copy_of("b", limits=wanted)])
    one.step(0)
    first, second = (copy.limits for copy in planes.orders[0].copies)
    assert (first.request_timeout_seconds, first.max_json_bytes) == (100, 10)
    assert (first.max_request_bytes, first.max_inflight_bytes) == (20, 40)
    assert (second.max_json_bytes, second.max_request_bytes, second.max_inflight_bytes) == (5, 15, 15)
    small = CEILINGS.clip(ReplicaLimits(max_json_bytes=9, max_request_bytes=7))
    assert (small.max_json_bytes, small.max_request_bytes) == (7, 7)  # nor does a packed one unpack to more


@pytest.mark.parametrize(
    ("asked", "whole", "json"),
    [
        (
            {},
            "--max-request-bytes, bounded by --most-request-bytes of the node's gateway",
            "--max-json-bytes",
        ),
        ({"max_request_bytes": 19, "max_json_bytes": 9}, "--max-request-bytes", "--max-json-bytes"),
        (
            {"max_request_bytes": 19, "max_json_bytes": 11},
            "--max-request-bytes",
            "--max-json-bytes, bounded by --most-json-bytes of the node's gateway",
        ),
        ({"max_request_bytes": 7}, "--max-request-bytes", "--max-request-bytes"),
        ({"max_inflight_bytes": 8}, *2 * ("--most-inflight-bytes of the node's gateway",)),
    ],
)
def test_who_is_refused_is_told_what_its_operator_can_change(
    asked: dict[str, int], whole: str, json: str
) -> None:
    """A pod that asks for more than a ceiling gets no more by asking again."""
    limits = CEILINGS.clip(ReplicaLimits(**{"max_json_bytes": 9, **asked}))
    flags = CEILINGS.flags(limits)
    assert (flags.request, flags.json) == (whole, json)
    assert flags.inflight == "--most-inflight-bytes of the node's gateway"


def test_a_drain_is_over_when_it_is_in_every_process_or_its_time_is_up() -> None:
    one, planes = control_plane()
    one.take_copies([copy_of("a"), copy_of("b"), copy_of("c")])
    planes.said = [Status(idle=frozenset({"a", "b"})), Status()]
    one.drain("a", 10, now=0)
    one.drain("b", 5, now=0)
    one.step(1)
    assert planes.orders[-1].draining == {"a", "b"}
    assert not one.news
    assert one.is_draining
    planes.said[1] = Status(idle=frozenset({"a"}))
    one.step(2)
    assert list(one.news) == [{"drained": "a"}]
    assert planes.orders[-1].drained == {"a"}
    one.step(5)
    assert len(one.news) == 1
    one.step(5.1)
    assert list(one.news) == [{"drained": "a"}, {"drained": "b"}]
    assert not one.is_draining
    one.drain("b", 5, now=6)
    one.drain("unknown", 5, now=6)
    one.drain("c", 5, now=6)
    one.drain("c", 100, now=7)  # asked again, it is no later
    one.step(11.1)
    assert one.news.pop() == {"drained": "c"}
    assert list(one.news)[2:] == [{"drained": "b"}, {"drained": "unknown"}]


def test_a_doors_wish_drains_and_the_agent_that_has_not_asked_is_not_told() -> None:
    one, planes = control_plane()
    one.take_copies([copy_of("a")])
    planes.said = [Status(drain_requests=frozenset({"a", "gone"})), Status()]
    one.step(0)
    assert planes.orders[-1].draining == {"a"}
    one.step(10_000)
    assert planes.orders[-1].drained == frozenset()
    planes.said = [
        Status(idle=frozenset({"a"}), drain_requests=frozenset({"a"})),
        Status(idle=frozenset({"a"})),
    ]
    one.step(10_001)
    assert planes.orders[-1].drained == {"a"}
    assert not one.news
    planes.said = [Status(idle=frozenset({"a"}))] * 2  # the door has gone: it may come again
    one.step(10_002)
    assert (planes.orders[-1].draining, planes.orders[-1].drained) == (frozenset(), frozenset())


def test_a_door_that_drains_and_goes_again_and_again_writes_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """data-plane D6. What the agent asks for is written each time."""
    caplog.set_level(logging.INFO, logger="proxy.gateway.control_plane")
    one, planes = control_plane()
    one.take_copies([copy_of("a"), copy_of("b")])

    def lines() -> list[str]:
        return [vars(record)["fields"]["pod_uid"] for record in caplog.records if record.message == "drained"]

    def drains(uid: str, now: float) -> None:
        planes.said = [Status(idle=frozenset({uid}), drain_requests=frozenset({uid}))]
        one.step(now)
        assert planes.orders[-1].drained == {uid}
        planes.said = [Status(idle=frozenset({uid}))]
        one.step(now + 0.05)
        assert planes.orders[-1].drained == frozenset()

    for number in range(300):
        drains("a", number / 10)
    assert lines() == ["a"]
    drains("b", 30)  # another one's is its own
    drains("a", 60)
    assert lines() == ["a", "b", "a"]
    one.drain("a", 10, now=61)
    planes.said = [Status(idle=frozenset({"a"}))]
    one.step(62)
    assert lines() == ["a", "b", "a", "a"]
    one.take_copies([])
    one.take_copies([copy_of("a")])
    drains("a", 63)
    assert lines() == ["a", "b", "a", "a", "a"]


def test_a_door_that_will_leave_is_heard_by_all_processes() -> None:
    one, planes = control_plane()
    one.take_copies([copy_of("a"), copy_of("b")])
    planes.said = [Status(leaving=frozenset({"a", "gone"})), Status()]
    one.step(0)
    assert (planes.orders[-1].leaving, planes.orders[-1].draining) == ({"a"}, frozenset())
    planes.said = [Status(), Status()]
    one.step(1)
    assert planes.orders[-1].leaving == frozenset()


def test_a_pod_that_comes_back_is_not_drained() -> None:
    one, planes = control_plane()
    one.take_copies([copy_of("a")])
    one.drain("a", 0, now=0)
    one.step(1)
    one.take_copies([])
    one.take_copies([copy_of("a")])
    one.step(2)
    assert (planes.orders[-1].draining, planes.orders[-1].drained) == (frozenset(), frozenset())


def test_what_an_agent_asked_ends_with_it_and_what_a_door_wishes_does_not() -> None:
    one, planes = control_plane()
    one.take_copies([copy_of("a"), copy_of("b"), copy_of("c")])
    for uid in ("a", "b"):
        one.drain(uid, 60, now=0)
    planes.said = [Status(idle=frozenset({"b"}), drain_requests=frozenset({"c"}))]
    one.step(1)
    assert planes.orders[-1].drained == {"b"}
    one.take_copies([copy_of("a"), copy_of("b"), copy_of("c")], anew=True)
    one.step(2)
    assert (planes.orders[-1].draining, planes.orders[-1].drained) == ({"c"}, frozenset())


def test_one_death_is_one_however_many_processes_tell_of_it() -> None:
    one, _ = control_plane()
    one.take_copies([copy_of("a"), copy_of("b")])
    one.triton_crashed({"a"}, now=100)
    one.step(100.5, settle_seconds=1)
    assert not one.news
    one.triton_crashed({"b"}, now=100.6)
    one.step(101.1, settle_seconds=1)
    assert list(one.news) == [{"tritonDied": {"suspects": ["a", "b"]}}]
    one.step(103, settle_seconds=1)
    assert len(one.news) == 1
    assert one.triton_crashes == 1


def test_who_was_alone_in_it_twice_is_held_for_its_time() -> None:
    one, planes = control_plane()
    one.take_copies([copy_of("a"), copy_of("b")])
    for now in (100, 200):
        one.triton_crashed({"a"}, now=now)
        one.step(now)
    assert set(planes.orders[-1].held) == {"a"}
    assert one.held == {"a"}
    one.step(259)
    assert set(planes.orders[-1].held) == {"a"}
    one.step(260)
    assert not planes.orders[-1].held


def test_what_the_agent_has_not_heard_is_bounded() -> None:
    one, _ = control_plane()
    for number in range(1000):
        one.drain(f"{number}", 1, now=0)
    assert len(one.news) == 64


def test_one_sum_of_all_processes() -> None:
    def status(uid: str, count: int) -> Status:
        figures = Figures(running=count)
        figures.rest.answered("200", 0.1)
        return Status(
            stats={uid: ReplicaStats(figures, LoadReport(count, 1.0, 5.0 * count, 7.0, 10 + count, count))}
        )

    total = aggregate([status("a", 1), status("a", 2), status("b", 9)], "a")
    assert total is not None
    assert (total.figures.running, total.figures.rest.codes) == (3, {"200": 2})
    assert total.load == LoadReport(
        3, 2.0, 10.0, 7.0, second=11, last_arrival=2
    )  # a second that both have closed
    assert aggregate([status("a", 1)], "c") is None
    said = replace(
        status("a", 3),
        idle=frozenset("i"),
        drain_requests=frozenset("w"),
        leaving=frozenset("l"),
        rejected={"late": 1},
        connections=2,
    )
    assert Status.from_json(said.to_json()) == said
    orders = Spec(
        copies=(copy_of("a"),),
        held={"a": "why"},
        draining=frozenset("a"),
        drained=frozenset("b"),
        leaving=frozenset("l"),
    )
    assert Spec.from_json(orders.to_json()) == orders


def test_new_changed_ended() -> None:
    registry = Registry()
    a, b = copy_of("a"), copy_of("b")
    assert registry.apply([a, b]).new == (a, b)
    other = copy_of("b", limits=ReplicaLimits(container_concurrency=1))
    changes = registry.apply([a, other])
    assert (changes.new, changes.changed, changes.ended) == ((), (other,), ())
    # The same pod with another name on the server is another copy: the old one's connections end.
    moved = copy_of("b", server_name="simple-of-b-anew")
    changes = registry.apply([moved])
    assert (changes.new, changes.ended) == ((moved,), (a, other))
    # So is one with another ticket, as when the node's secret was made anew: the old one opens nothing more.
    anew = copy_of("b", server_name="simple-of-b-anew", ticket=bytes(32))
    changes = registry.apply([anew])
    assert (changes.new, changes.ended) == ((anew,), (moved,))


@pytest.mark.parametrize(
    "wrong",
    [
        {"podUid": ""},
        {"serverName": "s"},
        {"ticket": "zz"},
        {"withheld": 5},
        {"limits": {}},
        {"limits": {**copy_of("a").to_json()["limits"], "containerConcurrency": -1}},
        {"limits": {**copy_of("a").to_json()["limits"], "requestTimeoutSeconds": 0}},
        {"limits": {**copy_of("a").to_json()["limits"], "requestTimeoutSeconds": float("nan")}},
        {"limits": {**copy_of("a").to_json()["limits"], "maxJsonBytes": 0}},
    ],
)
def test_copies_that_cannot_be(wrong: dict[str, Any]) -> None:
    good = copy_of("a").to_json()
    assert read_copies([good]) == (copy_of("a"),)
    with pytest.raises(InvalidValue):
        read_copies([copy_of("b").to_json(), {**good, **wrong}])


def free(descriptor: int) -> int:
    count = 0
    while True:
        try:
            os.eventfd_read(descriptor)
        except BlockingIOError:
            break
        count += 1
    if count:
        os.eventfd_write(descriptor, count)
    return count


def test_a_shared_limit_grows_at_once_and_shrinks_as_it_is_given_back() -> None:
    limit = SharedLimit(ReplicaLimits(container_concurrency=5, queue_depth=7))
    slots, places = limit.descriptors
    assert (free(slots), free(places)) == (5, 7)
    for _ in range(4):
        os.eventfd_read(slots)
    limit.resize(ReplicaLimits(container_concurrency=2, queue_depth=9))
    assert (free(slots), free(places)) == (0, 9)
    assert not limit.is_settled
    limit.resize(ReplicaLimits(container_concurrency=1, queue_depth=9))  # what is owed adds up
    for left in (0, 0, 0, 1):
        os.eventfd_write(slots, 1)
        limit.settle()
        assert free(slots) == left
    assert limit.is_settled
    limit.resize(ReplicaLimits())
    assert free(slots) == UNLIMITED
    limit.close()
