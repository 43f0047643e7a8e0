"""How much of the agent one pod may take, and how little that is of what others have."""

from contextlib import ExitStack

import pytest

from agent.limits import (
    CALL_BURST,
    CALL_RATE,
    OPEN_CALLS,
    Busy,
    CallLimiter,
    MinimumRate,
    RateLimiter,
)
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef


def ref(name: str, namespace: str = "team") -> PodRef:
    return PodRef(namespace, name, PodUid(f"{namespace}-{name}"))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_at_once_and_its_rate_in_the_long_run() -> None:
    clock = Clock()
    rates = RateLimiter(rate=2, burst=4, clock=clock)
    assert [rates.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert rates.take("b") == 0  # each key for itself
    clock.now += 0.25
    assert rates.take("a") == 0.25  # what was refused has cost nothing
    clock.now += 0.25
    assert [rates.take("a"), rates.take("a")] == [0, 0.5]
    clock.now += 1000
    assert [rates.take("a") > 0 for _ in range(5)] == [False] * 4 + [True]


def test_buckets_are_few_and_the_least_used_goes_first() -> None:
    rates = RateLimiter(rate=1, burst=1, most=2, clock=Clock())
    rates.take("a"), rates.take("b"), rates.take("a"), rates.take("c")
    assert rates.take("a") > 0
    assert rates.take("b") == 0


def test_a_pod_has_few_calls_open_and_another_as_many() -> None:
    callers = CallLimiter(clock=Clock())
    with ExitStack() as calls:
        for _ in range(OPEN_CALLS):
            calls.enter_context(callers.call(ref("evil")))
        for _ in range(3):
            with pytest.raises(Busy, match=f"pod team/evil has {OPEN_CALLS} calls open"):
                calls.enter_context(callers.call(ref("evil")))
        calls.enter_context(callers.call(ref("good")))
    with callers.call(ref("evil")):
        pass


def test_a_pod_that_calls_too_often_gets_a_retry_pause() -> None:
    clock = Clock()
    callers = CallLimiter(clock=clock)
    for _ in range(int(CALL_BURST)):
        with callers.call(ref("evil")):
            pass
    with pytest.raises(Busy, match="calls too often") as busy, callers.call(ref("evil")):
        pass
    assert busy.value.retry_seconds == 1 / CALL_RATE
    with callers.call(ref("good")):
        pass
    clock.now += busy.value.retry_seconds
    with callers.call(ref("evil")):
        pass


def test_who_trickles_uses_up_our_patience_and_who_sends_does_not() -> None:
    patience = MinimumRate(seconds=30, bytes_per_second=1000)
    for _ in range(100):
        patience.waited(1, then_came_bytes=1000)
    assert patience.left_seconds == 30
    for _ in range(10):
        patience.waited(1, then_came_bytes=1)
    assert 20 < patience.left_seconds < 20.1
    patience.waited(1, then_came_bytes=10**9)
    assert patience.left_seconds == 30  # nobody earns more than there was
