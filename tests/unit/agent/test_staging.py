import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import agent.staging
from agent.disk_space import DiskSpace
from agent.repository import RECORD_FILE
from agent.staging import BadStream, StagedFiles, TooLarge, WrongDigest, check_path


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


def test_entries_of_a_model_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agent.staging.MAX_ENTRIES == 100_000
    monkeypatch.setattr(agent.staging, "MAX_ENTRIES", 4)
    files = staged_files(tmp_path, 10)
    files.begin_file("1/a", 0)  # two entries
    files.begin_file("1/b", 0)
    files.begin_file("1/c", 0)
    with pytest.raises(TooLarge, match=r"at most 4 files and directories .* it has 5 and 0"):
        files.begin_file("1/d", 0)
    files.close()
