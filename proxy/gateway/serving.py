"""One process of a plane: its replicas, the ports at which their clients arrive, and what they share towards Triton."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from berth.contract.gateway import ReplicaLimits, ReplicaSpec
from berth.runtime.tasks import supervise
from proxy.downstream.grpc.connection import GrpcConnection
from proxy.downstream.grpc.downstream import GrpcCommon, GrpcDownstream
from proxy.downstream.listener import Listener, allow_descriptors
from proxy.downstream.rest.connection import RestConnection
from proxy.downstream.rest.downstream import RestDownstream, RestShared
from proxy.downstream.tls import Certificates, certificates_of, follow_certificates
from proxy.gateway.connection_limits import PendingConnections
from proxy.gateway.crash_detection import CrashDetector, refuses
from proxy.gateway.data_plane import DataPlane
from proxy.gateway.fair_reader import FairReadScheduler
from proxy.gateway.handshake import Handshake
from proxy.gateway.plane_config import PlaneConfig, Port
from proxy.gateway.replica import Downstream, Later, ServedReplica
from proxy.gateway.routing import Router
from proxy.gateway.spec import Events, ReplicaStats, Spec, Status
from proxy.policy.names import Names
from proxy.policy.refusal import Flags
from proxy.request.budget import Budget
from proxy.request.endpoint import UpstreamCluster
from proxy.request.outstanding import Outstanding
from proxy.request.replica import Replica
from proxy.upstream.health import Upstream
from proxy.upstream.http1 import UpstreamPool
from proxy.upstream.queries import TritonQuestions
from proxy.wire.preamble import Kind

_TICK_SECONDS: Final = 1.0
# Connections of clients: each costs some KiB, and a descriptor here and perhaps one towards Triton.
_MOST_CONNECTIONS: Final = 8192
_DESCRIPTORS_KEPT: Final = 256
# For readiness and the like: a few queries at once, beside the clients' own.
_POLL_CONNECTIONS: Final = 4

# The descriptors of a limit that a replica shares with other processes.
LimitOf = Callable[[ReplicaSpec], tuple[int, int] | None]


class _RestClients(RestDownstream):
    def connection(self) -> asyncio.Protocol:
        return RestConnection(self)


class _GrpcClients(GrpcDownstream):
    def connection(self) -> asyncio.Protocol:
        return GrpcConnection(self)


class Server:
    """The wired parts of one process, one of `config.workers`."""

    def __init__(self, config: PlaneConfig, events: Events, limit_of: LimitOf) -> None:
        """Raises ConfigError."""
        self._config, self._events, self._limit_of = config, events, limit_of
        self.certificates = certificates_of(config.tls)
        tenancy = config.tenancy
        self._cluster = UpstreamCluster(config.triton)
        self._budget = None if tenancy is None else Budget(tenancy.memory_budget // config.workers)
        self._outstanding = Outstanding(
            config.triton_rest_requests // config.workers, is_shared=tenancy is not None
        )
        self._rest = RestShared(self._cluster, lost=self._connection_broke)
        self._grpc = GrpcCommon(
            self._cluster, TritonQuestions(self._rest.pool, self._cluster), lost=self._connection_broke
        )
        self._queries = UpstreamPool(self._cluster, most=_POLL_CONNECTIONS)
        self._scheduler = None if tenancy is None else FairReadScheduler()
        self._data_plane = DataPlane(self._make_replica)
        self._router = None if self._scheduler is None else _router(self._data_plane, self._scheduler)
        self._crashes = CrashDetector(
            self._data_plane.in_triton, lambda: refuses(config.triton.http), events.triton_crashed
        )
        self._listeners = [(port, Listener(self._protocol_of(port), what=port.flag)) for port in config.ports]

    def _make_replica(self, spec: ReplicaSpec) -> ServedReplica:
        tenancy = self._config.tenancy
        replica = Replica(
            Names(spec.model.encode(), spec.server_name.encode()),
            spec.limits,
            process_budget=self._budget,
            outstanding=self._outstanding,
            shared=self._limit_of(spec),
            flags_of=_own_flags if tenancy is None else tenancy.ceilings.flags,
        )
        poller = Upstream(replica, self._cluster, self._queries)
        return ServedReplica(spec, replica, self._make_downstream, poller, self._events, self._scheduler)

    def _make_downstream(self, kind: Kind, replica: Replica, later: Later | None) -> Downstream:
        if kind is Kind.REST:
            return _RestClients(self._rest, replica, later=later)
        return _GrpcClients(replica, self._grpc, later=later)

    def _protocol_of(self, port: Port) -> Callable[[], asyncio.Protocol]:
        """What makes the protocol of a connection at this port."""
        kind = port.protocol
        if kind is None:
            assert self._router is not None, "a plane with handshakes has tenants"
            return self._router.handshakes.handshake
        return lambda: self._only_replica().downstream(kind).connection()

    def _only_replica(self) -> ServedReplica:
        (served,) = self._data_plane
        return served

    def _connection_broke(self, whose: object) -> None:
        """A connection to Triton with requests of this replica in it."""
        if self._config.tenancy is not None:
            self._crashes.broke(self._data_plane.uids_of([whose]))

    # Ports.

    async def start(self, sockets: Sequence[Sequence[socket.socket]] = ()) -> None:
        """`sockets`: of each port, where they are bound already. Raises CannotStart."""
        for at, (port, listener) in enumerate(self._listeners):
            tls = None
            if self.certificates is not None and port.protocol is not None:
                tls = _context(self.certificates, port.protocol)
            await listener.start(port.listen, tls=tls, sockets=sockets[at] if sockets else ())

    async def renew_certificates(self) -> None:
        """New connections are made with those that are in force now."""
        for port, listener in self._listeners:
            if self.certificates is not None and port.protocol is not None:
                await listener.renew(_context(self.certificates, port.protocol))

    @property
    def ports(self) -> tuple[int, ...]:
        """Those in use, also where 0 was requested."""
        return tuple(listener.port for _, listener in self._listeners)

    # What the control plane wants and sees.

    def apply(self, spec: Spec) -> None:
        self._data_plane.apply(spec)

    def publish_stats(self, stats: Mapping[str, ReplicaStats]) -> None:
        self._data_plane.publish_stats(stats)

    def status(self) -> Status:
        status, router = self._data_plane.status(), self._router
        if router is None:
            return status
        return replace(status, rejected=dict(router.handshakes.rejected), connections=router.limit.taken)

    @property
    def seconds(self) -> int:
        return self._data_plane.seconds

    @property
    def drains(self) -> bool:
        """Whether any replica takes nothing new, so that its end may be awaited."""
        return any(served.is_draining for served in self._data_plane)

    async def drain_all(self) -> None:
        """Take nothing new. A port of a single replica is closed; one with handshakes rejects them."""
        for port, listener in self._listeners:
            if port.protocol is not None:
                await listener.stop()
        self._data_plane.drain_all()

    @property
    def is_idle(self) -> bool:
        return self._data_plane.is_idle

    # Life.

    async def single_replica_ended(self) -> None:
        """Without other replicas, a process that no longer looks after its own is of no use."""
        await self._only_replica().ended()

    async def tick(self) -> None:
        """Every second, for ever."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self._data_plane.tick(now)
            self._grpc.tick(now)

    async def close(self) -> None:
        for _, listener in self._listeners:
            await listener.stop()
        if self._router is not None:
            self._router.handshakes.close()
        await self._data_plane.close()
        await self._grpc.close()
        await self._crashes.close()
        await self._rest.close()
        await self._queries.close()


def _context(certificates: Certificates, kind: Kind) -> ssl.SSLContext:
    return certificates.http if kind is Kind.REST else certificates.grpc


def _own_flags(_: ReplicaLimits) -> Flags:
    return Flags()


def _router(data_plane: DataPlane, scheduler: FairReadScheduler) -> Router:
    """As many connections as the process has descriptors for."""
    descriptors = allow_descriptors()
    return Router(
        data_plane,
        scheduler,
        pending=PendingConnections[Handshake](most=max(16, min(1024, descriptors // 8))),
        most_connections=min(_MOST_CONNECTIONS, (descriptors - descriptors // 8 - _DESCRIPTORS_KEPT) // 2),
    )


@asynccontextmanager
async def open_server(
    config: PlaneConfig,
    events: Events,
    spec: Spec | None = None,
    *,
    sockets: Sequence[Sequence[socket.socket]] = (),
    limit_of: LimitOf = lambda spec: None,
) -> AsyncIterator[Server]:
    """What serves in this process, with `spec` applied before its ports are open. Raises CannotStart or ConfigError."""
    server = Server(config, events, limit_of)
    try:
        if spec is not None:
            server.apply(spec)
        await server.start(sockets)
        async with supervise() as tasks:
            tasks.eternal("tick", server.tick())
            if config.tenancy is None:
                tasks.eternal("replica", server.single_replica_ended())
            if server.certificates is not None:
                tasks.eternal(
                    "certificates", follow_certificates(server.certificates, server.renew_certificates)
                )
            yield server
    finally:
        await server.close()
