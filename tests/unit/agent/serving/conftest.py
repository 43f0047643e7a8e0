"""What tests of the lifecycle on a leaping clock need."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent_node import Node


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take time that does not leap; and the disk of a test needs no more than to be there."""

    async def at_once(work: Callable[..., Any], *args: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return work(*args, **more)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    # Its kubelet is a fake: what is newer than the server is told by the file's own time.
    monkeypatch.setattr("agent.serving.restart.LEAST_SECONDS_BETWEEN", 0.0)


@pytest.fixture
def on_node(tmp_path: Path) -> Node:
    return Node(tmp_path, quiet=0.2)
