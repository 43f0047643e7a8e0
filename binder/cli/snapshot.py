"""The cluster as `berth top`, `why` and `would-fit` see it: every collection, listed once."""

from berth.contract.keys import Keys
from berth.kube.client import KubeClient
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import Cluster


async def read_cluster(client: KubeClient, keys: Keys, namespace: str) -> Cluster:
    """Raises KubeError."""
    cluster = Cluster(keys)
    for source in cluster.sources(namespace):
        for item in (await client.get(source.path)).get("items") or ():
            source.hear(Change(ChangeKind.SET, item))
    return cluster
