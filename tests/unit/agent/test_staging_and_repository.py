import errno
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agent.staging
from agent.disk_space import DiskSpace
from agent.repository import RECORD_FILE, Record, Repository, RepositoryUnusable
from agent.staging import BadStream, StagedFiles, TooLarge, WrongDigest, check_path
from berth.contract.errors import InvalidValue
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid, ServerName
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
NAME = RECORD.server_name


def digest_of(files: Sequence[tuple[str, bytes]]) -> str:
    parts = (path.encode() + b"\0" + str(len(body)).encode() + b"\0" + body for path, body in files)
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("path", ["config.pbtxt", "1/model.py", "1/a b/ü.bin", "x" * 255, "a/" * 31 + "b"])
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
        "a/" * 32 + "b",
        RECORD_FILE,
        "1/.berth.json",
        ".berth.json.new",
        ".berth.json/x",
        ".berth.json.new/x",
        ".berth",
        "1/.BERTH.config.pbtxt",
        "\u202eb",
    ],
)
def test_paths_that_are_refused(path: str) -> None:
    with pytest.raises(BadStream):
        check_path(path, after=None)


def staged_files(directory: Path, max_bytes: int) -> StagedFiles:
    return StagedFiles(directory, max_bytes=max_bytes, share=DiskSpace(directory, keep_share=0).reservation())


@pytest.mark.parametrize(
    ("paths", "entries"),
    [
        (("a", "b"), 2),
        (("a/1", "a/2"), 3),
        (("a-b/x", "a/x", "a/y", "b"), 6),
        (("a/b/c", "a/d", "b/b/c"), 7),
        (("/".join("x" * 32), "y"), 33),
    ],
)
def test_directories_are_counted_as_files_are(tmp_path: Path, paths: tuple[str, ...], entries: int) -> None:
    staged = staged_files(tmp_path, 10)
    for path in paths:
        staged.begin_file(path, 0)
    staged.close()
    assert staged.entries == len(list(tmp_path.rglob("*"))) == entries


def test_files_come_in_ascending_byte_order() -> None:
    check_path("1/b", after="1/a")
    check_path("1/ü", after="1/z")
    for path in ("1/a", "0/z"):
        with pytest.raises(BadStream, match="ascending"):
            check_path(path, after="1/a")


def test_what_is_staged_is_what_was_sent(tmp_path: Path) -> None:
    files = [("1/model.py", b"abc"), ("config.pbtxt", b"")]
    staged = staged_files(tmp_path, 100)
    for path, body in files:
        staged.begin_file(path, len(body))
        for byte in body:
            staged.write(bytes([byte]))
    assert staged.commit(digest_of(files)) == digest_of(files)
    assert (tmp_path / "1" / "model.py").read_bytes() == b"abc"
    assert (staged.files, staged.bytes) == (2, 3)


def test_streams_that_lie(tmp_path: Path) -> None:
    staged = staged_files(tmp_path, 10)
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
        staged_files(tmp_path, 10).commit("0" * 64)


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
    assert list(again.records()) == [NAME]


def test_a_directory_without_a_record_of_its_own_is_nobodys(repository: Repository) -> None:
    repository.publish(stage(repository), RECORD)
    repository.directory(NAME).rename(repository.models / "stolen")
    # As an agent has left it that knew no names of the server's own: under the model's.
    (repository.models / "m").mkdir()
    (repository.models / "m" / RECORD_FILE).write_text(RECORD.encode())
    (repository.models / "bare").mkdir()
    (repository.models / "garbled").mkdir()
    (repository.models / "garbled" / RECORD_FILE).write_text(json.dumps({"v": 1}))
    assert repository.records() == {"bare": None, "garbled": None, "m": None, "stolen": None}


def test_a_repository_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(RepositoryUnusable, match="no such directory"):
        Repository(tmp_path / "missing").open()
    (tmp_path / "models").write_text("a file")
    with pytest.raises(RepositoryUnusable, match="models"):
        Repository(tmp_path).open()


def test_a_model_is_as_large_as_the_node_takes_and_no_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.staging, "MAX_ENTRIES", 3)
    staged = staged_files(tmp_path, 10)
    for path, size in (("a", 4), ("b", 0), ("c", 6)):
        staged.begin_file(path, size)
        staged.write(b"x" * size)
    assert (staged.files, staged.bytes) == (3, 10)
    with pytest.raises(TooLarge, match="at most 3 files and directories and 10 bytes"):
        staged.begin_file("d", 0)
    files = [("a", b"xxxx"), ("b", b""), ("c", b"x" * 6)]
    assert staged.commit(digest_of(files)) == digest_of(files)


@pytest.mark.parametrize("path", ["/".join(["x" * 31] * 32) + "y", "ü" * 127 + "y", "1/berth", "1/.config"])
def test_paths_at_their_bounds_are_fine(path: str) -> None:
    check_path(path, after=None)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("x/" * 512 + "y", "1025 bytes; 1 to 1024"),
        ("x/" * 32 + "y", "has 33 parts; 32 are allowed"),
        ("ü" * 128, "part of more than 255 bytes"),
        ("", "0 bytes"),
        ("1/a", "does not come after '1/a'"),
    ],
)
def test_paths_beyond_them_are_told_why(path: str, why: str) -> None:
    with pytest.raises(BadStream, match=why):
        check_path(path, after="1/a")


def test_an_empty_chunk_and_a_file_of_nothing_are_fine_and_a_broken_stream_holds_no_file_open(
    tmp_path: Path,
) -> None:
    staged = staged_files(tmp_path, 10)
    staged.close()
    staged.begin_file("a", 0)
    staged.write(b"")
    staged.begin_file("b", 2)
    staged.write(b"x")
    opened = {os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if _is_open(one)}
    assert str(tmp_path / "b") in opened
    assert str(tmp_path / "a") not in opened
    staged.close()
    staged.close()
    opened = {os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if _is_open(one)}
    assert str(tmp_path / "b") not in opened


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_what_is_published_is_durable_before_it_is_visible(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which a machine that loses power could have kept it."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append("visible" if target.parent.name == "models" else "gone")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    staged = stage(repository)
    repository.publish(staged, RECORD)
    assert done[0] == RECORD_FILE
    assert set(done[1:3]) == {staged.name, "1"}
    assert done[3:] == ["visible", "models"]
    done.clear()
    files = StagedFiles(
        repository.new_staging(), max_bytes=10, share=DiskSpace(repository.models, keep_share=0).reservation()
    )
    for path in ("a", "b"):
        files.begin_file(path, 1)
        files.write(b"x")
    assert done == ["a"]
    files.commit(digest_of([("a", b"x"), ("b", b"x")]))
    assert done == ["a", "b"]
    done.clear()
    repository.learn(NAME, measured_bytes=1, served=True)
    assert done == [f"{RECORD_FILE}.new"]
    done.clear()
    repository.remove(NAME)
    assert done == ["gone", "models"]


def test_nothing_is_learned_of_what_is_not_there(repository: Repository) -> None:
    repository.learn(NAME, measured_bytes=1, served=True)
    assert list(repository.models.iterdir()) == []


def test_a_fresh_record_has_not_served_and_knows_no_measure() -> None:
    fresh = Record(RECORD.pod, None, RECORD.name, RECORD.gpu, "d")
    assert Record.decode(fresh.encode()) == fresh
    assert (fresh.model_id, fresh.measured_bytes, fresh.served) == (None, None, False)
    assert RECORD_FILE.startswith(".")  # Triton takes no version directory for it


def test_a_record_that_cannot_be_a_record_is_none(repository: Repository) -> None:
    made = ("directory", "loop", "file", "binary", "x" * 255)
    for name in made[:2] + made[3:]:
        (repository.models / name).mkdir()
    (repository.models / "directory" / RECORD_FILE).mkdir()
    (repository.models / "loop" / RECORD_FILE).symlink_to(RECORD_FILE)
    (repository.models / "binary" / RECORD_FILE).write_bytes(b"\xff")
    (repository.models / "file").write_text("")
    (repository.models / "link").symlink_to("directory")
    for name in (*made, "missing", "y" * 256):
        assert repository.record(ServerName(name)) is None, name
    assert sorted(repository.records()) == sorted({*made, "link"} - {"file"})
    # A link is taken away, and not what it leads to.
    repository.remove(ServerName("link"))
    assert (repository.models / "directory").is_dir()


def test_a_start_makes_its_directories_and_leaves_no_trace_of_trying(tmp_path: Path) -> None:
    for _ in range(2):
        Repository(tmp_path).open()
        assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {
            "models",
            "staging",
        }
        assert stat.S_IMODE((tmp_path / "staging").stat().st_mode) == 0o700  # nobody reads what others send
    (tmp_path / "staging" / "left").write_text("")
    (tmp_path / "staging").chmod(0o755)  # as an earlier version made it
    Repository(tmp_path).restore()
    assert stat.S_IMODE((tmp_path / "staging").stat().st_mode) == 0o700
    (tmp_path / "staging" / "link").symlink_to(tmp_path / "models")
    Repository(tmp_path).open()
    assert list((tmp_path / "staging").iterdir()) == []
    assert (tmp_path / "models").is_dir()


@pytest.mark.parametrize("which", ["models", "staging"])
def test_a_repository_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    mkdir = Path.mkdir

    def read_only(self: Path, *args: Any, **more: Any) -> None:
        if self.parent == tmp_path / which:
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        mkdir(self, *args, **more)

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(RepositoryUnusable, match=f"{which}/.*: Read-only file system"):
        Repository(tmp_path).open()


def test_models_and_staging_on_two_file_systems_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def elsewhere(self: Path, **more: Any) -> Any:
        found = stat(self, **more)
        device = found.st_dev + (self.name == "staging")
        return SimpleNamespace(st_dev=device, st_mode=found.st_mode)

    monkeypatch.setattr(Path, "stat", elsewhere)
    with pytest.raises(RepositoryUnusable, match="different file systems"):
        Repository(tmp_path).open()
