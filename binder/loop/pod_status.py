"""Writes to a pod's status."""

from collections.abc import Mapping
from typing import Any

from berth.contract.pod import PodRef
from berth.kube import paths
from berth.kube.client import STRATEGIC_PATCH
from binder.loop.fenced import PodClient


async def patch_status(client: PodClient, ref: PodRef, status: Mapping[str, Any]) -> None:
    """Merge into the pod's status; conditions by their type. Raises KubeError.

    The uid is a precondition: a successor of the same name is somebody else.
    """
    body = {"metadata": {"uid": ref.uid}, "status": status}
    path = f"{paths.pod(ref.namespace, ref.name)}/status"
    await client.patch(path, body, content_type=STRATEGIC_PATCH)
