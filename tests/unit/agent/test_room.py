"""How much of the node's disk models may take, with what is announced and not written yet."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.room import NoRoom, Room
from agent.staging import BadStream, StagedFiles


class Disk:
    """100 blocks of 10 bytes and 100 inodes, of which so many are free."""

    def __init__(self, *, blocks: int = 100, inodes: int = 100, files: int = 100) -> None:
        self.blocks, self.inodes, self.files = blocks, inodes, files

    def __call__(self, _: Path) -> Any:
        return SimpleNamespace(
            f_frsize=10, f_blocks=100, f_bavail=self.blocks, f_files=self.files, f_favail=self.inodes
        )


def room(disk: Disk, keep_share: float = 0.15) -> Room:
    return Room(Path("/"), keep_share=keep_share, statvfs=disk)


def test_a_share_of_the_disk_stays_free() -> None:
    one = room(Disk(blocks=50))
    one.announce(count=350, inodes=1)
    with pytest.raises(NoRoom, match=r"1 B were announced and 0 B of 1000 B may be written; 15% stay free"):
        one.announce(count=1, inodes=1)
    assert one.announced == (350, 1)


def test_a_disk_that_others_have_filled_takes_not_even_an_empty_file() -> None:
    with pytest.raises(NoRoom, match="No space left on device"):
        room(Disk(blocks=10)).announce(count=0, inodes=1)


def test_inodes_are_kept_as_bytes_are() -> None:
    one = room(Disk(inodes=20))
    one.announce(count=0, inodes=5)
    with pytest.raises(NoRoom, match="20 inodes of 100 left, of which 15% stay free"):
        one.announce(count=0, inodes=1)
    room(Disk(inodes=0, files=0)).announce(count=0, inodes=1)  # it makes them as they are needed


def test_what_others_have_announced_is_taken_until_they_have_written_it_or_end() -> None:
    disk = Disk()
    both = room(disk)
    one, other = both.share(), both.share()
    one.announce(count=800, inodes=1)
    with pytest.raises(NoRoom):
        other.announce(count=100, inodes=1)
    disk.blocks -= 30
    one.written(count=300)  # it is on the disk now, and counted there
    with pytest.raises(NoRoom):
        other.announce(count=100, inodes=1)
    one.close()
    one.close()
    assert both.announced == (0, 0)
    other.announce(count=550, inodes=1)


@pytest.mark.parametrize("sent", [b"", b"xy", b"xyz"])
def test_a_stream_that_ends_anyhow_has_nothing_announced(tmp_path: Path, sent: bytes) -> None:
    both = Room(tmp_path, keep_share=0)
    files = StagedFiles(tmp_path / "staged", max_bytes=100, share=both.share())
    files.begin_file("1/a", 3)
    assert both.announced == (3, 0)
    files.write(sent)
    assert both.announced == (3 - len(sent), 0)
    if len(sent) < 3:
        with pytest.raises(BadStream, match="shorter"):
            files.begin_file("1/b", 3)
    files.close()
    assert both.announced == (0, 0)


def test_what_cannot_be_made_is_given_back(tmp_path: Path) -> None:
    both = Room(tmp_path, keep_share=0)
    files = StagedFiles(tmp_path / "staged", max_bytes=100, share=both.share())
    files.begin_file("a", 0)
    with pytest.raises(BadStream):
        files.begin_file("a/b", 3)
    files.close()
    assert both.announced == (0, 0)


def test_of_a_real_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    Room(tmp_path, keep_share=0).announce(count=1, inodes=1)
    with pytest.raises(NoRoom):
        Room(tmp_path, keep_share=0).announce(count=free.f_frsize * free.f_blocks + 1, inodes=1)
    with pytest.raises(NoRoom):
        Room(tmp_path, keep_share=1).announce(count=0, inodes=0)
