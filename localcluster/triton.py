"""A real Triton on one loopback address: the server that the PyPI wheel nvidia-pytriton carries."""

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from berth.triton.keys import TritonKeys
from localcluster.deployment import base_container

HTTP_PORT, GRPC_PORT = 8000, 8001
SHM_VARIABLE = "BERTH_LOCALCLUSTER_SHM_PREFIX"


class TritonMissing(Exception):
    """nvidia-pytriton is not installed, or does not carry what this interpreter needs."""


def prepare_backends(directory: Path) -> Path:
    """A backend directory with the python backend for this interpreter. Returns `directory`.

    The wheel ships one stub for each Python version beside the backends; Triton looks for it inside.
    """
    server = _server_directory()
    target = directory / "python"
    shutil.copytree(server / "backends" / "python", target, dirs_exist_ok=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise TritonMissing(f"nvidia-pytriton has no python backend stub for Python {version}")
    shutil.copy2(stub, target / stub.name)
    (target / stub.name).chmod(0o755)
    return directory


def script(backends: Path) -> str:
    """A shell script in the server's place: it adds to its arguments what only this machine needs.

    The names of its shared memory begin with $SHM_VARIABLE. What a server that was killed has left of them is
    removed first: its successor would refuse to start over it.
    """
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in _added_environment().items())
    return (
        f'rm -f "/dev/shm/${SHM_VARIABLE}"*\n'
        f'{variables} exec {shlex.quote(_program())} "$@" {shlex.quote(f"--backend-directory={backends}")} '
        f'"--backend-config=python,shm-region-prefix-name=${SHM_VARIABLE}"'
    )


def command(
    *,
    address: str,
    models: Path,
    backends: Path,
    keys: TritonKeys,
    shm_prefix: str,
    grpc_address: str | None = None,
) -> list[str]:
    """A server that is run by itself, with the flags of the DaemonSet in `deploy/base`.

    `grpc_address`: where gRPC listens, if not there; of `unix:PATH` the socket is `PATH:8001`.
    """
    (line,) = base_container("triton")["args"]
    words = line.partition("exec tritonserver")[2].split()
    # What is no flag is the shell's: the keys, out of their file.
    flags = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
    flags |= {"--model-repository": str(models), "--http-address": address}
    flags["--grpc-address"] = grpc_address or address
    return [
        _program(),
        *(f"{flag}={value}" for flag, value in flags.items()),
        f"--backend-directory={backends}",
        "--exit-timeout-secs=3",
        "--http-thread-count=2",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        *keys.server_flags(),
    ]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the libraries that the server and the python backend's stub load."""
    return {**base, **_added_environment(base)}


def _added_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    libraries = [
        str(_package_directory().parent / "nvidia_pytriton.libs"),
        str(sysconfig.get_config_var("LIBDIR") or ""),
        base.get("LD_LIBRARY_PATH", ""),
    ]
    # The stub embeds an interpreter that takes its place from the first python on PATH: this one's
    # environment, with the numpy that every python model needs.
    path = f"{Path(sys.executable).parent}:{base.get('PATH', os.defpath)}"
    return {"LD_LIBRARY_PATH": ":".join(path for path in libraries if path), "PATH": path}


def _program() -> str:
    return str(_server_directory() / "bin" / "tritonserver")


def shm_prefix(cluster_id: str) -> str:
    """How the names of a cluster's shared memory regions begin; each of its servers adds to it."""
    return f"berth-{cluster_id}-"


def remove_shared_memory(prefix: str) -> None:
    """What a server that was killed left in /dev/shm; its successor would refuse to start over it."""
    for region in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108 - the backend's own place
        region.unlink(missing_ok=True)


def _package_directory() -> Path:
    found = importlib.util.find_spec("pytriton")
    if found is None or not found.submodule_search_locations:
        raise TritonMissing("nvidia-pytriton is not installed: pip install berth[local]")
    return Path(os.fspath(found.submodule_search_locations[0]))


def _server_directory() -> Path:
    return _package_directory() / "tritonserver"
