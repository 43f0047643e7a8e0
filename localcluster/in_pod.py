"""`berth` as a container's program: the ServiceAccount is where the process kubelet has put it, addresses are this
machine's.

A client in a pod reads its token at a path that is built in, and the process kubelet has no mounts. What the API
server tells as 10.X.a.b, in EndpointSlices and of Services, is 127.X.a.b (`services.here`), which is what a pod
knows of itself. So much is this machine's; the token itself, its renewal and all that reads it are as in any pod.
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


def _use_addresses(api_server: str) -> None:
    """Read the cluster's addresses as they are here. Its API server is on 127.X.0.1."""
    from berth.kube import client

    here = api_server.rpartition(".")[0].rpartition(".")[0]
    shown = f'"10.{here.partition(".")[2]}.'.encode()
    parsed = client._parsed
    client._parsed = lambda data: parsed(data.replace(shown, f'"{here}.'.encode()))


if __name__ == "__main__":
    if given := os.environ.pop(SERVICE_ACCOUNT_VARIABLE, None):
        _use_service_account(Path(given))
        _use_addresses(os.environ["KUBERNETES_SERVICE_HOST"])
    sys.exit(main())
