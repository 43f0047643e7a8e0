"""A model's directory as the stream of files that the agent takes."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

import loader.archive
import loader.send
from agent.disk_space import DiskSpace
from agent.staging import StagedFiles
from berth.contract.ids import ModelName
from berth.runtime.errors import Failed
from berth.v1 import node_agent_pb2 as pb
from loader.send import ModelFile, digest_of, list_files, stage_requests


def test_both_ends_count_the_same_digest(tmp_path: Path) -> None:
    files = written(tmp_path / "m", **{"1/model.py": b"x" * 3, "1/z": b"", "1a": b"y", "config.pbtxt": b"c"})
    assert [file.path for file in files] == ["1/model.py", "1/z", "1a", "config.pbtxt"]
    (tmp_path / "staged").mkdir()
    staged = StagedFiles(
        tmp_path / "staged", max_bytes=100, share=DiskSpace(tmp_path, keep_share=0).reservation()
    )
    for file in files:
        staged.begin_file(file.path, file.size)
        if file.size:
            staged.write(file.location.read_bytes())
    assert staged.commit(digest_of(files)) == digest_of(files)


def test_a_file_whose_name_is_not_utf_8_is_not_sent(tmp_path: Path) -> None:
    """node D8: the agent's API knows no such names."""
    for where in ("1/mod\udce8le.py", "mod\udce8le/x"):
        model = tmp_path / str(len(where))
        (model / where).parent.mkdir(parents=True)
        (model / where).touch()
        with pytest.raises(Failed, match=r"mod\\udce8le.* has a name that is not UTF-8"):
            list_files(model)


def test_links_to_what_is_inside_are_followed(tmp_path: Path) -> None:
    model = tmp_path / "m"
    (model / "weights").mkdir(parents=True)
    (model / "weights" / "w.bin").write_bytes(b"w")
    (model / "1").symlink_to("weights")
    (model / "2").symlink_to(model / "1")
    (model / "copy.bin").symlink_to("1/w.bin")
    (tmp_path / "again").symlink_to("m")
    for directory in (model, tmp_path / "again"):
        sent = [(file.path, file.size) for file in list_files(directory)]
        assert sent == [("1/w.bin", 1), ("2/w.bin", 1), ("copy.bin", 1), ("weights/w.bin", 1)]


def test_a_mounted_config_map_is_sent_once(tmp_path: Path) -> None:
    """As kubelet mounts it: links through `..data`, beside it the version that it leads to."""
    (tmp_path / "..2026_1").mkdir()
    (tmp_path / "..2026_1" / "config.pbtxt").write_text("")
    (tmp_path / "..data").symlink_to("..2026_1")
    (tmp_path / "config.pbtxt").symlink_to("..data/config.pbtxt")
    assert [file.path for file in list_files(tmp_path)] == ["config.pbtxt"]


def test_what_cannot_be_sent_is_named_and_not_left_out(tmp_path: Path) -> None:
    def refused(target: str) -> str:
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "1" / "link").symlink_to(target)
        with pytest.raises(Failed) as failed:
            list_files(tmp_path / "m")
        return str(failed.value)

    assert "1/link is a link to a directory that it is in" in refused("..")
    assert "1/link is a link to a directory that it is in" in refused(".")
    assert "link to nothing" in refused("missing")
    assert "leads out" in refused("../..")
    assert "leads out" in refused("/etc")
    assert "leads out" in refused("/etc/passwd")
    shutil.rmtree(tmp_path / "m")
    for one, other in (("a", "b"), ("b", "a")):  # each leads into the other
        (tmp_path / "m" / one).mkdir(parents=True)
        (tmp_path / "m" / one / "link").symlink_to(f"../{other}")
    with pytest.raises(Failed, match="a directory that it is in"):
        list_files(tmp_path / "m")
    shutil.rmtree(tmp_path / "m")
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / "pipe")
    with pytest.raises(Failed, match="neither a file nor a directory"):
        list_files(tmp_path / "m")


def test_what_only_looks_like_a_kubelets_is_sent(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "x").write_bytes(b"x")
    assert [file.path for file in list_files(tmp_path)] == ["..data/x"]


def test_a_directory_without_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with pytest.raises(Failed, match="holds no file"):
        list_files(tmp_path)


def test_links_that_multiply_files_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.send, "MAX_FILES", 100)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "x").write_bytes(b"x")
    for level in range(1, 20):
        (tmp_path / str(level)).mkdir()
        for name in "ab":
            (tmp_path / str(level) / name).symlink_to(f"../{level - 1}")
    with pytest.raises(Failed, match="more than 100 files"):
        list_files(tmp_path)


MIB = 1024 * 1024


def written(directory: Path, **files: bytes) -> list[ModelFile]:
    for path, body in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(body)
    return list_files(directory)


def sent(files: list[ModelFile]) -> list[pb.StageRequest]:
    return list(stage_requests(ModelName("net"), files, "d1"))


def test_the_digest_is_that_of_the_api(tmp_path: Path) -> None:
    """Path, NUL, decimal size, NUL, content of each file: the agent counts it by the same rule."""
    files = written(tmp_path, **{"b": b"", "1/a": b"xyz"})
    assert digest_of(files) == hashlib.sha256(b"1/a\x003\x00xyz" + b"b\x000\x00").hexdigest()


def test_paths_are_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    files = written(tmp_path, **{"é": b"", "z": b"", "a/b": b"", "a.b": b"", "A": b""})
    assert [file.path for file in files] == ["A", "a.b", "a/b", "z", "é"]


def test_the_stream_says_what_comes_then_each_file_then_that_it_is_all(tmp_path: Path) -> None:
    files = written(tmp_path, **{"1/m": b"xyz", "empty": b""})
    said = [pb.StageFile(path="1/m", size=3), pb.StageFile(path="empty", size=0)]
    assert sent(files) == [
        pb.StageRequest(header=pb.StageHeader(model_name="net", digest="d1", files=said)),
        pb.StageRequest(file=pb.StageFile(path="1/m", size=3)),
        pb.StageRequest(chunk=b"xyz"),
        pb.StageRequest(file=pb.StageFile(path="empty", size=0)),
        pb.StageRequest(commit=pb.StageCommit(digest="d1")),
    ]


def test_what_a_model_is_judged_by_goes_ahead_of_its_bytes(tmp_path: Path) -> None:
    header = sent(written(tmp_path, **{"1/m": b"x", "config.pbtxt": b"backend: 'p'"}))[0].header
    assert (header.config, [file.path for file in header.files]) == (b"backend: 'p'", ["1/m", "config.pbtxt"])


@pytest.mark.parametrize(
    "large", [{"config.pbtxt": b"#" * (2 * MIB + 1)}, {f"1/{'x' * 240}{n}": b"" for n in range(9000)}]
)
def test_what_is_too_large_for_one_message_does_not_go_ahead(tmp_path: Path, large: dict[str, bytes]) -> None:
    requests = stage_requests(ModelName("net"), written(tmp_path, **large), "d1")
    header = next(requests).header
    assert header == pb.StageHeader(model_name="net", digest="d1")


@pytest.mark.parametrize("size", [5 * MIB, 5 * MIB + 1])
def test_a_large_file_comes_in_pieces_that_grpc_takes(tmp_path: Path, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"\1" * (size % 256)
    files = written(tmp_path, m=body)
    chunks = [request.chunk for request in sent(files) if request.WhichOneof("part") == "chunk"]
    assert b"".join(chunks) == body
    assert max(map(len, chunks)) < 4 * MIB
    assert digest_of(files) == hashlib.sha256(f"m\0{size}\0".encode() + body).hexdigest()
