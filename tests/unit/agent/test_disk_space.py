"""How much of the node's disk models may take, with what is announced and not written yet."""

import os
import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agent.disk_space
from agent.disk_space import DiskFull, DiskReservation, DiskSpace
from agent.staging import BadStream, StagedFiles


class Disk:
    """100 blocks of 10 bytes and 100 inodes, of which so many are free."""

    def __init__(self, *, blocks: int = 100, inodes: int = 100, files: int = 100) -> None:
        self.blocks, self.inodes, self.files = blocks, inodes, files

    def __call__(self, _: Path) -> Any:
        return SimpleNamespace(
            f_frsize=10, f_blocks=100, f_bavail=self.blocks, f_files=self.files, f_favail=self.inodes
        )


def room(disk: Disk, keep_share: float = 0.15) -> DiskSpace:
    return DiskSpace(Path("/"), keep_share=keep_share, statvfs=disk)


def test_a_share_of_the_disk_stays_free() -> None:
    one = room(Disk(blocks=50))
    one.reserve(count=350, inodes=1)
    with pytest.raises(DiskFull, match=r"1 B are to come and 0 B of 1000 B may be written; 15% stay free"):
        one.reserve(count=1, inodes=1)
    assert one.reserved == (350, 1)


def test_a_disk_that_others_have_filled_takes_not_even_an_empty_file() -> None:
    with pytest.raises(DiskFull, match="No space left on device"):
        room(Disk(blocks=10)).reserve(count=0, inodes=1)


def test_inodes_are_kept_as_bytes_are() -> None:
    one = room(Disk(inodes=20))
    one.reserve(count=0, inodes=5)
    with pytest.raises(DiskFull, match="20 inodes of 100 left, of which 15% stay free"):
        one.reserve(count=0, inodes=1)
    room(Disk(inodes=0, files=0)).reserve(count=0, inodes=1)  # it makes them as they are needed


def test_what_others_have_reserved_is_taken_until_they_have_written_it_or_end() -> None:
    disk = Disk()
    both = room(disk)
    one, other = both.reservation(), both.reservation()
    one.announce(size=800, inodes=1)
    with pytest.raises(DiskFull):
        other.announce(size=100, inodes=1)
    disk.blocks -= 30
    one.written(count=300)  # it is on the disk now, and counted there
    with pytest.raises(DiskFull):
        other.announce(size=100, inodes=1)
    one.close()
    one.close()
    assert both.reserved == (0, 0)
    other.announce(size=550, inodes=1)


@pytest.mark.parametrize("sent", [b"", b"xy", b"xyz"])
def test_a_stream_that_ends_anyhow_has_nothing_reserved(tmp_path: Path, sent: bytes) -> None:
    both = DiskSpace(tmp_path, keep_share=0)
    files = StagedFiles(tmp_path / "staged", max_bytes=100, share=both.reservation())
    files.begin_file("1/a", 3)
    assert both.reserved == (3, 0)
    files.write(sent)
    assert both.reserved == (3 - len(sent), 0)
    if len(sent) < 3:
        with pytest.raises(BadStream, match="shorter"):
            files.begin_file("1/b", 3)
    files.close()
    assert both.reserved == (0, 0)


def test_what_is_announced_keeps_no_more_than_a_window_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """node D3: a file takes its room as it is written. One that can never fit is refused at once, still."""
    monkeypatch.setattr(agent.disk_space, "WINDOW_BYTES", 100)
    disk = Disk()
    both = room(disk)
    large, small = both.reservation(), both.reservation()
    large.announce(size=850, inodes=1)
    with pytest.raises(DiskFull, match="760 B are to come and 750 B of 1000 B may be written"):
        small.announce(size=760, inodes=1)
    small.announce(size=90, inodes=1)
    assert both.reserved == (190, 2)
    small.require(90)
    disk.blocks -= 9
    small.written(count=90, inodes=1)
    for _ in range(76):  # it asks for more as it writes, and the last that there is goes to whoever writes it
        large.require(10)
        disk.blocks -= 1
        large.written(count=10)
    with pytest.raises(DiskFull, match="0 B of 1000 B may be written"):
        large.require(10)
    large.close()
    small.close()
    assert both.reserved == (0, 0)


def test_a_window_is_what_comes_next_and_no_more_than_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """node D3: else the others would get no room for what never comes, or a stream none between two chunks."""
    monkeypatch.setattr(agent.disk_space, "WINDOW_BYTES", 100)
    both = room(Disk())
    one, seen = both.reservation(), []
    one.announce(size=250, inodes=0)
    for _ in range(5):
        one.require(50)
        seen.append(both.reserved[0])
        one.written(count=50)
    assert seen == [100, 50, 100, 50, 50]
    one.close()
    assert both.reserved == (0, 0)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_streams_do_what_is_kept_free_stays_free(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """node D3: announced, written, given up, in any order: never more than may be written, and a stream that is
    refused gives what it had back, so that one of two that do not fit together ends."""
    monkeypatch.setattr(agent.disk_space, "WINDOW_BYTES", 60)
    dice, disk = random.Random(seed), Disk()
    both = room(disk)
    ended = refused = 0
    streams: list[tuple[DiskReservation, int, int]] = []  # its share, what is to come, what it has written

    def give_up(at: int) -> None:
        share, _, written = streams.pop(at)
        share.close()
        disk.blocks += written // 10

    for _ in range(600):
        if len(streams) < 4 and dice.random() < 0.4:
            share, size = both.reservation(), dice.choice((10, 50, 60, 70, 400, 840))
            with suppress(DiskFull):
                share.announce(size=size, inodes=0)
                streams.append((share, size, 0))
        elif streams:
            at = dice.randrange(len(streams))
            share, left, written = streams[at]
            try:
                share.require(10)
            except DiskFull:
                refused += 1
                give_up(at)
                continue
            disk.blocks -= 1
            share.written(count=10)
            streams[at] = (share, left - 10, written + 10)
            if left == 10:
                ended += 1
                give_up(at)
        assert disk.blocks * 10 - both.reserved[0] >= 150
        assert both.reserved[0] <= 60 * len(streams)
    assert min(ended, refused) > 0
    while streams:
        give_up(0)
    assert both.reserved == (0, 0)


def test_what_cannot_be_made_is_given_back(tmp_path: Path) -> None:
    both = DiskSpace(tmp_path, keep_share=0)
    files = StagedFiles(tmp_path / "staged", max_bytes=100, share=both.reservation())
    files.begin_file("a", 0)
    with pytest.raises(BadStream):
        files.begin_file("a/b", 3)
    files.close()
    assert both.reserved == (0, 0)


def test_of_a_real_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    DiskSpace(tmp_path, keep_share=0).reserve(count=1, inodes=1)
    with pytest.raises(DiskFull):
        DiskSpace(tmp_path, keep_share=0).reserve(count=free.f_frsize * free.f_blocks + 1, inodes=1)
    with pytest.raises(DiskFull):
        DiskSpace(tmp_path, keep_share=1).reserve(count=0, inodes=0)
