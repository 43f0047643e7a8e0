"""An activator's models in this process, and model pods beside it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from berth.contract.activation import Assignment, BufferLimits, Report, RouteMode
from berth.contract.scaling import ModelKey
from localcluster import addresses
from proxy.activator.bounds import Bounds
from proxy.activator.model import BufferedModel
from proxy.activator.models import Models
from tests.fakes.pods import FakePod

OWN = ModelKey("a", "own")


def free_port() -> int:
    """Not one that the system gives to a connection that goes out meanwhile."""
    return addresses.free_port("127.0.0.1")


class Place:
    """One activator with the model "own" of namespace a, at zero at first."""

    def __init__(self, *, bounds: Bounds | None = None) -> None:
        self.refused_sources: set[str] = set()
        self.cold_starts: list[Report] = []
        self.models = Models(
            "127.0.0.1",
            lambda model, address: address not in self.refused_sources,
            on_cold_start=self.cold_starts.append,
            bounds=bounds,
        )
        self.pods: list[FakePod] = []
        self.assignment = Assignment(
            version=1,
            model=OWN,
            public_name="own",
            mode=RouteMode.PROXY,
            rest_port=free_port(),
            grpc_port=free_port(),
        )
        self._ticks: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.models.apply(self.assignment)
        self._ticks = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            await self.models.tick(time.monotonic())

    async def assign(self, **changes: Any) -> None:
        self.assignment = replace(self.assignment, version=self.assignment.version + 1, **changes)
        await self.models.apply(self.assignment)

    async def pod(self, name: str = "p", **more: Any) -> FakePod:
        pod = await FakePod(name, **more).start()
        self.pods.append(pod)
        return pod

    async def serve(self, *pods: FakePod) -> None:
        await self.assign(endpoints=tuple(pod.as_endpoint() for pod in pods))

    async def limits(self, **changes: Any) -> None:
        await self.assign(limits=replace(self.assignment.limits, **changes))

    @property
    def own(self) -> BufferedModel:
        model = self.models.get(OWN)
        assert model is not None
        return model

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.assignment.rest_port}"

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.assignment.grpc_port}"

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


__all__ = ["OWN", "BufferLimits", "Place", "free_port"]
