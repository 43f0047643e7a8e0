from typing import Any

import numpy as np

from binder.loop.queue import CAP_SECONDS, TURN, WOKEN_CAP_SECONDS, SchedulingQueue, Waiting
from binder.loop.requeue import NodeToStatus, QueueingHint
from binder.pod.demand import parse_demand
from tests.fakes.objects import KEYS, pod

STAND = NodeToStatus(np.zeros(0, np.int8), set(), unresolvable=False, clock=0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def queue() -> tuple[SchedulingQueue, Clock]:
    clock = Clock()
    return SchedulingQueue(clock), clock


def demand(uid: str, **more: Any) -> Any:
    return parse_demand(pod(uid, **more), KEYS)


def uid_of(waiting: Waiting | None) -> str | None:
    return None if waiting is None else waiting.demand.model.ref.uid


def test_priority_then_age_then_uid() -> None:
    waiting, _ = queue()
    waiting.put(demand("late", created="2026-01-02T00:00:00Z"))
    waiting.put(demand("b", created="2026-01-01T00:00:00Z"))
    waiting.put(demand("a", created="2026-01-01T00:00:00Z"))
    waiting.put(demand("vip", created="2026-01-03T00:00:00Z", priority=10))
    assert [uid_of(waiting.pop()) for _ in range(5)] == ["vip", "a", "b", "late", None]


def test_a_parked_pod_waits_longer_each_time_up_to_the_cap() -> None:
    waiting, clock = queue()
    waiting.put(demand("p"))
    delays = []
    for _ in range(12):
        entry = waiting.pop()
        assert entry is not None
        waiting.park(entry, STAND)
        assert waiting.pop() is None
        delay = waiting.seconds_to_next()
        assert delay is not None
        delays.append(delay)
        clock.now += delay
    assert 0.4 <= delays[0] <= 0.6
    assert CAP_SECONDS * 0.9 <= delays[-1] <= CAP_SECONDS * 1.1


def test_a_requeued_pod_keeps_a_short_pause_since_its_last_try() -> None:
    waiting, clock = queue()
    waiting.put(demand("p"))
    delays = []
    for _ in range(8):
        entry = waiting.pop()
        assert entry is not None
        waiting.park(entry, STAND)
        began = clock.now
        waiting.wake(entry, QueueingHint(None))
        clock.now += waiting.seconds_to_next() or 0.0
        delays.append(clock.now - began)
    assert 0.4 <= delays[0] <= 0.6
    assert max(delays) <= 1.1 * WOKEN_CAP_SECONDS
    clock.now += 60.0
    waiting.put(demand("q"))


def test_after_a_long_wait_a_change_wakes_at_once() -> None:
    waiting, clock = queue()
    waiting.put(demand("p"))
    for _ in range(9):
        entry = waiting.pop()
        assert entry is not None
        waiting.park(entry, STAND)
        clock.now += waiting.seconds_to_next() or 0.0
    entry = waiting.pop()
    assert entry is not None
    waiting.park(entry, STAND)
    clock.now += 11.0
    assert waiting.pop() is None
    waiting.wake(entry, QueueingHint(None))
    assert uid_of(waiting.pop()) == "p"


def test_who_has_a_reason_goes_before_who_only_waits_and_who_waits_gets_a_turn() -> None:
    waiting, clock = queue()
    waiting.put(demand("old", priority=10))
    entry = waiting.pop()
    assert entry is not None
    waiting.park(entry, STAND)
    clock.now += 1.0
    for number in range(2 * TURN):
        waiting.put(demand(f"new{number:02}"))
    popped = [uid_of(waiting.pop()) for _ in range(2 * TURN + 1)]
    assert popped.index("old") == TURN - 1  # one has gone before


def test_a_deleted_pod_is_out_and_blocks_nobody() -> None:
    waiting, _ = queue()
    waiting.put(demand("p"))
    waiting.remove(demand("p").model.ref.uid)
    assert waiting.pop() is None
    assert waiting.seconds_to_next() is None


def test_a_gated_pod_is_not_tried_until_its_gates_are_open() -> None:
    waiting, _ = queue()
    waiting.put(demand("p", schedulingGates=[{"name": "g"}]))
    assert waiting.pop() is None
    waiting.put(demand("p"))
    assert uid_of(waiting.pop()) == "p"


def test_a_pod_that_requests_less_now_is_tried_now() -> None:
    waiting, _ = queue()
    waiting.put(demand("p", mem="9Gi"))
    entry = waiting.pop()
    assert entry is not None
    waiting.park(entry, STAND)
    waiting.put(demand("p", mem="9Gi"))  # the same again changes nothing
    assert waiting.pop() is None
    waiting.put(demand("p", mem="1Gi"))
    assert uid_of(waiting.pop()) == "p"


def test_a_newer_state_is_not_lost_when_an_old_one_is_parked() -> None:
    waiting, _ = queue()
    waiting.put(demand("p", mem="9Gi"))
    old = waiting.pop()
    assert old is not None
    waiting.put(demand("p", mem="1Gi"))
    waiting.park(old, STAND)
    newest = waiting.pop()
    assert newest is not None
    assert newest.demand == demand("p", mem="1Gi")
