"""Where in a directory the model is, and where a lone file goes."""

from pathlib import Path

import pytest

from berth.runtime.errors import Failed
from loader.layout import find_model, place_file
from loader.send import list_files


def test_where_the_model_is(tmp_path: Path) -> None:
    (tmp_path / "a" / "inner" / "1").mkdir(parents=True)
    assert find_model(tmp_path / "a", source="it") == tmp_path / "a" / "inner"
    (tmp_path / "a" / "config.pbtxt").touch()
    assert find_model(tmp_path / "a", source="it") == tmp_path / "a"
    (tmp_path / "b" / "one").mkdir(parents=True)
    (tmp_path / "b" / "two" / "1").mkdir(parents=True)
    with pytest.raises(Failed, match="it holds no Triton model"):
        find_model(tmp_path / "b", source="it")


def config_map(directory: Path, *paths: str) -> None:
    """Files as a kubelet mounts them: the first part of each path is a link through `..data`."""
    for path in paths:
        target = directory / "..2026_1" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"x")
    (directory / "..data").symlink_to("..2026_1")
    for name in {path.partition("/")[0] for path in paths}:
        (directory / name).symlink_to(f"..data/{name}")


def test_a_mounted_config_map_may_hold_version_directories_or_a_whole_model(tmp_path: Path) -> None:
    config_map(tmp_path / "a", "1/model.py", "config.pbtxt")
    found = find_model(tmp_path / "a", source="a")
    assert [file.path for file in list_files(found)] == ["1/model.py", "config.pbtxt"]
    config_map(tmp_path / "b", "net/1/model.py", "net/config.pbtxt")
    found = find_model(tmp_path / "b", source="b")
    assert [file.path for file in list_files(found)] == ["1/model.py", "config.pbtxt"]
    (tmp_path / "c").mkdir()
    config_map(tmp_path / "c" / "1", "model.py")  # mounted where a version belongs
    assert [file.path for file in list_files(tmp_path / "c")] == ["1/model.py"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("net.onnx", "1/model.onnx"),
        ("net.plan", "1/model.plan"),
        ("net.v2.PT", "1/model.pt"),
        ("my_model.py", "1/model.py"),
    ],
)
def test_every_lone_file_goes_where_its_backend_looks(name: str, place: str) -> None:
    assert place_file(name, source="it") == place


def test_what_a_lone_file_may_be_is_reported() -> None:
    with pytest.raises(Failed, match=r"^it: an archive .* or a model file \(.onnx, .plan, .pt, .py\) is"):
        place_file("net.safetensors", source="it")


def test_a_model_may_lie_one_directory_down_beside_files(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "README").touch()
    (tmp_path / "net" / "config.pbtxt").touch()
    assert find_model(tmp_path, source="it") == tmp_path / "net"


@pytest.mark.parametrize(
    "entry", ["1", "net/1", "a/b/config.pbtxt", "v1/model.py", "config.pbtxt/x", "deep/"]
)
def test_what_only_looks_like_a_model_is_none(tmp_path: Path, entry: str) -> None:
    (tmp_path / entry).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / entry).touch()
    with pytest.raises(Failed, match=r"it holds no Triton model: config.pbtxt or a version directory"):
        find_model(tmp_path, source="it")
