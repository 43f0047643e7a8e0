"""`berth proxy --triton-http … --triton-grpc …`: the composition root of the data plane for one model."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry

from berth.runtime.admin import AdminServer, Answer, Reply, Request
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.logs import fields
from berth.runtime.tasks import supervise
from proxy.config import ProxyOptions
from proxy.drain import Stage, in_order
from proxy.memory import settle
from proxy.metrics import ProxyCollector
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.load import LoadReport
from proxy.request.replica import Replica
from proxy.request.traffic import Figures
from proxy.server import open_upstream, own_replica, serving
from proxy.stat import stat_reply
from proxy.upstream.health import Upstream
from proxy.workers import Crew

log = logging.getLogger(__name__)


class DataPlane(Protocol):
    """What serves: this process, or several."""

    def figures(self) -> Figures: ...

    async def stop_accepting(self) -> None: ...

    async def idle(self) -> None: ...


async def main(options: ProxyOptions, stop: asyncio.Event) -> None:
    assert options.triton_http is not None
    assert options.triton_grpc is not None
    settle()
    copy, where = own_replica(options), UpstreamCluster()
    async with open_upstream(copy, where) as upstream, AsyncExitStack() as stack:
        where.move(UpstreamEndpoint(options.triton_http, options.triton_grpc))
        await _Proxy(options, copy, upstream).run(stop, stack)


class _Proxy:
    """The wired parts."""

    def __init__(self, options: ProxyOptions, copy: Replica, upstream: Upstream) -> None:
        self._options, self._copy, self._upstream = options, copy, upstream
        self._began = time.monotonic()

    async def run(self, stop: asyncio.Event, stack: AsyncExitStack) -> None:
        options, upstream = self._options, self._upstream
        plane = await stack.enter_async_context(self._serving())
        await stack.enter_async_context(self._admin(plane))
        log.info(
            "serving", extra=fields(model=options.model, http=options.http_listen, grpc=options.grpc_listen)
        )
        async with supervise() as tasks:
            tasks.eternal("readiness", upstream.poll())
            await stop.wait()
            await in_order(self._ending(plane))

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[DataPlane]:
        if self._options.workers > 1:
            async with Crew(self._options, self._copy, self._upstream.cluster) as crew:
                yield crew
            return
        async with serving(self._options, self._copy, self._upstream) as server:
            yield server

    def _admin(self, plane: DataPlane) -> AdminServer:
        registry = CollectorRegistry()
        registry.register(ProxyCollector(plane.figures))
        return AdminServer(
            self._options.admin_listen,
            not_ready=self._copy.not_ready,
            pages={"/metrics": metrics_page(registry), "/stat": self._stat(plane.figures)},
        )

    def _ending(self, plane: DataPlane) -> list[Stage]:
        """The order in which the proxy ends."""
        options = self._options
        self._copy.drain()

        async def finish_requests() -> None:
            await plane.stop_accepting()
            await plane.idle()

        return [
            Stage("serve on", lambda: asyncio.sleep(options.drain_delay), options.drain_delay + 1),
            Stage("requests in flight", finish_requests, options.drain_timeout),
        ]

    def _stat(self, figures: Callable[[], Figures]) -> Answer:
        """The last second's load: Knative's Stat as protobuf if asked for, else JSON."""

        def answer(request: Request) -> Reply:
            now = figures()
            load = LoadReport(
                now.average_concurrency, now.requests_per_second, time.monotonic() - self._began, time.time()
            )
            return stat_reply(load, request.accept)

        return answer
