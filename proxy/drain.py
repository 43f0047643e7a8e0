"""How a proxy ends: an ordered list of bounded waits.

Unready first, so that endpoints are told; serve on while they are being told; then take nothing new,
let what is in flight finish, and only then give the model up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from berth.contract.ids import ModelName
from berth.nodeagent.client import AgentConnection, AgentError
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.v1 import node_agent_pb2 as pb

log = logging.getLogger(__name__)

UNLOAD_TRIES = 3
UNLOAD_SECONDS = 8.0


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


async def unload(agent: AgentConnection, model: ModelName) -> None:
    """Tell the agent, a few times at most. If it is away it will see for itself that the pod is gone."""
    backoff = Backoff(initial_seconds=0.3, cap_seconds=2.0)
    for attempt in range(1, UNLOAD_TRIES + 1):
        try:
            answer = await agent.unload(model)
        except AgentError as error:
            log.warning("unload not taken", extra=fields(attempt=attempt, error=error))
            if attempt < UNLOAD_TRIES:
                await asyncio.sleep(backoff.next())
            continue
        log.info("unload", extra=fields(outcome=pb.UnloadResponse.Outcome.Name(answer.outcome)))
        return
