"""`berth gateway`: the composition root of the node gateway, through which all requests reach the node's Triton."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import uvloop

from berth.contract.errors import InvalidValue
from berth.contract.gateway import ReplicaSpec
from berth.runtime.admin import AdminServer, CachedPage, Format
from berth.runtime.errors import ConfigError
from berth.runtime.process import run_process
from berth.runtime.tasks import supervise, wait_until_set
from berth.triton.keys import InferenceKey
from proxy.drain import Stage, in_order
from proxy.gateway.config import GatewayOptions
from proxy.gateway.control_plane import ControlPlane
from proxy.gateway.control_socket import ControlSocket
from proxy.gateway.metrics import metrics_page
from proxy.gateway.plane_config import PlaneConfig, Port, Tenancy
from proxy.gateway.spec import Events, ReplicaStats
from proxy.gateway.stats import stats_json, stats_protobuf
from proxy.gateway.worker_pool import Workers, open_workers
from proxy.memory import settle
from proxy.request.endpoint import UpstreamEndpoint

log = logging.getLogger(__name__)

SUMMARY = "The node gateway: every model's requests to the node's Triton, isolated, limited and reported."

_STEP_SECONDS: Final = 0.5
# While something waits for a replica to be idle.
_LOOK_SECONDS: Final = 0.05


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth gateway`."""
    return run_process("gateway", SUMMARY, GatewayOptions, main, argv, loop_factory=uvloop.new_event_loop)


async def main(options: GatewayOptions, stop: asyncio.Event) -> None:
    settle()
    async with serving(options) as gateway:
        await stop.wait()
        await gateway.end(options.drain_timeout)


def plane_config(options: GatewayOptions) -> PlaneConfig:
    """Raises ConfigError."""
    return PlaneConfig(
        logs=options,
        triton=_triton(options),
        ports=(Port(options.listen, "--listen"),),
        workers=options.workers,
        triton_rest_requests=options.triton_rest_requests,
        tenancy=Tenancy(ceilings=options.ceilings, memory_budget=options.memory_budget),
    )


def _triton(options: GatewayOptions) -> UpstreamEndpoint:
    """Where Triton is and what opens it. Raises ConfigError."""
    if options.triton_keys is None:
        return UpstreamEndpoint(options.triton_http, options.triton_grpc)
    try:
        key = InferenceKey.read(options.triton_keys)
    except InvalidValue as error:
        raise ConfigError(f"--triton-keys: {error}") from error
    return UpstreamEndpoint(options.triton_http, options.triton_grpc, key.http_headers, key.grpc_metadata)


class Gateway:
    """The wired parts."""

    def __init__(
        self, options: GatewayOptions, workers: Workers, events: Events, wake: asyncio.Event
    ) -> None:
        """`wake`: set at each event of the workers, and by the agent's messages."""
        self._workers, self._events, self._wake = workers, events, wake
        self.control_plane = ControlPlane(workers, options.ceilings)
        self.control_socket = ControlSocket(options.control, self.control_plane, wake.set)
        self._ends = False
        self.admin = self._admin(options)

    async def work(self) -> None:
        """Look at everything and do what follows, for ever."""
        while True:
            self._wake.clear()
            now = time.monotonic()
            for suspects in self._events.take_crashes():
                self.control_plane.triton_crashed(suspects, now)
            self.control_plane.step(now, settle_seconds=self._workers.settle_seconds)
            self.control_socket.flush()
            pause = _LOOK_SECONDS if self.control_plane.is_draining else _STEP_SECONDS
            await wait_until_set(self._wake, timeout_seconds=pause)

    async def publish_stats(self) -> None:
        """Every second: what each replica has done, in all processes, for its pod's proxy."""
        while True:
            await asyncio.sleep(1.0)
            self._workers.publish_stats(self.control_plane.stats())

    @property
    def port(self) -> int:
        """The port in use, also when 0 was requested."""
        return self._workers.ports[0]

    def not_ready(self) -> str | None:
        return "draining" if self._ends else self.control_plane.not_ready()

    def _admin(self, options: GatewayOptions) -> AdminServer:
        return AdminServer(
            options.admin_listen,
            not_ready=self.not_ready,
            pages={
                "/metrics": metrics_page(self.control_plane, self._workers.statuses),
                "/stat": self._stat(),
            },
        )

    def _stat(self) -> CachedPage[list[tuple[ReplicaSpec, ReplicaStats]]]:
        """Every replica's last second, as protobuf if requested, else JSON."""

        def take() -> list[tuple[ReplicaSpec, ReplicaStats]]:
            stats = self.control_plane.stats()
            return [(one, stats[one.pod_uid]) for one in self.control_plane.registry if one.pod_uid in stats]

        protobuf, json = "application/protobuf", "application/json"
        return CachedPage(
            take,
            (
                Format(protobuf, protobuf, lambda loads: iter([stats_protobuf(loads)])),
                Format("", json, lambda loads: iter([stats_json(loads)])),
            ),
            news=self._workers.seconds,
        )

    async def end(self, seconds: float) -> None:
        """Let what is under way come to its end, within a bound."""
        self._ends = True
        await self._workers.drain_all()
        await in_order([Stage("requests in flight", self._workers.idle, seconds)])


@asynccontextmanager
async def serving(options: GatewayOptions) -> AsyncIterator[Gateway]:
    """Raises CannotStart or ConfigError before it serves."""
    wake = asyncio.Event()
    events = Events(wake)
    async with open_workers(plane_config(options), events) as workers:
        gateway = Gateway(options, workers, events, wake)
        async with gateway.control_socket, gateway.admin, supervise() as tasks:
            tasks.eternal("control plane", gateway.work())
            tasks.eternal("pods' proxies", gateway.publish_stats())
            yield gateway
