"""The way of a model's requests from its copies to the activators and back, step by step."""

from dataclasses import replace
from typing import Any

import pytest

from berth.contract.ids import PodUid
from berth.contract.scaling import HoldState, ModelKey, PodEndpoint
from scaler.activation.activators import LINGER_NS, RETURN_NS, Activator, Activators
from scaler.activation.ports import PortPair, Ports
from scaler.activation.slices import BerthSlice, Service, ServicePort, ServiceRef, wanted_slice
from scaler.activation.switch import (
    FORWARD_NS,
    NO_ACTIVATOR,
    NO_PORTS,
    NO_SERVICE,
    QUIET_NS,
    Apply,
    Asked,
    Delete,
    Outcome,
    Seen,
    Switch,
)
from scaler.go import SECOND_NS

MODEL, OTHER = ModelKey("a", "m"), ModelKey("a", "other")
T0 = 1_700_000_000 * SECOND_NS
REST, GRPC = ServicePort("http", is_grpc=False), ServicePort("grpc", is_grpc=True)
SERVICE = Service(ServiceRef("a", "m"), "service-uid", (REST, GRPC))
POD = PodEndpoint(uid="u", name="p", address="10.0.0.9", rest_port=9000, grpc_port=9001, slots=4, ready=True)


class World:
    """One model, the API server's slices, and the activators; time goes by when it is told to."""

    def __init__(self, activators: int = 2, *, ports: Ports | None = None) -> None:
        self.now = T0
        self.activators = Activators(began_ns=T0 - RETURN_NS)
        self.ports = Ports() if ports is None else ports
        self.switch = Switch(MODEL, self.ports)
        self.asked = Asked(model=MODEL, away=False, public_name="m", endpoints=(POD,))
        self.seen = [Seen(SERVICE, ready=1)]
        self.attached = [self.attach(n) for n in range(activators)]

    def attach(self, n: int, scope: str | None = None) -> Activator:
        return self.activators.attach(PodUid(f"act-{n}"), f"act-{n}", f"10.0.1.{n}", scope)

    @property
    def pair(self) -> PortPair:
        pair = self.ports.known(MODEL)
        assert pair is not None
        return pair

    def look(self, *, after: int = 0, **asked: Any) -> Outcome:
        self.now += after
        self.asked = replace(self.asked, **asked)
        return self.switch.look(self.asked, self.seen, self.activators, self.now)

    def listen(self, *which: Activator) -> None:
        for one in which or self.attached:
            self.activators.opened(one, MODEL, self.pair)
            one.has_told = True

    def write(self, outcome: Outcome) -> None:
        """The API server has it."""
        for action in outcome.slices:
            self.seen = [
                replace(seen, ours=action.slice if isinstance(action, Apply) else None, since_ns=self.now)
                if seen.service.ref == action.slice.service
                else seen
                for seen in self.seen
            ]

    def serve(self, ready: int) -> None:
        self.seen = [replace(seen, ready=ready) for seen in self.seen]

    def asleep(self) -> Outcome:
        """All the way, and the last copy is gone."""
        self.look(away=True)
        self.listen()
        self.write(self.look())
        self.serve(0)
        return self.look(after=SECOND_NS, endpoints=())


def applied(outcome: Outcome) -> list[tuple[str, ...]]:
    return [one.slice.addresses for one in outcome.slices if isinstance(one, Apply)]


def test_a_model_with_copies_costs_nothing() -> None:
    world = World()
    assert world.look() == Outcome()
    assert world.ports.known(MODEL) is None


def test_to_zero_in_this_order() -> None:
    world = World()
    # Told to hold, and nothing is written before somebody listens.
    first = world.look(away=True)
    assert (first.state, first.slices, first.proven) == (HoldState.HOLD, (), False)
    assert set(first.assignments) == {"act-0", "act-1"}
    told = first.assignments[PodUid("act-0")]
    assert (told.state, told.rest_port, told.grpc_port, told.share) == (HoldState.HOLD, *world.pair, 2)
    # One of them listens: it is written, and is not proven before that is seen.
    world.listen(world.attached[0])
    half = world.look()
    assert applied(half) == [("10.0.1.0",)]
    assert not half.proven
    world.write(half)
    assert world.look().proven
    # The second joins in: not proven until it stands there.
    world.listen(world.attached[1])
    both = world.look(after=SECOND_NS)
    assert applied(both) == [("10.0.1.0", "10.0.1.1")]
    world.write(both)
    done = world.look(after=SECOND_NS)
    assert done.proven
    assert done.slices == ()
    assert done.proxied_since_ns is not None
    assert not done.quiet  # nobody knows when the last request came


def test_the_slice_names_the_services_ports_with_the_models_numbers() -> None:
    world = World(1)
    world.seen = [Seen(replace(SERVICE, ports=(replace(REST, app_protocol="http"), GRPC)), ready=1)]
    world.look(away=True)
    world.listen()
    (action,) = world.look().slices
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
def test_a_model_is_quiet_when_no_copy_has_had_a_request_since_the_switch(
    arrival: int | None, at: int, quiet: bool
) -> None:
    world = World()
    world.look(away=True)
    world.listen()
    world.write(world.look())
    assert world.look().proxied_since_ns == T0
    assert world.look(after=at, last_arrival_ns=arrival).quiet is quiet


def test_how_long_clients_are_waited_for() -> None:
    assert (QUIET_NS, FORWARD_NS) == (5 * SECOND_NS, 60 * SECOND_NS)


def test_a_slice_that_leads_nowhere_proves_nothing() -> None:
    """What is left of one when the last activator has died."""
    world = World(activators=1)
    world.look(away=True)
    world.listen()
    world.write(world.look())
    assert world.look().proven
    world.activators.detach(world.attached[0], world.now, dead=True)
    emptied = world.look(after=SECOND_NS)
    assert applied(emptied) == [()]
    world.write(emptied)
    assert not world.look(after=SECOND_NS).proven


def test_up_in_this_order() -> None:
    world = World()
    asleep = world.asleep()
    assert asleep.proven
    assert asleep.state is HoldState.HOLD
    # A copy is wanted and loads: requests are held, the slice stands, and copies are told of as they come.
    waking = world.look(after=SECOND_NS, away=False, endpoints=(replace(POD, ready=False),))
    assert waking.state is HoldState.HOLD
    assert waking.slices == ()
    assert not waking.proven
    assert [one.endpoints[0].ready for one in waking.assignments.values()] == [False, False]
    # It is ready in the controller's slice: ours goes, and only when that is seen do clients connect anew.
    world.serve(1)
    up = world.look(endpoints=(POD,))
    assert [type(one) for one in up.slices] == [Delete]
    assert up.state is HoldState.HOLD
    world.write(up)
    forward = world.look(after=SECOND_NS)
    assert forward.state is HoldState.FORWARD
    assert forward.slices == ()
    assert {one.state for one in forward.assignments.values()} == {HoldState.FORWARD}
    assert world.look(after=FORWARD_NS - 1).state is HoldState.FORWARD
    off = world.look(after=1)
    assert (off.state, off.assignments) == (HoldState.OFF, {})


def test_while_a_model_wakes_its_slice_follows_the_activators() -> None:
    world = World()
    world.asleep()
    world.activators.detach(world.attached[0], world.now, dead=True)
    waking = world.look(after=SECOND_NS, away=False)
    assert applied(waking) == [("10.0.1.1",)]
    world.write(waking)
    # Deleted by somebody: it is wanted to be up, so it does not come back.
    world.seen = [replace(world.seen[0], ours=None)]
    assert world.look().slices == ()


def test_who_held_for_it_the_last_time_has_nothing_to_do_with_it_the_next() -> None:
    world = World()
    world.asleep()
    world.serve(1)
    world.write(world.look(away=False))
    world.look()
    assert world.look(after=FORWARD_NS).state is HoldState.OFF
    world.attached[0].leaving = True
    assert set(world.look(away=True).assignments) == {"act-1"}


def test_it_turns_round_at_any_moment() -> None:
    world = World()
    world.look(away=True)
    assert world.look(away=False).state is HoldState.FORWARD  # nothing was written
    assert world.look(away=True).state is HoldState.HOLD
    world.listen()
    late = world.look()
    assert world.look(away=False).state is HoldState.FORWARD
    world.write(late)  # the write that was under way
    back = world.look()
    assert [type(one) for one in back.slices] == [Delete]
    assert back.state is HoldState.HOLD
    again = world.look(away=True)
    assert again.slices == ()
    assert again.proven


def test_copies_that_are_away_for_a_moment_are_waited_for() -> None:
    """Nobody wanted it to sleep: its copies have failed."""
    world = World()
    world.serve(0)
    world.look(away=True)
    world.listen()
    assert applied(world.look()) == [("10.0.1.0", "10.0.1.1")]


def test_a_slice_that_somebody_else_has_changed_is_mended_and_proves_nothing() -> None:
    world = World()
    world.asleep()
    (seen,) = world.seen
    assert seen.ours is not None
    for harm in (
        replace(seen.ours, addresses=("10.9.9.9",)),
        replace(seen.ours, addresses=(*seen.ours.addresses, "10.9.9.9")),
        replace(seen.ours, ports=()),
        replace(seen.ours, service_uid="another"),
    ):
        world.seen = [replace(seen, ours=harm)]
        outcome = world.look()
        assert applied(outcome) == [("10.0.1.0", "10.0.1.1")]
        assert not outcome.proven


def test_a_slice_that_is_deleted_comes_back() -> None:
    world = World()
    world.asleep()
    world.seen = [replace(world.seen[0], ours=None)]
    outcome = world.look()
    assert applied(outcome) == [("10.0.1.0", "10.0.1.1")]
    assert outcome.proxied_since_ns is None
    world.write(outcome)
    assert world.look(after=SECOND_NS).proxied_since_ns == world.now  # kube-proxies hear of it only now


def test_without_a_service_or_with_one_that_is_two_models_it_does_not_go_to_zero() -> None:
    world = World()
    world.seen = []
    none = world.look(away=True)
    assert (none.state, none.trouble, none.proven) == (HoldState.OFF, NO_SERVICE, False)
    world.seen = [Seen(SERVICE, ready=1, shared_with=OTHER)]
    shared = world.look(away=True)
    assert shared.trouble == "Service m leads to a/other as well"
    assert not shared.proven
    assert not shared.assignments
    assert not shared.slices


def test_a_model_asleep_whose_service_gets_a_second_model_can_still_be_woken() -> None:
    world = World()
    world.asleep()
    world.seen = [replace(world.seen[0], shared_with=OTHER)]
    outcome = world.look()
    assert outcome.state is HoldState.HOLD
    assert outcome.slices == ()
    assert outcome.assignments
    assert outcome.trouble
    assert not outcome.proven


def test_when_all_ports_are_taken_it_stays_up() -> None:
    ports = Ports(range(20000, 20002))
    ports.of(OTHER)
    outcome = World(ports=ports).look(away=True)
    assert (outcome.trouble, outcome.state, outcome.proven) == (NO_PORTS, HoldState.OFF, False)


def test_a_slice_whose_ports_cannot_be_had_is_ended() -> None:
    """It leads clients to another model's ports, or to none."""
    ports = Ports(range(20000, 20002))
    taken = ports.of(OTHER)
    assert taken is not None
    world = World(ports=ports)
    world.seen = [Seen(SERVICE, ready=0, ours=wanted_slice(SERVICE, taken, ["10.0.1.0"]))]
    world.switch.adopt(world.seen)
    outcome = world.look(away=True)
    assert [type(one) for one in outcome.slices] == [Delete]
    assert (outcome.trouble, outcome.state, outcome.assignments) == (NO_PORTS, HoldState.OFF, {})


def test_two_services_are_led_each_by_its_own_slice() -> None:
    world = World(1)
    second = Service(ServiceRef("a", "m-2"), "uid-2", (REST,))
    world.seen = [Seen(SERVICE, ready=1), Seen(second, ready=1)]
    world.look(away=True)
    world.listen()
    both = world.look()
    assert [one.slice.name for one in both.slices] == ["m-berth", "m-2-berth"]
    world.write(replace(both, slices=both.slices[:1]))
    assert not world.look().proven
    world.write(both)
    assert world.look().proven
    # Up again: the one whose controller is late keeps its slice, and the activators hold on.
    world.seen = [replace(world.seen[0], ready=1), replace(world.seen[1], ready=0)]
    outcome = world.look(away=False)
    assert [(type(one), one.slice.name) for one in outcome.slices] == [(Delete, "m-berth")]
    world.write(outcome)
    assert world.look().state is HoldState.HOLD


# Activators come and go.


def test_without_activators_nothing_is_written_and_nobody_sleeps() -> None:
    outcome = World(0).look(away=True)
    assert (outcome.slices, outcome.proven, outcome.trouble) == ((), False, NO_ACTIVATOR)


def test_one_that_dies_leaves_the_slice_and_one_whose_stream_breaks_stays_for_a_while() -> None:
    world = World()
    world.asleep()
    world.activators.detach(world.attached[0], world.now)
    still = world.look(after=LINGER_NS - 1)
    assert still.proven
    assert still.slices == ()
    world.activators.detach(world.attached[1], world.now, dead=True)
    assert applied(world.look()) == [("10.0.1.0",)]
    world.now += 1
    world.activators.expire(world.now)
    outcome = world.look()
    assert applied(outcome) == [()]
    assert not outcome.proven
    assert outcome.trouble == NO_ACTIVATOR


def test_one_that_leaves_is_taken_out_first_and_passes_on_what_still_comes() -> None:
    world = World()
    world.asleep()
    world.attached[0].leaving = True
    outcome = world.look()
    assert applied(outcome) == [("10.0.1.1",)]
    states = {uid: one.state for uid, one in outcome.assignments.items()}
    assert states == {"act-0": HoldState.FORWARD, "act-1": HoldState.HOLD}
    assert outcome.assignments[PodUid("act-1")].share == 1
    assert set(world.look(after=FORWARD_NS).assignments) == {"act-1"}


def test_the_last_ones_that_leave_pass_on_with_all_slots() -> None:
    world = World()
    world.asleep()
    for one in world.attached:
        one.leaving = True
    told = world.look().assignments.values()
    assert [(one.state, one.share) for one in told] == [(HoldState.FORWARD, 1)] * 2


def test_one_that_closes_its_ports_proves_nothing_any_more() -> None:
    world = World()
    world.asleep()
    world.activators.opened(world.attached[0], MODEL, PortPair(0, 0))
    outcome = world.look()
    assert applied(outcome) == [("10.0.1.1",)]
    assert not outcome.proven


def test_half_a_pair_of_ports_is_none() -> None:
    world = World(1)
    world.look(away=True)
    world.activators.opened(world.attached[0], MODEL, PortPair(world.pair.rest, 0))
    assert world.look().slices == ()


def test_a_scaler_that_starts_leaves_standing_what_it_finds_until_it_knows() -> None:
    before = World()
    before.asleep()
    world = World(0)
    world.activators = Activators(began_ns=T0)
    world.seen = before.seen
    world.switch.adopt(world.seen)
    assert world.pair == before.pair
    first = world.look(away=True, endpoints=())
    assert first.slices == ()
    assert not first.proven
    # One of the two comes back.
    one = world.attach(0)
    assert world.look().slices == ()
    world.listen(one)
    assert world.look().slices == ()
    assert not world.look().proven
    world.listen(world.attach(1))
    # Since it was written by another: the grace period does not begin again.
    back = world.look(after=SECOND_NS)
    assert back.proven
    assert back.proxied_since_ns == T0
    # Had it not come, it would have been taken out.
    world.activators = Activators(began_ns=T0)
    one = world.attach(0)
    world.listen(one)
    assert applied(world.look(after=RETURN_NS)) == [("10.0.1.0",)]


def test_a_slice_that_was_written_in_the_future_is_of_now() -> None:
    """By an API server whose clock is ahead."""
    before = World()
    before.asleep()
    world = World()
    (seen,) = before.seen
    world.seen = [replace(seen, since_ns=T0 + 3600 * SECOND_NS)]
    world.switch.adopt(world.seen)
    world.look(away=True)
    world.listen()
    assert world.look(after=SECOND_NS).proxied_since_ns == world.now


def test_a_scaler_that_starts_ends_what_another_has_begun() -> None:
    """The model has a copy, and its slice stands still."""
    world = World()
    world.seen = [Seen(SERVICE, ready=1, ours=wanted_slice(SERVICE, PortPair(20000, 20001), ["10.0.1.0"]))]
    world.switch.adopt(world.seen)
    outcome = world.look()
    assert [type(one) for one in outcome.slices] == [Delete]
    assert outcome.state is HoldState.HOLD
    assert len(outcome.assignments) == 2
    world.write(outcome)
    assert world.look().state is HoldState.FORWARD


def test_ports_of_a_slice_that_are_another_models_are_written_anew() -> None:
    ports = Ports()
    taken = ports.of(OTHER)
    assert taken is not None
    world = World(1, ports=ports)
    world.seen = [Seen(SERVICE, ready=0, ours=wanted_slice(SERVICE, taken, ["10.0.1.0"]))]
    world.switch.adopt(world.seen)
    world.look(away=True)
    assert world.pair != taken
    world.listen()
    (action,) = world.look().slices
    assert isinstance(action.slice, BerthSlice)
    assert action.slice.ports[0].number == world.pair.rest


def test_few_of_many_hold_for_a_model_and_mostly_the_same_ones() -> None:
    activators = Activators(began_ns=T0)
    all_of_them = [activators.attach(PodUid(f"u{n}"), f"n{n}", f"10.0.1.{n}", None) for n in range(20)]
    models = [ModelKey("a", f"m{n}") for n in range(100)]
    before = {model: {one.uid for one in activators.chosen(model)} for model in models}
    assert all(len(chosen) == 8 for chosen in before.values())
    load = [sum(one.uid in chosen for chosen in before.values()) for one in all_of_them]
    assert min(load) > 15
    assert max(load) < 70
    activators.detach(all_of_them[3], T0, dead=True)
    after = {model: {one.uid for one in activators.chosen(model)} for model in models}
    for model in models:
        assert before[model] - after[model] == before[model] & {"u3"}


def test_a_namespace_with_its_own_activators_is_held_for_by_these_alone() -> None:
    activators = Activators(began_ns=T0)
    activators.attach(PodUid("shared"), "s", "10.0.1.1", None)
    own = activators.attach(PodUid("own"), "o", "10.0.1.2", "a")
    assert [one.uid for one in activators.chosen(MODEL)] == ["own"]
    assert [one.uid for one in activators.chosen(ModelKey("b", "m"))] == ["shared"]
    own.leaving = True
    assert [one.uid for one in activators.chosen(MODEL)] == ["shared"]


def test_a_stream_that_comes_back_before_the_old_one_has_ended_stays() -> None:
    activators = Activators(began_ns=T0)
    old = activators.attach(PodUid("u"), "n", "10.0.1.1", None)
    activators.opened(old, MODEL, PortPair(20000, 20001))
    new = activators.attach(PodUid("u"), "n", "10.0.1.1", None)
    activators.detach(old, T0, dead=True)
    assert len(activators) == 1
    assert list(activators) == [new]
    assert activators.listening([new], MODEL, PortPair(20000, 20001)) == {"10.0.1.1"}
    # At another address nothing of it is open.
    moved = activators.attach(PodUid("u"), "n", "10.0.1.2", None)
    assert not moved.open


def test_what_an_activator_opens_is_news_once() -> None:
    world = World(1)
    (one,) = world.attached
    pair = PortPair(20000, 20001)
    said = [pair, pair, PortPair(20002, 20003), PortPair(0, 0), PortPair(0, 0)]
    assert [world.activators.opened(one, MODEL, ports) for ports in said] == [True, False, True, True, False]


def test_which_addresses_of_a_slice_may_still_come_back() -> None:
    activators = Activators(began_ns=T0)
    address = "10.0.1.1"
    assert activators.may_come_back(address, T0 + RETURN_NS - 1)
    assert not activators.may_come_back(address, T0 + RETURN_NS)
    one = activators.attach(PodUid("u"), "n", address, None)
    assert activators.may_come_back(address, T0)  # it has not told yet what it has open
    one.has_told = True
    assert not activators.may_come_back(address, T0)
    activators.detach(one, T0, dead=True)
    assert not activators.may_come_back(address, T0)
    activators.attach(PodUid("v"), "n", address, None)  # another pod at its address
    assert activators.may_come_back(address, T0)


def test_one_that_this_scaler_has_known_and_lost_is_not_waited_for_again() -> None:
    activators = Activators(began_ns=T0)
    one = activators.attach(PodUid("u"), "n", "10.0.1.1", None)
    one.has_told = True
    activators.detach(one, T0)
    activators.expire(T0 + LINGER_NS)
    assert not activators.may_come_back("10.0.1.1", T0 + LINGER_NS)


def test_who_died_is_not_remembered_for_ever() -> None:
    activators = Activators(began_ns=T0)
    for n in range(9):
        activators.detach(activators.attach(PodUid(f"u{n}"), "n", f"10.0.1.{n}", None), T0, dead=True)
    activators.begin(T0 + SECOND_NS)
    activators.expire(T0 + RETURN_NS - 1)
    assert not activators.may_come_back("10.0.1.1", T0 + RETURN_NS - 1)
    activators.expire(T0 + RETURN_NS)
    assert activators.may_come_back("10.0.1.1", T0 + RETURN_NS)


def test_the_order_in_which_activators_are_named_is_no_change() -> None:
    names = [f"10.0.1.{n}" for n in range(9)]
    pair = PortPair(20000, 20001)
    assert wanted_slice(SERVICE, pair, names) == wanted_slice(SERVICE, pair, reversed(names))
