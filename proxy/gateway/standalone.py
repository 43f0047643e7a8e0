"""`berth proxy --triton-http … --triton-grpc …`: the composition root of a plane with one replica, which no agent lists.

Its clients arrive at the replica's own ports, with TLS if there is to be any, and without a ticket.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from prometheus_client import Metric

from berth.contract.gateway import TICKET_BYTES, ReplicaSpec
from berth.runtime.admin import AdminServer, Reply, Request
from berth.runtime.admin.prometheus import written_page
from berth.runtime.logs import fields
from proxy.config import ProxyOptions
from proxy.drain import Stage, in_order
from proxy.gateway.metrics import figures_metrics
from proxy.gateway.plane_config import PlaneConfig, Port
from proxy.gateway.spec import Events, ReplicaStats, Spec, aggregate
from proxy.gateway.worker_pool import Workers, open_workers
from proxy.memory import settle
from proxy.request.endpoint import UpstreamEndpoint
from proxy.stat import stat_reply
from proxy.wire.preamble import Kind

log = logging.getLogger(__name__)

_UID: Final = "static"


def plane_config(options: ProxyOptions) -> PlaneConfig:
    assert options.triton_http is not None
    assert options.triton_grpc is not None
    return PlaneConfig(
        logs=options,
        triton=UpstreamEndpoint(options.triton_http, options.triton_grpc),
        ports=(
            Port(options.http_listen, "--http-listen", Kind.REST),
            Port(options.grpc_listen, "--grpc-listen", Kind.GRPC),
        ),
        workers=options.workers,
        triton_rest_requests=options.triton_rest_requests,
        tenancy=None,
        tls=options.tls,
    )


def static_spec(options: ProxyOptions) -> Spec:
    """One replica, which has one name and no ticket that could be shown."""
    replica = ReplicaSpec(
        ticket=bytes(TICKET_BYTES),
        namespace="",
        pod="",
        pod_uid=_UID,
        model=options.model,
        server_name=options.model,
        limits=options.limits,
    )
    return Spec(replicas=(replica,))


async def main(options: ProxyOptions, stop: asyncio.Event) -> None:
    """Raises ConfigError or CannotStart before it serves."""
    settle()
    spec = static_spec(options)
    async with open_workers(plane_config(options), Events(asyncio.Event()), spec) as workers:
        proxy = StandaloneProxy(options, workers, spec)
        async with proxy.admin:
            log.info(
                "serving",
                extra=fields(model=options.model, http=options.http_listen, grpc=options.grpc_listen),
            )
            await stop.wait()
            await in_order(proxy.ending())


class StandaloneProxy:
    """The wired parts."""

    def __init__(self, options: ProxyOptions, workers: Workers, spec: Spec) -> None:
        self._options, self._workers, self._spec = options, workers, spec
        self._ends = False
        self.admin = AdminServer(
            options.admin_listen,
            not_ready=self.not_ready,
            pages={"/metrics": written_page(self.stats, _metrics), "/stat": self._stat},
        )

    def not_ready(self) -> str | None:
        if self._ends:
            return "draining"
        reasons = [status.not_ready.get(_UID) for status in self._workers.statuses()]
        return next((reason for reason in reasons if reason is not None), None)

    def stats(self) -> ReplicaStats:
        """Of all processes."""
        stats = aggregate(self._workers.statuses(), _UID)
        assert stats is not None, "the replica is there from the start"
        return stats

    def _stat(self, request: Request) -> Reply:
        """The last second's load: Knative's Stat as protobuf if requested, else JSON."""
        return stat_reply(self.stats().load, request.accept)

    def ending(self) -> list[Stage]:
        """The order in which the proxy ends: it is unready from now on."""
        options = self._options
        self._ends = True
        self._workers.apply(replace(self._spec, leaving=frozenset({_UID})))

        async def finish_requests() -> None:
            await self._workers.drain_all()
            await self._workers.idle()

        return [
            Stage("serve on", lambda: asyncio.sleep(options.drain_delay), options.drain_delay + 1),
            Stage("requests in flight", finish_requests, options.drain_timeout),
        ]


def _metrics(stats: ReplicaStats) -> Iterator[Metric]:
    return figures_metrics([({}, stats.figures)])
