"""What tests on a real node need and a fresh machine lacks: Debian's packages, kubelet, kube-proxy, the images.

`python -m localcluster.node.prepare`. A machine that cannot run a node is told so and goes on without; in CI it
fails. Minutes at first, a second when everything is there.
"""

import asyncio
import os
import shutil
import subprocess
import sys

from localcluster import images
from localcluster.binaries import node_directory
from localcluster.building import BuildFailed
from localcluster.node import probe


def prepare() -> None:
    """Exits with the reason where that is an error."""
    install(probe.missing_packages())
    reason = probe.lacking()
    if reason is not None:
        sentence = f"no tests on a real node: {reason}"
        if os.environ.get("CI") == "true":
            sys.exit(sentence)
        print(sentence, file=sys.stderr)
        return
    try:
        node_directory()
        asyncio.run(images.images())
    except BuildFailed as error:
        sys.exit(f"localcluster.node.prepare: {error}")


def install(packages: list[str]) -> None:
    """Where it may; where it may not, the probe says what is missing."""
    if not packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    print(f"installing what a real node needs: {' '.join(packages)}", file=sys.stderr)
    # Never at the price of another package, such as a Docker that brings a containerd of its own.
    command = ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", "--no-remove", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=False)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    prepare()
