"""An activator's models in this process, and model pods beside it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from berth.contract.scaling import Assignment, HoldLimits, HoldState, ModelKey, Report
from localcluster import addresses
from proxy.activator.hold import Bounds
from proxy.activator.model import HeldModel
from proxy.activator.models import Models
from tests.fakes.pods import FakePod

OWN = ModelKey("a", "own")


def free_port() -> int:
    """Not one that the system gives to a connection that goes out meanwhile."""
    return addresses.free_port("127.0.0.1")


class Place:
    """One activator with the model "own" of namespace a, asleep at first."""

    def __init__(self, *, bounds: Bounds | None = None) -> None:
        self.refused_sources: set[str] = set()
        self.models = Models(
            "127.0.0.1", lambda model, address: address not in self.refused_sources, bounds=bounds
        )
        self.woken: list[Report] = []
        self.models.on_wake(self.woken.append)
        self.pods: list[FakePod] = []
        self.told = Assignment(
            version=1,
            model=OWN,
            public_name="own",
            state=HoldState.HOLD,
            rest_port=free_port(),
            grpc_port=free_port(),
        )
        self._ticks: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.models.apply(self.told)
        self._ticks = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            await self.models.tick(time.monotonic())

    async def tell(self, **changes: Any) -> None:
        self.told = replace(self.told, version=self.told.version + 1, **changes)
        await self.models.apply(self.told)

    async def pod(self, name: str = "p", **more: Any) -> FakePod:
        pod = await FakePod(name, **more).start()
        self.pods.append(pod)
        return pod

    async def serve(self, *pods: FakePod) -> None:
        await self.tell(endpoints=tuple(pod.told() for pod in pods))

    async def limits(self, **changes: Any) -> None:
        await self.tell(limits=replace(self.told.limits, **changes))

    @property
    def own(self) -> HeldModel:
        model = self.models.get(OWN)
        assert model is not None
        return model

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.told.rest_port}"

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.told.grpc_port}"

    async def close(self) -> None:
        if self._ticks is not None:
            self._ticks.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticks
        await self.models.close()
        for pod in self.pods:
            await pod.die()


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    await made.start()
    try:
        yield made
    finally:
        await made.close()


__all__ = ["OWN", "HoldLimits", "Place", "free_port"]
