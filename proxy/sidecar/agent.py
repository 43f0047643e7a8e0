"""The node's agent as the sidecar sees it: it names the gateway, gives the ticket, and takes the model back."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.gateway import ReplicaLimits
from berth.contract.ids import ModelName
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from proxy.sidecar import calls, messages
from proxy.sidecar.calls import CallFailed
from proxy.sidecar.gateway import GatewayAccess, NodeGateway
from proxy.sidecar.messages import ModelStatus
from proxy.wire.grpc_status import Status
from proxy.wire.h2.hpack import Header
from proxy.wire.preamble import TICKET_BYTES
from proxy.wire.protobuf import BadMessage

log = logging.getLogger(__name__)

UNLOAD_TRIES: Final = 3
UNLOAD_SECONDS: Final = 8.0
_SERVICE: Final = "/berth.v1.NodeAgent/"


class Agent(Protocol):
    """Calls that raise CallFailed."""

    def watch(self) -> AsyncIterator[ModelStatus]:
        """The model's status now and after every change."""
        ...

    async def unload(self) -> str:
        """Say that this pod is done with its model; the agent's answer in a word."""
        ...


@dataclass(frozen=True, slots=True)
class NodeAgent:
    """The real one, called under the pod's own projected token."""

    endpoint: Endpoint
    token_file: Path | None
    model: ModelName
    limits: ReplicaLimits

    async def watch(self) -> AsyncIterator[ModelStatus]:
        request = messages.watch_request(self.model, self.limits)
        answers = calls.stream(self.endpoint, _SERVICE + "WatchModel", request, self._metadata())
        async with aclosing(answers) as said:  # type: ignore[type-var]
            async for message in said:
                try:
                    yield messages.read_status(message)
                except BadMessage as error:
                    raise CallFailed(Status.INTERNAL, f"not a status: {error}") from error

    async def unload(self) -> str:
        request = messages.unload_request(self.model)
        answer = await calls.unary(
            self.endpoint, _SERVICE + "Unload", request, self._metadata(), timeout_seconds=UNLOAD_SECONDS
        )
        return messages.read_outcome(answer)

    def _metadata(self) -> Sequence[Header]:
        """The token is read for each call: the kubelet replaces it while the pod lives. Raises CallFailed."""
        if self.token_file is None:
            return ()
        try:
            token = self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise CallFailed(Status.UNAUTHENTICATED, f"--token-file: {self.token_file}: {reason}") from error
        return ((b"authorization", b"Bearer " + token.encode()),)


async def follow(agent: Agent, gateway: NodeGateway) -> None:
    """Follow the agent's status for ever; the last one holds while the agent is away."""
    backoff, logged = Backoff(initial_seconds=0.2, cap_seconds=5.0), ""
    while True:
        least = 0.0
        try:
            async for status in agent.watch():
                apply(gateway, status)
                backoff.reset()
                logged = ""
        except CallFailed as error:
            level = logging.DEBUG if str(error) == logged else logging.WARNING
            log.log(level, "agent is away", extra=fields(reason=error))
            logged = str(error)
            least = error.retry_seconds
        await asyncio.sleep(max(least, backoff.next()))


def apply(gateway: NodeGateway, status: ModelStatus) -> None:
    """Where the gateway is, and whether the model is to be used."""
    if status.endpoint:
        try:
            gateway.access = _access(status)
        except InvalidValue as error:
            log.warning("the agent's status cannot be read", extra=fields(reason=error))
    gateway.withheld = (status.reason or "the agent calls the model failed") if status.has_failed else None


def _access(status: ModelStatus) -> GatewayAccess:
    """Raises InvalidValue."""
    if len(status.ticket) != TICKET_BYTES:
        raise InvalidValue(f"a ticket of {len(status.ticket)} bytes; it has {TICKET_BYTES}")
    return GatewayAccess(Endpoint.parse(status.endpoint), status.ticket)


async def give_back(agent: Agent) -> None:
    """Tell the agent, a few times at most. If it is away it will see for itself that the pod is gone."""
    backoff = Backoff(initial_seconds=0.3, cap_seconds=2.0)
    for attempt in range(1, UNLOAD_TRIES + 1):
        try:
            outcome = await agent.unload()
        except CallFailed as error:
            log.warning("unload not taken", extra=fields(attempt=attempt, error=error))
            if attempt < UNLOAD_TRIES:
                await asyncio.sleep(backoff.next())
            continue
        log.info("unload", extra=fields(outcome=outcome))
        return
