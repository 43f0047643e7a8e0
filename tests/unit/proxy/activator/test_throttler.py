"""The queue in which requests wait for a replica: a limit that moves, its bounds, and what is counted. Without sockets."""

from collections.abc import Callable
from typing import Any

import pytest

from berth.contract.activation import BufferLimits
from proxy.activator.bounds import COLD_START_BURST, TENANT_COLD_START_BURST, Bounds, TokenBucket
from proxy.activator.throttler import TOO_MANY_COLD_STARTS, Throttler
from proxy.activator.tls_tunnel import NotHello, whole_hello
from proxy.policy.refusal import Refusal, Why
from proxy.request.admission import Admission
from proxy.request.budget import Budget
from proxy.request.load import LoadMeter


class Queue:
    """A hold whose clock a test moves."""

    def __init__(self, bounds: Bounds | None = None, **limits: Any) -> None:
        self.now = 100.0
        self.cold_starts = 0
        self.order: list[int] = []
        self.meter = LoadMeter(self.now, lambda: 0.0)
        self.throttler = Throttler(
            self.meter, BufferLimits(**limits), bounds or Bounds(), self._cold_start, clock=lambda: self.now
        )

    def _cold_start(self) -> None:
        self.cold_starts += 1

    def ask(self, number: int = 0) -> Admission:
        return self.throttler.admit(self.now, lambda: self.order.append(number))

    def refused(self) -> Refusal:
        with pytest.raises(Refusal) as refusal:
            self.ask()
        return refusal.value


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_no_replica_is_not_no_limit(queue: Queue) -> None:
    asked = [queue.ask(i) for i in range(5)]
    assert all(one.is_waiting for one in asked)
    assert queue.throttler.admit_at_once(queue.now) is None
    queue.throttler.allow(2)
    assert [one.is_running for one in asked] == [True, True, False, False, False]
    asked[0].release(queue.now)
    assert queue.order == [0, 1, 2]
    queue.throttler.allow(0)
    asked[1].release(queue.now)
    asked[2].release(queue.now)
    assert queue.order == [0, 1, 2]
    assert asked[3].is_waiting


def test_what_is_released_is_bounded_by_the_slots_at_every_step(queue: Queue) -> None:
    asked = [queue.ask(i) for i in range(100)]
    for slots in (3, 7, 2, 5):
        queue.throttler.allow(slots)
        for _ in range(20):
            running = [one for one in asked if one.is_running]
            assert len(running) <= 7
            assert queue.throttler.running == len(running)
            running[0].release(queue.now)
            assert queue.throttler.running <= max(slots, len(running) - 1)
    assert queue.order == list(range(len(queue.order)))


def test_the_first_that_waits_cold_starts_and_the_others_do_not(queue: Queue) -> None:
    first = queue.ask()
    assert (queue.cold_starts, queue.throttler.needs_replica) == (1, True)
    queue.ask()
    first.release(queue.now)
    queue.ask()
    assert queue.cold_starts == 1


def test_who_waits_for_a_busy_replica_cold_starts_nobody_until_the_replica_goes(queue: Queue) -> None:
    queue.throttler.allow(1)
    queue.ask()
    queue.ask()
    assert (queue.cold_starts, queue.throttler.needs_replica, queue.throttler.buffered) == (0, False, 1)
    queue.throttler.allow(0)
    assert (queue.cold_starts, queue.throttler.needs_replica) == (1, True)


def test_one_that_had_its_slot_and_lost_its_replica_is_buffered_again(queue: Queue) -> None:
    queue.throttler.allow(1)
    queue.ask()
    queue.throttler.allow(0)
    assert queue.cold_starts == 0, "it runs"
    queue.throttler.retry_began(queue.now)
    assert (queue.cold_starts, queue.throttler.buffered, queue.throttler.needs_replica) == (1, 1, True)
    queue.throttler.retry_ended(queue.now)
    assert (queue.throttler.buffered, queue.throttler.needs_replica) == (0, False)


def test_it_is_held_for_so_long_and_no_longer() -> None:
    queue = Queue(seconds=5.0)
    asked = queue.ask()
    assert not asked.is_overdue(queue.now + 5.0)
    assert asked.is_overdue(queue.now + 5.1)
    queue.throttler.allow(1)
    assert not asked.is_overdue(queue.now + 100), "it is in a replica"
    queue.now += 2
    queue.ask()
    queue.now += 1.5
    assert queue.throttler.counts(queue.now).oldest_seconds == pytest.approx(1.5)


def test_so_many_wait_and_no_more() -> None:
    queue = Queue(requests=2)
    first = queue.ask()
    queue.ask()
    refusal = queue.refused()
    assert (refusal.why, str(refusal)) == (
        Why.NO_ROOM,
        "2 requests wait for a replica of the model already (hold-requests)",
    )
    first.release(queue.now)
    queue.ask()
    queue.throttler.allow(10)
    assert queue.ask().is_running, "who has a slot needs no place"


def test_one_model_leaves_places_for_the_others() -> None:
    bounds = Bounds(places=Budget(8))
    greedy, other = Queue(bounds), Queue(bounds)
    for _ in range(4):
        greedy.ask()
    assert str(greedy.refused()) == "too many requests of all models wait for a replica already"
    assert other.ask().is_waiting
    greedy.throttler.allow(4)
    assert bounds.places.used_bytes == 1


def test_however_many_models_a_tenant_has_another_finds_room() -> None:
    bounds = Bounds(places=Budget(90), memory=Budget(90), connections=Budget(90))
    tenant, other = bounds.of_tenant(), bounds.of_tenant()
    for kind in ("places", "memory", "connections"):
        whole, theirs = getattr(bounds, kind), getattr(tenant, kind)
        greedy = [Budget(1000, theirs) for _ in range(20)]
        alone = next(count for count in range(100) if not greedy[0].take(1))
        assert alone == 45, "one model has what it had"
        taken = alone + sum(one.take(1) for one in greedy for _ in range(100))
        assert (taken, whole.used_bytes, theirs.used_bytes) == (60, 60, 60)
        modest = Budget(1000, getattr(other, kind))
        assert sum(modest.take(1) for _ in range(100)) == 15
        modest.give(15)
        for one in greedy:
            one.give(one.used_bytes)
        assert (whole.used_bytes, theirs.used_bytes) == (0, 0)


def test_however_many_models_a_tenant_cold_starts_another_is_started() -> None:
    bounds = Bounds()
    tenant, other = bounds.of_tenant(), bounds.of_tenant()
    taken = 0
    while tenant.cold_starts.has_one(100.0):
        tenant.cold_starts.take()
        taken += 1
    assert taken == TENANT_COLD_START_BURST
    for _ in range(COLD_START_BURST - TENANT_COLD_START_BURST):
        assert other.cold_starts.has_one(100.0)
        other.cold_starts.take()
    assert not other.cold_starts.has_one(100.0)


def test_a_model_is_started_so_often_and_no_more() -> None:
    queue = Queue(cold_starts_per_second=1.0, cold_start_burst=2)
    for _ in range(2):
        queue.ask().release(queue.now)
    assert str(queue.refused()) == TOO_MANY_COLD_STARTS
    assert queue.cold_starts == 2
    queue.now += 1
    queue.ask()
    assert queue.cold_starts == 3
    queue.ask()  # beside one that waits: nobody is taken by it
    assert queue.cold_starts == 3


def test_other_limits_count_for_whatever_comes_from_then_on() -> None:
    queue = Queue(requests=1, seconds=5.0, cold_starts_per_second=1.0, cold_start_burst=1)
    first = queue.ask()
    assert queue.refused().why is Why.NO_ROOM
    queue.throttler.set_limits(
        BufferLimits(requests=2, seconds=9.0, cold_starts_per_second=10.0, cold_start_burst=2)
    )
    second = queue.ask()
    assert first.is_overdue(queue.now + 5.1)
    assert not second.is_overdue(queue.now + 9.0)
    assert second.is_overdue(queue.now + 9.1)
    first.release(queue.now)
    second.release(queue.now)
    queue.now += 0.5  # tokens by the new rate, half of one by the old
    assert queue.ask().is_waiting


def test_a_client_that_waits_for_less_long_is_held_for_less_long() -> None:
    queue = Queue(seconds=5.0)
    asked = queue.throttler.admit(queue.now, lambda: None, deadline=queue.now + 1)
    assert asked.is_overdue(queue.now + 1.1)


def test_all_models_together_are_started_so_often_and_no_more() -> None:
    bounds = Bounds(cold_starts=TokenBucket(1.0, 3))
    queues = [Queue(bounds) for _ in range(4)]
    for one in queues[:3]:
        one.ask()
    assert str(queues[3].refused()) == TOO_MANY_COLD_STARTS
    # What is refused takes nothing of its model's own.
    queues[3].now += 1
    assert queues[3].ask().is_waiting


def test_a_failed_model_holds_nobody(queue: Queue) -> None:
    asked = [queue.ask(i) for i in range(3)]
    queue.throttler.closed = "never"
    assert str(queue.refused()) == "never"
    assert (queue.cold_starts, queue.throttler.needs_replica) == (1, False)
    queue.throttler.release_all()
    assert queue.order == [0, 1, 2], "each is told, and ends"
    for one in asked:
        one.release(queue.now)
    assert (queue.throttler.buffered, queue.throttler.running, queue.throttler.slots) == (0, 0, 0)
    queue.throttler.closed = None
    assert queue.ask().is_waiting


def test_every_request_arrives_once_and_is_forwarded_at_most_once() -> None:
    queue = Queue(requests=3)
    asked = [queue.ask() for _ in range(3)]
    queue.refused()
    queue.now += 1
    counted = queue.throttler.counts(queue.now)
    assert (counted.buffered, counted.arrived, counted.forwarded) == (3, 4, 0)
    assert counted.average_buffered == pytest.approx(3.0)
    queue.meter.report(queue.now)
    queue.throttler.allow(2)
    asked[2].release(queue.now)  # it left
    queue.now += 2
    asked[0].release(queue.now)
    queue.ask()
    counted = queue.throttler.counts(queue.now)
    assert (counted.buffered, counted.arrived, counted.forwarded) == (0, 1, 3)
    assert counted.average_buffered == pytest.approx(0.0)


def test_when_a_replica_came_for_those_that_waited_is_reported_once(queue: Queue) -> None:
    queue.throttler.allow(1)  # nobody waits for it
    assert queue.throttler.counts(queue.now).served_ago == 0
    queue.throttler.allow(0)
    first = queue.ask()
    queue.now += 1
    queue.throttler.allow(1)
    queue.now += 0.25
    queue.throttler.allow(2)  # another is none that was waited for
    queue.now += 0.5
    assert queue.throttler.counts(queue.now).served_ago == pytest.approx(0.75)
    assert queue.throttler.counts(queue.now).served_ago == 0
    first.release(queue.now)


@pytest.mark.parametrize("order", [lambda asked: asked, lambda asked: asked[::-1]])
def test_all_is_given_back(order: Callable[[list[Admission]], list[Admission]]) -> None:
    bounds = Bounds()
    queue = Queue(bounds)
    asked = [queue.ask() for _ in range(10)]
    queue.throttler.allow(4)
    for one in order(asked):
        one.release(queue.now)
        one.release(queue.now)
    assert (queue.throttler.buffered, queue.throttler.running, bounds.places.used_bytes) == (0, 0, 0)


HELLO = b"\x16\x03\x01\x00\x05\x01\x00\x00\x01x"


def test_a_hello_is_whole_with_its_first_record() -> None:
    for size in range(1, len(HELLO)):
        assert not whole_hello(HELLO[:size])
    assert whole_hello(HELLO)
    assert whole_hello(HELLO + b"more")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1",
        b"\x15\x03\x01",
        b"\x16\x02\x00",
        HELLO.replace(b"\x00\x05\x01", b"\x00\x05\x02"),
        HELLO.replace(b"\x00\x05", b"\x00\x03"),
        HELLO.replace(b"\x00\x05", b"\xff\xff"),
    ],
)
def test_what_is_no_hello_is_seen_at_once(data: bytes) -> None:
    with pytest.raises(NotHello):
        whole_hello(data)


def test_how_long_each_waited_is_counted_once_by_what_became_of_it() -> None:
    """autoscaling, Knative's metrics: nothing told how long requests are buffered."""
    bounds = Bounds()
    queue = Queue(bounds.of_tenant())
    first, second, third = (queue.ask(number) for number in range(3))
    queue.now += 3
    queue.throttler.allow(1)
    queue.now += 4
    second.give_up(queue.now)
    queue.now += 5
    first.release(queue.now)
    third.release(queue.now)
    queue.throttler.allow(9)
    queue.ask().release(queue.now)  # which did not wait
    forwarded, abandoned = bounds.buffered_seconds["forwarded"], bounds.buffered_seconds["abandoned"]
    assert (sum(forwarded.counts), forwarded.total) == (2, 3.0 + 12.0)
    assert (sum(abandoned.counts), abandoned.total) == (1, 7.0)
    assert not queue.throttler._since
