"""Tests on the event loop that the processes run on, which differs from asyncio's own where transports end."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import uvloop

P = ParamSpec("P")


def on_uvloop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that pytest calls as any function, with a loop of its own."""

    @functools.wraps(test)
    def run(*what: P.args, **more: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*what, **more))

    return run
