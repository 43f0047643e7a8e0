"""What each image is made of, as values: the files of its build's context, and a key over all of it."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from localcluster.building import BuildFailed

ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent
# The packages of Debian that make its plain system into what `python:…-slim` is, and what that leaves out.
# (usr-is-merged in place of usrmerge, which installs all of Perl.)
_PACKAGES = ("ca-certificates", "python3", "python3-venv", "usr-is-merged")
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
_MMDEBSTRAP = (
    "--variant=minbase",
    "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
    f"--include={','.join(_PACKAGES)}",
    '--aptopt=APT::Install-Recommends "false"',
    *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
    '--customize-hook=ln -s python3 "$1/usr/bin/python"',
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one image is made. Two recipes with the same key make the same image."""

    name: str
    files: Mapping[str, bytes]
    """The context of its build, by path. Modes and times are the same for all."""
    reference: str = ""
    """The name that another image's Dockerfile calls it by; empty: only its own."""
    base: str = ""
    """The key of the image that it stands on; empty: none."""

    @property
    def key(self) -> str:
        digest = hashlib.sha256(f"{self.name} {self.reference} {self.base}".encode())
        for how in ("build.py", "oci.py"):
            digest.update((_HERE / how).read_bytes())
        for path, content in sorted(self.files.items()):
            digest.update(f"\0{path} {len(content)}\0".encode() + content)
        return digest.hexdigest()[:16]


def pause() -> Recipe:
    return Recipe(name="pause", files={"pause.c": (_HERE / "pause.c").read_bytes()})


def base() -> Recipe:
    """Debian with its Python, in place of the image that the Dockerfile stands on; `mmdebstrap` are its arguments."""
    reference = _base_reference(_dockerfile())
    suite = reference.rpartition("-")[2]
    return Recipe(
        name="base",
        files={"mmdebstrap": "\n".join([*_MMDEBSTRAP, suite]).encode()},
        reference=f"docker.io/library/{reference}",
    )


def berth(base: Recipe) -> Recipe:
    """The repository's own Dockerfile, with everything that .dockerignore lets into its context."""
    files = {path: (ROOT / path).read_bytes() for path in sorted(_context_paths())}
    return Recipe(name="berth", files=files, base=base.key)


def tritonserver(base: Recipe) -> Recipe:
    """Triton with the versions that development has, the numpy of its python models among them."""
    locked = (ROOT / "requirements" / "dev.txt").read_text()
    files = {
        "Dockerfile": (_HERE / "tritonserver.Dockerfile").read_bytes(),
        "requirements.txt": "".join(_pin(locked, name) for name in ("numpy", "nvidia-pytriton")).encode(),
    }
    return Recipe(name="tritonserver", files=files, base=base.key)


def _dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text()


def _base_reference(dockerfile: str) -> str:
    """The one image that every stage of a Dockerfile stands on."""
    references = set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE))
    if len(references) != 1 or not re.fullmatch(r"python:3\.\d+-slim-[a-z]+", next(iter(references))):
        raise BuildFailed(
            "Dockerfile: every stage must stand on the same python:3.N-slim-SUITE, for which Debian's SUITE is "
            f"put here; found {', '.join(sorted(references)) or 'none'}"
        )
    return str(references.pop())


def _context_paths() -> Iterator[str]:
    """The Dockerfile, .dockerignore, and every file under a path that .dockerignore takes out of its `*`."""
    yield from ("Dockerfile", ".dockerignore")
    for allowed in re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE):
        found = ROOT / allowed
        for path in [found] if found.is_file() else found.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(ROOT))


def _pin(locked: str, name: str) -> str:
    """A package's entry in a file of pinned requirements, its hashes included."""
    found = re.search(rf"^{name}==(?:.*\\\n)+.*\n", locked, re.MULTILINE)
    if found is None:
        raise BuildFailed(f"requirements/dev.txt does not pin {name}")
    return found.group()
