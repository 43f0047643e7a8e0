import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.repository import RECORD_FILE, Record, Repository, RepositoryUnusable
from agent.staging import BadStream, StagedFiles, TooLarge, WrongDigest, check_path
from berth.contract.errors import InvalidValue
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid
from berth.contract.pod import PodRef

RECORD = Record(
    pod=PodRef("team", "p", PodUid("u1")),
    model_id=ModelId("m"),
    name=ModelName("m"),
    gpu=GpuChoice(GpuUuid("GPU-a"), 0, 5),
    digest="d" * 64,
    measured_bytes=7,
    served=True,
)
NAME = ModelName("m")


def digest_of(files: Sequence[tuple[str, bytes]]) -> str:
    parts = (path.encode() + b"\0" + str(len(body)).encode() + b"\0" + body for path, body in files)
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("path", ["config.pbtxt", "1/model.py", "1/a b/ü.bin", "x" * 255, "a/" * 300 + "b"])
def test_paths_that_are_fine(path: str) -> None:
    check_path(path, after=None)


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "/etc/passwd",
        "a//b",
        "a/",
        "a\x00b",
        "a\nb",
        "a\\b",
        "x" * 256,
        "a/" * 600,
        RECORD_FILE,
        "1/.berth.json",
        ".berth.json.new",
        ".berth.json/x",
        ".berth.json.new/x",
        "\u202eb",
    ],
)
def test_paths_that_are_refused(path: str) -> None:
    with pytest.raises(BadStream):
        check_path(path, after=None)


def test_files_come_in_ascending_byte_order() -> None:
    check_path("1/b", after="1/a")
    check_path("1/ü", after="1/z")
    for path in ("1/a", "0/z"):
        with pytest.raises(BadStream, match="ascending"):
            check_path(path, after="1/a")


def test_what_is_staged_is_what_was_sent(tmp_path: Path) -> None:
    files = [("1/model.py", b"abc"), ("config.pbtxt", b"")]
    staged = StagedFiles(tmp_path, max_bytes=100)
    for path, body in files:
        staged.begin_file(path, len(body))
        for byte in body:
            staged.write(bytes([byte]))
    assert staged.commit(digest_of(files)) == digest_of(files)
    assert (tmp_path / "1" / "model.py").read_bytes() == b"abc"
    assert (staged.files, staged.bytes) == (2, 3)


def test_streams_that_lie(tmp_path: Path) -> None:
    staged = StagedFiles(tmp_path, max_bytes=10)
    with pytest.raises(BadStream, match="before its file"):
        staged.write(b"x")
    with pytest.raises(TooLarge):
        staged.begin_file("a", 11)
    staged.begin_file("a", 2)
    with pytest.raises(BadStream, match="longer"):
        staged.write(b"xyz")
    staged.write(b"x")
    with pytest.raises(BadStream, match="1 bytes shorter"):
        staged.begin_file("b", 1)
    staged.write(b"y")
    with pytest.raises(BadStream, match="one name"):
        staged.begin_file("a/b", 1)
    with pytest.raises(WrongDigest):
        staged.commit("0" * 64)
    with pytest.raises(BadStream, match="no file"):
        StagedFiles(tmp_path, max_bytes=10).commit("0" * 64)


def test_a_record_comes_back_and_says_what_is_wrong_with_it() -> None:
    assert Record.decode(RECORD.encode()) == RECORD
    for broken in ("", "{}", RECORD.encode().replace('"v": 1', '"v": 2')):
        with pytest.raises(InvalidValue):
            Record.decode(broken)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path)
    repository.open()
    return repository


def stage(repository: Repository, body: bytes = b"x") -> Path:
    staged = repository.new_staging()
    (staged / "1").mkdir(parents=True)
    (staged / "1" / "model.py").write_bytes(body)
    return staged


def test_publish_learn_remove(repository: Repository, tmp_path: Path) -> None:
    repository.publish(stage(repository), RECORD)
    assert repository.records() == {NAME: RECORD}
    repository.publish(stage(repository, b"second"), RECORD)
    assert (repository.directory(NAME) / "1" / "model.py").read_bytes() == b"second"
    repository.learn(NAME, measured_bytes=9, served=False)
    record = repository.record(NAME)
    assert record is not None
    assert (record.measured_bytes, record.served) == (9, False)
    repository.remove(NAME)
    repository.remove(NAME)
    assert repository.records() == {}
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_start_empties_staging_and_keeps_models(repository: Repository, tmp_path: Path) -> None:
    repository.publish(stage(repository), RECORD)
    stage(repository)
    again = Repository(tmp_path)
    again.open()
    assert list((tmp_path / "staging").iterdir()) == []
    assert list(again.records()) == ["m"]


def test_a_directory_without_a_record_of_its_own_is_nobodys(repository: Repository) -> None:
    repository.publish(stage(repository), RECORD)
    repository.directory(NAME).rename(repository.models / "stolen")
    (repository.models / "bare").mkdir()
    (repository.models / "garbled").mkdir()
    (repository.models / "garbled" / RECORD_FILE).write_text(json.dumps({"v": 1}))
    assert repository.records() == {"bare": None, "garbled": None, "stolen": None}


def test_a_repository_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(RepositoryUnusable, match="no such directory"):
        Repository(tmp_path / "missing").open()
    (tmp_path / "models").write_text("a file")
    with pytest.raises(RepositoryUnusable, match="models"):
        Repository(tmp_path).open()
