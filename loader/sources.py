"""From a URI to a directory with the model, by scheme."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from berth.runtime.errors import ConfigError, Failed
from loader.archive import is_archive, unpack
from loader.download import Bounds, Download, check_digest
from loader.layout import find_model, place_file


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be fetched, and how."""

    uri: str
    sha256: str | None
    bounds: Bounds


Fetch = Callable[[Request, Path], Awaitable[Path]]


@asynccontextmanager
async def fetched(request: Request, work_dir: Path) -> AsyncIterator[Path]:
    """The model's directory, for as long as the block lasts. Raises ConfigError or Failed.

    An archive is unpacked below `work_dir` first: its members come in any order, and the agent takes
    files in ascending order only.
    """
    fetch = scheme_of(request.uri)
    work = await asyncio.to_thread(_made, work_dir)
    try:
        yield find_model(await fetch(request, work), source=request.uri)
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, work, True))


def scheme_of(uri: str) -> Fetch:
    """Raises ConfigError for a scheme that is not supported."""
    scheme = urlsplit(uri).scheme
    fetch = _SCHEMES.get(scheme)
    if fetch is None:
        known = ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        raise ConfigError(f"--uri: {uri!r}: scheme {scheme!r} is not supported; use one of {known}")
    return fetch


async def from_path(path: Path, work: Path, *, sha256: str | None, source: str) -> Path:
    """A directory as it is, an archive unpacked, a model file in its place. Raises Failed."""
    if path.is_dir():
        return path
    if not path.is_file():
        raise Failed(f"{source}: no such file or directory")
    if sha256 is not None:
        await asyncio.to_thread(check_digest, path, sha256, source=source)
    target = work / "model"
    target.mkdir()
    if is_archive(path.name):
        await asyncio.to_thread(unpack, path, target, source=source)
        return target
    placed = target / place_file(path.name, source=source)
    placed.parent.mkdir()
    await asyncio.to_thread(shutil.copyfile, path, placed)
    return target


async def _from_file(request: Request, work: Path) -> Path:
    parts = urlsplit(request.uri)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"--uri: {request.uri!r}: a file URI has three slashes: file:///path")
    return await from_path(Path(unquote(parts.path)), work, sha256=request.sha256, source=request.uri)


async def _from_http(request: Request, work: Path) -> Path:
    name = Path(unquote(urlsplit(request.uri).path)).name
    if not is_archive(name):
        place_file(name, source=request.uri)  # before gigabytes are fetched for nothing
    target = work / name
    has_digest = request.sha256 is not None
    await Download(request.uri, target, bounds=request.bounds, has_digest=has_digest).run()
    model = await from_path(target, work, sha256=request.sha256, source=request.uri)
    target.unlink()
    return model


def _made(parent: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="berth-loader-", dir=parent))
    except OSError as error:
        raise ConfigError(f"--work-dir: {parent}: {error.strerror}") from error


_SCHEMES: dict[str, Fetch] = {"file": _from_file, "http": _from_http, "https": _from_http}
