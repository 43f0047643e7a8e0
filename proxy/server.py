"""The data plane of one process for one model: both front ends, their ports, and what runs beside them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from berth.runtime.tasks import supervise, wait_until_set
from proxy.config import ProxyOptions
from proxy.downstream.grpc.connection import GrpcConnection
from proxy.downstream.grpc.downstream import GrpcCommon, GrpcDownstream
from proxy.downstream.listener import Listener
from proxy.downstream.rest.connection import RestConnection
from proxy.downstream.rest.downstream import RestDownstream, RestShared
from proxy.downstream.tls import Certificates, certificates_of, follow_certificates
from proxy.policy.names import Names
from proxy.request.endpoint import UpstreamCluster
from proxy.request.outstanding import Outstanding
from proxy.request.replica import Replica
from proxy.request.traffic import Figures
from proxy.upstream.health import Upstream
from proxy.upstream.http1 import UpstreamPool
from proxy.upstream.triton import TritonQuestions

_TICK_SECONDS = 1.0
_WATCH_SECONDS = 60.0
_LOOK_SECONDS = 0.05
# For readiness and the like: a few questions at once, beside the clients' own.
_POLL_CONNECTIONS = 4


def own_replica(options: ProxyOptions, *, shared: tuple[int, int] | None = None) -> Replica:
    """The one model of a proxy by itself, which has one name. `shared`: as Replica's.

    Of what requests may take each worker has its part, so that all together keep to it.
    """
    name = options.model.encode()
    limits = replace(options.limits, max_inflight_bytes=options.max_inflight_bytes // options.workers)
    outstanding = Outstanding(options.triton_rest_requests // options.workers)
    return Replica(Names(name, name), limits, shared=shared, outstanding=outstanding)


class Server:
    """Serves clients. `tick` and `tell_watchers` must run beside it, as `serving` has them do."""

    def __init__(self, copy: Replica, upstream: Upstream) -> None:
        self._copy = copy
        self._shared = RestShared(upstream.cluster)
        self.rest = RestDownstream(self._shared, copy)
        questions = TritonQuestions(self._shared.pool, upstream.cluster)
        self._grpc_common = GrpcCommon(upstream.cluster, questions)
        self.grpc = GrpcDownstream(copy, self._grpc_common)
        self.http_port = Listener(lambda: RestConnection(self.rest), what="--http-listen")
        self.grpc_port = Listener(lambda: GrpcConnection(self.grpc), what="--grpc-listen")

    async def start(
        self, options: ProxyOptions, certificates: Certificates | None, *, share_ports: bool
    ) -> None:
        """Raises CannotStart when a port is taken."""
        http_tls = None if certificates is None else certificates.http
        grpc_tls = None if certificates is None else certificates.grpc
        await self.http_port.start(options.http_listen, tls=http_tls, share_port=share_ports)
        await self.grpc_port.start(options.grpc_listen, tls=grpc_tls, share_port=share_ports)

    async def renew(self, certificates: Certificates) -> None:
        """New connections of both ports are made with these."""
        await self.http_port.renew(certificates.http)
        await self.grpc_port.renew(certificates.grpc)

    async def tick(self) -> None:
        """Every second: end what has waited too long, and close one period of the meter."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self._copy.tick(now)
            self.rest.tick(now)
            self.grpc.tick(now)
            self._grpc_common.tick(now)

    async def tell_watchers(self) -> None:
        """Pass every change of readiness on to the health checks that watch."""
        while True:
            change = self._copy.next_change()
            self.grpc.tell_watchers()
            await wait_until_set(change, timeout_seconds=_WATCH_SECONDS)

    def figures(self) -> Figures:
        figures = self._copy.figures()
        figures.busy_connections = self._busy_connections()
        return figures

    async def stop_accepting(self) -> None:
        """Take nothing new: ports closed, idle connections ended, the others told."""
        await self.http_port.stop()
        self.rest.stop_accepting()
        await self.grpc_port.stop()
        self.grpc.ask_to_leave()

    async def idle(self) -> None:
        """Return when nothing runs in Triton, nothing waits, and every answer has been delivered."""
        await self._copy.idle()
        while self._busy_connections():
            await asyncio.sleep(_LOOK_SECONDS)

    def _busy_connections(self) -> int:
        rest = sum(connection.is_busy for connection in self.rest.clients)
        return rest + self.grpc.busy_connections

    async def close(self) -> None:
        await self.http_port.stop()
        await self.grpc_port.stop()
        self.rest.close()
        self.grpc.close()
        await self._grpc_common.close()
        await self._shared.close()


@asynccontextmanager
async def serving(
    options: ProxyOptions, copy: Replica, upstream: Upstream, *, share_ports: bool = False
) -> AsyncIterator[Server]:
    """A server with all that runs beside it. Raises CannotStart or ConfigError before it serves."""
    certificates = certificates_of(options)
    server = Server(copy, upstream)
    try:
        await server.start(options, certificates, share_ports=share_ports)
        async with supervise() as tasks:
            tasks.eternal("tick", server.tick())
            tasks.eternal("watchers", server.tell_watchers())
            if certificates is not None:
                tasks.eternal(
                    "certificates", follow_certificates(certificates, lambda: server.renew(certificates))
                )
            yield server
    finally:
        await server.close()


@asynccontextmanager
async def open_upstream(copy: Replica, where: UpstreamCluster) -> AsyncIterator[Upstream]:
    """For questions to Triton; requests go their own ways."""
    pool = UpstreamPool(where, most=_POLL_CONNECTIONS)
    try:
        yield Upstream(copy, where, pool)
    finally:
        await pool.close()
