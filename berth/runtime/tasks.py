"""Supervised tasks and level-triggered loops."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

T = TypeVar("T")


class TaskReturned(Exception):
    """A task that must run for ever has returned: that is a failure, not an end."""


class Supervisor:
    """Starts the tasks of one process in a TaskGroup: the first failure ends them all."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._eternal: list[asyncio.Task[None]] = []

    def eternal(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` until the supervisor ends; its return is a failure."""
        task = self._group.create_task(_must_not_return(name, work), name=name)
        task.add_done_callback(lambda _: work.close())  # cancelled before it began, it was never awaited
        self._eternal.append(task)

    def cancel(self) -> None:
        for task in self._eternal:
            task.cancel()


@asynccontextmanager
async def supervise() -> AsyncIterator[Supervisor]:
    """Own tasks for the length of a block; leaving it cancels them and waits for their end."""
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group)
        try:
            yield supervisor
        finally:
            supervisor.cancel()


async def _must_not_return(name: str, work: Coroutine[Any, Any, Any]) -> None:
    await work
    raise TaskReturned(f"task {name} returned")


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run blocking work in a thread; a cancellation waits for its end, because nothing can stop it.

    With `asyncio.to_thread` the clean-up after a cancellation races against the thread.
    """
    future = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise


async def repeat(
    step: Callable[[], Awaitable[None]],
    *,
    name: str,
    interval_seconds: float,
    wake: asyncio.Event | None = None,
    backoff: Backoff | None = None,
    on_error: Callable[[Exception], None] | None = None,
) -> None:
    """Call `step` now, then after each interval or as soon as `wake` is set, for ever.

    A failing step is tried again after a growing pause; only cancellation ends the loop.
    """
    wake = wake or asyncio.Event()
    backoff = backoff or Backoff(initial_seconds=0.2, cap_seconds=max(5.0, interval_seconds))
    failure = _Failures(name)
    while True:
        wake.clear()
        try:
            await step()
        except Exception as error:  # the loop is the item boundary: one bad pass must not end the process
            failure.note(error)
            if on_error is not None:
                on_error(error)
            await asyncio.sleep(backoff.next())
            continue
        failure.over()
        backoff.reset()
        await wait_until_set(wake, timeout_seconds=interval_seconds)


class _Failures:
    """Says once that a loop fails, again when the reason changes, and once that it is over."""

    def __init__(self, name: str) -> None:
        self._name, self._said = name, ""

    def note(self, error: Exception) -> None:
        level = logging.DEBUG if repr(error) == self._said else logging.WARNING
        self._said = repr(error)
        log.log(level, "pass failed, will be tried again", extra=fields(task=self._name, error=self._said))
        log.debug("pass failed", exc_info=error)

    def over(self) -> None:
        if self._said:
            log.info("pass succeeds again", extra=fields(task=self._name))
            self._said = ""


async def wait_until_set(event: asyncio.Event, *, timeout_seconds: float) -> bool:
    """True if the event was set within the time."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def first_of(*events: asyncio.Event) -> None:
    """Return as soon as one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def work_or_stop(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """What the work returns, or None if `stop` is first; raises what the work raises. Work that is stopped has ended."""
    task, done = asyncio.create_task(work), asyncio.Event()
    task.add_done_callback(lambda _: done.set())
    try:
        await first_of(done, stop)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return None if task.cancelled() else task.result()
