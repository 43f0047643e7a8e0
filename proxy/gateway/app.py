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
from proxy.gateway.control import Control
from proxy.gateway.crew import Plane, open_plane
from proxy.gateway.hub import Hub
from proxy.gateway.metrics import metrics_page
from proxy.gateway.orders import Sum
from proxy.gateway.stats import stats_json, stats_protobuf
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

    def __init__(self, options: GatewayOptions, plane: Plane) -> None:
        self._plane = plane
        self._wake = asyncio.Event()
        plane.on_news(self._wake.set, self._triton_died)
        self.hub = Hub(plane, options.ceilings)
        self.control = Control(options.control, self.hub, self._wake.set)
        self._ends = False
        self.admin = self._admin(options)

    async def work(self) -> None:
        """Look at everything and do what follows, for ever."""
        while True:
            self._wake.clear()
            self.hub.step(time.monotonic(), settle_seconds=self._plane.settle_seconds)
            self.control.tell()
            pause = _LOOK_SECONDS if self.hub.is_draining else _STEP_SECONDS
            await wait_until_set(self._wake, timeout_seconds=pause)

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        return self._plane.port

    def _triton_died(self, inside: frozenset[str]) -> None:
        self.hub.triton_died(inside, time.monotonic())
        self._wake.set()

    def not_ready(self) -> str | None:
        return "draining" if self._ends else self.hub.not_ready()

    def _admin(self, options: GatewayOptions) -> AdminServer:
        return AdminServer(
            options.admin_listen,
            not_ready=self.not_ready,
            pages={"/metrics": metrics_page(self.hub, self._plane.words), "/stat": self._stat()},
        )

    def _stat(self) -> CachedPage[list[tuple[ReplicaSpec, Sum]]]:
        """Every copy's last second, as protobuf if asked for, else JSON."""

        def take() -> list[tuple[ReplicaSpec, Sum]]:
            sums = self.hub.sums()
            return [(copy, sums[copy.pod_uid]) for copy in self.hub.registry if copy.pod_uid in sums]

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
    async with open_plane(options) as plane:
        gateway = Gateway(options, plane)
        async with gateway.control, gateway.admin, supervise() as tasks:
            tasks.eternal("orders", gateway.work())
            tasks.eternal("doors", tell_doors(gateway.hub, plane))
            yield gateway


async def tell_doors(hub: Hub, plane: Plane) -> None:
    """Every second: what each copy has done, in all processes."""
    while True:
        await asyncio.sleep(1.0)
        plane.tell_sums(hub.sums())
