"""Slots, places and bytes: given in order, never more than there are, and all back in the end."""

import asyncio
import os
import random

import pytest

from berth.contract.gateway import ReplicaLimits
from proxy.policy.names import Names
from proxy.policy.refusal import Refusal, Why
from proxy.request.admission import (
    MOST_GIVEN_UP,
    QUEUE_FULL,
    Admission,
    Admissions,
    AdmissionState,
    SharedAdmissions,
    shared_limit,
)
from proxy.request.budget import Budget
from proxy.request.lifecycle import Request, Stage
from proxy.request.load import LoadMeter
from proxy.request.replica import Replica


def admissions(limit: int, depth: int, *, room: int = 10**9) -> tuple[Admissions, LoadMeter]:
    meter = LoadMeter(0.0, lambda: 0.0)
    return Admissions(meter, limit=limit, queue_depth=depth, bytes=Budget(room), bytes_flag="--room"), meter


def names(*admitted: Admission) -> list[str]:
    return [one.state.name.lower() for one in admitted]


def test_so_many_run_so_many_wait_and_the_rest_is_rejected() -> None:
    limited, meter = admissions(2, 1)
    log: list[int] = []
    had = [limited.admit(0.0, lambda i=i: log.append(i)) for i in range(3)]  # type: ignore[misc]
    with pytest.raises(Refusal, match=QUEUE_FULL) as refused:
        limited.admit(0.0, list)
    assert refused.value.why is Why.QUEUE_FULL
    assert names(*had) == ["running", "running", "waiting"]
    assert (limited.running, limited.waiting, meter.concurrency) == (2, 1, 3)
    for one in had:
        one.release(0.0)
    assert (log, limited.running, limited.waiting, meter.concurrency) == ([2], 0, 0, 0)


@pytest.mark.parametrize("shared", [False, True])
def test_one_that_is_rejected_has_arrived_all_the_same(shared: bool) -> None:
    """As Knative counts: else a model under too much load would seem to have less."""
    limited, meter = admissions(1, 0)
    if shared:
        limited = SharedAdmissions(meter, *shared_limit(1, 0), bytes=Budget(1))
    first = limited.admit(0.0, list)
    for _ in range(4):
        with pytest.raises(Refusal):
            limited.admit(0.0, list)
    first.release(0.5)
    assert meter.report(1.0).requests == 5


def test_the_one_that_waited_longest_is_next_and_one_that_left_leaves_no_trace() -> None:
    limited, meter = admissions(1, 10)
    log: list[str] = []
    had = {name: limited.admit(0.0, lambda name=name: log.append(name)) for name in "abcd"}  # type: ignore[misc]
    had["c"].give_up(0.0)
    assert (limited.waiting, meter.concurrency) == (2, 3)
    for name in "abd":
        had[name].release(0.0)
    assert log == ["b", "d"]


def test_nobody_overtakes_those_who_wait_for_bytes() -> None:
    limited, _ = admissions(0, 10, room=100)
    log: list[str] = []
    first = limited.admit(0.0, list, cost_bytes=60)
    second = limited.admit(0.0, lambda: log.append("large"), cost_bytes=50)
    third = limited.admit(0.0, lambda: log.append("small"), cost_bytes=1)
    assert limited.admit_at_once(0.0, cost_bytes=1) is None
    assert names(first, second, third) == ["running", "waiting", "waiting"]
    first.release(0.0)
    assert (log, limited.bytes.used_bytes) == (["large", "small"], 51)


def test_the_small_one_goes_when_the_large_one_before_it_leaves() -> None:
    limited, _ = admissions(0, 10, room=100)
    first, large = limited.admit(0.0, list, cost_bytes=60), limited.admit(0.0, list, cost_bytes=50)
    small = limited.admit(0.0, list, cost_bytes=1)
    large.give_up(0.0)
    assert names(first, large, small) == ["running", "released", "running"]


def test_a_limit_on_bytes_is_reported_with_its_flag() -> None:
    limited, meter = admissions(0, 0, room=100 * 1024)
    with pytest.raises(Refusal, match=r"200 KiB.*100 KiB.*--room") as refused:
        limited.admit(0.0, list, cost_bytes=200 * 1024)
    assert refused.value.why is Why.TOO_LARGE
    limited.admit(0.0, list, cost_bytes=90 * 1024)
    with pytest.raises(Refusal, match=r"90 KiB of the 100 KiB.*--room") as refused:
        limited.admit(0.0, list, cost_bytes=90 * 1024)
    assert refused.value.why is Why.NO_ROOM
    assert meter.report(1.0).requests == 3


async def test_an_answer_that_is_taken_slowly_keeps_its_bytes_and_not_the_slot() -> None:
    limited, meter = admissions(1, 2, room=100)
    first, second = limited.admit(0.0, list, cost_bytes=7), limited.admit(0.0, list)
    first.has_run(120)
    assert names(first, second) == ["aside", "waiting"]  # the answer takes all the room
    assert (limited.running, limited.bytes.used_bytes, meter.concurrency) == (0, 127, 2)
    idle = asyncio.create_task(limited.idle())
    first.give_up(0.0)
    first.release(0.0)
    assert names(first, second) == ["released", "running"]
    second.has_run(50)
    third = limited.admit(0.0, list)
    assert (names(second, third), limited.bytes.used_bytes) == (["aside", "running"], 50)
    third.release(0.0)
    await asyncio.sleep(0)
    assert not idle.done()
    second.release(0.0)
    await asyncio.wait_for(idle, 1)
    assert (limited.running, limited.bytes.used_bytes, meter.concurrency) == (0, 0, 0)


def test_what_triton_works_on_keeps_its_slot_though_nobody_waits_for_it() -> None:
    limited, meter = admissions(1, 1)
    first, second = limited.admit(0.0, list, cost_bytes=7), limited.admit(0.0, list)
    first.give_up(0.0)
    first.give_up(0.0)
    assert (names(first, second), limited.given_up) == (["given_up", "waiting"], 1)
    assert (limited.running, limited.bytes.used_bytes, meter.concurrency) == (1, 7, 2)
    for _ in range(2):
        first.release(0.0)
    assert (names(first, second), limited.given_up, limited.running) == (["released", "running"], 0, 1)


def test_work_that_nobody_waits_for_does_not_pile_up() -> None:
    unlimited, _ = admissions(0, 0)
    had = [unlimited.admit(0.0, list) for _ in range(MOST_GIVEN_UP)]
    for one in had:
        one.give_up(0.0)
    assert unlimited.admit_at_once(0.0) is None
    with pytest.raises(Refusal, match="without a client"):
        unlimited.admit(0.0, list)
    had[0].release(0.0)
    assert unlimited.admit(0.0, list).is_running


def test_those_who_wait_wait_on_while_too_much_runs_that_nobody_waits_for() -> None:
    limited, _ = admissions(MOST_GIVEN_UP + 1, 10)
    *had, last = [limited.admit(0.0, list) for _ in range(MOST_GIVEN_UP + 1)]
    waits = limited.admit(0.0, list)
    for one in had:
        one.give_up(0.0)
    last.release(0.0)
    assert waits.is_waiting
    had[0].release(0.0)
    assert waits.is_running


def test_a_queue_of_any_length_that_gives_back_at_once_what_it_is_given() -> None:
    """As when Triton is gone: each that is granted is refused in the same step."""
    limited, meter = admissions(1, 5000)
    first, had = limited.admit(0.0, list), []
    for _ in range(5000):
        had.append(limited.admit(0.0, lambda i=len(had): had[i].release(0.0)))  # type: ignore[misc]
    first.release(0.0)
    assert (limited.running, limited.waiting, meter.concurrency) == (0, 0, 0)


async def test_idle_is_reported_when_the_last_has_left() -> None:
    limited, _ = admissions(0, 0)
    had = [limited.admit(0.0, list) for _ in range(50)]
    idle = asyncio.create_task(limited.idle())
    await asyncio.sleep(0)
    for one in had:
        assert not idle.done()
        one.release(0.0)
    await asyncio.wait_for(idle, 1)


class _History:
    """Requests that come, wait, run, are given up and end, at random."""

    def __init__(self, seed: int, homes: list[Admissions]) -> None:
        self.rng, self.homes, self.all = random.Random(seed), homes, []
        self.granted: set[int] = set()

    def step(self) -> None:
        rng = self.rng
        live: list[Admission] = [one for one in self.all if one.state is not AdmissionState.RELEASED]
        what = rng.random()
        if what < 0.5 or not live:
            self._arrive()
        elif what < 0.7:
            rng.choice(live).release(0.0)
        elif what < 0.85:
            rng.choice(live).give_up(0.0)
        elif what < 0.88:
            rng.choice(self.all).release(0.0)  # perhaps again
        elif what < 0.92:
            rng.choice(live).step_aside()
        elif what < 0.97:
            self._come_back(rng.choice(live))
        else:
            rng.choice(live).has_run(rng.randrange(5))

    def _come_back(self, one: Admission) -> None:
        was, has_slot = one.state, one.come_back(list)
        assert has_slot is (one.state is AdmissionState.RUNNING)
        assert was is not AdmissionState.ASIDE or has_slot or one.state is AdmissionState.RETURNING

    def _arrive(self) -> None:
        index, cost = len(self.all), self.rng.randrange(30)
        try:
            one = self.rng.choice(self.homes).admit(
                0.0, lambda: self.granted.add(index), cost_bytes=cost, deadline=1.0
            )
        except Refusal:
            return
        self.all.append(one)

    def end(self) -> None:
        for one in self.all:
            one.release(0.0)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("limit", [0, 3])
def test_slots_and_bytes_are_back_to_zero_after_any_history(seed: int, limit: int) -> None:
    limited, meter = admissions(limit, 4, room=60)
    history = _History(seed, [limited])
    for _ in range(400):
        history.step()
        states = [one.state for one in history.all]
        running = states.count(AdmissionState.RUNNING) + states.count(AdmissionState.GIVEN_UP)
        assert limited.running == running
        assert not limit or running <= limit
        assert (limited.waiting, limited.given_up) == (
            states.count(AdmissionState.WAITING) + states.count(AdmissionState.RETURNING),
            states.count(AdmissionState.GIVEN_UP),
        )
        assert states.count(AdmissionState.WAITING) <= 4
        assert not states.count(AdmissionState.RETURNING) or running == limit
        in_triton = (
            AdmissionState.RUNNING,
            AdmissionState.GIVEN_UP,
            AdmissionState.ASIDE,
            AdmissionState.LEAVING,
            AdmissionState.RETURNING,
        )
        used = sum(o.cost_bytes for o in history.all if o.state in in_triton)
        assert limited.bytes.used_bytes == used
        aside = states.count(AdmissionState.ASIDE) + states.count(AdmissionState.LEAVING)
        assert meter.concurrency == running + limited.waiting + aside
        assert limited.leaving_bytes == sum(
            o.cost_bytes for o in history.all if o.state is AdmissionState.LEAVING
        )
        for index in history.granted:
            assert history.all[index].state is not AdmissionState.WAITING
    history.end()
    assert (limited.running, limited.waiting, limited.given_up) == (0, 0, 0)
    assert (limited.bytes.used_bytes, meter.concurrency) == (0, 0)


@pytest.mark.parametrize("seed", range(10))
async def test_one_limit_for_several_processes(seed: int) -> None:
    descriptors = shared_limit(3, 4)
    meters = [LoadMeter(0.0, lambda: 0.0) for _ in range(3)]
    homes: list[Admissions] = [
        SharedAdmissions(meter, *map(os.dup, descriptors), bytes=Budget(60)) for meter in meters
    ]
    history = _History(seed, homes)
    for _ in range(300):
        history.step()
        if history.rng.random() < 0.3:
            await asyncio.sleep(0)  # each hears of slots that others give back
        assert sum(one.running for one in homes) <= 3
        assert sum(one.state is AdmissionState.WAITING for one in history.all) <= 4
    history.end()
    await asyncio.sleep(0)
    assert [(one.running, one.waiting, one.bytes.used_bytes) for one in homes] == [(0, 0, 0)] * 3
    assert [os.eventfd_read(one) for one in descriptors for _ in range(3)] == [1] * 6
    for one in descriptors:
        os.close(one)


async def test_one_that_waits_for_bytes_does_not_spin_on_a_free_slot() -> None:
    limited = SharedAdmissions(LoadMeter(0.0, lambda: 0.0), *shared_limit(2, 4), bytes=Budget(100))
    calls = 0
    hand_out = limited.hand_out

    def counted() -> None:
        nonlocal calls
        calls += 1
        hand_out()

    limited.hand_out = counted  # type: ignore[method-assign]
    first, second = limited.admit(0.0, list, cost_bytes=80), limited.admit(0.0, list, cost_bytes=50)
    for _ in range(50):
        await asyncio.sleep(0)
    assert (second.is_waiting, calls) == (True, 0)
    first.release(0.0)
    assert second.is_running
    second.release(0.0)


def test_others_wait_for_room_where_a_slot_alone_would_not_do() -> None:
    limited, _ = admissions(2, 5, room=100)
    first = limited.admit(0.0, list, cost_bytes=60)
    assert not limited.others_wait_for_room
    limited.admit(0.0, list, cost_bytes=50)
    assert limited.others_wait_for_room
    first.release(0.0)
    assert not limited.others_wait_for_room


def test_what_is_not_whole_yet_needs_no_slot_and_comes_back_before_all_that_wait() -> None:
    limited, meter = admissions(1, 5, room=100)
    told: list[str] = []
    first = limited.admit(0.0, list, cost_bytes=40)
    first.step_aside()
    second = limited.admit(0.0, list, cost_bytes=40)
    third = limited.admit(0.0, lambda: told.append("third"))
    assert (names(first, second, third), limited.bytes.used_bytes) == (["aside", "running", "waiting"], 80)
    assert not first.come_back(lambda: told.append("first"))
    assert (limited.running, limited.waiting, meter.concurrency) == (1, 2, 3)
    assert limited.admit_at_once(0.0) is None
    second.step_aside()
    assert (told, names(first, second, third)) == (["first"], ["running", "aside", "waiting"])
    assert first.come_back(list)  # it has its slot
    second.come_back(lambda: told.append("second"))
    second.give_up(0.0)  # nobody waits for it: it needs no slot, and what Triton has of it stays
    first.release(0.0)
    assert (told, names(second, third)) == (["first", "third"], ["aside", "running"])
    assert limited.bytes.used_bytes == 40
    second.grow(20)
    third.release(0.0)
    assert second.come_back(list)
    second.release(0.0)
    assert (limited.running, limited.waiting, limited.bytes.used_bytes, meter.concurrency) == (0, 0, 0, 0)


def test_those_that_come_back_do_so_in_their_order() -> None:
    limited, _ = admissions(1, 5)
    aside = [limited.admit(0.0, list) for _ in range(1)]
    for _ in range(3):
        aside[-1].step_aside()
        aside.append(limited.admit(0.0, list))
    told: list[int] = []
    for number in (2, 0, 1):
        aside[number].come_back(lambda number=number: told.append(number))  # type: ignore[misc]
    for one in (3, 2, 0, 1):
        aside[one].release(0.0)
    assert told == [2, 0, 1]


async def test_what_comes_back_hears_of_a_slot_that_another_process_gives() -> None:
    descriptors = shared_limit(1, 5)
    ours, theirs = (
        SharedAdmissions(LoadMeter(0.0, lambda: 0.0), *map(os.dup, descriptors), bytes=Budget(100))
        for _ in range(2)
    )
    mine = ours.admit(0.0, list)
    mine.step_aside()
    other = theirs.admit(0.0, list)
    assert other.is_running
    assert not mine.come_back(list)
    other.release(0.0)
    await asyncio.sleep(0.01)
    assert mine.is_running
    mine.release(0.0)
    ours.close()
    theirs.close()


async def test_what_ends_after_its_replica_touches_no_descriptor_that_another_has_by_then() -> None:
    ended = shared_limit(1, 2)
    limited = SharedAdmissions(LoadMeter(0.0, lambda: 0.0), *ended, bytes=Budget(100))
    runs, waits = limited.admit(0.0, list), limited.admit(0.0, list)
    limited.close()
    assert not asyncio.get_running_loop().remove_reader(ended[0])  # nobody looks at it any more
    others = shared_limit(5, 5)
    assert others == ended  # the system gives the lowest number that is free
    with pytest.raises(Refusal, match="the model has ended"):
        limited.admit(0.0, list)
    runs.release(0.0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert waits.is_waiting
    waits.release(0.0)
    assert (limited.running, limited.waiting) == (0, 0)
    limited.close()
    for one in others:
        assert [os.eventfd_read(one) for _ in range(5)] == [1] * 5
        with pytest.raises(BlockingIOError):
            os.eventfd_read(one)
        os.close(one)


def test_however_much_one_part_takes_another_still_finds_room() -> None:
    whole = Budget(256)
    greedy, others = Budget(256, whole), [Budget(256, whole) for _ in range(20)]
    for _ in range(1000):
        greedy.take(1)
    assert greedy.used_bytes == 128
    for other in others[:3]:
        for _ in range(1000):
            other.take(1)
        assert other.used_bytes >= 16
    assert others[-1].take(8)
    for part in (greedy, *others):
        part.give(part.used_bytes)
    assert whole.used_bytes == 0


def test_the_last_byte_of_a_budget_may_be_taken_and_no_further_one() -> None:
    part = Budget(10)
    assert part.take(10)
    assert not part.take(1)


def test_what_is_there_already_counts_in_the_whole_and_exceeds_it_for_all_its_parts() -> None:
    whole = Budget(10)
    large, small = Budget(100, whole), Budget(100, whole)
    large.charge(10)
    assert (whole.used_bytes, small.is_exceeded) == (10, False)
    large.charge(1)
    assert small.is_exceeded
    assert not small.take(0)
    large.give(11)
    assert (whole.used_bytes, small.is_exceeded) == (0, False)


def replica(*, concurrency: int = 1, depth: int | None = None) -> Replica:
    return Replica(Names(b"own", b"own"), ReplicaLimits(container_concurrency=concurrency, queue_depth=depth))


async def test_more_room_for_bytes_is_given_to_those_who_wait_for_it() -> None:
    own = Replica(Names(b"own", b"own"), ReplicaLimits(max_inflight_bytes=10), shared=shared_limit(5, 5))
    first, waits = Request(own, own.rest, 0.0), Request(own, own.rest, 0.0)
    assert first.admit(0.0, list, 10)
    assert not waits.admit(0.0, list, 10)
    own.set_limits(ReplicaLimits(max_inflight_bytes=20))
    own.tick(1.0)
    assert waits.admission is not None
    assert waits.admission.is_running
    own.admissions.close()


def test_what_is_on_its_way_is_bounded_for_a_replica_and_for_all_of_a_process() -> None:
    whole = Budget(100)
    one, other = (
        Replica(Names(b"own", b"own"), ReplicaLimits(max_inflight_bytes=10), process_budget=whole)
        for _ in range(2)
    )
    held = Request(one, one.rest, 0.0)
    held.hold(10)
    with pytest.raises(Refusal, match=r"may take 10 B together \(--max-inflight-bytes\)"):
        Request(one, one.rest, 0.0).hold(1)
    one.set_limits(ReplicaLimits(max_inflight_bytes=200))
    held.hold(40)
    assert whole.used_bytes == 50
    with pytest.raises(Refusal, match=r"may take 100 B together \(--memory-budget of the node's gateway\)"):
        held.hold(1)  # it would have more than is left for all others
    Request(other, other.rest, 0.0).hold(10)
    held.let_all_go()
    assert whole.used_bytes == 10


async def test_questions_have_a_small_bound_of_their_own() -> None:
    own = replica(concurrency=1)
    had = [Request(own, own.rest, 0.0) for _ in range(400)]
    running = sum(one.admit(0.0, list, 0, counted=False) for one in had)
    assert (running, own.admissions.running, own.questions.waiting) == (8, 0, 392)
    assert Request(own, own.rest, 0.0).admit(0.0, list, 0)
    for one in had:
        one.end(Stage.ANSWERED, "200", 0.0)
    assert (own.questions.running, own.questions.waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(30))
async def test_a_request_is_counted_once_and_gives_all_back_however_it_ends(seed: int) -> None:
    rng, own, now = random.Random(seed), replica(concurrency=2, depth=3), 0.0
    live: list[Request] = []
    arrived = 0
    for _ in range(500):
        now += 0.01
        if rng.random() < 0.4 or not live:
            arrived += 1
            live.append(Request(own, own.rest, now))
            continue
        one = rng.choice(live)
        match rng.randrange(6):
            case 0 if not one.stage.is_over:
                one.hold(rng.randrange(1000))
            case 1 if one.admission is None and not one.stage.is_over:
                try:
                    one.admit(now, list, rng.randrange(1000), counted=rng.random() < 0.7)
                except Refusal:
                    one.end(Stage.REFUSED, "503", now)
            case 2 if not one.stage.is_over:
                one.end(Stage.ANSWERED, "200", now)
            case 3 if not one.stage.is_over:
                one.end(Stage.ABORTED, "499", now, in_triton=one.admission is not None)
            case 4:
                one.triton_is_done(now)
            case _:
                one.let_all_go()
    for one in live:
        if not one.stage.is_over:
            one.end(Stage.ABORTED, "499", now, in_triton=True)
        one.triton_is_done(now)
    assert (own.admissions.running, own.admissions.waiting, own.questions.running) == (0, 0, 0)
    assert (own.budget.used_bytes, own.admissions.bytes.used_bytes) == (0, 0)
    assert sum(own.rest.codes.values()) == arrived


def test_a_name_of_the_servers_is_replaced_in_its_own_length() -> None:
    names = Names(b"resnet", b"resnet-0123456789ab")
    assert len(names.public_member) == len(names.server_member)
    assert names.public_member.startswith(b'"model_name":"resnet" ')
    assert names.to_public(b"unknown model: 'resnet-0123456789ab'") == b"unknown model: 'resnet'"
    with pytest.raises(ValueError, match="shorter"):
        Names(b"resnet", b"r")


def test_a_replica_that_is_closed_refuses_with_the_reason_and_only_as_long() -> None:
    own = Replica(Names(b"m", b"m"), ReplicaLimits())
    running = own.admissions.admit_at_once(0.0)
    own.closed = "Triton has died of it"
    assert own.admissions.admit_at_once(0.0) is None
    with pytest.raises(Refusal, match="Triton has died of it") as refused:
        own.admissions.admit(0.0, list)
    assert refused.value.why is Why.NOT_SERVED
    assert running is not None
    running.release(0.0)
    own.closed = None
    assert own.admissions.admit_at_once(0.0) is not None


def test_other_limits_hold_from_now_on() -> None:
    own = Replica(Names(b"m", b"m"), ReplicaLimits(container_concurrency=1, queue_depth=1))
    had = [own.admissions.admit(0.0, list) for _ in range(2)]
    own.set_limits(ReplicaLimits(container_concurrency=3, queue_depth=0, max_inflight_bytes=100))
    assert names(*had) == ["running", "running"]
    assert own.admissions.admit_at_once(0.0) is not None
    with pytest.raises(Refusal, match=QUEUE_FULL):
        own.admissions.admit(0.0, list)
    own.set_limits(ReplicaLimits(container_concurrency=1, max_inflight_bytes=100))
    had[0].release(0.0)
    assert own.admissions.admit_at_once(0.0) is None  # two of the three still run
    with pytest.raises(Refusal, match="--max-inflight-bytes"):
        own.admissions.admit(0.0, list, cost_bytes=101)
