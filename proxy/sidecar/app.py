"""`berth proxy --agent`: the composition root of a pod's proxy.

It is on every pod's bill, so what is heavy is not imported here, nor by what is: no numpy, gRPC, protobuf,
aiohttp or prometheus_client.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Final

from berth.runtime.admin import AdminServer, CachedPage, Format, Reply, Request
from berth.runtime.logs import fields
from berth.runtime.tasks import supervise
from proxy.config import ProxyOptions
from proxy.downstream.tls import Certificates, certificates_of, follow_certificates
from proxy.drain import Stage, in_order
from proxy.request.load import LoadReport
from proxy.request.traffic import Figures
from proxy.sidecar.agent import UNLOAD_SECONDS, Agent, NodeAgent, follow, give_back
from proxy.sidecar.gateway import NodeGateway
from proxy.sidecar.metrics import CONTENT_TYPE, exposition
from proxy.sidecar.port import Port, most_clients
from proxy.sidecar.report import ReportClient
from proxy.stat import stat_reply
from proxy.transport.tunnel import Watermark
from proxy.wire.preamble import Kind

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.05


async def main(options: ProxyOptions, stop: asyncio.Event) -> None:
    """Raises ConfigError or CannotStart before it serves."""
    assert options.agent is not None
    agent = NodeAgent(options.agent, options.token_file, options.model, options.limits)
    await Sidecar(options, agent, certificates_of(options.tls)).run(stop)


class Sidecar:
    """The wired parts."""

    def __init__(self, options: ProxyOptions, agent: Agent, certificates: Certificates | None) -> None:
        self._options, self._agent, self._certificates = options, agent, certificates
        self._began = time.monotonic()
        self._is_draining = False
        self.gateway = NodeGateway()
        self._report = ReportClient(self.gateway)
        self._watermark, most = Watermark(), most_clients()
        self.rest = Port(Kind.REST, self.gateway, self._watermark, most=most, what="--http-listen")
        self.grpc = Port(Kind.GRPC, self.gateway, self._watermark, most=most, what="--grpc-listen")
        self.admin = AdminServer(
            options.admin_listen,
            not_ready=self._not_ready,
            pages={"/metrics": self._metrics(), "/stat": self._stat},
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Raises CannotStart when a port is taken."""
        options = self._options
        await self._use_certificates()
        try:
            async with self.admin:
                self.rest.start(options.http_listen)
                self.grpc.start(options.grpc_listen)
                log.info(
                    "listening",
                    extra=fields(model=options.model, http=options.http_listen, grpc=options.grpc_listen),
                )
                await self._serve(stop)
        finally:
            for port in (self.rest, self.grpc):
                port.close()

    async def _serve(self, stop: asyncio.Event) -> None:
        async with supervise() as tasks:
            tasks.eternal("agent", follow(self._agent, self.gateway))
            tasks.eternal("report", self._report.follow())
            if self._certificates is not None:
                tasks.eternal("certificates", follow_certificates(self._certificates, self._use_certificates))
            await stop.wait()
            await in_order(self._ending())

    async def _use_certificates(self) -> None:
        """New connections of both ports are made with these."""
        if self._certificates is not None:
            self.rest.tls, self.grpc.tls = self._certificates.http, self._certificates.grpc

    def _ending(self) -> list[Stage]:
        """The order in which the sidecar ends."""
        delay = self._options.drain_delay
        self._is_draining = True
        self._report.leave()
        return [
            Stage("serve on", lambda: asyncio.sleep(delay), delay + 1),
            Stage("requests in flight", self._finish, self._options.drain_timeout),
            Stage("unload", lambda: give_back(self._agent), UNLOAD_SECONDS),
        ]

    async def _finish(self) -> None:
        """Take no new client; return when the gateway has nothing of the replica left, and every client its answer."""
        self.rest.stop()
        self.grpc.stop()
        await self._report.drain(lambda: len(self._watermark) > 0)
        # Twice, for what the gateway had sent when it said so may not have been read before.
        looks = 0
        while looks < 2:
            looks = looks + 1 if self._is_settled() else 0
            await asyncio.sleep(_LOOK_SECONDS)

    def _is_settled(self) -> bool:
        others = len(self.rest) + len(self.grpc) - len(self._watermark)
        return others <= 0 and all(joined.is_settled for joined in self._watermark)

    def _not_ready(self) -> str | None:
        return "draining" if self._is_draining else self.gateway.not_ready()

    def _metrics(self) -> CachedPage[tuple[Figures, bool]]:
        def take() -> tuple[Figures, bool]:
            status = self.gateway.status
            return Figures() if status is None else status.figures, self.gateway.fresh_status() is not None

        def write(taken: tuple[Figures, bool]) -> Iterator[bytes]:
            figures, is_fresh = taken
            yield exposition(figures, is_fresh=is_fresh).encode()

        return CachedPage(take, [Format("", CONTENT_TYPE, write)])

    def _stat(self, request: Request) -> Reply:
        """The last second's load: Knative's Stat as protobuf if asked for, else JSON."""
        status = self.gateway.fresh_status()
        if status is None:  # unknown, which is not nothing
            return Reply(f"{self.gateway.not_ready()}\n".encode(), status=503)
        figures = status.figures
        load = LoadReport(
            figures.average_concurrency,
            figures.requests_per_second,
            time.monotonic() - self._began,
            time.time(),
        )
        return stat_reply(load, request.accept)
