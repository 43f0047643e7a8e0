"""`berth` as a container's program: the ServiceAccount is where the process kubelet has put it.

A client in a pod reads its token at a path that is built in, and the process kubelet has no mounts. So much
is this machine's; the token itself, its renewal and all that reads it are as in any pod.
"""

import os
import sys
from pathlib import Path

from berth.cli import main

SERVICE_ACCOUNT_VARIABLE = "BERTH_LOCALCLUSTER_SERVICE_ACCOUNT"
"""The directory in place of `/var/run/secrets/kubernetes.io/serviceaccount`, if the container mounts that."""


def _use_service_account(directory: Path) -> None:
    from kubernetes.aio.config import incluster_config  # most containers need none of it

    incluster_config.SERVICE_TOKEN_FILENAME = str(directory / "token")
    incluster_config.SERVICE_CERT_FILENAME = str(directory / "ca.crt")


if __name__ == "__main__":
    if given := os.environ.pop(SERVICE_ACCOUNT_VARIABLE, None):
        _use_service_account(Path(given))
    sys.exit(main())
