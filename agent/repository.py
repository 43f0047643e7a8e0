"""The model repository on disk: what is staged, published and removed.

    DIR/models/SERVER-NAME/             Triton's repository; each directory appears and goes in one rename
    DIR/models/SERVER-NAME/.berth.json  whose model it is (the record)
    DIR/staging/                        files on their way in, directories on their way out; the agent's alone

A directory without a readable record has no owner, nor has one under another name than its record's: an
older agent without server names has left it. Everything here blocks: call it from a thread.
"""

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from berth.contract import wire
from berth.contract.errors import InvalidValue
from berth.contract.gateway import server_name_of
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import ModelId, ModelName, PodUid, ServerName
from berth.contract.pod import PodRef
from berth.contract.wire import Count

# No file of a tenant has a name that begins so, in whatever letters.
OWN_PREFIX = ".berth"
RECORD_FILE = f"{OWN_PREFIX}.json"
_VERSION = 1
_WHAT = "model record"
_OWNERS_ONLY = 0o700
# There is no file of ours, whatever there is.
_NO_RECORD = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG}
)


class RepositoryUnusable(Exception):
    """The directory is missing, read-only or spread over two file systems."""


@dataclass(frozen=True, slots=True)
class Record:
    """Whose model a directory is, and what has been learned of it.

    `served`: it has been READY here, so a later failure to load is not the fault of its files.
    `code`: it has code that Triton runs; assumed where a record does not say.
    """

    pod: PodRef
    model_id: ModelId | None
    name: ModelName
    gpu: GpuChoice
    digest: str
    measured_bytes: int | None = None
    served: bool = False
    code: bool = True

    @property
    def server_name(self) -> ServerName:
        return server_name_of(self.name, self.pod.uid)

    def encode(self) -> str:
        stored = _Stored(
            namespace=self.pod.namespace,
            pod_name=self.pod.name,
            pod_uid=self.pod.uid,
            model_id=self.model_id,
            model_name=self.name,
            gpu=json.loads(self.gpu.encode()),
            digest=self.digest,
            measured_bytes=self.measured_bytes,
            served=self.served,
            code=self.code,
        )
        return json.dumps({"v": _VERSION, **msgspec.to_builtins(stored)})

    @classmethod
    def decode(cls, text: str) -> "Record":
        """Raises InvalidValue."""
        data = wire.parse(text, what=_WHAT)
        wire.check_version(data, _VERSION, what=_WHAT)
        stored = wire.convert(data, _Stored, what=_WHAT)
        return cls(
            pod=PodRef(stored.namespace, stored.pod_name, stored.pod_uid),
            model_id=stored.model_id,
            name=stored.model_name,
            gpu=GpuChoice.decode(json.dumps(stored.gpu)),
            digest=stored.digest,
            measured_bytes=stored.measured_bytes,
            served=stored.served,
            code=stored.code,
        )


class _Stored(msgspec.Struct, kw_only=True, rename="camel"):
    namespace: str
    pod_name: str
    pod_uid: PodUid
    model_id: ModelId | None = None
    model_name: ModelName
    gpu: dict[str, Any]
    digest: str
    measured_bytes: Count | None = None
    served: bool
    code: bool = True


class Repository:
    """One node's repository. Only the agent writes in it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        self.models, self._staging = directory / "models", directory / "staging"
        # By the file's identity: a record is always replaced, never written in place.
        self._decoded: dict[ServerName, tuple[tuple[int, int, int], Record | None]] = {}

    def open(self) -> None:
        """Make it ready and empty its staging area. Raises RepositoryUnusable."""
        try:
            if not self.root.is_dir():
                raise RepositoryUnusable(f"{self.root}: no such directory")
            self.models.mkdir(exist_ok=True)
            self._make_staging()
            _require_writable(self._staging)
            _require_writable(self.models)
            if self.models.stat().st_dev != self._staging.stat().st_dev:
                raise RepositoryUnusable(f"{self.root}: models and staging are on different file systems")
            for left in self._staging.iterdir():
                _remove(left)
        except OSError as error:
            raise RepositoryUnusable(f"{error.filename or self.root}: {error.strerror}") from error

    def records(self) -> dict[ServerName, Record | None]:
        """Every published directory; None where it has no owner."""
        return {ServerName(entry.name): self.record(ServerName(entry.name)) for entry in self._entries()}

    def record(self, name: ServerName) -> Record | None:
        """The record of one directory, if it is there and speaks of this directory. Raises OSError where
        it cannot be read now, which says nothing of whose it is."""
        try:
            with (self.models / name / RECORD_FILE).open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
                known = self._decoded.get(name)
                if known is None or known[0] != identity:
                    known = self._decoded[name] = (identity, _decode(file.read(), name))
        except OSError as error:
            self._decoded.pop(name, None)
            if error.errno in _NO_RECORD:
                return None
            raise
        return known[1]

    def restore(self) -> None:
        """Restore directories that another process has deleted. Without `models` Triton answers nothing, and of a
        model whose directory is gone it says nothing, whether it holds it or not."""
        self.models.mkdir(exist_ok=True)
        self._make_staging()

    def show(self, *names: ServerName) -> None:
        """Make Triton's index list these models: give each an empty directory if it has none."""
        self.restore()
        for name in names:
            (self.models / name).mkdir(exist_ok=True)

    def directory(self, name: ServerName) -> Path:
        return self.models / name

    def new_staging(self) -> Path:
        """A directory of its own for one stream of files, which its first file makes."""
        return self._staging / secrets.token_hex(8)

    def publish(self, staged: Path, record: Record) -> None:
        """Make a staged directory a model, in one rename, durable before it is visible."""
        _write_durably(staged / RECORD_FILE, record.encode())
        _sync_tree(staged)
        target = self.models / record.server_name
        if target.exists():
            self.remove(record.server_name)
        staged.rename(target)
        _sync(self.models)

    def learn(self, name: ServerName, *, measured_bytes: int | None, served: bool) -> None:
        """Add to a record what a load has shown."""
        record = self.record(name)
        if record is None:
            return
        fresh = self.models / name / f"{RECORD_FILE}.new"
        _write_durably(fresh, replace(record, measured_bytes=measured_bytes, served=served).encode())
        fresh.replace(self.models / name / RECORD_FILE)

    def remove(self, name: ServerName) -> None:
        """Take a model away in one rename, then delete its files."""
        target, doomed = self.models / name, self._staging / f"{secrets.token_hex(8)}.removed"
        try:
            target.rename(doomed)
        except FileNotFoundError:
            return
        _sync(self.models)
        _remove(doomed)

    def discard(self, staged: Path) -> None:
        """Delete what a broken stream has left, if anything."""
        _remove(staged)

    def _make_staging(self) -> None:
        """Code in Triton has not to see what others send: what is published leaves this directory."""
        self._staging.mkdir(mode=_OWNERS_ONLY, exist_ok=True)
        if stat.S_IMODE(self._staging.stat().st_mode) != _OWNERS_ONLY:
            self._staging.chmod(_OWNERS_ONLY)

    def _entries(self) -> Iterator[Path]:
        return (entry for entry in sorted(self.models.iterdir()) if entry.is_dir() or entry.is_symlink())


def _decode(text: bytes, name: ServerName) -> Record | None:
    """None where it is no record, or speaks of another directory."""
    try:
        record = Record.decode(text.decode())
    except (InvalidValue, UnicodeDecodeError):
        return None
    return record if record.server_name == name else None


def _require_writable(directory: Path) -> None:
    probe = directory / f".probe-{secrets.token_hex(4)}"
    probe.mkdir()
    probe.rmdir()


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(directory: Path) -> None:
    """Directories only: each file was synced when it was complete."""
    for parent, _, _ in os.walk(directory):
        _sync(Path(parent))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
