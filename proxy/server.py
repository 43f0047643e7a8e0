"""The data plane of one process: both front ends, one limit, one meter."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from berth.runtime.tasks import supervise, wait_until_set
from proxy.config import ProxyOptions
from proxy.exchange.breaker import Breaker, SharedBreaker
from proxy.exchange.load import LoadMeter, LoadReport
from proxy.exchange.traffic import Figures, Traffic
from proxy.fronts.grpc.front import GrpcFront
from proxy.fronts.rest.front import RestFront
from proxy.fronts.tls import Certificates, certificates_of, follow_certificates
from proxy.upstream import Upstream

_TICK_SECONDS = 1.0
_WATCH_SECONDS = 60.0
_LOOK_SECONDS = 0.05


class Server:
    """Serves clients. `tick` and `tell_watchers` must run beside it, as `serving` has them do."""

    def __init__(
        self,
        options: ProxyOptions,
        upstream: Upstream,
        not_ready: Callable[[], str | None],
        *,
        shared: tuple[int, int] | None = None,
    ) -> None:
        """`shared`: the limit is one with other processes' (`breaker.shared_limit`)."""
        self._upstream = upstream
        self._meter = LoadMeter(time.monotonic(), time.time)
        self._breaker = (
            Breaker(self._meter, limit=options.container_concurrency, queue_depth=options.waiting_limit)
            if shared is None
            else SharedBreaker(self._meter, *shared)
        )
        self._rest_traffic, self._grpc_traffic = Traffic(), Traffic()
        self.load = LoadReport(0.0, 0.0, 0.0, time.time())
        self.rest = RestFront(
            upstream,
            self._breaker,
            self._rest_traffic,
            max_json_bytes=options.max_json_bytes,
            timeout_seconds=options.request_timeout,
            not_ready=not_ready,
        )
        self.grpc = GrpcFront(
            upstream,
            self._breaker,
            self._grpc_traffic,
            inflate_limit=options.max_json_bytes,
            timeout_seconds=options.request_timeout,
            not_ready=not_ready,
        )

    async def start(
        self, options: ProxyOptions, certificates: Certificates | None, *, share_ports: bool
    ) -> None:
        """Raises CannotStart when a port is taken."""
        http_tls = None if certificates is None else certificates.http
        grpc_tls = None if certificates is None else certificates.grpc
        await self.rest.clients.start(options.http_listen, tls=http_tls, share_port=share_ports)
        await self.grpc.clients.start(options.grpc_listen, tls=grpc_tls, share_port=share_ports)

    async def renew(self, certificates: Certificates) -> None:
        """New connections of both ports are made with these."""
        await self.rest.clients.renew(certificates.http)
        await self.grpc.clients.renew(certificates.grpc)

    async def tick(self) -> None:
        """Every second: end what has waited too long, and close one period of the meter."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self.load = self._meter.report(now)
            self.rest.tick(now)
            self.grpc.tick(now)

    async def tell_watchers(self) -> None:
        """Pass every change of readiness on to the health checks that watch."""
        while True:
            change = self._upstream.next_change()
            self.grpc.tell_watchers()
            await wait_until_set(change, timeout_seconds=_WATCH_SECONDS)

    def figures(self) -> Figures:
        return Figures(
            rest=self._rest_traffic,
            grpc=self._grpc_traffic,
            running=self._breaker.running,
            waiting=self._breaker.waiting,
            average_concurrency=self.load.average_concurrency,
            requests_per_second=self.load.requests,
            busy_connections=self._busy_connections(),
            model_ready=self._upstream.is_ready,
        )

    async def stop_accepting(self) -> None:
        """Take nothing new: ports closed, idle connections ended, the others told."""
        await self.rest.stop_accepting()
        await self.grpc.stop_accepting()

    async def idle(self) -> None:
        """Return when nothing runs in Triton, nothing waits, and every answer has been delivered."""
        await self._breaker.idle()
        while self._busy_connections():
            await asyncio.sleep(_LOOK_SECONDS)

    def _busy_connections(self) -> int:
        rest = sum(connection.is_busy for connection in self.rest.clients)
        return rest + sum(connection.is_busy for connection in self.grpc.clients)

    async def close(self) -> None:
        await self.rest.close()
        await self.grpc.close()


@asynccontextmanager
async def serving(
    options: ProxyOptions,
    upstream: Upstream,
    not_ready: Callable[[], str | None],
    *,
    shared: tuple[int, int] | None = None,
    share_ports: bool = False,
) -> AsyncIterator[Server]:
    """A server with all that runs beside it. Raises CannotStart or ConfigError before it serves."""
    certificates = certificates_of(options)
    server = Server(options, upstream, not_ready, shared=shared)
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
