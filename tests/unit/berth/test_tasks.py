"""Tasks that live as long as their process."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from berth.runtime.backoff import Backoff
from berth.runtime.tasks import (
    TaskReturned,
    first_of,
    in_thread,
    repeat,
    supervise,
    wait_until_set,
    work_or_stop,
)
from tests.fakes import leaping


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_a_task_that_never_began_is_no_failure() -> None:
    async def never() -> None:
        raise AssertionError

    async with supervise() as tasks:
        tasks.eternal("never", never())


async def test_a_failing_task_ends_the_others_and_says_who() -> None:
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("bug")

    with pytest.raises(ExceptionGroup) as caught:
        async with supervise() as tasks:
            tasks.eternal("waits", waits())
            tasks.eternal("fails", fails())
            await asyncio.Event().wait()
    assert caught.group_contains(RuntimeError, match="bug")
    assert ended.is_set()


def test_a_loop_comes_round_in_its_time_and_pauses_longer_while_it_fails() -> None:
    async def story() -> None:
        at: list[float] = []
        failures: list[Exception] = []

        async def step() -> None:
            at.append(leaping.now())
            if len(at) <= 12:
                raise RuntimeError("bug")

        task = asyncio.create_task(repeat(step, name="t", interval_seconds=3, on_error=failures.append))
        await asyncio.sleep(100)
        task.cancel()
        pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
        assert len(failures) == 12
        assert 0.05 < pauses[0] < 1  # what fails once is soon mended
        assert pauses[1] > pauses[0]
        assert 4 < max(pauses[:12]) < 6
        assert all(2.9 < pause < 3.1 for pause in pauses[12:])

    leaping.run(story())


def test_a_slow_loop_that_fails_is_not_tried_more_often_than_it_comes_round() -> None:
    async def story() -> None:
        count = 0

        async def step() -> None:
            nonlocal count
            count += 1
            raise RuntimeError("bug")

        task = asyncio.create_task(repeat(step, name="t", interval_seconds=300))
        await asyncio.sleep(3500)
        task.cancel()
        assert 10 < count < 25

    leaping.run(story())


async def test_a_wait_tells_whether_it_was_worth_it() -> None:
    event = asyncio.Event()
    assert await wait_until_set(event, timeout_seconds=0.01) is False
    event.set()
    assert await wait_until_set(event, timeout_seconds=0.01) is True


async def test_work_is_waited_for_until_it_ends_or_is_to_stop() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async def breaks() -> None:
        raise LookupError

    async with asyncio.timeout(5):
        assert await work_or_stop(asyncio.sleep(0, "done"), stop) == "done"
        with pytest.raises(LookupError):
            await work_or_stop(breaks(), stop)
        asyncio.get_running_loop().call_later(0.01, stop.set)
        assert await work_or_stop(for_ever(), stop) is None
        assert ended.is_set(), "it has ended before anybody goes on"
        # Nor does it outlive who waited for it.
        ended.clear()
        waiting = asyncio.create_task(work_or_stop(for_ever(), asyncio.Event()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert ended.is_set()
        assert waiting.cancelled()


async def test_the_first_of_several_events_is_enough_and_leaves_no_task() -> None:
    one, two = asyncio.Event(), asyncio.Event()
    waiting = asyncio.create_task(first_of(one, two))
    await asyncio.sleep(0)
    assert not waiting.done()
    two.set()
    await asyncio.wait_for(waiting, 5)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def _ends() -> None:
    return None


async def test_an_eternal_task_that_returns_is_a_failure() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with supervise() as tasks:
            tasks.eternal("short", _ends())
            await asyncio.Event().wait()
    assert caught.group_contains(TaskReturned)


async def test_leaving_the_block_cancels_the_tasks() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with supervise() as tasks:
        tasks.eternal("long", work())
        await asyncio.sleep(0)
    assert ended.is_set()


async def test_a_failing_step_is_repeated_and_a_wake_is_not_lost() -> None:
    calls: list[str] = []
    wake, done = asyncio.Event(), asyncio.Event()

    async def step() -> None:
        calls.append("x")
        if len(calls) == 1:
            raise RuntimeError("once")
        if len(calls) == 2:
            wake.set()  # a wake during the pass must cause another pass
        if len(calls) == 3:
            done.set()

    backoff = Backoff(initial_seconds=0, cap_seconds=0)
    task = asyncio.create_task(repeat(step, name="t", interval_seconds=3600, wake=wake, backoff=backoff))
    async with asyncio.timeout(5):
        await done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_a_failure_that_lasts_is_logged_once_and_its_end_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcomes = [RuntimeError("a"), RuntimeError("a"), RuntimeError("b"), None, None]
    done, wake = asyncio.Event(), asyncio.Event()

    async def step() -> None:
        outcome = outcomes.pop(0)
        (wake if outcomes else done).set()
        if outcome:
            raise outcome

    caplog.set_level(logging.INFO)
    backoff = Backoff(initial_seconds=0, cap_seconds=0)
    task = asyncio.create_task(repeat(step, name="t", interval_seconds=3600, wake=wake, backoff=backoff))
    async with asyncio.timeout(5):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    said = [record.getMessage() for record in caplog.records if record.name == "berth.runtime.tasks"]
    assert said == ["pass failed, will be tried again"] * 2 + ["pass succeeds again"]


async def test_cancelled_work_in_a_thread_is_waited_for() -> None:
    """Whoever cleans up after it must not race against the thread."""
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.2)
        done.set()

    task = asyncio.create_task(in_thread(work))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()
    assert await in_thread(sum, [1, 2]) == 3
