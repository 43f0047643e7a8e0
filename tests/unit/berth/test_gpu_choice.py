"""The binder's GPU choice on the wire."""

import json
from typing import Any

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import GpuUuid


def test_gpu_choice_round_trip_and_errors() -> None:
    choice = GpuChoice(GpuUuid("GPU-a"), 1, 5)
    assert GpuChoice.decode(choice.encode()) == choice
    assert json.loads(choice.encode()) == {"v": 1, "uuid": "GPU-a", "index": 1, "bytes": 5}
    for text in (
        "",
        "{}",
        '{"v":2,"uuid":"a","index":0,"bytes":1}',
        '{"v":1,"uuid":"a","index":0,"bytes":-1}',
    ):
        with pytest.raises(InvalidValue):
            GpuChoice.decode(text)


A, B, C = GpuUuid("GPU-a"), GpuUuid("GPU-b"), GpuUuid("GPU-c")


def test_a_choice_of_several_gpus() -> None:
    choice = GpuChoice(A, 0, 5, (GpuRef(B, 1), GpuRef(C, 3)))
    assert choice.encode() == (
        '{"v":1,"uuid":"GPU-a","index":0,"bytes":5,"others":[{"uuid":"GPU-b","index":1},{"uuid":"GPU-c","index":3}]}'
    )
    assert GpuChoice.decode(choice.encode()) == choice
    assert choice.gpus == (GpuRef(A, 0), GpuRef(B, 1), GpuRef(C, 3))
    assert choice.uuids == (A, B, C)
    assert GpuChoice(A, 0, 5).uuids == (A,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": 2}, "GPU choice has version 2; this Berth reads 1"),
        ({"bytes": -1}, "GPU choice.bytes: Expected `int` >= 0"),
        ({"index": None}, "GPU choice.index: .*got `null`"),
        ({"uuid": 7}, "GPU choice.uuid: .*got `int`"),
        ({"others": [{"uuid": "GPU-a", "index": 1}]}, "GPU choice names one GPU twice"),
        ({"others": [{"uuid": "GPU-b"}]}, r"GPU choice.others\[0\]: .*`index`"),
        ({"others": None}, "GPU choice.others: .*got `null`"),
    ],
)
def test_a_choice_that_cannot_be_read_says_what(change: dict[str, Any], message: str) -> None:
    said = {"v": 1, "uuid": "GPU-a", "index": 0, "bytes": 5, **change}
    with pytest.raises(InvalidValue, match=message):
        GpuChoice.decode(json.dumps(said))
