"""Ends pods so that others can have their place, through the API that honours PodDisruptionBudgets."""

from typing import Any

from berth.contract.pod import PodRef
from berth.kube import paths
from berth.kube.errors import NotFound
from binder.loop.fenced import PodClient
from binder.loop.pod_status import patch_status


async def evict(client: PodClient, ref: PodRef, *, rehearse: bool = False) -> None:
    """Ask for the pod's end, or whether it would be granted. Raises KubeError: 429 where a budget does not
    allow it now, 500 where two budgets count the pod."""
    options: dict[str, Any] = {"preconditions": {"uid": ref.uid}}
    if rehearse:
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


async def set_nominated_node(client: PodClient, ref: PodRef, node: str) -> None:
    """Say in the pod's status for which node it waits; "" for none. Raises KubeError."""
    await patch_status(client, ref, {"nominatedNodeName": node or None})
