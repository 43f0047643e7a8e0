"""The node's Triton as all clients of a process share it: its gRPC port, and what is asked of it."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from berth.runtime.logs import fields
from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.grpc_head import Keys
from proxy.request.replica import Replica
from proxy.transport.write_batch import WriteBatch
from proxy.upstream.grpc import AnswerReaders, GrpcRequest, UpstreamConnection
from proxy.upstream.http1 import UpstreamPool
from proxy.upstream.interface import Lost
from proxy.upstream.queries import fetch

log = logging.getLogger(__name__)

# Triton may be busy with somebody's large JSON.
_QUESTION_SECONDS: Final = 5.0
_METADATA_SECONDS: Final = 10.0
# After a connection that could not be made: twice as long each time.
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 2.0


class Upstreams(Protocol):
    """Where calls go."""

    def at_hand(self) -> UpstreamConnection | None:
        """A connection, if what is sent on it goes out now."""
        ...

    def connection(self, caller: GrpcRequest) -> UpstreamConnection | None:
        """For a call that begins now. None: `connected` follows, or `answer_broke`. Raises NotServed."""
        ...


class TritonGrpc:
    """One connection for all calls, made when it is needed; a new one takes over when it can take no more."""

    def __init__(self, cluster: UpstreamCluster, batch: WriteBatch, *, lost: Lost | None = None) -> None:
        """`lost`: told whose calls Triton had when it went, before they are refused."""
        self.batch = batch
        self._cluster, self._lost = cluster, lost
        self._readers = AnswerReaders()
        self._current: UpstreamConnection | None = None
        # Those too that only end their last calls.
        self.connections: set[UpstreamConnection] = set()
        self._pause, self._not_before, self._why = 0.0, 0.0, ""
        cluster.follow(self._moved)

    def at_hand(self) -> UpstreamConnection | None:
        """The connection, if what is sent on it goes out now."""
        current = self._current
        return current if current is not None and current.has_room else None

    def connection(self, caller: GrpcRequest | None = None) -> UpstreamConnection:
        """The one for a call that begins now. Raises NotServed."""
        current = self._current
        if current is not None and current.is_usable:
            return current
        endpoint = self._cluster.require()
        if asyncio.get_running_loop().time() < self._not_before:
            raise NotServed(self._why)
        if current is not None:
            current.retire()
        self._current = UpstreamConnection(
            endpoint.grpc, Keys(endpoint.grpc_metadata), self._readers, self.batch, self
        )
        self.connections.add(self._current)
        return self._current

    def connection_over(self, connection: UpstreamConnection, replicas: list[object]) -> None:
        self.connections.discard(connection)
        if connection.transport is None:
            self._pause = min(_LONGEST_PAUSE_SECONDS, 2 * self._pause or _FIRST_PAUSE_SECONDS)
            self._not_before = asyncio.get_running_loop().time() + self._pause
            self._why = f"Triton cannot be reached at {connection.address}"
        else:
            self._pause = self._not_before = 0.0
        if replicas:
            log.warning("triton is gone with calls in it", extra=fields(replicas=len(replicas)))
        if self._lost is not None:
            for replica in replicas:
                self._lost(replica)

    def tick(self, now: float) -> None:
        """Called every second."""
        for connection in list(self.connections):
            connection.tick(now)

    async def close(self) -> None:
        for connection in list(self.connections):
            await connection.closed("the proxy ends")

    def _moved(self, _: UpstreamEndpoint) -> None:
        """Calls that come now go elsewhere."""
        self._not_before = 0.0
        if self._current is not None:
            self._current.retire()
            self._current = None


class TritonQuestions:
    """What gRPC clients ask that is answered here, from Triton's REST port. The server's own is asked once for
    all who ask within a while: it does not change."""

    def __init__(
        self, pool: UpstreamPool, cluster: UpstreamCluster, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool, self._cluster, self._clock = pool, cluster, clock
        self._metadata: Mapping[str, Any] = {}
        self._read_at = -math.inf
        self._asking = asyncio.Lock()

    async def versions(self, replica: Replica) -> list[str]:
        """Raises NotServed."""
        _, data = await self._ask(f"/v2/models/{replica.names.server.decode()}")
        found = data.get("versions")
        return [str(version) for version in found] if isinstance(found, list) else []

    async def server_metadata(self) -> Mapping[str, Any]:
        """Raises NotServed."""
        async with self._asking:
            if self._clock() - self._read_at > _METADATA_SECONDS:
                status, data = await self._ask("/v2")
                if status != 200 or not data:
                    raise NotServed(f"Triton does not tell of itself, but answers {status}")
                self._metadata, self._read_at = data, self._clock()
        return self._metadata

    async def _ask(self, path: str) -> tuple[int, Mapping[str, Any]]:
        answer = await fetch(self._pool, self._cluster, path, seconds=_QUESTION_SECONDS)
        try:
            data = json.loads(answer.body)
        except ValueError as error:
            raise NotServed("Triton does not answer in JSON") from error
        return answer.status, data if isinstance(data, dict) else {}
