from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.echo_gateway import echo_gateways
from tests.fakes.gateway_plane import Plane


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    one = Plane()
    yield one
    await one.data_plane.close()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return echo_gateways(tmp_path, monkeypatch)
