"""`berth gateway`: the composition root of the one way to a node's Triton."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import uvloop

from berth.contract.gateway import ReplicaSpec
from berth.runtime.admin import AdminServer, CachedPage, Format
from berth.runtime.process import run_process
from berth.runtime.tasks import supervise, wait_until_set
from proxy.drain import Stage, in_order
from proxy.gateway.config import GatewayOptions
from proxy.gateway.control_plane import ControlPlane
from proxy.gateway.control_socket import ControlSocket
from proxy.gateway.metrics import metrics_page
from proxy.gateway.spec import ReplicaStats
from proxy.gateway.stats import stats_json, stats_protobuf
from proxy.gateway.worker_pool import Workers, open_workers
from proxy.memory import settle

log = logging.getLogger(__name__)

SUMMARY = "The one way to a node's Triton: every model's requests, kept apart, limited and reported."

_STEP_SECONDS: Final = 0.5
# While somebody waits for a copy to be idle.
_LOOK_SECONDS: Final = 0.05


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth gateway`."""
    return run_process("gateway", SUMMARY, GatewayOptions, main, argv, loop_factory=uvloop.new_event_loop)


async def main(options: GatewayOptions, stop: asyncio.Event) -> None:
    settle()
    async with serving(options) as gateway:
        await stop.wait()
        await gateway.end(options.drain_timeout)


class Gateway:
    """The wired parts."""

    def __init__(self, options: GatewayOptions, plane: Workers) -> None:
        self._plane = plane
        self._wake = asyncio.Event()
        plane.on_news(self._wake.set, self._triton_died)
        self.control_plane = ControlPlane(plane, options.ceilings)
        self.control = ControlSocket(options.control, self.control_plane, self._wake.set)
        self._ends = False
        self.admin = self._admin(options)

    async def work(self) -> None:
        """Look at everything and do what follows, for ever."""
        while True:
            self._wake.clear()
            self.control_plane.step(time.monotonic(), settle_seconds=self._plane.settle_seconds)
            self.control.tell()
            pause = _LOOK_SECONDS if self.control_plane.is_draining else _STEP_SECONDS
            await wait_until_set(self._wake, timeout_seconds=pause)

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        return self._plane.port

    def _triton_died(self, inside: frozenset[str]) -> None:
        self.control_plane.triton_crashed(inside, time.monotonic())
        self._wake.set()

    def not_ready(self) -> str | None:
        return "draining" if self._ends else self.control_plane.not_ready()

    def _admin(self, options: GatewayOptions) -> AdminServer:
        return AdminServer(
            options.admin_listen,
            not_ready=self.not_ready,
            pages={"/metrics": metrics_page(self.control_plane, self._plane.statuses), "/stat": self._stat()},
        )

    def _stat(self) -> CachedPage[list[tuple[ReplicaSpec, ReplicaStats]]]:
        """Every copy's last second, as protobuf if asked for, else JSON."""

        def take() -> list[tuple[ReplicaSpec, ReplicaStats]]:
            stats = self.control_plane.stats()
            return [
                (copy, stats[copy.pod_uid]) for copy in self.control_plane.registry if copy.pod_uid in stats
            ]

        protobuf, json = "application/protobuf", "application/json"
        return CachedPage(
            take,
            (
                Format(protobuf, protobuf, lambda told: iter([stats_protobuf(told)])),
                Format("", json, lambda told: iter([stats_json(told)])),
            ),
            news=self._plane.seconds,
        )

    async def end(self, seconds: float) -> None:
        """Let what is under way come to its end, within a bound."""
        self._ends = True
        self._plane.drain_all()
        await in_order([Stage("requests in flight", self._plane.idle, seconds)])


@asynccontextmanager
async def serving(options: GatewayOptions) -> AsyncIterator[Gateway]:
    """Raises CannotStart or ConfigError before it serves."""
    async with open_workers(options) as plane:
        gateway = Gateway(options, plane)
        async with gateway.control, gateway.admin, supervise() as tasks:
            tasks.eternal("orders", gateway.work())
            tasks.eternal("doors", publish_stats(gateway.control_plane, plane))
            yield gateway


async def publish_stats(control_plane: ControlPlane, plane: Workers) -> None:
    """Every second: what each copy has done, in all processes."""
    while True:
        await asyncio.sleep(1.0)
        plane.publish_stats(control_plane.stats())
