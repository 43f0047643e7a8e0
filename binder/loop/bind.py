"""The Binding: one write that gives a pod its node and its GPU, and how it really went."""

import asyncio
import logging
from typing import Any

from berth.contract.keys import Keys
from berth.contract.pod import PodRef
from berth.kube import paths
from berth.kube.errors import KubeError, NotFound
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from binder.engine.decision import Placement
from binder.loop.fenced import NotLeading, PodClient

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]


async def post_binding(client: PodClient, keys: Keys, ref: PodRef, placement: Placement) -> None:
    """Bind the pod. Raises KubeError; whether it took effect is then for `may_have_happened` to say.

    The uid is a precondition, and the annotations are merged into the pod in the same write.
    """
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": ref.name,
            "namespace": ref.namespace,
            "uid": ref.uid,
            "annotations": {keys.gpu: placement.gpu.encode()},
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": placement.node},
    }
    await client.create(f"{paths.pod(ref.namespace, ref.name)}/binding", body)


def is_answer(error: KubeError) -> bool:
    """Silence, a server that fails and one that is too busy do not say what becomes of the Binding."""
    return error.status is not None and error.status < 500 and error.status not in (408, 429)


def may_have_happened(error: KubeError) -> bool:
    """A refusal is certain, and so is what was not sent; silence and the server's own failure leave it open."""
    return not isinstance(error, NotLeading) and (error.status is None or error.status >= 500)


async def current_pod(client: PodClient, ref: PodRef) -> JsonObject | None:
    """The pod as it is now, None if it is gone. Asks until there is an answer."""
    backoff = Backoff(initial_seconds=0.2, cap_seconds=15.0)
    while True:
        try:
            pod = await client.get(paths.pod(ref.namespace, ref.name))
        except NotFound:
            return None
        except KubeError as error:
            log.warning("binding unknown", extra=fields(pod=ref, error=error))
            await asyncio.sleep(backoff.next())
            continue
        return pod if pod["metadata"]["uid"] == ref.uid else None
