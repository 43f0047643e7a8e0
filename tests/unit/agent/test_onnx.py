"""Which files an ONNX graph may take its weights from."""

import os
from pathlib import Path

import pytest

import agent.admission.onnx
from agent.admission import CONFIG_FILE, InvalidModel, NodeRules, admit
from berth.contract.ids import ModelName
from berth.contract.report import CodeRule

NAME = ModelName("m")
RULES = NodeRules(frozenset({"onnxruntime", "openvino", "python"}), CodeRule.NAMESPACE)


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low]) if not rest else bytes([low | 0x80]) + varint(rest)


def part(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def entry(key: bytes, value: bytes) -> bytes:
    return part(13, part(1, key) + part(2, value))


def tensor(location: bytes) -> bytes:
    """With dims and a data type before, and where its bytes begin after."""
    return b"\x08\x04\x10\x01" + entry(b"location", location) + entry(b"offset", b"0") + b"\x70\x01"


def graph(location: bytes) -> bytes:
    return part(7, part(5, tensor(location)))


def attribute(body: bytes) -> bytes:
    return part(7, part(1, part(5, body)))


def admitted(directory: Path, body: bytes, *, config: str = "", name: str = "model.onnx") -> None:
    files = {
        CONFIG_FILE: config.encode() or b'backend: "onnxruntime"',
        f"1/{name}": body,
        "1/w": b"x",
        "1/d/w": b"x",
    }
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    admit(directory, NAME, RULES)


@pytest.mark.parametrize("location", [b"w", b"d/w", b"./w"])
def test_weights_beside_the_graph_are_taken(tmp_path: Path, location: bytes) -> None:
    admitted(tmp_path, graph(location))


@pytest.mark.parametrize(
    "location",
    [
        b"../../victim/1/weights",
        b"/etc/passwd",
        b"d/../../w",
        b"..",
        b"",
        b"a//b",
        b"*/_ORT_MEM_ADDR_/*",
        b"\xff",
    ],
)
def test_weights_of_elsewhere_are_refused(tmp_path: Path, location: bytes) -> None:
    with pytest.raises(
        InvalidModel, match=r"1/model.onnx: the location of external data: .* does not stay inside"
    ):
        admitted(tmp_path, graph(location))


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="there is no file '1/other'"):
        admitted(tmp_path, graph(b"other"))


OUT = tensor(b"../x")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(part(7, part(15, part(1, OUT))), id="sparse values"),
        pytest.param(part(7, part(15, part(2, OUT))), id="sparse indices"),
        pytest.param(attribute(part(5, OUT)), id="constant"),
        pytest.param(attribute(part(10, OUT)), id="constants"),
        pytest.param(attribute(part(22, part(1, OUT))), id="sparse constant"),
        pytest.param(attribute(part(23, part(1, OUT))), id="sparse constants"),
        pytest.param(attribute(part(6, part(5, OUT))), id="subgraph"),
        pytest.param(attribute(part(11, part(5, OUT))), id="subgraphs"),
        pytest.param(part(20, part(1, part(5, OUT))), id="training, at first"),
        pytest.param(part(20, part(2, part(5, OUT))), id="training"),
        pytest.param(part(25, part(7, part(5, part(5, OUT)))), id="function"),
        pytest.param(part(25, part(11, part(5, OUT))), id="a default of a function"),
        pytest.param(graph(b"w") + graph(b"../x"), id="a second graph, which is merged"),
        pytest.param(
            part(7, part(5, tensor(b"w") + entry(b"location", b"../x"))), id="the second word holds"
        ),
        pytest.param(
            part(7, part(5, part(13, part(1, b"y") + part(2, b"../x") + part(1, b"location")))), id="key last"
        ),
        pytest.param(
            b"\xba\x80\x80\x80\x10" + graph(b"../x")[1:], id="a number beyond 32 bits, which is cut"
        ),
        pytest.param(b"\x09" + bytes(8) + b"\x0d" + bytes(4) + graph(b"../x"), id="after fixed numbers"),
    ],
)
def test_wherever_it_stands(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(InvalidModel, match=r"'\.\./x' does not stay inside"):
        admitted(tmp_path, body)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ('backend: "openvino" default_model_filename: "model.onnx"', "model.onnx"),
        ('backend: "onnxruntime" default_model_filename: "graph"', "graph"),
        ('backend: "onnxruntime" cc_model_filenames { key: "8.6" value: "graph" }', "graph"),
        ('backend: "onnxruntime"', "model.onnx/model.onnx"),
    ],
)
def test_whatever_the_graph_is_called(tmp_path: Path, config: str, name: str) -> None:
    with pytest.raises(InvalidModel, match=r"'\.\./x' does not stay inside"):
        admitted(tmp_path, graph(b"../x"), config=config, name=name)


def test_a_compiled_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="EPContext is another compiler's program"):
        admitted(tmp_path, part(7, part(1, part(4, b"EPContext"))))


@pytest.mark.parametrize("body", [b"\x3blocation", b"\x3a\x7flocation", b"\xff" * 11 + b"location"])
def test_what_is_no_graph_is_refused_where_it_may_name_a_file(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(InvalidModel, match=r"1/model\.onnx: it is no ONNX graph"):
        admitted(tmp_path, body)


def test_what_names_no_file_is_not_looked_into(tmp_path: Path) -> None:
    admitted(tmp_path, b"\xff" * 100)
    admitted(tmp_path, part(7, part(5, part(9, b"a location, in weights"))))


def test_the_word_is_found_wherever_a_window_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.admission.onnx, "_WINDOW_BYTES", 32)
    for pad in range(64):
        with pytest.raises(InvalidModel, match="does not stay inside"):
            admitted(tmp_path, part(2, b"p" * pad) + graph(b"../x"))


def test_no_graph_is_looked_at_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.admission.onnx, "_MOST_FIELDS", 100)
    with pytest.raises(InvalidModel, match="more than 100 parts"):
        admitted(tmp_path, b"\x08\x01" * 100 + graph(b"w"))


def test_a_graph_that_nobody_could_read_is_refused_unread(tmp_path: Path) -> None:
    admitted(tmp_path, b"x")
    os.truncate(tmp_path / "1/model.onnx", 2**31)
    with pytest.raises(InvalidModel, match="at most 2147483647 bytes"):
        admit(tmp_path, NAME, RULES)
