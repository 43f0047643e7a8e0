"""What the ServiceAccounts of `deploy/base` may not do. What they may is shown by every other test:
agents and binders run under them and nothing else."""

import pytest

from berth.kube.client import open_client
from berth.kube.errors import Denied
from localcluster.cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": []}}
FORBIDDEN = {
    "gpu-1": [
        ("get", "/api/v1/secrets"),
        ("get", "/api/v1/namespaces/berth-system/configmaps"),
        ("get", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"),
        ("create", "/api/v1/namespaces/default/pods"),
        ("delete", "/api/v1/nodes/gpu-2"),
        ("delete", "/api/v1/namespaces/default/pods/x"),
        ("create", "/api/v1/namespaces/default/pods/x/binding"),
        ("patch", "/api/v1/namespaces/default/pods/x"),
        ("patch", "/api/v1/nodes/gpu-1/status"),
    ],
    "binder-0": [
        ("get", "/api/v1/secrets"),
        ("get", "/api/v1/namespaces/berth-system/configmaps"),
        ("get", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"),
        ("create", "/api/v1/namespaces/default/pods"),
        ("delete", "/api/v1/namespaces/default/pods/x"),
        ("patch", "/api/v1/namespaces/default/pods/x"),
        ("patch", "/api/v1/nodes/gpu-1"),
        ("create", "/apis/authentication.k8s.io/v1/tokenreviews"),
    ],
}


@pytest.mark.parametrize(
    ("account", "verb", "path"), [(account, *call) for account, calls in FORBIDDEN.items() for call in calls]
)
async def test_what_is_not_needed_is_not_allowed(
    cluster: LocalCluster, account: str, verb: str, path: str
) -> None:
    async with open_client(str(cluster.directory / f"{account}.kubeconfig")) as client:
        call = {
            "get": lambda: client.get(path),
            "create": lambda: client.create(path, POD),
            "patch": lambda: client.patch(path, {"metadata": {"labels": {"x": "y"}}}),
            "delete": lambda: client.delete(path),
        }[verb]
        with pytest.raises(Denied, match="403 Forbidden"):
            await call()
