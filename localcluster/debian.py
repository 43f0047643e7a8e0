"""Debian's packages, for programs that neither pip nor Go installs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

from localcluster.building import locked
from localcluster.paths import cache_directory


def install(packages: Iterable[str]) -> None:
    """Where it may; where it may not, a program that needs them reports that they are missing."""
    packages = sorted(packages)
    if not packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    print(f"installing Debian's packages {' '.join(packages)}", file=sys.stderr, flush=True)
    # Never at the price of another package, such as a Docker with a containerd of its own.
    command = ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", "--no-remove", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with locked(cache_directory() / "apt.lock"):
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
