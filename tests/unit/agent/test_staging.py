import os
from pathlib import Path

import pytest

import agent.staging
from agent.disk_space import DiskSpace
from agent.repository import RECORD_FILE
from agent.staging import BadStream, StagedFiles, TooLarge, WrongDigest, check_path
from tests.fakes.agent_api import digest_of


@pytest.mark.parametrize(
    "path",
    [
        *("config.pbtxt", "1/model.py", "1/a b/ü.bin", "1/berth", "1/.config"),
        *("x" * 255, "ü" * 127 + "y", "a/" * 31 + "b", "/".join(["x" * 31] * 32) + "y"),
    ],
)
def test_paths_that_are_fine(path: str) -> None:
    check_path(path, after=None)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "0 bytes"),
        *(
            (path, "must be relative")
            for path in (".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "a\\b")
        ),
        *((path, "unprintable characters") for path in ("a\x00b", "a\nb", "\u202eb")),
        *(
            (path, "are the agent's own")
            for path in (RECORD_FILE, ".berth", ".berth.json.new", ".berth.json/x")
        ),
        *(
            (path, "are the agent's own")
            for path in ("1/.berth.json", "1/.BERTH.config.pbtxt", ".berth.json.new/x")
        ),
        *((path, "part of more than 255 bytes") for path in ("x" * 256, "ü" * 128)),
        ("x/" * 512 + "y", "1025 bytes; 1 to 1024"),
        ("a/" * 32 + "b", "has 33 parts; 32 are allowed"),
    ],
)
def test_paths_that_are_refused(path: str, why: str) -> None:
    with pytest.raises(BadStream, match=why):
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
        with pytest.raises(BadStream, match=f"'{path}' does not come after '1/a'.*ascending"):
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
    assert agent.staging.MAX_ENTRIES == 100_000
    monkeypatch.setattr(agent.staging, "MAX_ENTRIES", 4)
    staged = staged_files(tmp_path, 10)
    files = [("1/a", b"xxxx"), ("1/b", b""), ("1/c", b"x" * 6)]  # and their directory
    for path, body in files:
        staged.begin_file(path, len(body))
        staged.write(body)
    assert (staged.files, staged.bytes) == (3, 10)
    with pytest.raises(TooLarge, match=r"at most 4 files and directories and 10 bytes.* it has 5 and 10"):
        staged.begin_file("1/d", 0)
    assert staged.commit(digest_of(files)) == digest_of(files)


def test_an_empty_chunk_and_a_file_of_nothing_are_fine_and_a_broken_stream_holds_no_file_open(
    tmp_path: Path,
) -> None:
    staged = staged_files(tmp_path, 10)
    staged.close()
    staged.begin_file("a", 0)
    staged.write(b"")
    staged.begin_file("b", 2)
    staged.write(b"x")
    assert opened(tmp_path) == {str(tmp_path / "b")}
    staged.close()
    staged.close()
    assert opened(tmp_path) == set()


def opened(directory: Path) -> set[str]:
    """The files in it that this process has open."""
    descriptors = (f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd"))
    files = {os.readlink(one) for one in descriptors if os.path.lexists(one)}
    return {one for one in files if one.startswith(f"{directory}/")}
