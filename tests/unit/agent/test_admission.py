"""From a model's files to what Triton is given, or to the reason why not."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as pb

from agent.admission import (
    CONFIG_FILE,
    Admitted,
    CodeRefused,
    InvalidModel,
    ModelFiles,
    NodeRules,
    admit,
    judge,
    write_anew,
)
from agent.config import DEFAULT_CAPABILITIES
from berth.contract.ids import ModelName
from berth.contract.report import CodeRule

NAME = ModelName("m")
RULES = NodeRules(frozenset({*DEFAULT_CAPABILITIES, "fil", "vllm"}), CodeRule.NAMESPACE)
NO_CODE = NodeRules(RULES.capabilities, CodeRule.NONE)
ONNX = {"1/model.onnx": 9}
ONNX_CONFIG = 'backend: "onnxruntime" '
PYTHON = {"1/model.py": 9}
PYTHON_CONFIG = 'backend: "python" '


def judged(text: str | None, files: Mapping[str, int] = ONNX, rules: NodeRules = RULES) -> Admitted:
    return judge(None if text is None else text.encode(), ModelFiles(files), NAME, rules)


def config_of(text: str | None, files: Mapping[str, int] = ONNX, *gpus: int) -> dict[str, Any]:
    return judged(text, files).for_gpus(gpus or [3], kind="KIND_GPU")


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


@pytest.mark.parametrize(
    ("file", "backend"),
    [
        ("model.onnx", "onnxruntime"),
        ("model.onnx/weights", "onnxruntime"),
        ("model.plan", "tensorrt"),
        ("model.pt", "pytorch"),
        ("model.py", "python"),
    ],
)
@pytest.mark.parametrize("text", [None, "", "max_batch_size: 4"])
def test_without_a_backend_the_file_tells_it(file: str, backend: str, text: str | None) -> None:
    assert judged(text, {f"1/{file}": 1}).backend == backend


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ('platform: "onnxruntime_onnx"', "onnxruntime"),
        ('name: "m" backend: "onnxruntime"', "onnxruntime"),
        ('backend: "onnx"', "onnxruntime"),
        ('backend: "onnx" platform: "onnxruntime_onnx"', "onnxruntime"),
    ],
)
def test_a_backend_is_named_in_two_ways(text: str, backend: str) -> None:
    assert judged(text).backend == backend


@pytest.mark.parametrize(("said", "overwritten"), [("densenet_onnx", "densenet_onnx"), ("m", ""), ("", "")])
def test_the_name_in_a_config_is_overwritten(said: str, overwritten: str) -> None:
    """ecosystem A5: samples are named after their directory; the pod's model is what it is served as."""
    admitted = judged(ONNX_CONFIG + f'name: "{said}"')
    assert (admitted.config.name, admitted.overwritten_name) == ("m", overwritten)
    again = judged(admitted.text())
    assert (again, again.overwritten_name) == (admitted, "")


DIMS = 'input [ { name: "I" data_type: TYPE_FP32 dims: [ %s ] } ]'
QUEUE = "dynamic_batching { %s }"
PARAMETER = 'parameters { key: "%s" value { string_value: "%s" } }'
WARM = 'model_warmup [ { name: "w" batch_size: %d inputs { key: "I" value { data_type: TYPE_FP32 %s } } } ]'
METRIC = 'model_metrics { metric_control [ { metric_identifier { family: "%s" } %s } ] }'
ACCELERATOR = 'optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "%s" %s } ] } }'
FIRST = """sequence_batching { direct { } state [ { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ]
  initial_state { name: "z" data_type: TYPE_FP32 %s } } ] }"""
REFUSED = [
    (FIRST % "dims: [ 67108864 ] zero_data: true", None),
    (FIRST % "dims: [ 67108865 ] zero_data: true", "state: 268435460 bytes at first; at most 268435456"),
    (
        FIRST % "dims: [ 67108864 ] zero_data: true" + "instance_group { count: 2 }",
        "state: 536870912 bytes at first",
    ),
    (FIRST % 'dims: [ 1 ] data_file: "x"', "data_file: there is no file 'initial_state/x'"),
    (FIRST.replace('"z" data_type: TYPE_FP32', '"z"') % "dims: [ 1 ]", "initial_state: a data_type like"),
    ('sequence_batching { state { input_name: "S" } state { input_name: "S" } }', "state: 'S' comes twice"),
    ("max_batch_size: many", r"config.pbtxt: 1:\d+"),
    ("nonsense { }", "no field named"),
    ("input {" * 2000, "no field named"),
    ('platform: "ensemble"', "ensembles are not served"),
    ("ensemble_scheduling { }", "ensemble_scheduling: leave it out: a pod is one model"),
    ("model_repository_agents { }", "model_repository_agents: leave it out"),
    ("instance_group [ { count: 65 } ]", r"instance_group\[0\].count: 65; 0 to 64 is taken"),
    (
        "instance_group [ { count: 40 }, { count: 25 } ]",
        "instance_group: 65 instances of 1 versions; at most 64",
    ),
    ("instance_group [ { count: -1 } ]", "count: -1; 0 to 64"),
    ('instance_group [ { name: "a" }, { name: "a" } ]', "two groups have one name"),
    ("instance_group [ { passive: true } ]", "all are passive"),
    ("instance_group [ { secondary_devices [ { device_id: 1 } ] } ]", "secondary_devices: only|only GPUs"),
    (
        "instance_group [ { kind: KIND_MODEL } ]",
        "kind: KIND_MODEL; this backend runs on KIND_GPU or KIND_CPU",
    ),
    ('instance_group [ { profile: "-1" } ]', "'-1'; a whole number from 0 to 9999 is taken"),
    ("instance_group [ { rate_limiter { resources [ { count: 4000000000 } ] } } ]", "0 to 1024 is taken"),
    ('platform: "caffe2_netdef"', "platform: 'caffe2_netdef' is none of"),
    ('backend: "python" platform: "tensorrt_plan"', "does not go with platform"),
    ('backend: "tensorflow"', "backend: 'tensorflow' is not among what this node's Triton has: dali"),
    ('backend: "../evil"', "a name like 'python' is taken"),
    ('backend: "python\\000x"', "unprintable|a name like"),
    ('runtime: "libtriton_python.so"', "runtime: .*leave it out"),
    ("max_batch_size: -4", "max_batch_size: -4; 0 to 65536 is taken"),
    ("max_batch_size: 2147483647", "max_batch_size: 2147483647; 0 to 65536"),
    ("max_batch_size: 2147483648", "config.pbtxt: 1:"),
    (DIMS % "0", r"input\[0\].dims\[0\]: 0; -1 or 1 to 2147483648 is taken"),
    (DIMS % "-7", r"dims\[0\]: -7"),
    (DIMS % "65536, 65536", r"dims: 4294967296 elements; at most 2147483648"),
    (DIMS % ", ".join("1" * 17), "dims: 17 entries; at most 16"),
    (DIMS % "1" + DIMS % "1", "input: 'I' comes twice"),
    (DIMS.replace('"I"', '""') % "1", r"input\[0\]: it has no name"),
    (WARM.replace("TYPE_FP32", "TYPE_INVALID") % (1, "dims: [ 1 ] zero_data: true"), "a data_type like"),
    (DIMS.replace("TYPE_FP32", "99") % "1", "data_type: 99 is none of|config.pbtxt: 1:"),
    (DIMS.replace('"I"', '"\\001"') % "1", "unprintable"),
    (DIMS.replace('"I"', f'"{"x" * 1025}"') % "1", "1025 characters; at most 1024"),
    (QUEUE % "max_queue_delay_microseconds: 18446744073709551615", "0 to 60000000 is taken"),
    (QUEUE % "preferred_batch_size: [ 0 ]", "preferred_batch_size.0.: 0; 1 to"),
    ("max_batch_size: 4 " + QUEUE % "preferred_batch_size: 8", "8 is more than max_batch_size 4"),
    (QUEUE % "priority_levels: 1000000000000", "priority_levels: 1000000000000; 0 to 256"),
    (QUEUE % "default_priority_level: 3 priority_levels: 2", "level 3, but priority_levels is 2"),
    (QUEUE % "default_queue_policy { max_queue_size: 4294967295 }", "max_queue_size: 4294967295"),
    ("max_batch_size: 8192 sequence_batching { }", "8192 sequences at once; at most 4096"),
    ("sequence_batching { oldest { max_candidate_sequences: -1 } }", "-1; 0 to 4096"),
    ("version_policy { latest { num_versions: 4294967295 } }", "num_versions: 4294967295; 1 to 32"),
    ("version_policy { specific { versions: [ 7, 8 ] } }", "of versions 7, 8 none is there; there is 1"),
    ("version_policy { specific { versions: [ -1 ] } }", "-1; 0 to"),
    (WARM % (1, "dims: [ 288230376151711744 ] random_data: true"), "288230376151711744; 1 to 2147483648"),
    (WARM % (1, "dims: [ -1 ] zero_data: true"), "dims.0.: -1; 1 to"),
    (WARM % (1, "dims: [ 134217729 ] zero_data: true"), "536870916 bytes; at most 536870912"),
    (WARM % (1, "dims: [ 67108865 ] zero_data: true") + "instance_group { count: 2 }", "536870920 bytes"),
    ("max_batch_size: 64 sequence_batching { direct { } } instance_group { count: 64 }", None),
    ("max_batch_size: 65 sequence_batching { direct { } } instance_group { count: 64 }", "4160 sequences"),
    (WARM % (4096, "dims: [ 65536 ] zero_data: true"), "1073741824 bytes"),
    (WARM % (4097, "dims: [ 1 ] zero_data: true"), "batch_size: 4097; 0 to 4096"),
    (WARM % (1, "dims: [ 1 ]"), "zero_data, random_data or input_data_file is expected"),
    (WARM % (1, 'dims: [ 1 ] input_data_file: "x"'), "there is no file 'warmup/x'"),
    ("model_warmup [ { count: 600 }, { name: 'b' count: 600 } ]", "1200 runs; at most 1000"),
    ('default_model_filename: "../1/model.onnx"', "default_model_filename: .* does not stay inside"),
    ('default_model_filename: "/model.onnx"', "does not stay inside"),
    ('default_model_filename: "a//model.onnx"', "does not stay inside"),
    ('default_model_filename: "./model.onnx"', "does not stay inside"),
    ('default_model_filename: "a\\\\model.onnx"', "does not stay inside"),
    ('default_model_filename: "a\\000b"', "does not stay inside"),
    ('default_model_filename: "$(id)"', "does not stay inside"),
    (f'default_model_filename: "{"x" * 1025}"', "a path of 1025 characters"),
    ('default_model_filename: "other.onnx"', "1/other.onnx is needed, and not there"),
    ('cc_model_filenames { key: "8.6" value: "sm86.plan" }', "1/sm86.plan is needed, and not there"),
    ('cc_model_filenames { key: "../x" value: "model.onnx" }', "a compute capability like '8.6' is taken"),
    ('output [ { name: "O" label_filename: "labels" } ]', "there is no file 'labels'"),
    ('model_operations { op_library_filename: "x.so" }', "op_library_filename: leave it out"),
    (PARAMETER % ("session.load_model_format", "/x"), "session.load_model_format'.: not taken; leave it out"),
    (PARAMETER % ("intra_op_thread_count", "1000000"), "'1000000'; a whole number from 0 to 128 is taken"),
    (PARAMETER % ("intra_op_thread_count", "nan"), "a whole number from"),
    (ACCELERATOR % ("evil", ""), "'evil' is none of auto_mixed_precision"),
    (
        ACCELERATOR % ("tensorrt", 'parameters { key: "trt_engine_cache_path" value: "/x" }'),
        "trt_engine_cache_path'.: not taken",
    ),
    ('metric_tags { key: "a-b" value: "c" }', "'a-b'; a letter or digit, and more of them and '_', is taken"),
    ('metric_tags { key: "_a" value: "c" }', "'_a'; a letter or digit"),
    ('metric_tags { key: "" value: "c" }', "''; a letter or digit"),
    ('metric_tags { key: "a_1" value: "c" }', None),
    (METRIC % ("x", "histogram_options { buckets: [ 1, 1 ] }"), "buckets must ascend"),
    (METRIC % ("x", "histogram_options { buckets: [ inf ] }"), "a finite number is taken"),
    (METRIC % ("a b", "histogram_options { buckets: [ 1 ] }"), "the name of a metric is taken"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_refused_says_which_field_and_what_would_be_right(text: str, message: str | None) -> None:
    own = "backend:" in text or "platform:" in text
    if message is None:
        assert judged(ONNX_CONFIG + text)
        return
    with pytest.raises(InvalidModel, match=message):
        judged(text if own else ONNX_CONFIG + text)


@pytest.mark.parametrize(
    ("text", "files", "message"),
    [
        (PYTHON_CONFIG, {"1/x": 1}, "backend 'python': 1/model.py is needed, and not there"),
        (PYTHON_CONFIG, {"2/model.py": 1, "1/x": 1}, None),
        (PYTHON_CONFIG + "version_policy { all { } }", {"2/model.py": 1, "1/x": 1}, "1/model.py is needed"),
        ('backend: "openvino"', {"1/model.xml": 1}, "1/model.xml and 1/model.bin, or 1/model.onnx is needed"),
        ('backend: "tensorrt"', {"1/model.onnx": 1}, "1/model.plan is needed"),
        (ONNX_CONFIG, {"model.onnx": 1}, "there is no version directory: .* belong into one like '1'"),
        (ONNX_CONFIG, {}, "there is no version directory"),
        (None, {"1/weights": 1}, "no backend is named, and the files do not show it"),
        (None, {"1/model.onnx": 1, "1/model.py": 1}, "no backend is named, and the files do not show it"),
        (ONNX_CONFIG, {**ONNX, "01/model.onnx": 1}, "directory '01' is no version"),
        (ONNX_CONFIG, {**ONNX, "1b/model.onnx": 1}, "directory '1b' is no version"),
        (ONNX_CONFIG, {**ONNX, "-1/model.onnx": 1}, "directory '-1' is no version"),
        (ONNX_CONFIG, {**ONNX, " 2/model.onnx": 1}, "directory ' 2' is no version"),
        (ONNX_CONFIG, {**ONNX, f"{2**63}/model.onnx": 1}, "is no version"),
        (ONNX_CONFIG, {**ONNX, f"{'9' * 200}/model.onnx": 1}, "is no version"),
        (ONNX_CONFIG, {**ONNX, f"{2**63 - 1}/model.onnx": 1}, None),
        (ONNX_CONFIG, {**ONNX, "warmup/x": 1, "v2/x": 1}, None),
        (ONNX_CONFIG, {**ONNX, "config.pbtxt/x": 1}, "config.pbtxt is a directory"),
        (
            ONNX_CONFIG + "version_policy { all { } }",
            {f"{version}/model.onnx": 1 for version in range(33)},
            "33 versions; at most 32 are served",
        ),
        (ONNX_CONFIG, {f"{version}/model.onnx": 1 for version in range(33)}, None),
        (
            ONNX_CONFIG + "version_policy { all { } } instance_group { count: 3 }",
            {f"{version}/model.onnx": 1 for version in range(22)},
            "66 instances of 22 versions; at most 64",
        ),
    ],
)
def test_the_files_that_a_backend_needs_are_there(
    text: str | None, files: dict[str, int], message: str | None
) -> None:
    if message is None:
        assert judged(text, files)
    else:
        with pytest.raises(InvalidModel, match=message):
            judged(text, files)


LABELS = """output [ { name: "O" data_type: TYPE_FP32 dims: [ 1 ] label_filename: "l" },
  { name: "P" data_type: TYPE_FP32 dims: [ 1 ] label_filename: "l" } ]"""


def test_labels_have_a_bound_for_all_outputs_together() -> None:
    assert judged(ONNX_CONFIG + LABELS, {**ONNX, "l": 32 * 1024**2})
    with pytest.raises(
        InvalidModel, match=r"output\[1\].label_filename: 67108866 bytes of labels in all; at most"
    ):
        judged(ONNX_CONFIG + LABELS, {**ONNX, "l": 32 * 1024**2 + 1})


@pytest.mark.parametrize("path", ["triton_python_backend_stub", "triton_python_backend_stub/x"])
def test_a_stub_of_its_own_would_not_start(path: str) -> None:
    with pytest.raises(InvalidModel, match="triton_python_backend_stub: leave it out"):
        judged(PYTHON_CONFIG, {**PYTHON, path: 1})


ENV = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "%s" } }'


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("$$TRITON_MODEL_DIRECTORY/env.tar.gz", None),
        ("$$TRITON_MODEL_DIRECTORY/other.tar.gz", "there is no other.tar.gz"),
        ("$$TRITON_MODEL_DIRECTORY/../env.tar.gz", "does not stay inside"),
        ("$$TRITON_MODEL_DIRECTORY", "TRITON_MODEL_DIRECTORY/FILE is taken"),
        ("/env.tar.gz", "TRITON_MODEL_DIRECTORY/FILE is taken"),
        ("env.tar.gz", "TRITON_MODEL_DIRECTORY/FILE is taken"),
    ],
)
def test_an_interpreter_comes_with_the_model(path: str, message: str | None) -> None:
    files = {**PYTHON, "env.tar.gz": 1}
    if message is None:
        assert judged(PYTHON_CONFIG + ENV % path, files)
    else:
        with pytest.raises(InvalidModel, match=message):
            judged(PYTHON_CONFIG + ENV % path, files)


@pytest.mark.parametrize(
    ("text", "files", "why"),
    [
        (ONNX_CONFIG, ONNX, None),
        (ONNX_CONFIG, {**ONNX, "1/tokenizer.json": 1, "labels.txt": 1}, None),
        ('backend: "tensorrt"', {"1/model.plan": 1}, None),
        ('backend: "fil"', {"1/xgboost.json": 1}, None),
        (PYTHON_CONFIG, PYTHON, "backend 'python'"),
        ('backend: "vllm"', {"1/model.json": 1}, "backend 'vllm'"),
        ('backend: "pytorch"', {"1/model.pt": 1}, "backend 'pytorch'"),
        ('backend: "dali"', {"1/model.dali": 1}, "backend 'dali'"),
        (ONNX_CONFIG, {**ONNX, "libtriton_onnxruntime.so": 1}, "libtriton_onnxruntime.so"),
        (ONNX_CONFIG, {**ONNX, "1/LIB.SO": 1}, "1/LIB.SO"),
        (ONNX_CONFIG, {**ONNX, "1/libx.so.1.2": 1}, "1/libx.so.1.2"),
        (ONNX_CONFIG, {**ONNX, "model.py": 1}, "model.py"),
        (ONNX_CONFIG, {**ONNX, "1/a/b.pyc": 1}, "1/a/b.pyc"),
        (ONNX_CONFIG, {**ONNX, "triton_python_backend_stub": 1}, "triton_python_backend_stub"),
    ],
)
def test_what_is_code(text: str, files: dict[str, int], why: str | None) -> None:
    admitted = judged(text, files)
    assert (admitted.code, admitted.has_code) == (why, why is not None)
    if why is None:
        assert judged(text, files, NO_CODE)
    else:
        with pytest.raises(CodeRefused, match=r"has code \(.*this node takes none"):
            judged(text, files, NO_CODE)


def written(directory: Path, files: Mapping[str, bytes]) -> Path:
    for path, body in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(body)
    return directory


def test_native_code_is_known_by_its_beginning(tmp_path: Path) -> None:
    files = {CONFIG_FILE: ONNX_CONFIG.encode(), "1/model.onnx": b"x", "1/weights.bin": b"\x7fELF\2"}
    assert admit(written(tmp_path, files), NAME, RULES).code == "1/weights.bin"
    (tmp_path / "1/weights.bin").write_bytes(b"\x7fEL")
    assert admit(tmp_path, NAME, RULES).code is None


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_link_is_not_followed(tmp_path: Path, kind: str) -> None:
    written(tmp_path, {CONFIG_FILE: ONNX_CONFIG.encode(), "1/model.onnx": b"x"})
    if kind == "link":
        (tmp_path / "1" / "more").symlink_to("/etc")
    else:
        os.mkfifo(tmp_path / "1" / "more")
    with pytest.raises(InvalidModel, match="1/more is a link or a special file"):
        admit(tmp_path, NAME, RULES)


def test_what_was_understood_takes_the_place_of_what_was_written(tmp_path: Path) -> None:
    text = b"# a word to Triton\n" + ONNX_CONFIG.encode() + b'name: "m" # another'
    written(tmp_path, {CONFIG_FILE: text, "1/model.onnx": b"x", ".berth.json": b"{}"})
    admitted = admit(tmp_path, NAME, RULES)
    write_anew(tmp_path, admitted)
    assert (tmp_path / CONFIG_FILE).read_text() == admitted.text()
    assert "word" not in admitted.text()
    again = admit(tmp_path, NAME, RULES)
    assert again == admitted
    before = (tmp_path / CONFIG_FILE).stat().st_ino
    write_anew(tmp_path, again)
    assert (tmp_path / CONFIG_FILE).stat().st_ino == before
    assert {path.name for path in tmp_path.iterdir()} == {CONFIG_FILE, "1", ".berth.json"}


def test_without_a_config_one_is_written(tmp_path: Path) -> None:
    written(tmp_path, {"1/model.onnx": b"x"})
    write_anew(tmp_path, admit(tmp_path, NAME, RULES))
    config = text_format.Parse((tmp_path / CONFIG_FILE).read_text(), pb.ModelConfig())
    assert (config.name, config.backend) == ("m", "onnxruntime")


@pytest.mark.parametrize("body", [b"\xff\xfe", b"x" * 10, b'name: "\\xff"'])
def test_what_is_no_text_is_the_models_own_fault(body: bytes) -> None:
    with pytest.raises(InvalidModel, match=r"^config\.pbtxt: "):
        judge(body, ModelFiles(ONNX), NAME, RULES)


def test_a_byte_order_mark_and_an_editors_line_ends_are_no_fault() -> None:
    text = b"\xef\xbb\xbf" + ONNX_CONFIG.encode() + b"\r\nmax_batch_size: 4\r\n"
    assert judge(text, ModelFiles(ONNX), NAME, RULES).config.max_batch_size == 4


def test_a_config_is_not_read_beyond_its_bound(tmp_path: Path) -> None:
    line = b"# " + b"x" * 1021 + b"\n"
    written(tmp_path, {CONFIG_FILE: line * 256, "1/model.onnx": b"x"})
    assert admit(tmp_path, NAME, RULES).backend == "onnxruntime"
    (tmp_path / CONFIG_FILE).write_bytes(line * 256 + b"#")
    with pytest.raises(InvalidModel, match="larger than 262144 bytes"):
        admit(tmp_path, NAME, RULES)


def test_what_triton_is_given_is_a_model_config() -> None:
    given = config_of(ONNX_CONFIG + DIMS % "-1, 9007199254740993".replace("9007199254740993", "7"))
    config = json_format.ParseDict(given, pb.ModelConfig())
    assert list(config.input[0].dims) == [-1, 7]
