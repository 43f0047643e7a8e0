"""What is in a model's directory, by name: which names may stand in it, what is code, which versions there are."""

import os
import re
import stat
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from agent.admission.errors import InvalidModel

CONFIG_FILE = "config.pbtxt"
# Letters of any script, digits and a few signs: nothing that a shell, which starts the python backend's
# stub, would read as more than a name.
_PART = re.compile(r"[\w.@%+=,:-]{1,255}")
_PATH_CHARACTERS = 1024
_ELF = b"\x7fELF"
# Triton's own names end in a library's or a script's; the rest is what an interpreter would take.
_CODE = re.compile(r"(\.so(\.[\d.]+)?|\.py|\.pyc|\.pyo|\.pyd|\.pth|\.dll|\.dylib|\.a|\.o)$", re.IGNORECASE)
# Triton looks for it in the model's directory before it takes its own.
PYTHON_STUB = "triton_python_backend_stub"
_CODE_NAMES = frozenset({PYTHON_STUB})
# Triton reads a version as C's stoll does, to which '-1', ' 1' and '1b' are numbers; one that is too large
# for it throws what Triton does not catch.
_READ_AS_NUMBER = re.compile(r"[\s+-]*[0-9]")
_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")
LARGEST_VERSION = 2**63 - 1


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model: sizes in bytes by path relative to its directory; `native`: those that begin
    as an ELF library or program does, as far as the files have been read."""

    sizes: Mapping[str, int]
    native: frozenset[str] = frozenset()

    def has(self, path: str) -> bool:
        """A file of this path, or a directory with files in it."""
        if path in self.sizes:
            return True
        at = bisect_left(self._sorted, f"{path}/")
        return at < len(self._sorted) and self._sorted[at].startswith(f"{path}/")

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.sizes)

    def versions(self) -> list[int]:
        """The numbers of the version directories, ascending. Raises InvalidModel for one that Triton would
        read otherwise than it is written."""
        tops = {path.split("/", 1)[0] for path in self.sizes if "/" in path}
        found = []
        for top in sorted(top for top in tops if _READ_AS_NUMBER.match(top)):
            if not _VERSION.fullmatch(top) or int(top) > LARGEST_VERSION:
                raise InvalidModel(
                    f"directory {top[:80]!r} is no version: a number without sign or leading zeros, up to "
                    f"{LARGEST_VERSION}, is one"
                )
            found.append(int(top))
        return sorted(found)

    def code(self) -> str | None:
        """The first file that is code by its name or its beginning."""
        return next((path for path in self._sorted if path in self.native or _is_code(path)), None)


def look_at(directory: Path) -> ModelFiles:
    """Read names, sizes and first bytes. Blocks. Raises InvalidModel for what is no file, or OSError."""
    sizes, native = {}, set()
    for entry in _entries(directory):
        path = Path(entry.path).relative_to(directory).as_posix()
        found = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidModel(f"{path} is a link or a special file; only files and directories are taken")
        sizes[path] = found.st_size
        with open(entry.path, "rb") as file:
            if file.read(len(_ELF)) == _ELF:
                native.add(path)
    return ModelFiles(sizes, frozenset(native))


def require_inside(path: str, *, where: str) -> None:
    """Raises InvalidModel unless `path` is a plain relative path that leads nowhere else."""
    parts = path.split("/")
    if len(path) > _PATH_CHARACTERS:
        raise InvalidModel(f"{where}: a path of {len(path)} characters; at most {_PATH_CHARACTERS} are taken")
    if any(part in (".", "..") or not _PART.fullmatch(part) for part in parts):
        raise InvalidModel(
            f"{where}: {path[:200]!r} does not stay inside the model's directory: a relative path of letters, "
            "digits and . _ - + = , : @ %, without '.' or '..' parts, is taken"
        )


def _is_code(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name in _CODE_NAMES or name.startswith("libtriton_") or _CODE.search(name) is not None


def _entries(directory: Path) -> Iterable["os.DirEntry[str]"]:
    """Everything but directories, however deep."""
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif not entry.name.startswith(".berth"):
                    yield entry
