"""Checks over several fields of a config, and over its files."""

import pytest

from agent.admission import (
    InvalidModel,
)
from tests.fakes.admission import ONNX, ONNX_CONFIG, PYTHON, PYTHON_CONFIG, judged


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
