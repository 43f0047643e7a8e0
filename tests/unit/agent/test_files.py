"""What is in a model's directory: native code, links, what counts as code."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.admission import (
    CONFIG_FILE,
    CodeRefused,
    InvalidModel,
    admit,
)
from tests.fakes.admission import NAME, NO_CODE, ONNX, ONNX_CONFIG, PYTHON, PYTHON_CONFIG, RULES, judged


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
