from pathlib import Path
from typing import Any

import pytest

from agent.failures import classify, explain
from agent.model_config import InvalidModel, load_config, pinned
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


def test_the_gpus_of_now_take_the_place_of_those_of_the_choice(tmp_path: Path) -> None:
    text = "instance_group [ { count: 2 } ]"
    config = pinned(configured(tmp_path, text), [7, 0])
    assert config["instance_group"] == [{"kind": "KIND_GPU", "count": 2, "gpus": [7, 0]}]
    config = pinned(configured(tmp_path, text, kind="KIND_CPU"), [7, 0])
    assert config["instance_group"] == [{"kind": "KIND_CPU", "count": 2}]


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


# As Triton 2.51 answers a load, except for the first group: those are what its backends pass on.
TEXTS = [
    ("CUDA error: out of memory", Failure.CAPACITY),
    ("onnx runtime error 6: Failed to allocate memory for requested buffer of size 9", Failure.CAPACITY),
    (
        "failed to allocate CUDA memory with byte size 9 on GPU 0: CNMEM_STATUS_OUT_OF_MEMORY",
        Failure.CAPACITY,
    ),
    ("memory limit set for GPU 0 has exceeded", Failure.CAPACITY),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", Failure.CAPACITY),
    ("[TRT] Requested amount of GPU memory (9 bytes) could not be allocated", Failure.CAPACITY),
    (
        "onnx runtime error 7: Load model from 1/model.onnx failed: Protobuf parsing failed.",
        Failure.INVALID_MODEL,
    ),
    ("unable to find '/models/m/1/model.onnx' for model instance 'm'", Failure.INVALID_MODEL),
    ("Failed to create shared memory region", Failure.TRANSIENT),
    ("CUDA driver version is insufficient for CUDA runtime version", Failure.TRANSIENT),
    ("ImportError: libcudnn.so.9: cannot open shared object file: No such file", Failure.TRANSIENT),
    ("unable to create stream: something else", Failure.TRANSIENT),
    ("failed to allocate pinned system memory", Failure.TRANSIENT),
    ("something that nobody has seen before", Failure.TRANSIENT),
    ("", Failure.TRANSIENT),
    ("failed to load 'm', failed to poll from model repository", Failure.TRANSIENT),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ModuleNotFoundError: "
        "No module named 'torch9'\n\nAt:\n  /models/m/1/model.py(4): initialize\n;\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: SyntaxError: "
        "invalid syntax (model.py, line 1);\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: AttributeError: "
        "module '1.model' has no attribute 'TritonPythonModel';\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ConnectionRefusedError: "
        "[Errno 111] Connection refused\n\nAt:\n  /models/m/1/model.py(4): initialize\n;\n",
        Failure.TRANSIENT,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: RuntimeError: "
        "no weights here\n\nAt:\n  /models/m/1/model.py(4): initialize\n;\n",
        Failure.TRANSIENT,  # what it was, only its author knows
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: Stub process "
        "'m_0_0' is not healthy.;\n",
        Failure.TRANSIENT,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: unable to find "
        "backend library for backend 'tensorflow9', try specifying runtime on the model configuration.;\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: model input 'I' "
        "dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m;\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: instance group m_0 "
        "of model m specifies invalid or unsupported gpu id 3. GPUs with at least the minimum required CUDA "
        "compute compatibility of 6.000000 are: ;\n",
        Failure.TRANSIENT,
    ),
    (
        "load failed for model 'm': at least one version must be available under the version policy of "
        "model 'm'\n",
        Failure.INVALID_MODEL,
    ),
]


@pytest.mark.parametrize(("reason", "kind"), TEXTS)
def test_failures_are_told_apart_by_tritons_text(reason: str, kind: Failure) -> None:
    assert classify(reason) is kind


def test_a_text_without_the_cause_says_where_it_is() -> None:
    assert "Triton's log" in explain("failed to load 'm', failed to poll from model repository")
    assert explain("CUDA error: out of memory") == "CUDA error: out of memory"


def test_a_config_that_is_no_text_file_is_the_models_own_fault(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").mkdir()
    with pytest.raises(InvalidModel, match=r"config\.pbtxt is not a file"):
        configured(tmp_path, None)
    (tmp_path / "config.pbtxt").rmdir()
    (tmp_path / "config.pbtxt").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidModel, match=r"config\.pbtxt: .*utf-8"):
        configured(tmp_path, None)


def test_a_config_is_not_read_beyond_its_bound(tmp_path: Path) -> None:
    line = "# " + "x" * 1021 + "\n"
    assert configured(tmp_path, line * (4 * 1024))["name"] == "m"
    with pytest.raises(InvalidModel, match="larger than 4194304 bytes"):
        configured(tmp_path, line * (4 * 1024) + "#")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("instance_group [ { count: 1 }, { count: 3 }, { count: 2 } ]", 3),
        ("instance_group [ { kind: KIND_CPU } ]", 1),
        ("instance_group [ { count: 64 } ]", 64),
        ('name: "m"', 1),
    ],
)
def test_as_many_instances_as_the_largest_group_has(tmp_path: Path, text: str, count: int) -> None:
    (group,) = configured(tmp_path, text)["instance_group"]
    assert group == {"kind": "KIND_GPU", "count": count, "gpus": [3]}


@pytest.mark.parametrize("text", ['backend: "ensemble"', "instance_group [ { count: 65 } ]"])
def test_more_that_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidModel):
        configured(tmp_path, text)
