"""Instance groups: what a model says of them is kept, but for the GPUs."""

from typing import Any

import pytest

from tests.fakes.admission import ONNX_CONFIG, config_of, judged


def test_the_instances_go_to_the_chosen_gpu_and_nothing_else_is_lost() -> None:
    text = (
        ONNX_CONFIG
        + """max_batch_size: 8 instance_group [ { count: 2 kind: KIND_GPU gpus: [0, 1] } ]
    parameters { key: "intra_op_thread_count" value { string_value: "4" } }
    dynamic_batching { preferred_batch_size: [ 4 ] }"""
    )
    config = config_of(text)
    assert config["instance_group"] == [{"kind": "KIND_GPU", "count": 2, "gpus": [3]}]
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("m", "onnxruntime", 8)
    assert config["parameters"] == {"intra_op_thread_count": {"string_value": "4"}}
    assert config["dynamic_batching"] == {"preferred_batch_size": [4]}


@pytest.mark.parametrize(
    ("backend", "groups", "placed"),
    [
        ("onnxruntime", "", [{"kind": "KIND_GPU", "count": 1, "gpus": [7, 0]}]),
        (
            "onnxruntime",
            "{ count: 1 }, { count: 3 }",
            [
                {"kind": "KIND_GPU", "count": 1, "gpus": [7, 0]},
                {"kind": "KIND_GPU", "count": 3, "gpus": [7, 0]},
            ],
        ),
        (
            "onnxruntime",
            "{ kind: KIND_CPU count: 2 }, { kind: KIND_GPU }",
            [{"kind": "KIND_CPU", "count": 2}, {"kind": "KIND_GPU", "count": 1, "gpus": [7, 0]}],
        ),
        ("openvino", "", [{"kind": "KIND_CPU", "count": 1}]),
        ("openvino", "{ count: 2 }", [{"kind": "KIND_CPU", "count": 2}]),
        ("python", "{ kind: KIND_MODEL gpus: [ 5 ] }", [{"kind": "KIND_MODEL", "count": 1}]),
        (
            "tensorrt",
            '{ name: "a" profile: [ "0", "2" ] passive: true count: 1 }, { name: "b" host_policy: "numa0" '
            'rate_limiter { resources [ { name: "R" count: 4 } ] priority: 2 } }',
            [
                {
                    "name": "a",
                    "profile": ["0", "2"],
                    "passive": True,
                    "count": 1,
                    "kind": "KIND_GPU",
                    "gpus": [7, 0],
                },
                {
                    "name": "b",
                    "host_policy": "numa0",
                    "rate_limiter": {"resources": [{"name": "R", "count": 4}], "priority": 2},
                    "count": 1,
                    "kind": "KIND_GPU",
                    "gpus": [7, 0],
                },
            ],
        ),
    ],
)
def test_only_the_placement_on_gpus_is_ours(backend: str, groups: str, placed: list[Any]) -> None:
    files = {f"1/{name}": 1 for name in ("model.onnx", "model.py", "model.plan", "model.xml", "model.bin")}
    text = f'backend: "{backend}" ' + (f"instance_group [ {groups} ]" if groups else "")
    assert config_of(text, files, 7, 0)["instance_group"] == placed


def test_where_gpus_are_simulated_instances_run_on_the_cpu() -> None:
    config = judged(ONNX_CONFIG + "instance_group [ { count: 2 } ]").for_gpus([7], kind="KIND_CPU")
    assert config["instance_group"] == [{"kind": "KIND_CPU", "count": 2}]
