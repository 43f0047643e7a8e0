"""The life of a request: in which order its stages follow, and what must be true however it ends."""

import itertools
import random

import pytest

from berth.contract.gateway import ReplicaLimits
from proxy.policy.names import Names
from proxy.policy.refusal import Refusal
from proxy.request.admission import GIVEN_UP_SECONDS
from proxy.request.lifecycle import TRANSITIONS, GivenUpRequests, Request, Stage
from proxy.request.replica import Replica

OVER = {Stage.ANSWERED, Stage.REFUSED, Stage.ABORTED}
FORWARDS = [
    (Stage.RECEIVING, Stage.QUEUED),
    (Stage.RECEIVING, Stage.FORWARDED),
    (Stage.QUEUED, Stage.FORWARDED),
    *itertools.product((Stage.RECEIVING, Stage.QUEUED, Stage.FORWARDED), OVER),
]


def own(**limits: int) -> Replica:
    return Replica(Names(b"m", b"m"), ReplicaLimits(**limits))


def test_every_stage_has_its_line_in_the_table_and_nothing_follows_an_end() -> None:
    assert set(TRANSITIONS) == set(Stage)
    assert {stage for stage, followers in TRANSITIONS.items() if not followers} == OVER
    assert {stage for stage in Stage if stage.is_over} == OVER
    assert {stage for stage in Stage if stage.is_pending} == {Stage.RECEIVING, Stage.QUEUED}


@pytest.mark.parametrize(("before", "after"), [*itertools.product(Stage, Stage)])
def test_a_request_only_moves_on(before: Stage, after: Stage) -> None:
    replica = own()
    request = Request(replica, replica.rest, 0.0)
    request.stage = before
    if (before, after) in FORWARDS:
        request.enter(after)
        assert request.stage is after
    else:
        with pytest.raises(AssertionError, match=f"{after} after {before}"):
            request.enter(after)


def test_what_is_open_or_held_is_its_own_until_it_ends() -> None:
    replica = own(max_inflight_bytes=100)
    first, second = Request(replica, replica.grpc, 0.0), Request(replica, replica.grpc, 0.0)
    first.open(10)
    first.hold(60)
    with pytest.raises(Refusal, match="too many requests"):
        second.open(31)
    with pytest.raises(Refusal, match="too many requests"):
        second.hold(31)
    first.let_go(20)
    second.hold(31)
    assert (first.buffered_bytes, first.open_bytes, replica.budget.used_bytes) == (40, 10, 81)
    first.end(Stage.ABORTED, "CANCELLED", 1.0)
    assert (first.buffered_bytes, first.open_bytes, replica.budget.used_bytes) == (0, 0, 31)
    assert replica.grpc.codes == {"CANCELLED": 1}


@pytest.mark.parametrize("in_triton", [False, True])
def test_its_slot_is_kept_while_triton_works_on_it_though_nobody_waits(in_triton: bool) -> None:
    replica = own(container_concurrency=1)
    request = Request(replica, replica.rest, 0.0)
    assert request.admit(0.0, list, 0)
    request.enter(Stage.FORWARDED)
    request.end(Stage.ABORTED, "499", 5.0, in_triton=in_triton)
    assert replica.admissions.running == in_triton
    assert request.given_up_until == (5.0 + GIVEN_UP_SECONDS if in_triton else 0.0)
    request.triton_is_done(6.0)
    assert replica.admissions.running == 0


def test_who_is_refused_before_asking_for_a_slot_has_arrived_all_the_same() -> None:
    replica = own(max_inflight_bytes=1)
    request = Request(replica, replica.rest, 0.0)
    with pytest.raises(Refusal):
        request.hold(2)
    replica.tick(1e9)
    assert replica.load.requests > 0


class Left(Request):
    ended = 0

    def out_of_time(self) -> None:
        self.ended += 1
        there.discard(self)


there = GivenUpRequests()


def test_what_nobody_waits_for_ends_when_its_time_is_up() -> None:
    replica = own()
    early, late = Left(replica, replica.rest, 0.0), Left(replica, replica.rest, 0.0)
    early.given_up_until, late.given_up_until = 10.0, 20.0
    there.update((early, late))
    there.tick(10.0)
    assert (early.ended, late.ended) == (0, 0)
    there.tick(10.5)
    assert (early.ended, late.ended, set(there)) == (1, 0, {late})
    there.close()
    assert (late.ended, set(there)) == (1, set())


@pytest.mark.parametrize("seed", range(10))
def test_budgets_are_whole_after_any_history(seed: int) -> None:
    rng, replica = random.Random(seed), own(max_inflight_bytes=1000, container_concurrency=2, queue_depth=3)
    live: list[Request] = []
    for now in range(300):
        if not live or rng.random() < 0.4:
            live.append(Request(replica, replica.rest, now))
        one = rng.choice(live)
        try:
            match rng.randrange(5):
                case 0:
                    one.hold(rng.randrange(300))
                case 1 if not one.open_bytes:
                    one.open(rng.randrange(100))
                case 2 if one.admission is None:
                    one.admit(now, list, rng.randrange(300))
                    one.enter(Stage.QUEUED)
                case 3 if one.admission is not None and one.stage is Stage.QUEUED:
                    one.enter(Stage.FORWARDED)
                case 4:
                    live.remove(one)
                    one.end(rng.choice(sorted(OVER, key=str)), "x", now)
        except Refusal:
            live.remove(one)
            one.end(Stage.REFUSED, "503", now)
    for one in live:
        one.end(Stage.ABORTED, "499", 300)
    assert (replica.budget.used_bytes, replica.admissions.bytes.used_bytes) == (0, 0)
    assert (replica.admissions.running, replica.admissions.waiting) == (0, 0)
