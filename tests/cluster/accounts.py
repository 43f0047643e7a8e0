"""To speak to the API server as one of Berth's ServiceAccounts, or as somebody else's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from localcluster.cluster import LocalCluster
from localcluster.credentials import write_kubeconfig

Json = dict[str, Any]


async def bound_token(
    cluster: LocalCluster, account: str, *, namespace: str = "berth-system", bound_to: Json | None = None
) -> str:
    """A token as a kubelet asks for one for a pod's volume; `bound_to` is a Pod or a Node."""
    spec: Json = {}
    if bound_to is not None:
        meta = bound_to["metadata"]
        spec = {"kind": bound_to["kind"], "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        spec = {"boundObjectRef": spec}
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    token: str = (await cluster.client.create(path, asked))["status"]["token"]
    return token


@asynccontextmanager
async def speaking_as(
    cluster: LocalCluster,
    account: str,
    directory: Path,
    *,
    namespace: str = "berth-system",
    bound_to: Json | None = None,
) -> AsyncIterator[KubeClient]:
    """A client with a token of this ServiceAccount; its kubeconfig lies in `directory`."""
    config = write_kubeconfig(
        directory / f"{namespace}-{account}",
        server=cluster.client.host,
        certificate=cluster.directory / "serving.crt",
        token=await bound_token(cluster, account, namespace=namespace, bound_to=bound_to),
    )
    async with open_client(str(config)) as client:
        yield client


@asynccontextmanager
async def agent_of(cluster: LocalCluster, node: str, directory: Path) -> AsyncIterator[KubeClient]:
    """The agent of one node: its token is bound to it."""
    found = {**await cluster.client.get(paths.node(node)), "kind": "Node"}
    async with speaking_as(cluster, "berth-agent", directory, bound_to=found) as client:
        yield client
