"""Unpacks archives from untrusted sources. Blocks: call it from a thread.

Only plain files and directories come out, below the target, within bounds; anything else in the
archive (links, devices, absolute or climbing names) refuses the whole of it by name.
"""

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from berth.runtime.errors import Failed

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
MAX_FILES = 100_000
# Weights hardly shrink. What unpacks to this many times its size, and to more than the floor, is a bomb.
MAX_RATIO, RATIO_FLOOR_BYTES = 200, 1024**3
_COPY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    is_directory: bool
    is_plain: bool
    entry: tarfile.TarInfo | zipfile.ZipInfo


def is_archive(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def is_utf8(name: str) -> bool:
    """A name that a system or an archive has given: bytes that are none come as surrogates (PEP 383)."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def unpack(archive: Path, target: Path, *, source: str) -> None:
    """Raises Failed naming the member that is wrong; what was written before it is the caller's to delete."""
    limit = max(RATIO_FLOOR_BYTES, MAX_RATIO * archive.stat().st_size)
    try:
        with _opened(archive) as members:
            _write_all(members, target, limit_bytes=limit, source=source)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        OSError,
        NotImplementedError,
        RuntimeError,
        ValueError,  # of tarfile for a sparse map that is none, of zipfile for a name
        LookupError,  # of zipfile for an empty name
    ) as error:
        raise Failed(f"{source}: not a readable archive: {error}") from error


def _write_all(members: "_Members", target: Path, *, limit_bytes: int, source: str) -> None:
    left = limit_bytes
    for count, member in enumerate(members, start=1):
        path = _safe(member, source)
        if count > MAX_FILES:
            raise Failed(f"{source}: more than {MAX_FILES} files")
        if member.is_directory:
            (target / path).mkdir(parents=True, exist_ok=True)
            continue
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        with members.open(member) as data, (target / path).open("xb") as file:
            left -= _copy(data, file, limit_bytes=left, source=source)


def _copy(data: IO[bytes], file: IO[bytes], *, limit_bytes: int, source: str) -> int:
    """Count what really comes out: a header may lie."""
    copied = 0
    while chunk := data.read(_COPY_BYTES):
        copied += len(chunk)
        if copied > limit_bytes:
            raise Failed(f"{source}: unpacks to more than {MAX_RATIO} times its size")
        file.write(chunk)
    return copied


def _safe(member: _Member, source: str) -> PurePosixPath:
    path = PurePosixPath(member.name)
    if not is_utf8(member.name):
        raise Failed(f"{source}: member {member.name!r} has a name that is not UTF-8")
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
        raise Failed(f"{source}: member {member.name!r} would leave the model's directory")
    if not member.is_plain and not member.is_directory:
        raise Failed(f"{source}: member {member.name!r} is neither a file nor a directory")
    return path


class _Members:
    """One view of tar and zip."""

    def __init__(self, container: tarfile.TarFile | zipfile.ZipFile) -> None:
        self._container = container

    def __enter__(self) -> "_Members":
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def __iter__(self) -> Iterator[_Member]:
        if isinstance(self._container, tarfile.TarFile):
            for tar in self._container:
                yield _Member(tar.name, tar.isdir(), tar.isreg(), tar)
        else:
            for info in self._container.infolist():
                # The upper half of a zip made on Unix holds the file's mode; a link is 0o120000.
                kind = (info.external_attr >> 16) & 0o170000
                yield _Member(info.filename, info.is_dir(), kind in (0, 0o100000), info)

    def open(self, member: _Member) -> IO[bytes]:
        if isinstance(self._container, tarfile.TarFile):
            assert isinstance(member.entry, tarfile.TarInfo)
            data = self._container.extractfile(member.entry)
            assert data is not None
            return data
        assert isinstance(member.entry, zipfile.ZipInfo)
        return self._container.open(member.entry)


def _opened(archive: Path) -> _Members:
    if archive.name.lower().endswith(".zip"):
        return _Members(zipfile.ZipFile(archive))
    return _Members(tarfile.open(archive, mode="r:*"))
