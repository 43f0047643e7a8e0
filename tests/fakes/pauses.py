"""A module's pauses, noted instead of waited for."""

import asyncio
from types import ModuleType
from typing import Any

import pytest


def noted(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[float]:
    """What `module` asks `asyncio.sleep` for from now on, in seconds. Everything else of asyncio it has as ever."""
    pauses: list[float] = []

    class Asyncio:
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            await asyncio.sleep(0)

    monkeypatch.setattr(module, "asyncio", Asyncio())
    return pauses
