"""A minute of `python -m tests.soak`. Its faults go by no speed: they are stalls, leftovers and growth."""

from pathlib import Path

import pytest

from tests.soak.run import soak

pytestmark = pytest.mark.nightly


async def test_mixed_clients_leave_nothing_behind(tmp_path: Path) -> None:
    result = await soak(tmp_path, seconds=45)
    assert result.faults == [], result.to_json()
    assert sum(sum(ends.values()) for ends in result.calls.values()) > 0
