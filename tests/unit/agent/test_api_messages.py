"""The status of each error."""

from pathlib import Path

import pytest

from berth.triton.errors import TritonUnavailable
from tests.fakes.agent_api import Refused, api_for, staged
from tests.fakes.agent_node import Node


async def test_a_disk_that_is_full_and_a_triton_that_is_away_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    api = api_for(node)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(node.repository, "publish", full)
        with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED: .*No space left on device"):
            await staged(api, "model-p1")
    node.triton.index_errors = [TritonUnavailable("connection refused")]
    with pytest.raises(Refused, match="UNAVAILABLE: connection refused"):
        await staged(api, "model-p1")
    assert list((tmp_path / "staging").iterdir()) == []
    assert not any(node.repository.records().values())  # a directory of nobody, which the next pass removes


async def test_long_reasons_are_cut_for_the_wire(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.triton.index_errors = [TritonUnavailable("x" * 5000)]
    with pytest.raises(Refused) as refused:
        await staged(api_for(node), "model-p1")
    assert str(refused.value) == "UNAVAILABLE: " + "x" * 1000
