"""`berth proxy`: the composition root of the door to one model."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry

from berth.runtime.admin import AdminServer, Handler
from berth.runtime.errors import ConfigError
from berth.runtime.logs import fields
from berth.runtime.process import run_process
from berth.runtime.tasks import supervise
from proxy.config import ProxyOptions
from proxy.drain import Stage, in_order
from proxy.exchange.load import LoadReport, encode_stat
from proxy.exchange.traffic import Figures
from proxy.memory import settle
from proxy.metrics import ProxyCollector
from proxy.server import serving
from proxy.upstream import Access, Upstream, open_upstream
from proxy.workers import Crew

log = logging.getLogger(__name__)

SUMMARY = "The door to one model: REST and gRPC, isolated, limited, drained in order."


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth proxy`."""
    return run_process("proxy", SUMMARY, ProxyOptions, main, argv, loop_factory=uvloop.new_event_loop)


class DataPlane(Protocol):
    """What serves: this process, or several."""

    def figures(self) -> Figures: ...

    async def stop_accepting(self) -> None: ...

    async def idle(self) -> None: ...


async def main(options: ProxyOptions, stop: asyncio.Event) -> None:
    _require_consistent(options)
    settle()
    async with open_upstream(options.model) as upstream, AsyncExitStack() as stack:
        if options.triton_http is not None and options.triton_grpc is not None:
            upstream.access = Access(options.triton_http, options.triton_grpc)
        await _Proxy(options, upstream).run(stop, stack)


def _require_consistent(options: ProxyOptions) -> None:
    """Raises ConfigError."""
    if options.agent is None and (options.triton_http is None or options.triton_grpc is None):
        raise ConfigError(
            "--triton-http and --triton-grpc are required where there is no --agent to tell them"
        )
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together")
    if options.tls_client_ca is not None and options.tls_cert is None:
        raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")


class _Proxy:
    """The wired parts."""

    def __init__(self, options: ProxyOptions, upstream: Upstream) -> None:
        self._options, self._upstream = options, upstream
        self._draining = False
        self._began = time.monotonic()

    async def run(self, stop: asyncio.Event, stack: AsyncExitStack) -> None:
        options, upstream = self._options, self._upstream
        agent = None
        if options.agent is not None:
            # Imported here: without an agent nobody pays for gRPC's own library.
            from proxy.agent import UNLOAD_SECONDS, open_agent

            agent = await stack.enter_async_context(
                open_agent(
                    options.agent, options.token_file, http=options.triton_http, grpc=options.triton_grpc
                )
            )
        plane = await stack.enter_async_context(self._serving())
        await stack.enter_async_context(self._admin(plane))
        log.info(
            "serving", extra=fields(model=options.model, http=options.http_listen, grpc=options.grpc_listen)
        )
        async with supervise() as tasks:
            tasks.eternal("readiness", upstream.poll())
            if agent is not None:
                tasks.eternal("agent", agent.follow(upstream))
            await stop.wait()
            stages = self._ending(plane)
            if agent is not None:
                stages.append(Stage("unload", lambda: agent.unload(options.model), UNLOAD_SECONDS))
            await in_order(stages)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[DataPlane]:
        if self._options.workers > 1:
            async with Crew(self._options, self._upstream, self._not_ready) as crew:
                yield crew
            return
        async with serving(self._options, self._upstream, self._not_ready) as server:
            yield server

    def _admin(self, plane: DataPlane) -> AdminServer:
        registry = CollectorRegistry()
        registry.register(ProxyCollector(plane.figures))
        return AdminServer(
            self._options.admin_listen,
            not_ready=self._not_ready,
            registry=registry,
            routes=[("/stat", self._stat(plane.figures))],
        )

    def _ending(self, plane: DataPlane) -> list[Stage]:
        """The order in which the proxy ends."""
        options = self._options
        self._draining = True
        self._upstream.announce()

        async def finish_requests() -> None:
            await plane.stop_accepting()
            await plane.idle()

        return [
            Stage("serve on", lambda: asyncio.sleep(options.drain_delay), options.drain_delay + 1),
            Stage("requests in flight", finish_requests, options.drain_timeout),
        ]

    def _not_ready(self) -> str | None:
        return "draining" if self._draining else self._upstream.not_ready

    def _stat(self, figures: Callable[[], Figures]) -> Handler:
        """The last second's load: Knative's Stat as protobuf if asked for, else JSON."""

        async def answer(request: web.Request) -> web.Response:
            now, pod = figures(), socket.gethostname()
            load = LoadReport(
                now.average_concurrency, now.requests_per_second, time.monotonic() - self._began, time.time()
            )
            if "application/protobuf" in request.headers.get("Accept", ""):
                return web.Response(body=encode_stat(load, pod_name=pod), content_type="application/protobuf")
            return web.json_response(
                {
                    "podName": pod,
                    "averageConcurrentRequests": load.average_concurrency,
                    "requestCount": load.requests,
                    "processUptime": load.uptime_seconds,
                    "timestamp": int(load.timestamp),
                }
            )

        return answer
