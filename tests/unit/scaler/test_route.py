"""The way of a model's requests from its replicas to the activators and back, step by step."""

from dataclasses import replace
from typing import Any

import pytest

from berth.contract.activation import ReplicaEndpoint, RouteMode
from berth.contract.ids import PodUid
from berth.contract.scaling import ModelKey
from scaler.activation.activators import LINGER_NS, RETURN_NS, Activator, Activators
from scaler.activation.ports import PortAllocator, PortPair
from scaler.activation.route import (
    FORWARD_NS,
    NO_ACTIVATOR,
    NO_PORTS,
    NO_SERVICE,
    QUIET_NS,
    Apply,
    Delete,
    ObservedService,
    RouteDecision,
    RouteSpec,
    RouteState,
    reconcile_route,
)
from scaler.activation.slices import BerthSlice, Service, ServicePort, ServiceRef, desired_slice
from scaler.go import SECOND_NS

MODEL, OTHER = ModelKey("a", "m"), ModelKey("a", "other")
T0 = 1_700_000_000 * SECOND_NS
REST, GRPC = ServicePort("http", is_grpc=False), ServicePort("grpc", is_grpc=True)
SERVICE = Service(ServiceRef("a", "m"), "service-uid", (REST, GRPC))
POD = ReplicaEndpoint(
    uid="u", name="p", address="10.0.0.9", rest_port=9000, grpc_port=9001, slots=4, ready=True
)


class World:
    """One model, the API server's slices, and the activators; time goes by when it is told to."""

    def __init__(self, activators: int = 2, *, ports: PortAllocator | None = None) -> None:
        self.now = T0
        self.activators = Activators(began_ns=T0 - RETURN_NS)
        self.ports = PortAllocator() if ports is None else ports
        self.state = RouteState()
        self.spec = RouteSpec(model=MODEL, needs_proxy=False, public_name="m", endpoints=(POD,))
        self.services = [ObservedService(SERVICE, ready=1)]
        self.connected = [self.connect(n) for n in range(activators)]

    def connect(self, n: int, scope: str | None = None) -> Activator:
        return self.activators.connect(PodUid(f"act-{n}"), f"act-{n}", f"10.0.1.{n}", scope)

    @property
    def pair(self) -> PortPair:
        pair = self.ports.get(MODEL)
        assert pair is not None
        return pair

    def reconcile(self, *, after: int = 0, **spec: Any) -> RouteDecision:
        self.now += after
        self.spec = replace(self.spec, **spec)
        self.state, decision = reconcile_route(
            self.state, self.spec, self.services, self.activators, self.ports.allocate, self.now
        )
        return decision

    def adopt(self) -> None:
        """As a scaler that starts keeps the ports of the slices that exist."""
        for service in self.services:
            if service.ours is not None:
                self.ports.adopt(MODEL, service.ours.ports[0].number)

    def listen(self, *which: Activator) -> None:
        for one in which or self.connected:
            self.activators.set_open(one, MODEL, self.pair)
            one.has_reported = True

    def write(self, decision: RouteDecision) -> None:
        """The API server has it."""
        for action in decision.slices:
            self.services = [
                replace(seen, ours=action.slice if isinstance(action, Apply) else None, since_ns=self.now)
                if seen.service.ref == action.slice.service
                else seen
                for seen in self.services
            ]

    def serve(self, ready: int) -> None:
        self.services = [replace(seen, ready=ready) for seen in self.services]

    def proxied(self) -> None:
        """The activators listen, and nothing is written yet."""
        self.reconcile(needs_proxy=True)
        self.listen()

    def at_zero(self) -> RouteDecision:
        """All the way, and the last copy is gone."""
        self.proxied()
        self.write(self.reconcile())
        self.serve(0)
        return self.reconcile(after=SECOND_NS, endpoints=())


def asleep() -> World:
    world = World()
    world.at_zero()
    return world


def applied(decision: RouteDecision) -> list[tuple[str, ...]]:
    return [one.slice.addresses for one in decision.slices if isinstance(one, Apply)]


def test_a_model_with_replicas_costs_nothing() -> None:
    world = World()
    assert world.reconcile() == RouteDecision()
    assert world.ports.get(MODEL) is None


def test_to_zero_in_this_order() -> None:
    world = World()
    # Told to hold, and nothing is written before somebody listens.
    first = world.reconcile(needs_proxy=True)
    assert (first.mode, first.slices, first.proven) == (RouteMode.PROXY, (), False)
    assert set(first.assignments) == {"act-0", "act-1"}
    told = first.assignments[PodUid("act-0")]
    assert (told.mode, told.rest_port, told.grpc_port, told.activators) == (RouteMode.PROXY, *world.pair, 2)
    # One of them listens: it is written, and is not proven before that is seen.
    world.listen(world.connected[0])
    half = world.reconcile()
    assert applied(half) == [("10.0.1.0",)]
    assert not half.proven
    world.write(half)
    assert world.reconcile().proven
    # The second joins in: not proven until it stands there.
    world.listen(world.connected[1])
    both = world.reconcile(after=SECOND_NS)
    assert applied(both) == [("10.0.1.0", "10.0.1.1")]
    world.write(both)
    done = world.reconcile(after=SECOND_NS)
    assert done.proven
    assert done.slices == ()
    assert done.proxied_since_ns is not None
    assert not done.quiet  # nobody knows when the last request came


def test_the_slice_names_the_services_ports_with_the_models_numbers() -> None:
    world = World(1)
    world.services = [
        ObservedService(replace(SERVICE, ports=(replace(REST, app_protocol="http"), GRPC)), ready=1)
    ]
    world.proxied()
    (action,) = world.reconcile().slices
    assert isinstance(action, Apply)
    assert action.slice.to_json() == {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "m-berth",
            "namespace": "a",
            "labels": {
                "kubernetes.io/service-name": "m",
                "endpointslice.kubernetes.io/managed-by": "berth-scaler",
            },
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": "m", "uid": "service-uid"}],
        },
        "addressType": "IPv4",
        "ports": [
            {"name": "http", "port": world.pair.rest, "protocol": "TCP", "appProtocol": "http"},
            {"name": "grpc", "port": world.pair.grpc, "protocol": "TCP"},
        ],
        "endpoints": [
            {
                "addresses": ["10.0.1.0"],
                "conditions": {"ready": True, "serving": True, "terminating": False},
            }
        ],
    }


@pytest.mark.parametrize(
    ("arrival", "at", "quiet"),
    [
        (None, 60 * SECOND_NS, False),
        (T0 - 60 * SECOND_NS, SECOND_NS, False),
        (T0, QUIET_NS - 1, False),
        (T0, QUIET_NS, True),
        (T0 + 3 * SECOND_NS, QUIET_NS, False),
        (T0 + 3 * SECOND_NS, QUIET_NS + 3 * SECOND_NS, True),
    ],
)
def test_a_model_is_quiet_when_no_replica_has_had_a_request_since_the_switch(
    arrival: int | None, at: int, quiet: bool
) -> None:
    world = World()
    world.proxied()
    world.write(world.reconcile())
    assert world.reconcile().proxied_since_ns == T0
    assert world.reconcile(after=at, last_arrival_ns=arrival).quiet is quiet


def test_how_long_clients_are_waited_for() -> None:
    assert (QUIET_NS, FORWARD_NS) == (5 * SECOND_NS, 60 * SECOND_NS)


def test_a_slice_that_leads_nowhere_proves_nothing() -> None:
    """What is left of one when the last activator has died."""
    world = World(activators=1)
    world.proxied()
    world.write(world.reconcile())
    assert world.reconcile().proven
    world.activators.disconnect(world.connected[0], world.now, gone=True)
    emptied = world.reconcile(after=SECOND_NS)
    assert applied(emptied) == [()]
    world.write(emptied)
    assert not world.reconcile(after=SECOND_NS).proven


def test_up_in_this_order() -> None:
    world = World()
    down = world.at_zero()
    assert (down.proven, down.mode) == (True, RouteMode.PROXY)
    # A copy is wanted and loads: requests are buffered, the slice stands, and copies are told of as they come.
    waking = world.reconcile(after=SECOND_NS, needs_proxy=False, endpoints=(replace(POD, ready=False),))
    assert waking.mode is RouteMode.PROXY
    assert waking.slices == ()
    assert not waking.proven
    assert [one.endpoints[0].ready for one in waking.assignments.values()] == [False, False]
    # It is ready in the controller's slice: ours goes, and only when that is seen do clients connect anew.
    world.serve(1)
    up = world.reconcile(endpoints=(POD,))
    assert [type(one) for one in up.slices] == [Delete]
    assert up.mode is RouteMode.PROXY
    world.write(up)
    forward = world.reconcile(after=SECOND_NS)
    assert forward.mode is RouteMode.SERVE
    assert forward.slices == ()
    assert {one.mode for one in forward.assignments.values()} == {RouteMode.SERVE}
    assert world.reconcile(after=FORWARD_NS - 1).mode is RouteMode.SERVE
    off = world.reconcile(after=1)
    assert (off.needs_activators, off.assignments) == (False, {})


def test_while_a_model_wakes_its_slice_follows_the_activators() -> None:
    world = asleep()
    world.activators.disconnect(world.connected[0], world.now, gone=True)
    waking = world.reconcile(after=SECOND_NS, needs_proxy=False)
    assert applied(waking) == [("10.0.1.1",)]
    world.write(waking)
    # Deleted by somebody: it is wanted to be up, so it does not come back.
    world.services = [replace(world.services[0], ours=None)]
    assert world.reconcile().slices == ()


def test_who_held_for_it_the_last_time_has_nothing_to_do_with_it_the_next() -> None:
    world = asleep()
    world.serve(1)
    world.write(world.reconcile(needs_proxy=False))
    world.reconcile()
    assert world.reconcile(after=FORWARD_NS).needs_activators is False
    world.connected[0].draining = True
    assert set(world.reconcile(needs_proxy=True).assignments) == {"act-1"}


def test_it_turns_round_at_any_moment() -> None:
    world = World()
    world.reconcile(needs_proxy=True)
    assert world.reconcile(needs_proxy=False).mode is RouteMode.SERVE  # nothing was written
    assert world.reconcile(needs_proxy=True).mode is RouteMode.PROXY
    world.listen()
    late = world.reconcile()
    assert world.reconcile(needs_proxy=False).mode is RouteMode.SERVE
    world.write(late)  # the write that was under way
    back = world.reconcile()
    assert [type(one) for one in back.slices] == [Delete]
    assert back.mode is RouteMode.PROXY
    again = world.reconcile(needs_proxy=True)
    assert again.slices == ()
    assert again.proven


def test_replicas_that_are_away_for_a_moment_are_waited_for() -> None:
    """Nobody wanted it to sleep: its replicas have failed."""
    world = World()
    world.serve(0)
    world.proxied()
    assert applied(world.reconcile()) == [("10.0.1.0", "10.0.1.1")]


def test_a_slice_that_somebody_else_has_changed_is_mended_and_proves_nothing() -> None:
    world = asleep()
    (seen,) = world.services
    assert seen.ours is not None
    for harm in (
        replace(seen.ours, addresses=("10.9.9.9",)),
        replace(seen.ours, addresses=(*seen.ours.addresses, "10.9.9.9")),
        replace(seen.ours, ports=()),
        replace(seen.ours, service_uid="another"),
    ):
        world.services = [replace(seen, ours=harm)]
        decision = world.reconcile()
        assert applied(decision) == [("10.0.1.0", "10.0.1.1")]
        assert not decision.proven


def test_a_slice_that_is_deleted_comes_back() -> None:
    world = asleep()
    world.services = [replace(world.services[0], ours=None)]
    decision = world.reconcile()
    assert applied(decision) == [("10.0.1.0", "10.0.1.1")]
    assert decision.proxied_since_ns is None
    world.write(decision)
    assert world.reconcile(after=SECOND_NS).proxied_since_ns == world.now  # kube-proxies hear of it only now


def test_without_a_service_or_with_one_that_is_two_models_it_does_not_go_to_zero() -> None:
    world = World()
    world.services = []
    none = world.reconcile(needs_proxy=True)
    assert (none.needs_activators, none.failure, none.proven) == (False, NO_SERVICE, False)
    world.services = [ObservedService(SERVICE, ready=1, shared_with=OTHER)]
    shared = world.reconcile(needs_proxy=True)
    assert shared.failure == "Service m leads to a/other as well"
    assert not shared.proven
    assert not shared.assignments
    assert not shared.slices


def test_a_model_asleep_whose_service_gets_a_second_model_can_still_be_woken() -> None:
    world = asleep()
    world.services = [replace(world.services[0], shared_with=OTHER)]
    decision = world.reconcile()
    assert decision.mode is RouteMode.PROXY
    assert decision.slices == ()
    assert decision.assignments
    assert decision.failure
    assert not decision.proven


def test_when_all_ports_are_taken_it_stays_up() -> None:
    ports = PortAllocator(range(20000, 20002))
    ports.allocate(OTHER)
    decision = World(ports=ports).reconcile(needs_proxy=True)
    assert (decision.failure, decision.needs_activators, decision.proven) == (NO_PORTS, False, False)


def test_a_slice_whose_ports_cannot_be_had_is_ended() -> None:
    """It leads clients to another model's ports, or to none."""
    ports = PortAllocator(range(20000, 20002))
    taken = ports.allocate(OTHER)
    assert taken is not None
    world = World(ports=ports)
    world.services = [ObservedService(SERVICE, ready=0, ours=desired_slice(SERVICE, taken, ["10.0.1.0"]))]
    world.adopt()
    decision = world.reconcile(needs_proxy=True)
    assert [type(one) for one in decision.slices] == [Delete]
    assert (decision.failure, decision.needs_activators, decision.assignments) == (NO_PORTS, False, {})


def test_two_services_are_led_each_by_its_own_slice() -> None:
    world = World(1)
    second = Service(ServiceRef("a", "m-2"), "uid-2", (REST,))
    world.services = [ObservedService(SERVICE, ready=1), ObservedService(second, ready=1)]
    world.proxied()
    both = world.reconcile()
    assert [one.slice.name for one in both.slices] == ["m-berth", "m-2-berth"]
    world.write(replace(both, slices=both.slices[:1]))
    assert not world.reconcile().proven
    world.write(both)
    assert world.reconcile().proven
    # Up again: the one whose controller is late keeps its slice, and the activators hold on.
    world.services = [replace(world.services[0], ready=1), replace(world.services[1], ready=0)]
    decision = world.reconcile(needs_proxy=False)
    assert [(type(one), one.slice.name) for one in decision.slices] == [(Delete, "m-berth")]
    world.write(decision)
    assert world.reconcile().mode is RouteMode.PROXY


# Activators come and go.


def test_without_activators_nothing_is_written_and_no_model_scales_to_zero() -> None:
    decision = World(0).reconcile(needs_proxy=True)
    assert (decision.slices, decision.proven, decision.failure) == ((), False, NO_ACTIVATOR)


def test_one_that_dies_leaves_the_slice_and_one_whose_stream_breaks_stays_for_a_while() -> None:
    world = asleep()
    world.activators.disconnect(world.connected[0], world.now)
    still = world.reconcile(after=LINGER_NS - 1)
    assert still.proven
    assert still.slices == ()
    world.activators.disconnect(world.connected[1], world.now, gone=True)
    assert applied(world.reconcile()) == [("10.0.1.0",)]
    world.now += 1
    world.activators.expire(world.now)
    decision = world.reconcile()
    assert applied(decision) == [()]
    assert not decision.proven
    assert decision.failure == NO_ACTIVATOR


def test_one_that_leaves_is_taken_out_first_and_passes_on_what_still_comes() -> None:
    world = asleep()
    world.connected[0].draining = True
    decision = world.reconcile()
    assert applied(decision) == [("10.0.1.1",)]
    states = {uid: one.mode for uid, one in decision.assignments.items()}
    assert states == {"act-0": RouteMode.SERVE, "act-1": RouteMode.PROXY}
    assert decision.assignments[PodUid("act-1")].activators == 1
    assert set(world.reconcile(after=FORWARD_NS).assignments) == {"act-1"}


def test_the_last_ones_that_leave_pass_on_with_all_slots() -> None:
    world = asleep()
    for one in world.connected:
        one.draining = True
    told = world.reconcile().assignments.values()
    assert [(one.mode, one.activators) for one in told] == [(RouteMode.SERVE, 1)] * 2


def test_one_that_closes_its_ports_proves_nothing_any_more() -> None:
    world = asleep()
    world.activators.set_open(world.connected[0], MODEL, PortPair(0, 0))
    decision = world.reconcile()
    assert applied(decision) == [("10.0.1.1",)]
    assert not decision.proven


def test_half_a_pair_of_ports_is_none() -> None:
    world = World(1)
    world.reconcile(needs_proxy=True)
    world.activators.set_open(world.connected[0], MODEL, PortPair(world.pair.rest, 0))
    assert world.reconcile().slices == ()


def test_a_scaler_that_starts_leaves_standing_what_it_finds_until_it_knows() -> None:
    before = asleep()
    world = World(0)
    world.activators = Activators(began_ns=T0)
    world.services = before.services
    world.adopt()
    assert world.pair == before.pair
    first = world.reconcile(needs_proxy=True, endpoints=())
    assert first.slices == ()
    assert not first.proven
    # One of the two comes back.
    one = world.connect(0)
    assert world.reconcile().slices == ()
    world.listen(one)
    assert world.reconcile().slices == ()
    assert not world.reconcile().proven
    world.listen(world.connect(1))
    # Since it was written by another: the grace period does not begin again.
    back = world.reconcile(after=SECOND_NS)
    assert back.proven
    assert back.proxied_since_ns == T0
    # Had it not come, it would have been taken out.
    world.activators = Activators(began_ns=T0)
    one = world.connect(0)
    world.listen(one)
    assert applied(world.reconcile(after=RETURN_NS)) == [("10.0.1.0",)]


def test_a_slice_that_was_written_in_the_future_is_of_now() -> None:
    """By an API server whose clock is ahead."""
    before = asleep()
    world = World()
    (seen,) = before.services
    world.services = [replace(seen, since_ns=T0 + 3600 * SECOND_NS)]
    world.adopt()
    world.proxied()
    assert world.reconcile(after=SECOND_NS).proxied_since_ns == world.now


def test_a_scaler_that_starts_ends_what_another_has_begun() -> None:
    """The model has a replica, and its slice stands still."""
    world = World()
    world.services = [
        ObservedService(SERVICE, ready=1, ours=desired_slice(SERVICE, PortPair(20000, 20001), ["10.0.1.0"]))
    ]
    world.adopt()
    decision = world.reconcile()
    assert [type(one) for one in decision.slices] == [Delete]
    assert decision.mode is RouteMode.PROXY
    assert len(decision.assignments) == 2
    world.write(decision)
    assert world.reconcile().mode is RouteMode.SERVE


def test_ports_of_a_slice_that_are_another_models_are_written_anew() -> None:
    ports = PortAllocator()
    taken = ports.allocate(OTHER)
    assert taken is not None
    world = World(1, ports=ports)
    world.services = [ObservedService(SERVICE, ready=0, ours=desired_slice(SERVICE, taken, ["10.0.1.0"]))]
    world.adopt()
    world.reconcile(needs_proxy=True)
    assert world.pair != taken
    world.listen()
    (action,) = world.reconcile().slices
    assert isinstance(action.slice, BerthSlice)
    assert action.slice.ports[0].number == world.pair.rest


def test_few_of_many_hold_for_a_model_and_mostly_the_same_ones() -> None:
    activators = Activators(began_ns=T0)
    all_of_them = [activators.connect(PodUid(f"u{n}"), f"n{n}", f"10.0.1.{n}", None) for n in range(20)]
    models = [ModelKey("a", f"m{n}") for n in range(100)]
    before = {model: {one.uid for one in activators.chosen(model)} for model in models}
    assert all(len(chosen) == 8 for chosen in before.values())
    load = [sum(one.uid in chosen for chosen in before.values()) for one in all_of_them]
    assert min(load) > 15
    assert max(load) < 70
    activators.disconnect(all_of_them[3], T0, gone=True)
    after = {model: {one.uid for one in activators.chosen(model)} for model in models}
    for model in models:
        assert before[model] - after[model] == before[model] & {"u3"}


def test_a_namespace_with_its_own_activators_is_held_for_by_these_alone() -> None:
    activators = Activators(began_ns=T0)
    activators.connect(PodUid("shared"), "s", "10.0.1.1", None)
    own = activators.connect(PodUid("own"), "o", "10.0.1.2", "a")
    assert [one.uid for one in activators.chosen(MODEL)] == ["own"]
    assert [one.uid for one in activators.chosen(ModelKey("b", "m"))] == ["shared"]
    own.draining = True
    assert [one.uid for one in activators.chosen(MODEL)] == ["shared"]


def connect(activators: Activators, address: str = "10.0.1.1", uid: str = "u") -> Activator:
    return activators.connect(PodUid(uid), "n", address, None)


def test_a_stream_that_comes_back_before_the_old_one_has_ended_stays() -> None:
    activators = Activators(began_ns=T0)
    old = connect(activators)
    activators.set_open(old, MODEL, PortPair(20000, 20001))
    new = connect(activators)
    activators.disconnect(old, T0, gone=True)
    assert len(activators) == 1
    assert list(activators) == [new]
    assert activators.listening([new], MODEL, PortPair(20000, 20001)) == {"10.0.1.1"}
    # At another address nothing of it is open.
    moved = connect(activators, "10.0.1.2")
    assert not moved.open


def test_what_an_activator_opens_is_news_once() -> None:
    world = World(1)
    (one,) = world.connected
    pair = PortPair(20000, 20001)
    said = [pair, pair, PortPair(20002, 20003), PortPair(0, 0), PortPair(0, 0)]
    assert [world.activators.set_open(one, MODEL, ports) for ports in said] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_which_addresses_of_a_slice_may_still_come_back() -> None:
    activators = Activators(began_ns=T0)
    address = "10.0.1.1"
    assert activators.may_reconnect(address, T0 + RETURN_NS - 1)
    assert not activators.may_reconnect(address, T0 + RETURN_NS)
    one = connect(activators, address)
    assert activators.may_reconnect(address, T0)  # it has not told yet what it has open
    one.has_reported = True
    assert not activators.may_reconnect(address, T0)
    activators.disconnect(one, T0, gone=True)
    assert not activators.may_reconnect(address, T0)
    connect(activators, address, "v")  # another pod at its address
    assert activators.may_reconnect(address, T0)


def test_one_that_this_scaler_has_known_and_lost_is_not_waited_for_again() -> None:
    activators = Activators(began_ns=T0)
    one = connect(activators)
    one.has_reported = True
    activators.disconnect(one, T0)
    activators.expire(T0 + LINGER_NS)
    assert not activators.may_reconnect("10.0.1.1", T0 + LINGER_NS)


def test_who_died_is_not_remembered_for_ever() -> None:
    activators = Activators(began_ns=T0)
    for n in range(9):
        activators.disconnect(connect(activators, f"10.0.1.{n}", f"u{n}"), T0, gone=True)
    activators.lead(T0 + SECOND_NS)
    activators.expire(T0 + RETURN_NS - 1)
    assert not activators.may_reconnect("10.0.1.1", T0 + RETURN_NS - 1)
    activators.expire(T0 + RETURN_NS)
    assert activators.may_reconnect("10.0.1.1", T0 + RETURN_NS)


def test_the_order_in_which_activators_are_named_is_no_change() -> None:
    names = [f"10.0.1.{n}" for n in range(9)]
    pair = PortPair(20000, 20001)
    assert desired_slice(SERVICE, pair, names) == desired_slice(SERVICE, pair, reversed(names))
