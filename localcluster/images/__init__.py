"""The images that a real node runs, as OCI archives: pause, Berth's own and Triton's. For tests only.

Nothing is pulled: there is no registry. Each archive is built once and cached by what it is made of in
`images` below the cache directory; a change in Berth's sources builds Berth's image anew, no other. Usable as

    python -m localcluster.images       # builds what is missing, prints names and archives

and from code:

    lacking = images.lacking()          # why this machine cannot build them, None if it can
    built = await images.images()       # minutes at first, milliseconds when they are there
    built.berth.name                    # localhost/berth:1f0c…: what a pod's `image:` says
    built.berth.archive                 # for `ctr -n k8s.io images import`: it comes in under that name

The name holds the hash of what the image is made of, so `imagePullPolicy: IfNotPresent` runs the right one.
The archive of an image that has not been used for an hour may go once there are newer ones: import it soon.
"""

import asyncio
import os
import shutil
from dataclasses import dataclass

from localcluster.images import build, recipes
from localcluster.images.build import Image

__all__ = ["Image", "Images", "images", "lacking", "missing_packages"]

# Program -> Debian's packages that it takes.
_PROGRAMS = {
    "buildah": ["buildah"],
    "mmdebstrap": ["mmdebstrap"],
    "gcc": ["gcc", "libc6-dev"],
    "unshare": ["util-linux"],
}


@dataclass(frozen=True, kw_only=True)
class Images:
    pause: Image
    berth: Image
    tritonserver: Image


def lacking() -> str | None:
    """Why images cannot be built on this machine, None if they can."""
    if not (recipes.ROOT / "Dockerfile").is_file():
        return f"images are built from a checkout of the repository, and {recipes.ROOT} is none"
    if os.geteuid() != 0:
        return "images are built by root only"
    missing = missing_packages()
    return f"not installed: {' '.join(missing)}" if missing else None


def missing_packages() -> list[str]:
    """Debian's packages of programs that are not here."""
    return [name for program, names in _PROGRAMS.items() if shutil.which(program) is None for name in names]


async def images() -> Images:
    """Every image, built if need be. Raises BuildFailed."""
    return await asyncio.to_thread(_images)


def _images() -> Images:
    base = recipes.base()
    pause, berth, tritonserver = build.all_of(
        [recipes.pause(), recipes.berth(base), recipes.tritonserver(base)], base=base
    )
    return Images(pause=pause, berth=berth, tritonserver=tritonserver)
