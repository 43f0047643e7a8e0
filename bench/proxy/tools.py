"""Client programs that no package of Python holds: installed, or built once and cached.

`python -m bench.proxy.tools` does so for those that tests want: minutes at first, a second when all are there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.builds import go_build, kept, key_of
from localcluster.building import BuildFailed, say
from localcluster.debian import install

_MODULE: Final = Path(__file__).parent / "goclient"
_H2SPEC: Final = "github.com/summerwind/h2spec/cmd/h2spec"
# The last whose perf_analyzer runs with the C library of Debian 12; its libraries are those of nvidia-pytriton.
_TRITON_CLIENT: Final = "tritonclient==2.51.0"
_LIBRARIES: Final = ("libb64.so.0d", "libcudart.so.12")


def go_client() -> Path:
    """A client by grpc-go, connect-go or x/net's HTTP/2: goclient/main.go. Raises BuildFailed."""
    return kept("goclient", _key("go.mod", "go.sum", "main.go"), lambda to: go_build(".", to, _MODULE))


def h2spec() -> Path:
    """Raises BuildFailed."""
    return kept("h2spec", _key("go.mod", "go.sum"), lambda to: go_build(_H2SPEC, to, _MODULE))


def perf_analyzer() -> tuple[Path, dict[str, str]]:
    """Triton's own load generator, and the environment that it wants. Raises BuildFailed."""
    made_of = " ".join((_TRITON_CLIENT, *_LIBRARIES))
    home = kept("perf_analyzer", hashlib.sha256(made_of.encode()).hexdigest()[:16], _install_perf)
    return home / "perf_analyzer", {**os.environ, "LD_LIBRARY_PATH": str(home)}


def curl() -> str:
    """Raises BuildFailed."""
    return _of_debian("curl", "curl")


def h2load() -> str:
    """Raises BuildFailed."""
    return _of_debian("h2load", "nghttp2-client")


def _of_debian(program: str, package: str) -> str:
    if shutil.which(program) is None:
        install([package])
    found = shutil.which(program)
    if found is None:
        raise BuildFailed(f"{program} is not here: install {package}")
    return found


def _key(*names: str) -> str:
    return key_of(*(_MODULE / name for name in names))


def _install_perf(target: Path) -> None:
    target.mkdir()
    wheel = (
        "--only-binary=:all:",
        "--platform=manylinux1_x86_64",
        "--no-deps",
        f"--target={target / 'wheel'}",
    )
    command = [sys.executable, "-m", "pip", "install", "--quiet", *wheel, _TRITON_CLIENT]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        raise BuildFailed(f"pip cannot install {_TRITON_CLIENT}: {installed.stderr[-1000:]}")
    shutil.move(target / "wheel" / "bin" / "perf_analyzer", target)
    (target / "perf_analyzer").chmod(0o755)
    shutil.rmtree(target / "wheel")
    for library in _LIBRARIES:
        shutil.copy(_of_pytriton(library), target / library)  # this environment may go before the cache does


def _of_pytriton(library: str) -> Path:
    """The wheel has put a digest into its name."""
    stem, _, version = library.partition(".so")
    for directory in map(Path, sys.path):
        for found in directory.glob(f"nvidia_pytriton.libs/{stem}-*.so{version}*"):
            return found
    raise BuildFailed(f"nvidia-pytriton does not bring {library}")


if __name__ == "__main__":
    for tool in (curl, h2load, perf_analyzer, h2spec, go_client):
        try:
            tool()
        except BuildFailed as error:  # only what needs it fails
            say(f"bench.proxy.tools: {error}")
