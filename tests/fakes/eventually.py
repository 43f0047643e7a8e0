"""How a test waits: for the state that it asserts, within a bound, and says what it waited for in vain."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from berth.kube.errors import NotFound

T = TypeVar("T")

_PAUSE_SECONDS = 0.005


async def until(condition: Callable[[], object], seconds: float = 20, *, what: str = "") -> int:
    """Wait until `condition`, a function or a coroutine function, is true; returns how often it was asked."""
    asked = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                asked += 1
                holds = condition()
                if inspect.isawaitable(holds):
                    holds = await holds
                if holds:
                    return asked
                await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError as error:
        raise AssertionError(
            f"not within {seconds:g} s: {what or inspect.getsource(condition).strip()}"
        ) from error


async def eventually(check: Callable[[], Awaitable[T]], *, seconds: float = 60, what: str = "") -> T:
    """Call `check` until it raises neither AssertionError nor NotFound; says the last failure on time-out."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await check()
        except (AssertionError, NotFound) as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds:g} s: {what} {error}") from error
        await asyncio.sleep(0.1)
