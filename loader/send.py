"""A model's directory as the agent's stream of files: ascending order, bounded memory, one digest."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from berth.contract.ids import ModelName
from berth.runtime.errors import Failed
from berth.v1 import node_agent_pb2 as pb
from loader.archive import MAX_FILES, is_utf8
from loader.layout import kubelets_own

CHUNK_BYTES = 1024 * 1024
# Of what goes ahead of the files; a message to the agent has at most 4 MiB.
_MANIFEST_BYTES = 2 * 1024 * 1024
_CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file, by its path inside the model."""

    path: str
    location: Path
    size: int


def list_files(directory: Path) -> list[ModelFile]:
    """Every file in ascending byte order of its path. Links are followed, to what is inside only.

    Raises Failed for what cannot be sent: nothing is left out silently, but what kubelet keeps beside
    the files of a mounted ConfigMap, which are links into it; and where there is no file at all.
    """
    root, files = directory.resolve(), []
    for parent, directories, names in os.walk(directory, followlinks=True, onerror=_unreadable):
        kept = kubelets_own(Path(parent))
        directories[:] = [name for name in directories if name not in kept]
        for name in directories:
            _require_inside(Path(parent, name), root)
            _require_no_circle(Path(parent, name), directory)
        for name in names:
            location = Path(parent, name)
            _require_inside(location, root)
            if not location.is_file():
                raise Failed(f"{location} is neither a file nor a directory, or a link to nothing")
            path = location.relative_to(directory).as_posix()
            if not is_utf8(path):
                raise Failed(f"{str(directory)!r}: the file {path!r} has a name that is not UTF-8")
            files.append(ModelFile(path, location, location.stat().st_size))
            if len(files) > MAX_FILES:
                raise Failed(
                    f"{directory} holds more than {MAX_FILES} files, what links lead to counted each time"
                )
    if not files:
        raise Failed(f"{directory} holds no file; is the volume empty, or not what was meant?")
    return sorted(files, key=lambda file: file.path.encode())


def _require_inside(location: Path, root: Path) -> None:
    if not location.resolve().is_relative_to(root):
        raise Failed(f"{location} is a link that leads out of the model's directory")


def _require_no_circle(location: Path, top: Path) -> None:
    if location.is_symlink():
        target = location.resolve()
        above = [parent for parent in location.parents if parent.is_relative_to(top)]
        if any(parent.resolve() == target for parent in above):
            raise Failed(f"{location} is a link to a directory that it is in")


def _unreadable(error: OSError) -> None:
    raise Failed(f"{error.filename}: {error.strerror}") from error


def digest_of(files: list[ModelFile]) -> str:
    """The digest of the API: SHA-256 over path, NUL, decimal size, NUL, content of each file. Blocks."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(_head(file))
        with file.location.open("rb") as data:
            while chunk := data.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def stage_requests(model: ModelName, files: list[ModelFile], digest: str) -> Iterator[pb.StageRequest]:
    """The stream, read as fast as it is taken. What changes on disk meanwhile fails at the commit. Blocks."""
    yield pb.StageRequest(header=_header(model, files, digest))
    for file in files:
        yield pb.StageRequest(file=pb.StageFile(path=file.path, size=file.size))
        with file.location.open("rb") as data:
            while chunk := data.read(CHUNK_BYTES):
                yield pb.StageRequest(chunk=chunk)
    yield pb.StageRequest(commit=pb.StageCommit(digest=digest))


def _header(model: ModelName, files: list[ModelFile], digest: str) -> pb.StageHeader:
    """With all that the agent judges a model by, unless that is too much for one message. Blocks."""
    header = pb.StageHeader(model_name=model, digest=digest)
    config = next((file for file in files if file.path == _CONFIG_FILE), None)
    if config is not None and config.size > _MANIFEST_BYTES:
        return header
    whole = pb.StageHeader(files=[pb.StageFile(path=file.path, size=file.size) for file in files])
    if config is not None:
        whole.config = config.location.read_bytes()
    if whole.ByteSize() <= _MANIFEST_BYTES:
        header.MergeFrom(whole)
    return header


def _head(file: ModelFile) -> bytes:
    return file.path.encode() + b"\0" + str(file.size).encode() + b"\0"
