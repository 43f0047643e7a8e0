"""REST requests outstanding at Triton: bounded for all replicas together, and handed out in turns."""

import asyncio
import random

import pytest

from proxy.policy.refusal import Refusal
from proxy.request.admission import (
    QUEUE_FULL,
    Admission,
    Admissions,
    AdmissionState,
    SharedAdmissions,
    shared_limit,
)
from proxy.request.budget import Budget
from proxy.request.load import LoadMeter
from proxy.request.outstanding import Outstanding


def replica(whole: Outstanding, *, limit: int = 0, depth: int = 100, room: int = 10**9) -> Admissions:
    meter = LoadMeter(0.0, lambda: 0.0)
    return Admissions(meter, limit=limit, queue_depth=depth, bytes=Budget(room), outstanding=whole)


def ask(one: Admissions, count: int = 1, **more: int) -> list[Admission]:
    return [one.admit(0.0, list, is_rest=True, **more) for _ in range(count)]  # type: ignore[arg-type]


def running(admitted: list[Admission]) -> int:
    return sum(one.is_running for one in admitted)


def test_one_replica_leaves_room_to_the_others() -> None:
    """Data-plane D2: no bound but that of bytes stood between a replica's burst and Triton."""
    whole = Outstanding(16)
    greedy, other, third = (replica(whole) for _ in range(3))
    many = ask(greedy, 40)
    assert (running(many), greedy.running, greedy.waiting) == (7, 7, 33)
    assert running(ask(other, 1)) == 1
    assert running(ask(third, 20)) == 3
    assert whole.free == 5
    assert greedy.admit_at_once(0.0, is_rest=True) is None


def test_replicas_that_compute_for_long_leave_one_turn_to_each_other_one() -> None:
    """Data-plane D2: nine of them had every turn between them, and a neighbour waited until one was done."""
    whole = Outstanding(256)
    slow = [replica(whole, depth=300) for _ in range(12)]
    for one in slow:
        ask(one, 300)
    assert [one.running for one in slow[:4]] == [97, 48, 24, 12]
    others = [replica(whole) for _ in range(whole.free)]
    assert len(others) >= 50
    for one in others:
        first, second = ask(one, 2)
        assert (first.is_running, second.is_running) == (True, False)
    for one in others:  # one after the other, however long the slow ones take
        assert one.running == 1
    assert whole.free == 0


def test_a_turn_that_is_kept_goes_from_request_to_request_of_its_replica() -> None:
    whole = Outstanding(16)
    slow = [replica(whole) for _ in range(6)]
    for one in slow:
        ask(one, 20)
    assert 0 < whole.free <= whole.kept
    first, second, third = ask(replica(whole), 3)
    for done, follows in ((first, second), (second, third)):
        assert (done.is_running, follows.is_running) == (True, False)
        done.release(0.0)
        assert follows.is_running


def test_what_waits_for_its_turn_is_in_the_bounded_queue() -> None:
    greedy = replica(Outstanding(3), depth=2)
    ask(greedy, 4)
    assert (greedy.running, greedy.waiting) == (2, 2)
    with pytest.raises(Refusal, match=QUEUE_FULL):
        ask(greedy)
    assert greedy.waiting == 2


def test_replicas_that_wait_take_turns() -> None:
    whole, log = Outstanding(4), list[str]()
    replicas = {name: replica(whole) for name in "abcd"}
    first = [one for home in replicas.values() for one in ask(home)]
    for name, home in replicas.items():
        for _ in range(3):
            home.admit(0.0, lambda name=name: log.append(name), is_rest=True)  # type: ignore[misc]
    assert whole.free == 0
    for one in first:
        one.release(0.0)
    assert log == ["a", "b", "c", "d"]


def test_who_has_just_had_its_turn_is_last() -> None:
    """Also where nothing is left for those behind."""
    whole, log, running = Outstanding(1), list[str](), list[Admission]()
    (first,) = ask(replica(whole))
    for name in "abc":
        home = replica(whole)
        for _ in range(2):
            waits: list[Admission] = []

            def granted(name: str = name, waits: list[Admission] = waits) -> None:
                log.append(name)
                running.extend(waits)

            waits.append(home.admit(0.0, granted, is_rest=True))
    first.release(0.0)
    while running:
        running.pop().release(0.0)
    assert log == ["a", "b", "c", "a", "b", "c"]


def test_many_replicas_that_give_back_at_once_what_they_were_given() -> None:
    """As all do while Triton is not reached: that is told one after the other, not one within the other."""
    whole, refused = Outstanding(1), 0
    (first,) = ask(replica(whole))
    for _ in range(500):
        waits: list[Admission] = []

        def granted(waits: list[Admission] = waits) -> None:
            nonlocal refused
            refused += 1
            waits[0].release(0.0)

        waits.append(replica(whole).admit(0.0, granted, is_rest=True))
    first.release(0.0)
    assert (refused, whole.free) == (500, 1)


def test_grpc_does_not_wait_for_rest_that_is_out_of_turn() -> None:
    whole = Outstanding(1)
    greedy = replica(whole)
    first, waits = ask(greedy, 2)
    assert greedy.admit(0.0, list).is_running
    first.release(0.0)
    assert waits.is_running


def test_rest_that_has_its_turn_goes_before_grpc_that_came_later() -> None:
    whole = Outstanding(1)
    home = replica(whole, limit=1)
    first, second = ask(home, 2)
    later = home.admit(0.0, list)
    first.release(0.0)
    assert (second.is_running, later.is_running) == (True, False)
    second.release(0.0)
    assert later.is_running


@pytest.mark.parametrize("aside", ["step_aside", "has_run"])
def test_what_triton_does_not_compute_counts_for_nothing(aside: str) -> None:
    """Half a request, and an answer on its way, keep no turn from others."""
    whole = Outstanding(1)
    mine, theirs = replica(whole), replica(whole)
    (one,) = ask(mine)
    (waits,) = ask(theirs)
    assert not waits.is_running
    one.has_run(0 if aside == "step_aside" else 10)
    assert waits.is_running
    assert not one.come_back(list)
    waits.release(0.0)
    assert one.is_running
    one.release(0.0)
    assert whole.free == 1


def test_what_nobody_waits_for_keeps_its_turn_until_triton_is_done() -> None:
    whole = Outstanding(1)
    home = replica(whole)
    one, waits = ask(home, 2)
    one.give_up(0.0)
    assert not waits.is_running
    one.release(0.0)
    one.release(0.0)
    assert (waits.is_running, whole.free) == (True, 0)


def test_one_that_leaves_the_queue_holds_up_nobody() -> None:
    whole = Outstanding(1)
    mine, theirs = replica(whole), replica(whole)
    (runs,) = ask(theirs)
    gone, stays = ask(mine, 2)
    gone.release(0.0)
    runs.release(0.0)
    assert (stays.is_running, mine.waiting) == (True, 0)


async def test_who_waits_for_a_turn_alone_does_not_spin_on_a_free_slot() -> None:
    whole = Outstanding(1)
    meter = LoadMeter(0.0, lambda: 0.0)
    shared = SharedAdmissions(meter, *shared_limit(5, 5), bytes=Budget(100), outstanding=whole)
    calls = 0
    hand_out = shared.hand_out

    def counted() -> None:
        nonlocal calls
        calls += 1
        hand_out()

    shared.hand_out = counted  # type: ignore[method-assign]
    first, second = ask(shared, 2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert calls == 0
    first.release(0.0)
    assert second.is_running
    second.release(0.0)
    shared.close()


def act(rng: random.Random, one: Admission) -> None:
    """Something that may happen to one that has been admitted."""
    match rng.randrange(5):
        case 0:
            one.release(0.0)
        case 1:
            one.give_up(0.0)
        case 2:
            one.step_aside()
        case 3:
            one.come_back(list)
        case _:
            one.has_run(3)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("shared", [False, True])
async def test_after_any_history_nobody_is_forgotten(seed: int, shared: bool) -> None:
    """Whoever waits has a reason, and all that was taken comes back."""
    rng = random.Random(seed)
    bound = rng.randrange(1, 9)
    whole = Outstanding(bound)
    limits = [rng.randrange(4) for _ in range(4)]
    if shared:
        homes: list[Admissions] = [
            SharedAdmissions(
                LoadMeter(0.0, lambda: 0.0),
                *shared_limit(limit or 1000, 5),
                bytes=Budget(100),
                outstanding=whole,
            )
            for limit in limits
        ]
    else:
        homes = [replica(whole, limit=limit, depth=5, room=100) for limit in limits]
    every: list[Admission] = []
    for _ in range(300):
        live = [one for one in every if one.state is not AdmissionState.RELEASED]
        if rng.random() < 0.5 or not live:
            try:
                home = rng.choice(homes)
                is_rest = rng.random() < 0.7
                every.append(home.admit(0.0, list, cost_bytes=rng.randrange(40), is_rest=is_rest))
            except Refusal:
                continue
        else:
            act(rng, rng.choice(live))
        if shared:
            await asyncio.sleep(0)
        in_turn = [
            one
            for one in every
            if one.share is not None and one.state in (AdmissionState.RUNNING, AdmissionState.GIVEN_UP)
        ]
        assert whole.free == bound - len(in_turn) >= 0
        for home, limit in zip(homes, limits, strict=True):
            mine = [one for one in every if one._home is home]
            waits = [one for one in mine if one.state is AdmissionState.WAITING]
            assert len(waits) <= 5
            has_slot = not limit or home.running < limit
            first = next(iter(waits), None)
            if first is not None and has_slot and first.cost_bytes <= home.bytes.free_bytes:
                assert first.share is not None
                assert not first.share.has_room or any(one.state is AdmissionState.RETURNING for one in mine)
    while live := [one for one in every if one.state is not AdmissionState.RELEASED]:
        rng.choice([one for one in live if one.state is not AdmissionState.WAITING] or live).release(0.0)
        if shared:
            await asyncio.sleep(0)
    assert whole.free == bound
    assert [(home.running, home.waiting, home.bytes.used_bytes) for home in homes] == [(0, 0, 0)] * 4
    for home in homes:
        home.close()
