"""`berth activator`: the composition root of the process that buffers requests until a replica is ready."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import uvloop
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from berth.contract.activation import Report
from berth.contract.scaling import ModelKey
from berth.runtime.admin import AdminServer
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.errors import ConfigError
from berth.runtime.process import run_process
from berth.runtime.tasks import supervise
from proxy.activator.assignments import Assignments
from proxy.activator.bounds import Bounds
from proxy.activator.config import ActivatorOptions
from proxy.activator.control_client import ControlClient
from proxy.activator.metrics import ActivatorCollector, ActivatorStats, Connection
from proxy.activator.model import BufferedModel
from proxy.activator.models import Models
from proxy.activator.port import MOST_PENDING, PendingClients
from proxy.downstream.listener import allow_descriptors
from proxy.drain import Stage, in_order
from proxy.memory import settle
from proxy.request.budget import Budget

log = logging.getLogger(__name__)

SUMMARY = (
    "Buffers the requests of models that are scaled to zero, has a replica started, and forwards the requests to it. "
    "A model's Service leads here while no replica is ready; each model has ports of its own, assigned by the scaler, "
    "so that no header decides whose a request is. It asks nothing of the API server."
)

_TICK_SECONDS: Final = 1.0
# During a cold start.
_LOOK_SECONDS: Final = 0.02
# Descriptors of the process itself; of the others half is for connections to replicas.
_DESCRIPTORS_KEPT: Final = 256


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth activator`."""
    return run_process("activator", SUMMARY, ActivatorOptions, main, argv, loop_factory=uvloop.new_event_loop)


async def main(options: ActivatorOptions, stop: asyncio.Event) -> None:
    require_own(options.address)
    settle()
    async with serving(options) as activator:
        await stop.wait()
        await activator.end(options)


def require_own(address: str) -> None:
    """Raises ConfigError where no port could be opened there: Services would lead nowhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ConfigError(f"--address: {address}: {error.strerror or error}") from error


class ActivatorProcess:
    """The wired parts."""

    def __init__(self, options: ActivatorOptions) -> None:
        self._assignments = Assignments()
        self.stats = ActivatorStats(time.monotonic)
        descriptors = allow_descriptors()
        self.models = Models(
            options.address,
            self._assignments.allows,
            on_cold_start=self._cold_start,
            pending=PendingClients(
                _most_pending(descriptors), connected_for=lambda: self.control.connected_for
            ),
            bounds=_bounds(options, descriptors),
        )
        self.control = ControlClient(
            options.scaler,
            options.token_file,
            options.address,
            self._assignments,
            self.models,
            on_report=self.stats.reported,
        )
        self._cold_start_began = asyncio.Event()
        self.admin = self._admin(options)

    def _cold_start(self, report: Report) -> None:
        self.stats.cold_start_began(report.model)
        self._cold_start_began.set()
        self.control.report_now(report)

    async def tick(self) -> None:
        """Every second: what has waited too long ends, and what is buffered is reported."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            await self.models.tick(now)
            await self.control.carry_out(self._assignments.expire(now))
            self.control.tick()
            self.stats.keep(model.key for model in self.models.all())

    async def watch_cold_starts(self) -> None:
        """How far they have come."""
        while True:
            await self._cold_start_began.wait()
            while models := self.stats.cold_starting:
                for key in models:
                    self._observe(key)
                await asyncio.sleep(_LOOK_SECONDS)
            self._cold_start_began.clear()

    def _observe(self, key: ModelKey) -> None:
        model = self.models.get(key)
        if model is None:
            self.stats.observe(key, replicas=0, serves=False, buffers=False)
            return
        self.stats.observe(
            key,
            replicas=len(model.assignment.endpoints),
            serves=model.pods.any_open,
            buffers=model.throttler.buffered > 0,
        )

    def not_ready(self) -> str | None:
        """It stays ready while no scaler is connected: what is buffered can still be forwarded."""
        if self.control.is_draining:
            return "draining"
        return None if self._assignments.has_snapshot else "no scaler has sent yet which models there are"

    def _admin(self, options: ActivatorOptions) -> AdminServer:
        registry = CollectorRegistry()
        registry.register(
            ActivatorCollector(
                self.stats,
                lambda: map(_Refusals, self.models.all()),
                lambda: Connection(self.control.is_connected, self.control.streams),
                self.models.bounds.buffered_seconds,
            )
        )
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        return AdminServer(
            options.admin_listen, not_ready=self.not_ready, pages={"/metrics": metrics_page(registry)}
        )

    async def end(self, options: ActivatorOptions) -> None:
        """Out of the slices first, then no new clients, then to the end of what is here; every wait is bounded."""
        self.control.drain()
        delay = options.drain_delay
        await in_order(
            [
                Stage("serve on", lambda: asyncio.sleep(delay), delay + 1),
                Stage("requests that are buffered or under way", self.models.drain, options.drain_timeout),
            ]
        )


@dataclass(frozen=True, slots=True)
class _Refusals:
    """Of a model, its ports included."""

    model: BufferedModel

    @property
    def key(self) -> ModelKey:
        return self.model.key

    @property
    def refusals(self) -> Mapping[str, int]:
        unknown = self.model.rest_port.refused + self.model.grpc_port.refused
        return {**self.model.throttler.refusals, "unknown-client": unknown}


def _most_pending(descriptors: int) -> int:
    """How many clients may be pending: they have descriptors, too."""
    return min(MOST_PENDING, descriptors // 8)


def _bounds(options: ActivatorOptions, descriptors: int) -> Bounds:
    """No more connections than there are descriptors for: each may have one more, to a replica that never answers."""
    for_clients = (descriptors - _DESCRIPTORS_KEPT - _most_pending(descriptors)) // 2
    return Bounds(
        places=Budget(options.max_buffered_requests),
        memory=Budget(options.memory_budget),
        connections=Budget(min(options.max_connections, for_clients)),
    )


@asynccontextmanager
async def serving(options: ActivatorOptions) -> AsyncIterator[ActivatorProcess]:
    """Raises CannotStart when the admin port is taken."""
    activator = ActivatorProcess(options)
    try:
        async with activator.admin, supervise() as tasks:
            tasks.eternal("scaler", activator.control.run())
            tasks.eternal("models", activator.tick())
            tasks.eternal("cold starts", activator.watch_cold_starts())
            yield activator
    finally:
        await activator.models.close()
