"""The cluster as `berth top` and `berth why` see it: three lists, read once."""

import time
from collections.abc import Callable
from typing import Any

from berth.contract.keys import Keys, agent_lease_name
from berth.kube import paths
from berth.kube.client import KubeClient
from berth.kube.lease import Freshness
from berth.kube.times import utc_now
from binder.state import ClusterState


async def read_cluster(
    client: KubeClient, keys: Keys, namespace: str
) -> tuple[ClusterState, Callable[[str], bool]]:
    """The state, and which nodes' heartbeats are alive. Raises KubeError."""
    state, fresh, now = ClusterState(keys, clock=time.monotonic), Freshness(), time.monotonic()
    for lease in await _items(client, paths.leases(namespace)):
        fresh.observe(lease, monotonic=now, wall=utc_now())
    for node in await _items(client, paths.NODES):
        state.set_node(node)
    for pod in await _items(client, paths.PODS):
        state.set_pod(pod)
    return state, lambda node: fresh.is_fresh(agent_lease_name(node), monotonic=now)


async def _items(client: KubeClient, path: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await client.get(path)).get("items") or []
    return items
