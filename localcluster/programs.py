"""The programs that stand in for the images of `deploy/`: this interpreter's Berth and pytriton's server.

They add what only this machine needs, and no flag that `deploy/` could have.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from localcluster import triton
from localcluster.kubelet.images import Image, Images

_PYTHON = f'exec "{sys.executable}" -m'
# Changing an owner takes root; without root, every process is the same user and it changes nothing.
_NO_CHOWN = 'echo "chown $*: left out, because this kubelet is not root" >&2'


def make_images(directory: Path, *, cluster_id: str) -> Images:
    """Write the programs below `directory`. Raises triton.TritonMissing."""
    backends = triton.prepare_backends(directory / "backends")
    berth = {"berth": f'{_PYTHON} localcluster.in_pod "$@"'}
    if os.geteuid() != 0:
        berth["chown"] = _NO_CHOWN
    server = {"tritonserver": triton.script(backends)}
    if shutil.which("curl") is None:
        server["curl"] = f'{_PYTHON} localcluster.curl "$@"'
    return Images(
        {
            "berth": Image(
                entrypoint=("berth",),
                programs=_programs(directory / "berth", berth),
                # What this server can do, which is less than NVIDIA's image can.
                environment={"BERTH_AGENT_BACKEND_DIRECTORY": str(backends)},
            ),
            "tritonserver": Image(
                programs=_programs(directory / "tritonserver", server),
                environment={triton.SHM_VARIABLE: f"{triton.shm_prefix(cluster_id)}$(POD_IP)-"},
            ),
        }
    )


def _programs(directory: Path, scripts: Mapping[str, str]) -> Path:
    directory.mkdir(parents=True)
    for name, script in scripts.items():
        path = directory / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return directory
