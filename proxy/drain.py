"""How a proxy ends: an ordered list of bounded waits.

Unready first, so that endpoints change; serve on while they do; then take nothing new,
let what is in flight finish, and only then give the model up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from berth.runtime.logs import fields

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """One step and the longest that it may take."""

    name: str
    work: Callable[[], Awaitable[object]]
    seconds: float


async def in_order(stages: Sequence[Stage]) -> None:
    """Run each for as long as it may take; one that fails or is late does not stop the next."""
    for stage in stages:
        try:
            async with asyncio.timeout(stage.seconds):
                await stage.work()
        except TimeoutError:
            log.warning("drain: out of time", extra=fields(stage=stage.name, seconds=stage.seconds))
        except Exception as error:  # an end must come to its end
            log.warning("drain: failed", extra=fields(stage=stage.name, error=repr(error)))
        else:
            log.info("drained", extra=fields(stage=stage.name))
