"""`berth activator`: the composition root of who holds requests while a model wakes."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import uvloop
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from berth.contract.scaling import ModelKey, Report
from berth.runtime.admin import AdminServer
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.errors import ConfigError
from berth.runtime.process import run_process
from berth.runtime.tasks import supervise
from proxy.activator.assign import Assigned
from proxy.activator.attend import Link
from proxy.activator.config import ActivatorOptions
from proxy.activator.hold import Bounds
from proxy.activator.metrics import ActivatorCollector, Counts
from proxy.activator.model import HeldModel
from proxy.activator.models import Models
from proxy.activator.port import MOST_STRANGERS, Doorstep
from proxy.downstream.listener import allow_descriptors
from proxy.drain import Stage, in_order
from proxy.memory import settle
from proxy.request.budget import Budget

log = logging.getLogger(__name__)

SUMMARY = (
    "Holds the requests of models that have no copy, wakes them, and hands the requests on. "
    "A model's Service leads here while it sleeps; each model has ports of its own, which the scaler tells, "
    "so that no header decides whose a request is. It asks nothing of the API server."
)

_TURN_SECONDS: Final = 1.0
# While a model wakes.
_LOOK_SECONDS: Final = 0.02
# Descriptors of the process itself; of the others half is for connections to copies.
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
    """Raises ConfigError where no port could be opened there: Services would lead to nobody."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ConfigError(f"--address: {address}: {error.strerror or error}") from error


class ActivatorProcess:
    """The wired parts."""

    def __init__(self, options: ActivatorOptions) -> None:
        self._assigned = Assigned()
        self.counts = Counts(time.monotonic)
        descriptors = allow_descriptors()
        doorstep = Doorstep(_strangers(descriptors), told_for=lambda: self.link.told_for)
        bounds = _bounds(options, descriptors)
        self.models = Models(options.address, self._assigned.allows, doorstep=doorstep, bounds=bounds)
        self.link = Link(
            options.scaler,
            options.token_file,
            options.address,
            self._assigned,
            self.models,
            on_report=self.counts.reported,
        )
        self.models.on_wake(self._wake)
        self._waking = asyncio.Event()
        self.admin = self._admin(options)

    def _wake(self, report: Report) -> None:
        self.counts.woken(report.model)
        self._waking.set()
        self.link.wake(report)

    async def turn(self) -> None:
        """Every second: what has waited too long ends, and what is held is told."""
        while True:
            await asyncio.sleep(_TURN_SECONDS)
            now = time.monotonic()
            await self.models.tick(now)
            await self.link.carry_out(self._assigned.expire(now))
            self.link.turn()
            self.counts.forget(model.key for model in self.models.all())

    async def watch_wakes(self) -> None:
        """How far those have come that wake."""
        while True:
            await self._waking.wait()
            while waking := self.counts.waking:
                for key in waking:
                    self._see(key)
                await asyncio.sleep(_LOOK_SECONDS)
            self._waking.clear()

    def _see(self, key: ModelKey) -> None:
        model = self.models.get(key)
        if model is None:
            self.counts.seen(key, copies=0, serves=False, held=False)
            return
        self.counts.seen(
            key,
            copies=len(model.told.endpoints),
            serves=model.pods.any_open,
            held=model.hold.held > 0,
        )

    def not_ready(self) -> str | None:
        """A scaler that is away leaves it ready: what is held can still be handed on."""
        if self.link.is_leaving:
            return "draining"
        return None if self._assigned.is_told else "no scaler has told yet which models there are"

    def _admin(self, options: ActivatorOptions) -> AdminServer:
        registry = CollectorRegistry()
        link = self.link
        registry.register(
            ActivatorCollector(
                self.counts,
                lambda: map(_Held, self.models.all()),
                lambda: (link.is_attached, link.attached_times),
                self.models.bounds.buffered,
            )
        )
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        return AdminServer(
            options.admin_listen, not_ready=self.not_ready, pages={"/metrics": metrics_page(registry)}
        )

    async def end(self, options: ActivatorOptions) -> None:
        """Out of the slices first, then nobody new, then to the end of what is here; every wait is bounded."""
        self.link.leave()
        delay = options.drain_delay
        await in_order(
            [
                Stage("serve on", lambda: asyncio.sleep(delay), delay + 1),
                Stage("requests that are held or under way", self.models.drain, options.drain_timeout),
            ]
        )


@dataclass(frozen=True, slots=True)
class _Held:
    """A model's figures that are its own."""

    model: HeldModel

    @property
    def key(self) -> ModelKey:
        return self.model.key

    @property
    def refusals(self) -> dict[str, int]:
        strangers = self.model.rest_port.refused + self.model.grpc_port.refused
        return {**self.model.hold.refusals, "stranger": strangers}


def _strangers(descriptors: int) -> int:
    """How many may wait at the doorstep: they have descriptors, too."""
    return min(MOST_STRANGERS, descriptors // 8)


def _bounds(options: ActivatorOptions, descriptors: int) -> Bounds:
    """No more connections than there are descriptors for: each may have one more, to a copy that never answers."""
    for_clients = (descriptors - _DESCRIPTORS_KEPT - _strangers(descriptors)) // 2
    return Bounds(
        places=Budget(options.most_held),
        memory=Budget(options.memory_budget),
        connections=Budget(min(options.most_connections, for_clients)),
    )


@asynccontextmanager
async def serving(options: ActivatorOptions) -> AsyncIterator[ActivatorProcess]:
    """Raises CannotStart when the admin port is taken."""
    activator = ActivatorProcess(options)
    try:
        async with activator.admin, supervise() as tasks:
            tasks.eternal("scaler", activator.link.run())
            tasks.eternal("models", activator.turn())
            tasks.eternal("wakes", activator.watch_wakes())
            yield activator
    finally:
        await activator.models.close()
