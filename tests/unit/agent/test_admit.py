"""From a model's files to what Triton is given, or to the reason why not."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as pb

from agent.admission import (
    CONFIG_FILE,
    InvalidModel,
    ModelFiles,
    admit,
    judge,
    write_anew,
)
from tests.fakes.admission import NAME, ONNX, ONNX_CONFIG, RULES, config_of, judged


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


def written(directory: Path, files: Mapping[str, bytes]) -> Path:
    for path, body in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(body)
    return directory


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
