from pathlib import Path
from typing import Any

import pytest

from agent.failures import classify
from agent.model_config import InvalidModel, load_config
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName
from berth.contract.report import Failure

GPU = GpuChoice(GpuUuid("GPU-a"), 3, 5)


def configured(tmp_path: Path, text: str | None, *, kind: str = "KIND_GPU") -> dict[str, Any]:
    if text is not None:
        (tmp_path / "config.pbtxt").write_text(text)
    return load_config(tmp_path, ModelName("m"), gpu=GPU, kind=kind)


def test_the_instances_go_to_the_chosen_gpu_and_nothing_else_is_lost(tmp_path: Path) -> None:
    text = """backend: "onnxruntime" max_batch_size: 8 instance_group [ { count: 2 kind: KIND_GPU gpus: [0, 1] } ]
    parameters { key: "k" value { string_value: "v" } } dynamic_batching { preferred_batch_size: [ 4 ] }"""
    config = configured(tmp_path, text)
    assert config["instance_group"] == [{"kind": "KIND_GPU", "count": 2, "gpus": [3]}]
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("m", "onnxruntime", 8)
    assert config["parameters"] == {"k": {"string_value": "v"}}
    assert config["dynamic_batching"] == {"preferred_batch_size": [4]}


def test_without_a_file_there_is_one_instance(tmp_path: Path) -> None:
    assert configured(tmp_path, None, kind="KIND_CPU") == {
        "name": "m",
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: many", r"config.pbtxt: 1:\d+"),
        ("nonsense { }", "config.pbtxt"),
        ('name: "other"', "name is 'other', but the pod's model is 'm'"),
        ('platform: "ensemble"', "ensembles are not served"),
        ("ensemble_scheduling { }", "ensembles are not served"),
        (
            'model_repository_agents { agents [ { name: "checksum" } ] }',
            "model_repository_agents are not allowed",
        ),
        ("instance_group [ { count: 100 } ]", "100 instances"),
    ],
)
def test_a_config_that_is_refused_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        configured(tmp_path, text)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("CUDA error: out of memory", Failure.CAPACITY),
        ("onnx runtime error 6: Failed to allocate memory for requested buffer", Failure.CAPACITY),
        ("memory limit set for GPU 0 has exceeded", Failure.CAPACITY),
        ("Failed to create shared memory region", Failure.TRANSIENT),
        ("ModuleNotFoundError: No module named 'torch'", Failure.INVALID_MODEL),
        ("failed to poll from model repository", Failure.INVALID_MODEL),
    ],
)
def test_failures_are_told_apart_by_tritons_text(reason: str, kind: Failure) -> None:
    assert classify(reason) is kind
