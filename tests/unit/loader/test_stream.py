"""A model's directory as the agent's stream."""

import hashlib
from pathlib import Path

import pytest

from berth.contract.ids import ModelName
from berth.v1 import node_agent_pb2 as pb
from loader.send import ModelFile, digest_of, list_files, stage_requests

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


def test_a_file_that_grows_or_moves_is_another_model(tmp_path: Path) -> None:
    digests = [digest_of(written(tmp_path / "a", **{"1/m": b"xy"}))]
    digests += [digest_of(written(tmp_path / "b", **{"1/m": b"xyz"}))]
    digests += [digest_of(written(tmp_path / "c", **{"2/m": b"xy"}))]
    assert len(set(digests)) == 3


def test_paths_are_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    files = written(tmp_path, **{"é": b"", "z": b"", "a/b": b"", "a.b": b"", "A": b""})
    assert [file.path for file in files] == ["A", "a.b", "a/b", "z", "é"]


def test_a_link_to_a_file_of_the_model_is_sent_as_the_file(tmp_path: Path) -> None:
    written(tmp_path, **{"1/m": b"xyz"})
    (tmp_path / "link").symlink_to(tmp_path / "1" / "m")
    assert [(file.path, file.size) for file in list_files(tmp_path)] == [("1/m", 3), ("link", 3)]


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
