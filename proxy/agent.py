"""The node's agent as the proxy sees it: it tells where Triton is, and takes the model back."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from berth.contract.endpoint import Address, Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.ids import ModelName
from berth.nodeagent.client import AgentBusy, AgentConnection, AgentError, connect
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.v1 import node_agent_pb2 as pb
from proxy.exchange.access import Access
from proxy.upstream import Upstream

log = logging.getLogger(__name__)

UNLOAD_TRIES = 3
UNLOAD_SECONDS = 8.0


class Agent:
    """A connection to the agent. `http`, `grpc`: endpoints of Triton that hold whatever it says."""

    def __init__(self, connection: AgentConnection, *, http: Endpoint | None, grpc: Address | None) -> None:
        self._connection, self._http, self._grpc = connection, http, grpc

    async def follow(self, upstream: Upstream) -> None:
        """Follow the agent's word for ever; what it said last holds while it is away."""
        backoff, said = Backoff(initial_seconds=0.2, cap_seconds=5.0), ""
        while True:
            least = 0.0
            try:
                async for status in self._connection.watch(ModelName(upstream.model)):
                    self._take(upstream, status)
                    backoff.reset()
                    said = ""
            except AgentError as error:
                level = logging.DEBUG if str(error) == said else logging.WARNING
                log.log(level, "agent is away", extra=fields(reason=error))
                said = str(error)
                least = error.retry_seconds if isinstance(error, AgentBusy) else 0.0
            await asyncio.sleep(max(least, backoff.next()))

    def _take(self, upstream: Upstream, status: pb.ModelStatus) -> None:
        told = status.triton
        try:
            access = Access(
                self._http or Endpoint.parse(told.http_endpoint),
                self._grpc or Endpoint.parse(told.grpc_endpoint),
                dict(told.http_headers),
                dict(told.grpc_metadata),
            )
        except InvalidValue as error:
            log.warning("the agent's word is not readable", extra=fields(reason=error))
        else:
            upstream.where.move(access)
        failed = status.state == pb.MODEL_STATE_FAILED
        upstream.copy.withheld = (status.reason or "the agent calls the model failed") if failed else None
        upstream.nudge()

    async def unload(self, model: ModelName) -> None:
        """Tell the agent, a few times at most. If it is away it will see for itself that the pod is gone."""
        backoff = Backoff(initial_seconds=0.3, cap_seconds=2.0)
        for attempt in range(1, UNLOAD_TRIES + 1):
            try:
                answer = await self._connection.unload(model)
            except AgentError as error:
                log.warning("unload not taken", extra=fields(attempt=attempt, error=error))
                if attempt < UNLOAD_TRIES:
                    await asyncio.sleep(backoff.next())
                continue
            log.info("unload", extra=fields(outcome=pb.UnloadResponse.Outcome.Name(answer.outcome)))
            return


@asynccontextmanager
async def open_agent(
    endpoint: Endpoint, token_file: Path | None, *, http: Endpoint | None, grpc: Address | None
) -> AsyncIterator[Agent]:
    async with connect(endpoint, token_file) as connection:
        yield Agent(connection, http=http, grpc=grpc)
