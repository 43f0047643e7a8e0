"""Builds images by mmdebstrap and buildah, in a directory of our own, and keeps them as archives.

Everything that a build starts runs in namespaces of its own: it ends with us, however we end, and its mounts
with it. buildah's store lies in the cache, for the layers that the next build of the same image begins with.
"""

import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localcluster.building import BuildFailed, locked, progress, say
from localcluster.images import oci
from localcluster.images.recipes import Recipe
from localcluster.paths import cache_directory
from localcluster.processes import DYING_WITH_PARENT

_CERTIFICATES = "/etc/ssl/certs"
_ALONE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
# buildah notes the blobs that it has seen in a place that no flag moves.
_HIDDEN = (
    "sh",
    "-c",
    'mkdir -p /var/lib/containers && mount -t tmpfs tmpfs /var/lib/containers && exec "$@"',
    "sh",
)
_MACHINE = platform.machine()
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TIMES = {
    "pause": "a moment",
    "base": "about a minute",
    "berth": "about a minute, less where only sources have changed",
    "tritonserver": "about a minute",
}
# How many archives of one image stay however old they are, and how long one stays that was requested.
_KEPT, _KEPT_SECONDS = 3, 3600.0
# Layers that no build will use again pile up in buildah's store; past this it is begun anew.
_STORE_IMAGES = 150


@dataclass(frozen=True, kw_only=True)
class Image:
    name: str
    archive: Path


def directory() -> Path:
    return cache_directory() / "images"


def all_of(recipes: Sequence[Recipe], *, base: Recipe) -> list[Image]:
    """An image for each recipe; those that are missing are built, on `base` if need be. Raises BuildFailed."""
    if not all(_is_there(recipe) for recipe in recipes):
        with locked(directory() / "lock"):
            for recipe in recipes:
                if not _is_there(recipe):
                    _make(recipe, base=base)
                    _forget_old(recipe.name)
    return [_used(recipe) for recipe in recipes]


def archive(recipe: Recipe) -> Path:
    return directory() / f"{recipe.name}-{recipe.key}.tar"


def _is_there(recipe: Recipe) -> bool:
    return archive(recipe).exists()


def _used(recipe: Recipe) -> Image:
    os.utime(archive(recipe))
    return Image(name=name(recipe), archive=archive(recipe))


def name(recipe: Recipe) -> str:
    return recipe.reference or f"localhost/{recipe.name}:{recipe.key}"


def _forget_old(image: str) -> None:
    """Remove the archives that have not been used for a while, but the last few."""
    newest_first = sorted(directory().glob(f"{image}-*.tar"), key=lambda path: -path.stat().st_mtime)
    for path in newest_first[_KEPT:]:
        if time.time() - path.stat().st_mtime > _KEPT_SECONDS:
            path.unlink()


def digest_built_anew(recipe: Recipe, *, base: Recipe) -> str:
    """The digest of the image that another build makes, which begins with no layer of an earlier one."""
    with locked(directory() / "lock"), _context(recipe) as scratch:
        return oci.digest(_built_by_buildah(recipe, scratch, base, "--no-cache"))


def _make(recipe: Recipe, *, base: Recipe) -> None:
    if recipe.base and not _is_there(base):
        _make(base, base=base)
    say(f"building the image {recipe.name}: {_TIMES[recipe.name]}, until what it is made of changes")
    started = time.monotonic()
    with _context(recipe) as scratch:
        with progress(started):
            made = _maker(recipe)(recipe, scratch, base)
        made.rename(archive(recipe))
    say(f"built in {time.monotonic() - started:.0f} s: {archive(recipe)}")


@contextmanager
def _context(recipe: Recipe) -> Iterator[Path]:
    """A directory for one build, with the recipe's files in its `context`.

    Under the lock: whatever lies there at first is a dead build's.
    """
    scratch = directory() / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for path, content in recipe.files.items():
            file = scratch / "context" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _maker(recipe: Recipe) -> Callable[[Recipe, Path, Recipe], Path]:
    if recipe.base:
        return _built_by_buildah
    return {"pause": _compiled, "base": _bootstrapped}[recipe.name]


def _compiled(recipe: Recipe, scratch: Path, _base: Recipe) -> Path:
    """The image of one static program."""
    program, layer, finished = scratch / "pause", scratch / "layer.tar", scratch / "finished.tar"
    source = scratch / "context" / "pause.c"
    _run(["gcc", "-Os", "-static", "-s", "-Wl,--build-id=none", f"-o{program}", str(source)], scratch)
    oci.tar_of_program(layer, "pause", program)
    config = {"Entrypoint": ["/pause"], "User": "65535:65535"}
    oci.write_single_layer(finished, name=name(recipe), layer=layer, machine=_MACHINE, config=config)
    return finished


def _bootstrapped(recipe: Recipe, scratch: Path, _base: Recipe) -> Path:
    """Debian, the same bytes for the same versions of its packages."""
    layer, finished = scratch / "layer.tar", scratch / "finished.tar"
    arguments = recipe.files["mmdebstrap"].decode().splitlines()
    _run(["mmdebstrap", *arguments, str(layer)], scratch)
    oci.write_single_layer(
        finished,
        name=name(recipe),
        layer=layer,
        machine=_MACHINE,
        config={"Env": [_PATH], "Cmd": ["python3"]},
    )
    return finished


def _built_by_buildah(recipe: Recipe, scratch: Path, base: Recipe, *flags: str) -> Path:
    """What the Dockerfile in the recipe's files says."""
    store = directory() / "store"
    if len(list(store.glob("overlay-images/*"))) > _STORE_IMAGES:
        shutil.rmtree(store)
    buildah = [*_HIDDEN, "buildah", f"--root={store}", f"--runroot={scratch / 'run'}"]
    _run([*buildah, "pull", "--quiet", f"oci-archive:{archive(base)}"], scratch)
    # A machine that reaches its package index by a proxy of its own trusts that proxy's certificate.
    certificates = [f"--volume={_CERTIFICATES}:{_CERTIFICATES}:ro"] if Path(_CERTIFICATES).is_dir() else []
    how = ["--isolation=chroot", "--network=host", "--pull-never", "--layers", "--timestamp=0", *certificates]
    context = str(scratch / "context")
    _run(
        [*buildah, "bud", *how, *flags, f"--file={context}/Dockerfile", f"--tag={name(recipe)}", context],
        scratch,
    )
    # Neither compressed here nor unpacked at every import: of the layouts that buildah writes only this one
    # leaves the layers as they are.
    pushed, finished = scratch / "layout", scratch / "finished.tar"
    _run([*buildah, "push", "--quiet", "--disable-compression", name(recipe), f"dir:{pushed}"], scratch)
    oci.write_from_directory(finished, name=name(recipe), directory=pushed)
    return finished


def _run(command: Sequence[str], scratch: Path) -> None:
    env = {**os.environ, "SOURCE_DATE_EPOCH": "0", "TMPDIR": str(scratch)}
    ran = subprocess.run(
        [*DYING_WITH_PARENT, *_ALONE, *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if ran.returncode:
        raise BuildFailed(f"{shlex.join(command)}: {ran.stdout[-2000:]}")
