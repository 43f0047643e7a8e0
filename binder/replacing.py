"""Replaces pods whose model could not be loaded where they are, but may be elsewhere.

A pod cannot be moved: it is evicted, its controller makes another, and that one keeps away from the node
(`load_failures`). A pod whose model files are gone from its node is evicted as well, because its loader
does not run again; its successor may go anywhere. Where this makes no sense, the pod's condition says why
the model is not loaded: the pod is pinned, nobody would replace it, the model itself is at fault, or
enough was tried.
"""

import asyncio
import logging
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, is_deleting, node_of
from berth.contract.report import ModelReport, ModelState
from berth.kube import paths
from berth.kube.client import KubeClient
from berth.kube.errors import KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.kube.times import rfc3339, utc_now
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from binder.demand import Demand, parse_demand
from binder.evictions import evict
from binder.load_failures import CURABLE, EXCLUDED_SECONDS, LoadFailures, model_key
from binder.pod_status import patch_status
from binder.view import NodeView

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]
_QUEUE_LIMIT = 1000
_IN_TROUBLE = (ModelState.FAILED, ModelState.LOST)


class Replacer:
    """`look_at` takes what the reports tell, on a standby too; only `run` acts on it."""

    def __init__(
        self,
        client: KubeClient,
        keys: Keys,
        scheduler_name: str,
        failures: LoadFailures,
        events: EventRecorder,
    ) -> None:
        self._client, self._keys, self._name = client, keys, scheduler_name
        self._failures, self._events = failures, events
        # Failed loads that have not been dealt with, by pod, and those that have.
        self._failed: dict[PodUid, tuple[NodeName, ModelReport]] = {}
        self._settled: dict[NodeName, dict[PodUid, str]] = {}
        self._wake = asyncio.Event()

    def look_at(self, view: NodeView) -> None:
        """Take note of the loads that the node's report calls failed."""
        node, report = view.facts.name, view.facts.report
        models = {} if report is None else {m.pod_uid: m for m in report.models}
        failed = {uid: m for uid, m in models.items() if m.state in _IN_TROUBLE}
        for uid in models.keys() - failed.keys():
            self._failed.pop(uid, None)
        before = self._settled.pop(node, {})
        if settled := {uid: reason for uid, reason in before.items() if uid in failed}:
            self._settled[node] = settled
        for uid, model in failed.items():
            if settled.get(uid) != model.reason and len(self._failed) < _QUEUE_LIMIT:
                self._failed[uid] = (node, model)
                self._wake.set()

    async def run(self) -> None:
        """Deal with them one by one, for ever."""
        backoff = Backoff(initial_seconds=0.5, cap_seconds=30.0)
        while True:
            await self._wake.wait()
            self._wake.clear()
            for uid, (node, model) in list(self._failed.items()):
                try:
                    await self._settle(node, model)
                except KubeError as error:
                    log.warning(
                        "failed load not dealt with", extra=fields(model=model.model_name, error=error)
                    )
                    self._wake.set()
                    await asyncio.sleep(backoff.next())
                else:
                    backoff.reset()
                    self._failed.pop(uid, None)
                    self._settled.setdefault(node, {})[uid] = model.reason

    async def _settle(self, node: NodeName, model: ModelReport) -> None:
        try:
            pod = await self._client.get(paths.pod(model.namespace, model.pod_name))
            demand = parse_demand(pod, self._keys)
        except (NotFound, InvalidPod):
            return
        ref = demand.model.ref
        if ref.uid != model.pod_uid or node_of(pod) != node or is_deleting(pod):
            return
        if model.state is ModelState.LOST:
            await self._restage(ref, pod, demand, model)
            return
        if pod["spec"].get("schedulerName") != self._name:
            return
        if why_not := self._why_not(demand, model, node):
            await self._tell_failed(ref, f"{model.reason or 'the load failed'} ({why_not})")
        else:
            await self._replace(ref, node, model)

    async def _restage(self, ref: PodRef, pod: JsonObject, demand: Demand, model: ModelReport) -> None:
        """Files that are gone are staged by a new pod's loader only; any node will do, this one as well."""
        if not _is_initialized(pod):
            return  # its own loader is still at it
        if demand.owner is None:
            await self._tell_failed(ref, f"{model.reason} (nothing would replace the pod)")
            return
        self._events.record(ref, "Warning", "ModelLost", f"{model.reason}; replaced")
        log.info("replacing a pod whose model is lost", extra=fields(pod=ref, reason=model.reason))
        await evict(self._client, ref)

    def _why_not(self, demand: Demand, model: ModelReport, node: NodeName) -> str:
        """Why the pod is left where it is; "" where another node is worth a try."""
        if model.failure not in CURABLE:
            return "the model would fail on every node"
        if demand.shape.server is not None:
            return f"the pod is pinned to server {demand.shape.server}"
        key = model_key(demand)
        if demand.owner is None or key is None:
            return "nothing would replace the pod"
        return (
            "" if self._failures.note(key, node) else "it failed on other nodes, too; none is tried any more"
        )

    async def _replace(self, ref: PodRef, node: str, model: ModelReport) -> None:
        minutes = int(EXCLUDED_SECONDS / 60)
        message = f"{model.reason}; replaced, and node {node} is left out for {minutes} min"
        self._events.record(ref, "Warning", "ModelLoadFailedHere", message)
        log.info("replacing a pod whose load failed", extra=fields(pod=ref, node=node, reason=model.reason))
        await evict(self._client, ref)

    async def _tell_failed(self, ref: PodRef, message: str) -> None:
        self._events.record(ref, "Warning", "ModelLoadFailed", message)
        condition = {
            "type": self._keys.loaded_condition,
            "status": "False",
            "reason": "ModelLoadFailed",
            "message": message,
            "lastTransitionTime": rfc3339(utc_now()),
        }
        await patch_status(self._client, ref, {"conditions": [condition]})


def _is_initialized(pod: JsonObject) -> bool:
    """Every initContainer, the loader among them, has done its work."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one.get("type") == "Initialized" and one.get("status") == "True" for one in conditions)
