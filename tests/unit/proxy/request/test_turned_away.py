"""Whoever was rejected was load: of every way to be refused for want of room the scaler hears as of an arrival, once."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy.downstream.rest import checking
from proxy.gateway.spec import Spec
from proxy.policy.refusal import NotServed, Refusal, Why
from proxy.request.messages import framed
from proxy.request.replica import Replica
from proxy.wire.preamble import Kind, Preamble
from tests.fakes.agent_control import replica_of
from tests.fakes.data_plane import GrpcPair, RestPair, own_replica, settle, triton_at_hand
from tests.fakes.eventually import until
from tests.fakes.gateway_plane import Plane
from tests.fakes.grpc_peers import Client, request
from tests.unit.proxy.downstream.test_connection import infer

MIB = 1024**2


@pytest.fixture
def triton() -> Any:
    with RestPair.triton_at_hand(), triton_at_hand():
        yield


def nobody() -> None:
    """Told of a slot."""


def arrived(replica: Replica) -> int:
    return replica._meter.arrived


def rest(replica: Replica, sent: bytes = b"") -> RestPair:
    pair = RestPair(replica=replica)
    pair.client.data_received(sent or infer())
    return pair


def call(replica: Replica) -> GrpcPair:
    pair = GrpcPair(replica=replica)
    client = Client(pair)
    client.send(client.call(), framed(request()), end=True)
    client.exchange()
    return pair


async def full_queue() -> Replica:
    replica = own_replica(limit=1, depth=0)
    replica.admissions.admit(0.0, nobody)
    return rest(replica).downstream.replica


async def no_room_in_triton() -> Replica:
    replica = own_replica(limit=1, depth=0)
    replica.admissions.bytes.charge(replica.limits.max_inflight_bytes)
    replica._meter.refused()  # the other ways have one that is there already
    return rest(replica).downstream.replica


async def no_room_for_what_comes() -> Replica:
    replica = own_replica()
    replica._meter.refused()
    replica.budget.charge(replica.limits.max_inflight_bytes)
    return rest(replica, infer()[:-1]).downstream.replica


async def no_room_for_a_call() -> Replica:
    replica = own_replica()
    replica._meter.refused()
    replica.budget.charge(replica.limits.max_inflight_bytes)
    call(replica)
    return replica


async def held_back() -> Replica:
    replica = own_replica()
    replica._meter.refused()
    replica.closed = "Triton died with a request of it"
    return rest(replica).downstream.replica


async def too_many_to_check() -> Replica:
    replica = own_replica(max_json_bytes=MIB)
    replica._meter.refused()
    pair = RestPair(replica=replica)

    async def full(*_: Any) -> Any:
        raise Refusal(Why.NO_ROOM, "256 bodies wait to be checked already")

    pair.downstream.shared.checker.check = full  # type: ignore[method-assign, assignment]
    pair.client.data_received(infer(b"1" * (checking.INLINE_BYTES + 1)))
    await settle()
    return replica


async def out_of_time_in_the_queue() -> Replica:
    replica = own_replica(limit=1, depth=5)
    replica.admissions.admit(0.0, nobody)
    pair = rest(replica)
    pair.client.tick(1e12)
    return replica


async def out_of_time_in_the_queue_of_calls() -> Replica:
    replica = own_replica(limit=1, depth=5)
    replica.admissions.admit(0.0, nobody)
    call(replica).client.tick(1e12)
    return replica


async def no_triton() -> Replica:
    replica = own_replica()
    replica._meter.refused()
    pair = RestPair(replica=replica)

    def away(*_: Any) -> Any:
        raise NotServed("Triton does not answer")

    pair.downstream.shared.pool.take = away  # type: ignore[method-assign, assignment]
    pair.client.data_received(infer())
    return replica


WAYS = (
    full_queue,
    no_room_in_triton,
    no_room_for_what_comes,
    no_room_for_a_call,
    held_back,
    too_many_to_check,
    out_of_time_in_the_queue,
    out_of_time_in_the_queue_of_calls,
    no_triton,
)


@pytest.mark.parametrize("way", WAYS)
async def test_who_is_rejected_has_arrived(way: Callable[[], Awaitable[Replica]], triton: Any) -> None:
    """One that is there, and one that is refused."""
    replica = await way()
    assert arrived(replica) == 2
    refused = {**replica.rest.codes, **replica.grpc.codes}
    assert sum(refused.values()) == 1
    assert not refused.keys() & {"200", "OK"}


async def test_a_body_that_is_refused_for_what_it_says_has_not_arrived(triton: Any) -> None:
    """However long it is: no replica more would serve it."""
    replica = own_replica(max_json_bytes=MIB)
    pair = RestPair(replica=replica)
    pair.client.data_received(infer(b"1" * (checking.INLINE_BYTES + 1)))
    await until(lambda: sum(replica.rest.codes.values()) == 1)
    assert replica.rest.codes == {"400": 1}
    assert arrived(replica) == 0


@pytest.mark.parametrize("draining", [True, False])
async def test_a_connection_that_finds_no_place_or_no_replica_has_arrived(draining: bool) -> None:
    plane = Plane(most_connections=0)
    await plane.apply(Spec(replicas=(replica_of("a"),), draining=frozenset("a") if draining else frozenset()))
    assert plane.router.route(Preamble(Kind.REST, replica_of("a").ticket)) is None
    assert plane.router.route(Preamble(Kind.GRPC, replica_of("b").ticket)) is None  # of no replica
    assert arrived(plane.replica("a")) == 1
    await plane.data_plane.close()
