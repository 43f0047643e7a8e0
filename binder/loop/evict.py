"""Replaces bound pods whose model is not served where they are and may be served elsewhere: the eviction controller.

It evicts, through the API that honours PodDisruptionBudgets, and the pod's controller creates another. Three causes: a load
that failed and may succeed on another node, files that are gone from the node, and a GPU that has been broken for a while.
`verdict` says whether a pod is replaced; here is when, at what rate, and what is reported to its owner.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from berth.contract.errors import InvalidPod
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, is_deleting, is_model_pod, node_of, pod_ref
from berth.contract.report import Failure, ModelReport, ModelState
from berth.kube import paths
from berth.kube.client import JsonObject
from berth.kube.errors import KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.kube.times import rfc3339, utc_now
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from binder.cache.load_failures import EXCLUDED_SECONDS, LoadFailures, model_key
from binder.cache.view import NodeView
from binder.engine.cluster import Cluster
from binder.loop.fenced import FencedClient
from binder.loop.pod_writes import evict, patch_status
from binder.loop.verdict import (
    BROKEN_SECONDS,
    BoundPod,
    Cause,
    Verdict,
    broken_gpu,
    cause_of,
    gpu_failure,
    verdict,
)
from binder.pod.conditions import reported_failure
from binder.pod.demand import Demand, parse_demand
from binder.rules.registry import FITS

log = logging.getLogger(__name__)

# Between two evictions from broken GPUs: the successor is placed before room for the next pod is looked for.
PAUSE_SECONDS = 5.0
# Until room for a pod whose load failed is looked for again.
LOOK_AGAIN_SECONDS = 60.0
_TICK_SECONDS = 1.0


@dataclass(slots=True)
class _Rate:
    """How often pods are evicted for a cause. `lasting_seconds`: how long the cause must have lasted; `pause_seconds`: after
    an eviction; `retries`: after an error of the API server; `refused_seconds`, `no_room_seconds`: until a pod that could
    not go is tried again; `most`: pods that are tried in one pass."""

    lasting_seconds: float
    pause_seconds: float
    retries: Backoff
    refused_seconds: float
    no_room_seconds: float
    most: int | None
    next_try: float = float("-inf")


def _rate_of_failed_loads() -> _Rate:
    return _Rate(
        lasting_seconds=0.0,
        pause_seconds=0.0,
        retries=Backoff(initial_seconds=0.5, cap_seconds=30.0),
        refused_seconds=0.5,
        no_room_seconds=LOOK_AGAIN_SECONDS,
        most=None,
    )


def _rate_of_broken_gpus() -> _Rate:
    """Where a whole cluster fails, no attempt helps, and each costs a call and a decision."""
    return _Rate(
        lasting_seconds=BROKEN_SECONDS,
        pause_seconds=PAUSE_SECONDS,
        retries=Backoff(initial_seconds=PAUSE_SECONDS, cap_seconds=PAUSE_SECONDS, jitter=0.0),
        refused_seconds=30.0,
        no_room_seconds=30.0,
        most=20,
    )


@dataclass(slots=True)
class _Candidate:
    """A pod that may have to be replaced. `reason`: what is wrong; `next_try`: when it may be evicted; `reported`: what its
    condition says."""

    node: NodeName
    model: ModelReport
    cause: Cause
    reason: str
    next_try: float
    reported: str = ""
    is_settled: bool = False

    @property
    def identity(self) -> tuple[Cause, str, Failure | None]:
        """A load that fails otherwise is another case; a GPU is broken, whatever is said of it."""
        is_load = self.cause is not Cause.GPU_BROKEN
        return self.cause, self.reason if is_load else "", self.model.failure if is_load else None


class EvictionController:
    """`observe`, `forget` and `observe_end` take note of what is reported, on a standby too; only `step` acts."""

    def __init__(
        self,
        client: FencedClient,
        cluster: Cluster,
        events: EventRecorder,
        *,
        keys: Keys,
        scheduler_name: str,
        failures: LoadFailures,
        clock: Callable[[], float],
    ) -> None:
        self._client, self._cluster, self._events = client, cluster, events
        self._keys, self._name, self._failures, self._clock = keys, scheduler_name, failures, clock
        self._loads, self._gpus = _rate_of_failed_loads(), _rate_of_broken_gpus()
        # No more than the last reports name.
        self._candidates: dict[NodeName, dict[PodUid, _Candidate]] = {}
        # Pods whose condition says that the model is not loaded, and it is by now.
        self._loaded: dict[PodUid, PodRef] = {}
        self._wake = asyncio.Event()

    def observe(self, view: NodeView) -> None:
        """Take over what the node reports of its models and GPUs."""
        node, report = view.facts.name, view.facts.report
        before, now = self._candidates.pop(node, {}), dict[PodUid, _Candidate]()
        gpus = {gpu.uuid: gpu for gpu in view.gpus}
        for model in () if report is None else report.models:
            if not model.pod_name:
                continue  # the report had no room for the name; another one will have
            known = before.get(model.pod_uid)
            if model.state is ModelState.READY and known is not None and known.reported:
                self._loaded[model.pod_uid] = PodRef(model.namespace, model.pod_name, model.pod_uid)
            if (cause := cause_of(model, gpus)) is not None:
                found = self._candidate(node, model, cause, view)
                same = known is not None and known.identity == found.identity
                now[model.pod_uid] = known if same and known is not None else found
        if now:
            self._candidates[node] = now
        if self._loaded or any(one is not before.get(uid) for uid, one in now.items()):
            self._wake.set()

    def _candidate(self, node: NodeName, model: ModelReport, cause: Cause, view: NodeView) -> _Candidate:
        gpu = broken_gpu(model, {one.uuid: one for one in view.gpus})
        failure = None if gpu is None else gpu_failure(gpu.uuid, gpu, node)
        reason = model.reason if failure is None else failure.message
        return _Candidate(node, model, cause, reason, self._clock() + self._rate(cause).lasting_seconds)

    def forget(self, node: NodeName) -> None:
        """The node is gone."""
        self._candidates.pop(node, None)

    def observe_end(self, pod: JsonObject) -> None:
        """A pod ends. If its load had failed, the leader has replaced it; the next leader must know, too, which node
        its successor keeps away from."""
        node = node_of(pod)
        one = None if node is None else self._candidates.get(node, {}).get(pod_ref(pod).uid)
        if one is None or one.cause is not Cause.LOAD_FAILED:
            return
        with suppress(InvalidPod):
            demand = parse_demand(pod, self._keys)
            # Also for pods of another scheduler: its successor would fail there, too.
            if not self._verdict(
                one, pod, demand, scheduler_name=pod["spec"].get("schedulerName") or ""
            ).stays:
                self._note_failure(one, demand)

    async def run(self) -> None:
        """Replace pods for ever."""
        while True:
            self._wake.clear()
            await self.step()
            await wait_until_set(self._wake, timeout_seconds=_TICK_SECONDS)

    async def step(self) -> None:
        """One pass over the pods that are due."""
        for rate in (self._loads, self._gpus):
            await self._step(rate)
        await self._report_loaded()

    async def _step(self, rate: _Rate) -> None:
        for one in self._due(rate):
            if self._clock() < rate.next_try:
                return
            # Before the first wait: no second pass deals with the same pod meanwhile.
            one.next_try = self._clock() + rate.no_room_seconds
            try:
                if await self._deal_with(one):
                    rate.next_try = self._clock() + rate.pause_seconds
            except KubeError as error:  # a budget, most likely
                log.warning(
                    "pod not replaced", extra=fields(pod=one.model.pod_name, why=one.reason, error=error)
                )
                one.next_try = self._clock() + rate.refused_seconds
                rate.next_try = self._clock() + rate.retries.next()
            except Exception as error:  # what breaks over one pod must not stop the others
                log.error("replacement broke", extra=fields(pod=one.model.pod_name), exc_info=error)
                one.is_settled = True
            else:
                rate.retries.reset()

    def _due(self, rate: _Rate) -> list[_Candidate]:
        """Those who have waited longest first, so that no refusal keeps the others waiting."""
        now = self._clock()
        if now < rate.next_try:
            return []
        found = (one for of_node in self._candidates.values() for one in of_node.values())
        due = (
            one
            for one in found
            if not one.is_settled and one.next_try <= now and self._rate(one.cause) is rate
        )
        return sorted(due, key=lambda one: one.next_try)[: rate.most]

    def _rate(self, cause: Cause) -> _Rate:
        return self._gpus if cause is Cause.GPU_BROKEN else self._loads

    async def _deal_with(self, one: _Candidate) -> bool:
        """True where the pod was evicted. Raises KubeError."""
        found = await pod_of_row(self._client, self._keys, one.model, one.node)
        if found is None:
            one.is_settled = True
            return False
        pod, demand = found
        decided = self._verdict(one, pod, demand, scheduler_name=self._name)
        stays = decided.stays
        if one.cause is Cause.LOAD_FAILED and not stays and not self._note_failure(one, demand):
            stays = "it failed on other nodes, too; none is tried any more"
        if stays:
            if decided.is_reported:
                await self._report_stays(one, pod, stays)
            one.is_settled = True
        elif not decided.waits and await self._has_room(one, pod, demand):
            await self._replace(one, demand.model.ref)
            return True
        return False

    def _verdict(self, one: _Candidate, pod: JsonObject, demand: Demand, *, scheduler_name: str) -> Verdict:
        bound = BoundPod.of(pod, server=demand.shape.server)
        return verdict(bound, one.cause, one.model.failure, keys=self._keys, scheduler_name=scheduler_name)

    def _note_failure(self, one: _Candidate, demand: Demand) -> bool:
        """True while another node is worth a try."""
        key = model_key(demand)
        return key is not None and self._failures.note(key, one.node, demand.model.ref.uid)

    async def _has_room(self, one: _Candidate, pod: JsonObject, demand: Demand) -> bool:
        """Whether the pod's successor could be placed. Lost files are staged again on any node, also on this one."""
        if one.cause is Cause.FILES_LOST:
            return True
        fitting = self._fitting(demand)
        if one.cause is Cause.GPU_BROKEN:
            return bool(fitting)
        if not fitting - {one.node}:
            await self._report_stays(one, pod, "no other node has room for it now")
            return False
        return True

    def _fitting(self, demand: Demand) -> set[NodeName]:
        """Nodes that would take a pod that has a place, were it to be created anew."""
        decider = self._cluster.decider
        with decider.without((demand.model.ref.uid,)):
            rows = np.flatnonzero(decider.codes(demand) == FITS)
            return {decider.table.view(int(row)).facts.name for row in rows}

    async def _replace(self, one: _Candidate, ref: PodRef) -> None:
        reason, outcome = _REPLACED[one.cause]
        await evict(self._client, ref)
        one.is_settled = True
        self._events.record(ref, "Warning", reason, f"{one.reason}; {outcome.format(node=one.node)}")
        log.info("replaced", extra=fields(pod=ref, node=one.node, cause=one.cause.value, reason=one.reason))

    async def _report_stays(self, one: _Candidate, pod: JsonObject, why: str) -> None:
        """Once for each message; in the pod's condition, whichever binder leads."""
        ref = pod_ref(pod)
        if one.cause is Cause.GPU_BROKEN:
            self._events.record(ref, "Warning", _REPLACED[one.cause][0], f"{one.reason}; {why}")
            return
        message = f"{one.reason or 'the load failed'} ({why})"
        if message not in (one.reported, reported_failure(pod, self._keys).get("message")):
            reason = "ModelQuarantined" if one.model.failure is Failure.QUARANTINED else "ModelLoadFailed"
            self._events.record(ref, "Warning", reason, message)
            await self._write_condition(ref, "False", reason, message)
        one.reported = message

    async def _report_loaded(self) -> None:
        """Correct what was reported; once, for the node's report says it as well."""
        while self._loaded:
            _, ref = self._loaded.popitem()
            try:
                await self._write_condition(ref, "True", "ModelLoaded", "")
            except KubeError as error:
                log.info("condition not corrected", extra=fields(pod=ref, error=error))

    async def _write_condition(self, ref: PodRef, status: str, reason: str, message: str) -> None:
        condition = {
            "type": self._keys.loaded_condition,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": rfc3339(utc_now()),
        }
        await patch_status(self._client, ref, {"conditions": [condition]})


# The event of a replaced pod, and what it says happens.
_REPLACED = {
    Cause.LOAD_FAILED: (
        "ModelLoadFailedHere",
        f"replaced, and node {{node}} is left out for {EXCLUDED_SECONDS / 60:g} min",
    ),
    Cause.FILES_LOST: ("ModelLost", "replaced"),
    Cause.GPU_BROKEN: ("ModelOnBrokenGPU", "replaced"),
}


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
