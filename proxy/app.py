"""`berth proxy`: the composition root of the door to one model."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry

from berth.nodeagent.client import AgentConnection, connect
from berth.runtime.admin import AdminServer
from berth.runtime.errors import ConfigError
from berth.runtime.logs import fields
from berth.runtime.process import run_process
from berth.runtime.tasks import repeat, supervise
from proxy.breaker import Breaker
from proxy.config import ProxyOptions
from proxy.drain import UNLOAD_SECONDS, Stage, in_order, unload
from proxy.grpc_front import GrpcFront
from proxy.load import LoadMeter, LoadReport, encode_stat
from proxy.metrics import ProxyMetrics
from proxy.rest import RestFront
from proxy.upstream import Upstream, open_upstream

log = logging.getLogger(__name__)

SUMMARY = "The door to one model: REST and gRPC, isolated, limited, drained in order."
_REPORT_SECONDS = 1.0


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth proxy`."""
    return run_process("proxy", SUMMARY, ProxyOptions, main, argv)


async def main(options: ProxyOptions, stop: asyncio.Event) -> None:
    if options.agent is None and (options.triton_http is None or options.triton_grpc is None):
        raise ConfigError(
            "--triton-http and --triton-grpc are required where there is no --agent to tell them"
        )
    async with (
        _agent(options) as agent,
        open_upstream(options.model, http=options.triton_http, grpc_=options.triton_grpc) as upstream,
        AsyncExitStack() as stack,
    ):
        proxy = _Proxy(options, upstream)
        await stack.enter_async_context(proxy.admin)
        stack.push_async_callback(proxy.rest.close)
        await proxy.rest.start(options.http_listen)
        await proxy.grpc.start(options.grpc_listen)
        stack.push_async_callback(proxy.grpc.stop_accepting, grace_seconds=0.0)
        log.info(
            "serving", extra=fields(model=options.model, http=options.http_listen, grpc=options.grpc_listen)
        )
        async with supervise() as tasks:
            tasks.eternal("readiness", upstream.poll())
            tasks.eternal("load", repeat(proxy.report_load, name="load", interval_seconds=_REPORT_SECONDS))
            if agent is not None:
                tasks.eternal("agent", upstream.follow(agent))
            await stop.wait()
            await in_order(proxy.ending(agent))


class _Proxy:
    """The wired parts."""

    def __init__(self, options: ProxyOptions, upstream: Upstream) -> None:
        self._options, self._upstream = options, upstream
        self._draining = False
        registry = CollectorRegistry()
        self._metrics = ProxyMetrics(registry)
        self._meter = LoadMeter(time.monotonic, time.time)
        self._load = LoadReport(0.0, 0.0, 0.0, time.time())
        self._breaker = Breaker(
            limit=options.container_concurrency, queue_depth=options.waiting_limit, meter=self._meter
        )
        self.rest = RestFront(
            upstream,
            self._breaker,
            self._metrics,
            max_json_bytes=options.max_json_bytes,
            timeout_seconds=options.request_timeout,
            not_ready=self._not_ready,
        )
        self.grpc = GrpcFront(
            upstream,
            self._breaker,
            self._metrics,
            timeout_seconds=options.request_timeout,
            not_ready=self._not_ready,
        )
        self.admin = AdminServer(
            options.admin_listen,
            not_ready=self._not_ready,
            registry=registry,
            routes=[("/stat", self._stat)],
        )

    async def report_load(self) -> None:
        """Close one second of the load meter."""
        self._load = self._meter.report()
        self._metrics.concurrency.set(self._load.average_concurrency)
        self._metrics.rate.set(self._load.requests)
        self._metrics.running.set(self._breaker.running)
        self._metrics.waiting.set(self._breaker.waiting)
        self._metrics.model_ready.set(self._upstream.is_ready)

    def ending(self, agent: AgentConnection | None) -> list[Stage]:
        """The order in which the proxy ends."""
        options = self._options
        self._draining = True
        self._upstream.announce()
        stages = [
            Stage("serve on", lambda: asyncio.sleep(options.drain_delay), options.drain_delay + 1),
            Stage("requests in flight", self._finish_requests, options.drain_timeout),
        ]
        if agent is not None:
            stages.append(Stage("unload", lambda: unload(agent, options.model), UNLOAD_SECONDS))
        return stages

    async def _finish_requests(self) -> None:
        """Take nothing new and wait, by our own count, for what is inside Triton or waits for it."""
        await self.rest.stop_accepting()
        stopping = self.grpc.stop_accepting(grace_seconds=self._options.drain_timeout)
        await asyncio.gather(stopping, self._breaker.idle())

    def _not_ready(self) -> str | None:
        return "draining" if self._draining else self._upstream.not_ready

    async def _stat(self, request: web.Request) -> web.Response:
        """The last second's load: Knative's Stat as protobuf if asked for, else JSON."""
        load, pod = self._load, socket.gethostname()
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


@asynccontextmanager
async def _agent(options: ProxyOptions) -> AsyncIterator[AgentConnection | None]:
    if options.agent is None:
        yield None
        return
    async with connect(options.agent, options.token_file) as agent:
        yield agent
