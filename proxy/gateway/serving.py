"""One process' data plane for all copies of a node: what they share towards Triton, and their fronts."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from berth.contract.errors import InvalidValue
from berth.contract.gateway import ReplicaSpec
from berth.runtime.errors import ConfigError
from berth.runtime.tasks import supervise
from berth.triton.keys import InferenceKey
from proxy.downstream.grpc.connection import GrpcConnection
from proxy.downstream.grpc.downstream import GrpcCommon, GrpcDownstream
from proxy.downstream.listener import Listener, allow_descriptors
from proxy.downstream.rest.connection import RestConnection
from proxy.downstream.rest.downstream import RestDownstream, RestShared
from proxy.gateway.config import GatewayOptions
from proxy.gateway.connection_limits import PendingConnections
from proxy.gateway.crash_detection import CrashDetector, refuses
from proxy.gateway.data_plane import TICK_SECONDS, DataPlane
from proxy.gateway.handshake import Handshake
from proxy.gateway.replica import Front, Later
from proxy.policy.names import Names
from proxy.request.budget import Budget
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.outstanding import Outstanding
from proxy.request.replica import Replica
from proxy.upstream.health import Upstream
from proxy.upstream.http1 import UpstreamPool
from proxy.upstream.triton import TritonQuestions
from proxy.wire.preamble import Kind

# Connections of clients: each costs some KiB, and a descriptor here and perhaps one towards Triton.
_MOST_CONNECTIONS: Final = 8192
_DESCRIPTORS_KEPT: Final = 256
# For readiness and the like: a few questions at once, beside the clients' own.
_POLL_CONNECTIONS: Final = 4


def access_of(options: GatewayOptions) -> UpstreamEndpoint:
    """Where Triton is and what opens it. Raises ConfigError."""
    if options.triton_keys is None:
        return UpstreamEndpoint(options.triton_http, options.triton_grpc)
    try:
        key = InferenceKey.read(options.triton_keys)
    except InvalidValue as error:
        raise ConfigError(f"--triton-keys: {error}") from error
    return UpstreamEndpoint(options.triton_http, options.triton_grpc, key.http_headers, key.grpc_metadata)


class RestCopy:
    """The REST clients of one copy."""

    def __init__(self, front: RestDownstream) -> None:
        self._front = front
        self.tick, self.close, self.stop_accepting = front.tick, front.close, front.stop_accepting

    def connection(self) -> asyncio.Protocol:
        return RestConnection(self._front)

    @property
    def busy_connections(self) -> int:
        return sum(connection.is_busy for connection in self._front.clients)

    def readiness_changed(self) -> None:
        """Nobody is told of it: who wants to know asks."""


class GrpcCopy:
    """The gRPC clients of one copy."""

    def __init__(self, front: GrpcDownstream) -> None:
        self._front = front
        self.tick, self.close, self.stop_accepting = front.tick, front.close, front.ask_to_leave
        self.readiness_changed = front.tell_watchers

    def connection(self) -> asyncio.Protocol:
        return GrpcConnection(self._front)

    @property
    def busy_connections(self) -> int:
        return self._front.busy_connections


LimitOf = Callable[[ReplicaSpec], tuple[int, int] | None]


@asynccontextmanager
async def open_data_plane(
    options: GatewayOptions,
    *,
    share: int = 1,
    listening: socket.socket | None = None,
    limit_of: LimitOf = lambda copy: None,
) -> AsyncIterator[tuple[DataPlane, int]]:
    """What serves in this process, one of so many that do, and its port. Raises CannotStart or ConfigError.

    `listening`: the port's socket, where it is there already. `limit_of`: a copy's limit that it shares with
    other processes'.
    """
    parts = _Parts(options, share, limit_of)
    try:
        await parts.listener.start(options.listen, sock=listening)
        async with supervise() as tasks:
            tasks.eternal("tick", parts.tick())
            yield parts.node, parts.listener.port
    finally:
        await parts.close()


class _Parts:
    """The wired parts."""

    def __init__(self, options: GatewayOptions, share: int, limit_of: LimitOf) -> None:
        self._where = UpstreamCluster(access_of(options))
        self._budget = Budget(options.memory_budget // share)
        self._outstanding = Outstanding(options.triton_rest_requests // share)
        self._limit_of, self._flags_of = limit_of, options.ceilings.flags
        self._rest = RestShared(self._where, lost=self._broke)
        self._grpc = GrpcCommon(self._where, TritonQuestions(self._rest.pool, self._where), lost=self._broke)
        self._questions = UpstreamPool(self._where, most=_POLL_CONNECTIONS)
        descriptors = allow_descriptors()
        pending: PendingConnections[Handshake] = PendingConnections(most=max(16, min(1024, descriptors // 8)))
        self.node = DataPlane(
            self._make_copy,
            self._make_front,
            lambda copy: Upstream(copy, self._where, self._questions),
            pending=pending,
            most_connections=min(
                _MOST_CONNECTIONS, (descriptors - descriptors // 8 - _DESCRIPTORS_KEPT) // 2
            ),
        )
        self._death = CrashDetector(
            self.node.inside,
            lambda: refuses(options.triton_http),
            lambda inside: self.node.triton_crashed(frozenset(inside)),
        )
        self.listener = Listener(self.node.handshakes.handshake, what="--listen")

    def _make_copy(self, copy: ReplicaSpec) -> Replica:
        return Replica(
            Names(copy.model.encode(), copy.server_name.encode()),
            copy.limits,
            process_budget=self._budget,
            outstanding=self._outstanding,
            shared=self._limit_of(copy),
            flags_of=self._flags_of,
        )

    def _make_front(self, kind: Kind, copy: Replica, later: Later) -> Front:
        if kind is Kind.REST:
            return RestCopy(RestDownstream(self._rest, copy, later=later))
        return GrpcCopy(GrpcDownstream(copy, self._grpc, later=later))

    def _broke(self, whose: object) -> None:
        """A connection to Triton with requests of this copy in it."""
        self._death.broke(self.node.uids_of([whose]))

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            self.node.tick(now)
            self._grpc.tick(now)

    async def close(self) -> None:
        await self.listener.stop()
        await self.node.close()
        await self._grpc.close()
        await self._death.close()
        await self._rest.close()
        await self._questions.close()
