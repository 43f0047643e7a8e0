"""What tests on a real node need and a fresh machine lacks: Debian's packages, kubelet, kube-proxy, the images.

`python -m localcluster.node.prepare`. On a machine that cannot run a node it says so and goes on without; in CI it
fails. Minutes at first, a second when everything is there.
"""

import asyncio
import os
import sys

from localcluster import images
from localcluster.binaries import node_directory
from localcluster.building import BuildFailed
from localcluster.debian import install
from localcluster.node import probe


def prepare() -> None:
    """Exits with the reason where that is an error."""
    install({*probe.missing_packages(), *images.missing_packages()})
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


if __name__ == "__main__":
    prepare()
