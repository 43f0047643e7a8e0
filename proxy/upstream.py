"""The own model in the node's Triton: where it is, with which keys, and whether it serves now.

Two sources: the agent's word (endpoints, keys, and a nudge when the state changes) and Triton's own
answer, asked every second. Only the latter makes the model ready, so a pod is never ready without
its model, and an agent that restarts makes no pod unready.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import grpc.aio

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.ids import ModelName
from berth.nodeagent.client import AgentConnection, AgentError
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from berth.v1 import node_agent_pb2 as pb
from proxy.bodies import TooLarge, read_whole

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_POLL_TIMEOUT_SECONDS = 1.0
_MAX_MESSAGE = 2**31 - 1  # Triton's own limit for gRPC messages
_METADATA_BYTES = 1024 * 1024


class NotServed(Exception):
    """Triton cannot be asked now; the message says why."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where Triton is and what opens it. The headers are secret: never logged."""

    http: Endpoint
    grpc: Endpoint
    http_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    grpc_metadata: Mapping[str, str] = field(default_factory=dict, repr=False)


class Upstream:
    """What the front ends ask. Runs on the event loop alone."""

    def __init__(
        self,
        model: ModelName,
        session: aiohttp.ClientSession,
        *,
        http: Endpoint | None,
        grpc_: Endpoint | None,
    ) -> None:
        self.model, self.session = model, session
        self._http, self._grpc = http, grpc_
        self.access = None if http is None or grpc_ is None else Access(http, grpc_)
        self.not_ready: str | None = "the model has not been asked for yet"
        self._channel: tuple[Endpoint, grpc.aio.Channel] | None = None
        self._changed = asyncio.Event()
        self._nudge = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.not_ready is None

    def next_change(self) -> asyncio.Event:
        """Set when readiness changes. Take it before looking."""
        return self._changed

    def announce(self) -> None:
        """Wake who waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def require(self) -> Access:
        """Raises NotServed while nobody has told where Triton is."""
        if self.access is None:
            raise NotServed("the agent has not told yet where Triton is")
        return self.access

    def channel(self) -> grpc.aio.Channel:
        """The gRPC channel to Triton, made anew when its address changes. Raises NotServed."""
        endpoint = self.require().grpc
        if self._channel is None or self._channel[0] != endpoint:
            options = [
                ("grpc.enable_http_proxy", 0),
                ("grpc.max_send_message_length", _MAX_MESSAGE),
                ("grpc.max_receive_message_length", _MAX_MESSAGE),
                # Triton restarts on the same port: try again soon.
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ]
            self._channel = (endpoint, grpc.aio.insecure_channel(str(endpoint), options=options))
        return self._channel[1]

    async def versions(self) -> list[str]:
        """The versions that Triton serves. Raises NotServed."""
        access = self.require()
        url = f"http://{access.http}/v2/models/{self.model}"
        timeout = aiohttp.ClientTimeout(total=_POLL_TIMEOUT_SECONDS)
        try:
            async with self.session.get(url, headers=access.http_headers, timeout=timeout) as answer:
                data: Any = json.loads(await read_whole(answer.content, limit_bytes=_METADATA_BYTES))
        except (aiohttp.ClientError, TimeoutError, TooLarge, ValueError) as error:
            raise NotServed(f"Triton does not answer: {error!r}") from error
        found = data.get("versions") if isinstance(data, dict) else None
        return [str(version) for version in found] if isinstance(found, list) else []

    async def poll(self) -> None:
        """Ask Triton for ever whether it serves the model."""
        while True:
            self._nudge.clear()
            self._set(await self._why_not_ready())
            await wait_until_set(self._nudge, timeout_seconds=_POLL_SECONDS)

    async def follow(self, agent: AgentConnection) -> None:
        """Follow the agent's word for ever; what it said last holds while it is away."""
        backoff, said = Backoff(initial_seconds=0.2, cap_seconds=5.0), ""
        while True:
            try:
                async for status in agent.watch(self.model):
                    self._take(status)
                    backoff.reset()
                    said = ""
            except AgentError as error:
                level = logging.DEBUG if str(error) == said else logging.WARNING
                log.log(level, "agent is away", extra=fields(reason=error))
                said = str(error)
            await asyncio.sleep(backoff.next())

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel[1].close(grace=None)

    def _take(self, status: pb.ModelStatus) -> None:
        told = status.triton
        try:
            self.access = Access(
                self._http or Endpoint.parse(told.http_endpoint),
                self._grpc or Endpoint.parse(told.grpc_endpoint),
                dict(told.http_headers),
                dict(told.grpc_metadata),
            )
        except InvalidValue as error:
            log.warning("the agent's word is not readable", extra=fields(reason=error))
        self._nudge.set()

    async def _why_not_ready(self) -> str | None:
        try:
            access = self.require()
        except NotServed as error:
            return str(error)
        url = f"http://{access.http}/v2/models/{self.model}/ready"
        timeout = aiohttp.ClientTimeout(total=_POLL_TIMEOUT_SECONDS)
        try:
            async with self.session.get(url, headers=access.http_headers, timeout=timeout) as answer:
                return (
                    None if answer.status == 200 else f"Triton does not serve {self.model} ({answer.status})"
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"Triton does not answer: {type(error).__name__}"

    def _set(self, reason: str | None) -> None:
        if (reason is None) != self.is_ready:
            log.info(
                "model ready" if reason is None else "model not ready", extra=fields(reason=reason or "-")
            )
            self.announce()
        self.not_ready = reason


@asynccontextmanager
async def open_upstream(
    model: ModelName, *, http: Endpoint | None, grpc_: Endpoint | None
) -> AsyncIterator[Upstream]:
    """An upstream with a connection pool of its own."""
    # Limits on requests are the breaker's; a pool that limits too would queue where nobody counts.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        upstream = Upstream(model, session, http=http, grpc_=grpc_)
        try:
            yield upstream
        finally:
            await upstream.close()
