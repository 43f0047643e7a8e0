"""The repository on disk: published, learned, removed, unusable."""

import errno
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.disk_space import DiskSpace
from agent.repository import RECORD_FILE, Record, Repository, RepositoryUnusable
from agent.staging import StagedFiles
from berth.contract.errors import InvalidValue
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid, ServerName
from berth.contract.pod import PodRef
from tests.fakes.agent_api import digest_of

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
