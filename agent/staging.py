"""Receives one model's files: checks every path and size, counts, hashes. Blocks: call it from a thread.

The digest is that of the API: SHA-256 over path, NUL, decimal size, NUL, content of each file.
"""

import hashlib
import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from agent.disk_space import DiskReservation
from agent.repository import OWN_PREFIX

PATH_BYTES = 1024
PART_BYTES = 255
# Directories in directories: a python environment has 15.
PATH_PARTS = 32
# Files and directories: each is an inode of the node's disk.
MAX_ENTRIES = 100_000


class BadStream(Exception):
    """The stream breaks the contract of StageRequest."""


class TooLarge(Exception):
    """The model is larger than this node takes."""


class WrongDigest(Exception):
    """What arrived is not what was sent."""


def check_path(path: str, *, after: str | None) -> None:
    """Raise BadStream unless `path` may name a file and comes after the one before it."""
    encoded = path.encode("utf-8", "surrogatepass")
    parts = path.split("/")
    if not path or len(encoded) > PATH_BYTES:
        raise BadStream(f"a path has {len(encoded)} bytes; 1 to {PATH_BYTES} are allowed")
    if not path.isprintable():
        raise BadStream(f"path {path!r} holds control or other unprintable characters")
    if len(parts) > PATH_PARTS:
        raise BadStream(f"path {path[:80]!r}… has {len(parts)} parts; {PATH_PARTS} are allowed")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path:
        raise BadStream(f"path {path!r} must be relative and without empty, '.', '..' or backslash parts")
    if any(len(part.encode("utf-8", "surrogatepass")) > PART_BYTES for part in parts):
        raise BadStream(f"path {path[:80]!r}… has a part of more than {PART_BYTES} bytes")
    if any(part.casefold().startswith(OWN_PREFIX) for part in parts):
        raise BadStream(f"path {path!r}: names that begin with {OWN_PREFIX!r} are the agent's own")
    if after is not None and encoded <= after.encode("utf-8", "surrogatepass"):
        raise BadStream(f"path {path!r} does not come after {after!r}; send files in ascending order")


class StagedFiles:
    """Writes the files of one stream below `directory`, one after another, in its `share` of the disk."""

    def __init__(self, directory: Path, *, max_bytes: int, share: DiskReservation) -> None:
        self._directory, self._max_bytes, self._share = directory, max_bytes, share
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._left = 0
        self._last: str | None = None
        self.files = self.bytes = self.entries = 0

    def begin_file(self, path: str, size: int) -> None:
        """Raises BadStream, TooLarge, DiskFull or OSError."""
        self._end_file()
        check_path(path, after=self._last)
        entries = _new_entries(path, after=self._last)
        if self.entries + entries > MAX_ENTRIES or self.bytes + size > self._max_bytes:
            raise TooLarge(
                f"a model has at most {MAX_ENTRIES} files and directories and {self._max_bytes} bytes"
                f" (--max-model-bytes); with {path!r} it has {self.entries + entries} and {self.bytes + size}"
            )
        self._share.announce(size=size, inodes=entries)
        self._file = self._made(path)
        self._share.written(inodes=entries)
        self._hash.update(path.encode() + b"\0" + str(size).encode() + b"\0")
        self._last, self._left = path, size
        self.files, self.bytes, self.entries = self.files + 1, self.bytes + size, self.entries + entries

    def write(self, chunk: bytes) -> None:
        """The next bytes of the current file. Raises BadStream, DiskFull or OSError."""
        if self._file is None:
            raise BadStream("a chunk came before its file")
        if len(chunk) > self._left:
            raise BadStream(f"file {self._last!r} is longer than it was said to be")
        self._share.require(len(chunk))
        self._file.write(chunk)
        self._hash.update(chunk)
        self._left -= len(chunk)
        self._share.written(count=len(chunk))

    def commit(self, digest: str) -> str:
        """The end of the stream. Raises WrongDigest where it does not match what was written."""
        self._end_file()
        if not self.files:
            raise BadStream("there is no file")
        actual = self._hash.hexdigest()
        if digest != actual:
            raise WrongDigest(f"the files that arrived have digest {actual}, not {digest[:64]!r}")
        return actual

    def close(self) -> None:
        """Close an open file and release what will not come any more."""
        self._share.close()
        if self._file is not None:
            with suppress(OSError):  # of a write that has failed and been reported already
                self._file.close()

    def _made(self, path: str) -> BinaryIO:
        target = self._directory / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return target.open("xb")
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise BadStream(f"path {path!r}: a file and a directory have one name") from error

    def _end_file(self) -> None:
        if self._file is None:
            return
        if self._left:
            raise BadStream(f"file {self._last!r} is {self._left} bytes shorter than it was said to be")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None


def _new_entries(path: str, *, after: str | None) -> int:
    """How many files and directories `path` adds. In ascending order everything below one directory comes
    in one piece, so a directory that the path before did not have is new."""
    directories = path.split("/")[:-1]
    known = [] if after is None else after.split("/")[:-1]
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(directories, known, strict=False))
    return 1 + len(directories) - sum(1 for _ in shared)
