"""Replaces pods whose model could not be loaded where they are, but may be elsewhere.

A pod cannot be moved: it is evicted, its controller makes another, and that one keeps away from the node
(`load_failures`). A pod whose model files are gone from its node is evicted as well, because its loader
does not run again; its successor may go anywhere. Where this makes no sense, the pod's condition says why
the model is not loaded: the pod is pinned, nobody would replace it, the model itself is at fault, or
enough was tried. While no other node has room for a failed one it stays, too, and is looked at again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, is_deleting, is_model_pod, node_of, pod_ref
from berth.contract.report import Failure, ModelReport, ModelState
from berth.kube import paths
from berth.kube.errors import KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.kube.times import rfc3339, utc_now
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from binder.cache.view import NodeView
from binder.loop.evict import evict
from binder.loop.fenced import FencedClient
from binder.loop.pod_status import patch_status
from binder.pod.demand import Demand, parse_demand
from binder.rules.load_failures import CURABLE, EXCLUDED_SECONDS, LoadFailures, model_key

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]
_IN_TROUBLE = (ModelState.FAILED, ModelState.LOST)
# For room on another node.
LOOK_AGAIN_SECONDS = 60.0


@dataclass(slots=True)
class _Failed:
    """A model that a node's report calls failed or lost. `told`: what its pod's condition says of it."""

    node: NodeName
    model: ModelReport
    told: str = ""
    is_settled: bool = False


class Replacer:
    """`look_at` takes what the reports tell, on a standby too; only `run` acts on it.

    `fits_elsewhere`: whether some other node would take the pod now.
    """

    def __init__(
        self,
        client: FencedClient,
        keys: Keys,
        scheduler_name: str,
        failures: LoadFailures,
        events: EventRecorder,
        fits_elsewhere: Callable[[Demand, NodeName], bool] = lambda *_: True,
    ) -> None:
        self._client, self._keys, self._name = client, keys, scheduler_name
        self._failures, self._events, self._fits_elsewhere = failures, events, fits_elsewhere
        # No more than the last reports name.
        self._failed: dict[NodeName, dict[PodUid, _Failed]] = {}
        # Whose condition is to be taken back, for the model is loaded after all.
        self._loaded: dict[PodUid, PodRef] = {}
        self._wake = asyncio.Event()

    def look_at(self, view: NodeView) -> None:
        """Take note of the loads that the node's report calls failed."""
        node, report = view.facts.name, view.facts.report
        models = () if report is None else report.models
        before = self._failed.pop(node, {})
        # A report that had no room for a pod's name tells it another time.
        troubled = (m for m in models if m.state in _IN_TROUBLE and m.pod_name)
        now = {m.pod_uid: _known(before, node, m) for m in troubled}
        if now:
            self._failed[node] = now
        ready = {m.pod_uid: m for m in models if m.state is ModelState.READY and m.pod_name}
        for uid in before.keys() & ready.keys():
            if before[uid].told:
                self._loaded[uid] = PodRef(ready[uid].namespace, ready[uid].pod_name, uid)
        if self._loaded or any(failed is not before.get(uid) for uid, failed in now.items()):
            self._wake.set()

    def forget(self, node: NodeName) -> None:
        """The node is gone."""
        self._failed.pop(node, None)

    def see_going(self, pod: JsonObject) -> None:
        """A pod ends. If its load had failed, whoever leads has replaced it: the next leader must know, too,
        where its successor is not to go."""
        node, ref = node_of(pod), pod_ref(pod)
        failed = None if node is None else self._failed.get(node, {}).get(ref.uid)
        if node is None or failed is None or failed.model.state is not ModelState.FAILED:
            return
        with suppress(InvalidPod):
            self._why_not(parse_demand(pod, self._keys), failed.model, node)

    async def run(self) -> None:
        """Deal with them one by one, for ever."""
        backoff = Backoff(initial_seconds=0.5, cap_seconds=30.0)
        while True:
            self._wake.clear()
            for failed in [one for of_node in self._failed.values() for one in of_node.values()]:
                if failed.is_settled:
                    continue
                try:
                    failed.is_settled = await self._settle(failed)
                except KubeError as error:
                    name = failed.model.model_name
                    log.warning("failed load not dealt with", extra=fields(model=name, error=error))
                    self._wake.set()
                    await asyncio.sleep(backoff.next())
                except Exception as error:  # what breaks over one pod must not stop the others
                    log.error("failed load broke", extra=fields(pod=failed.model.pod_name), exc_info=error)
                    failed.is_settled = True
                else:
                    backoff.reset()
            await self._tell_loaded()
            await wait_until_set(self._wake, timeout_seconds=LOOK_AGAIN_SECONDS)

    async def _settle(self, failed: _Failed) -> bool:
        """False where it must be looked at again."""
        node, model = failed.node, failed.model
        found = await pod_of_row(self._client, self._keys, model, node)
        if found is None:
            return True
        pod, demand = found
        ref = demand.model.ref
        if model.state is ModelState.LOST:
            return await self._restage(failed, ref, pod, demand)
        if pod["spec"].get("schedulerName") != self._name:
            return True
        if why_not := self._why_not(demand, model, node):
            await self._tell_failed(failed, pod, why_not)
            return True
        if not self._fits_elsewhere(demand, node):
            await self._tell_failed(failed, pod, "no other node has room for it now")
            return False
        await self._replace(ref, node, model)
        return True

    async def _restage(self, failed: _Failed, ref: PodRef, pod: JsonObject, demand: Demand) -> bool:
        """Files that are gone are staged by a new pod's loader only; any node will do, this one as well."""
        if not _is_initialized(pod):
            return False  # its own loader is still at it
        if demand.owner is None:
            await self._tell_failed(failed, pod, "nothing would replace the pod")
            return True
        await evict(self._client, ref)
        reason = failed.model.reason
        self._events.record(ref, "Warning", "ModelLost", f"{reason}; replaced")
        log.info("replaced a pod whose model is lost", extra=fields(pod=ref, reason=reason))
        return True

    def _why_not(self, demand: Demand, model: ModelReport, node: NodeName) -> str:
        """Why the pod is left where it is; "" where another node is worth a try."""
        if model.failure is Failure.QUARANTINED:
            return (
                "no node takes these files while they are quarantined here, nor any pod of this template; to lift"
                f" it: kubectl annotate node {node} {self._keys.lift_quarantine}=all"
            )
        if model.failure not in CURABLE:
            return "the model would fail on every node"
        if demand.shape.server is not None:
            return f"the pod is pinned to server {demand.shape.server}"
        key = model_key(demand)
        if demand.owner is None or key is None:
            return "nothing would replace the pod"
        return (
            ""
            if self._failures.note(key, node, demand.model.ref.uid)
            else "it failed on other nodes, too; none is tried any more"
        )

    async def _replace(self, ref: PodRef, node: str, model: ModelReport) -> None:
        minutes = int(EXCLUDED_SECONDS / 60)
        message = f"{model.reason}; replaced, and node {node} is left out for {minutes} min"
        await evict(self._client, ref)
        self._events.record(ref, "Warning", "ModelLoadFailedHere", message)
        log.info("replaced a pod whose load failed", extra=fields(pod=ref, node=node, reason=model.reason))

    async def _tell_failed(self, failed: _Failed, pod: JsonObject, why_not: str) -> None:
        """Once for each message, whichever binder leads."""
        ref, message = pod_ref(pod), f"{failed.model.reason or 'the load failed'} ({why_not})"
        if message in (failed.told, self._told_before(pod)):
            failed.told = message
            return
        quarantined = failed.model.failure is Failure.QUARANTINED
        reason = "ModelQuarantined" if quarantined else "ModelLoadFailed"
        self._events.record(ref, "Warning", reason, message)
        await patch_status(self._client, ref, {"conditions": [self._condition("False", reason, message)]})
        failed.told = message

    async def _tell_loaded(self) -> None:
        """Take back what was said; once, for the report says it anyway."""
        while self._loaded:
            _, ref = self._loaded.popitem()
            try:
                await patch_status(
                    self._client, ref, {"conditions": [self._condition("True", "ModelLoaded", "")]}
                )
            except KubeError as error:
                log.info("condition not taken back", extra=fields(pod=ref, error=error))

    def _condition(self, status: str, reason: str, message: str) -> JsonObject:
        return {
            "type": self._keys.loaded_condition,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": rfc3339(utc_now()),
        }

    def _told_before(self, pod: JsonObject) -> str:
        conditions = (pod.get("status") or {}).get("conditions") or []
        found = (one for one in conditions if one.get("type") == self._keys.loaded_condition)
        return next((one.get("message") or "" for one in found if one.get("status") == "False"), "")


async def pod_of_row(
    client: FencedClient, keys: Keys, model: ModelReport, node: NodeName
) -> tuple[JsonObject, Demand] | None:
    """The pod of a row of the node's report, if it is still there, stays, and is a model pod: whatever a
    report says, no agent may have other pods evicted. Raises KubeError."""
    try:
        pod = await client.get(paths.pod(model.namespace, model.pod_name))
        demand = parse_demand(pod, keys)
    except (NotFound, InvalidPod):
        return None
    is_it = demand.model.ref.uid == model.pod_uid and node_of(pod) == node and not is_deleting(pod)
    return (pod, demand) if is_it and is_model_pod(pod, keys) else None


def _known(before: Mapping[PodUid, _Failed], node: NodeName, model: ModelReport) -> _Failed:
    """What is known of this failure, if it is the same still."""
    known = before.get(model.pod_uid)
    return known if known is not None and _what(known.model) == _what(model) else _Failed(node, model)


def _what(model: ModelReport) -> tuple[ModelState, str, Failure | None]:
    return model.state, model.reason, model.failure


def _is_initialized(pod: JsonObject) -> bool:
    """Every initContainer, the loader among them, has done its work."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one.get("type") == "Initialized" and one.get("status") == "True" for one in conditions)
