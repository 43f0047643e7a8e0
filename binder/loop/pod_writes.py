"""Writes about one pod: to its status, and its eviction through the API that honours PodDisruptionBudgets.

The uid is a precondition of each: a successor of the same name is another pod.
"""

from collections.abc import Mapping
from typing import Any

from berth.contract.pod import PodRef
from berth.kube import paths
from berth.kube.client import STRATEGIC_PATCH
from berth.kube.errors import NotFound
from binder.loop.fenced import PodClient


async def patch_status(client: PodClient, ref: PodRef, status: Mapping[str, Any]) -> None:
    """Merge into the pod's status; conditions by their type. Raises KubeError."""
    body = {"metadata": {"uid": ref.uid}, "status": status}
    path = f"{paths.pod(ref.namespace, ref.name)}/status"
    await client.patch(path, body, content_type=STRATEGIC_PATCH)


async def set_nominated_node(client: PodClient, ref: PodRef, node: str) -> None:
    """Write into the pod's status for which node it waits; "" for none. Raises KubeError."""
    await patch_status(client, ref, {"nominatedNodeName": node or None})


async def evict(client: PodClient, ref: PodRef, *, dry_run: bool = False) -> None:
    """Evict the pod, or ask whether that would be granted. Raises KubeError: 429 where a budget does not
    allow it now, 500 where two budgets count the pod."""
    options: dict[str, Any] = {"preconditions": {"uid": ref.uid}}
    if dry_run:
        options["dryRun"] = ["All"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": ref.name, "namespace": ref.namespace},
        "deleteOptions": options,
    }
    try:
        await client.create(f"{paths.pod(ref.namespace, ref.name)}/eviction", body)
    except NotFound:  # gone already
        return
