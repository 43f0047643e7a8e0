"""The cluster as the watches tell it: everything that a decision can depend on, in one place.

Shared by the scheduler, which follows it, and by `berth why`, `top` and `would-fit`, which read it once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys, agent_lease_namespace
from berth.contract.pod import node_of, pod_ref
from berth.kube import paths
from berth.kube.informer import Change, ChangeKind
from berth.kube.times import utc_now
from binder.cache.cluster_facts import ClusterFacts
from binder.cache.disruption_budgets import Budgets
from binder.cache.heartbeats import Heartbeats
from binder.cache.live_nodes import LiveNodes
from binder.cache.load_failures import LoadFailures
from binder.cache.node_kinds import NodeKinds
from binder.cache.quarantine import Quarantines
from binder.cache.snapshot import ClusterSnapshot
from binder.cache.state import ClusterState
from binder.engine.decision import Decider
from binder.engine.score import Strategy, make_strategy
from binder.pod.conditions import reported_message
from binder.pod.demand import controller_of
from binder.pod.template import Family, Template, template_of

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """One collection of the API server, and who hears of its changes. A handler returns whether the
    change could let a waiting pod in."""

    name: str
    path: str
    hear: Callable[[Change], bool]


class Cluster:
    """`facts` and `nodes` are what it keeps; `decider` decides over them."""

    def __init__(
        self,
        keys: Keys,
        strategy: Strategy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._keys, self._clock = keys, clock
        self.state = ClusterState(keys, clock=clock)
        self.facts = ClusterFacts(
            state=self.state,
            clock=clock,
            quarantines=Quarantines(now),
            load_failures=LoadFailures(clock),
        )
        self.nodes, self.budgets = LiveNodes(self.state), Budgets()
        self.kinds = NodeKinds(self.state, clock=clock)
        # Set by what is heard, taken back by who has looked at it (`loop.requeue`).
        self.volumes_changed = False
        self.namespaces_changed: set[str] = set()
        self._heartbeats = Heartbeats(keys.report_behind)
        self._strategy = strategy or make_strategy("binpack", np.random.default_rng())
        self.decider = Decider(self.nodes, self.facts, self._strategy)

    def sources(self, system_namespace: str) -> tuple[Source, ...]:
        """In the order in which they must be known: what is free before who wants it."""
        return (
            Source("nodes", paths.NODES, self.on_node),
            Source("leases", paths.leases(agent_lease_namespace(system_namespace)), self.on_lease),
            Source("earlier leases", paths.leases(system_namespace), self.on_earlier_lease),
            Source("namespaces", paths.NAMESPACES, self.on_namespace),
            Source("persistentvolumes", paths.VOLUMES, self.on_volume),
            Source("persistentvolumeclaims", paths.CLAIMS, self.on_claim),
            Source("storageclasses", paths.STORAGE_CLASSES, self.on_class),
            Source("poddisruptionbudgets", paths.BUDGETS, self.on_budget),
            Source("pods", paths.PODS, self.on_pod),
        )

    def snapshot(self) -> ClusterSnapshot:
        """A mirror of the nodes, for questions that begin with "if"."""
        return ClusterSnapshot(self.nodes)

    def decider_over(self, snapshot: ClusterSnapshot) -> Decider:
        return Decider(snapshot, self.facts, self._strategy)

    def is_fresh(self, node: NodeName) -> bool:
        """The heartbeat of the node's agent is alive."""
        return self.nodes.table.deadline_of(node) > self._clock()

    def on_node(self, change: Change) -> bool:
        name = NodeName(change.object["metadata"]["name"])
        if change.kind is ChangeKind.GONE:
            self.facts.quarantines.follow(name, None, "", self._template, self._family)
            return self.state.remove_node(name)
        helps = self.state.set_node(change.object)
        if helps and (facts := self.state.facts_of(name)) is not None:
            self.kinds.see(facts)
        self._follow_quarantines(name)
        return helps

    def on_lease(self, change: Change) -> bool:
        return self._hear_heartbeat(change, earlier=False)

    def on_earlier_lease(self, change: Change) -> bool:
        """Of an agent of an earlier version."""
        return self._hear_heartbeat(change, earlier=True)

    def _hear_heartbeat(self, change: Change, *, earlier: bool) -> bool:
        now = self._clock()
        node = self._heartbeats.hear(change, earlier=earlier, now=now)
        if node is None:
            return False
        table, deadline = self.nodes.table, self._heartbeats.deadline(node, now=now)
        revives = deadline > now >= table.deadline_of(node)
        table.beat(node, deadline)
        if revives:
            table.ease(node)
        return revives

    def on_pod(self, change: Change) -> bool:
        """Pods that have a node; who waits for one is the queue's affair."""
        pod = change.object
        if node_of(pod) is None and (said := reported_message(pod)):
            ref, labels = pod_ref(pod), pod["metadata"].get("labels") or {}
            model_id = (pod["metadata"].get("annotations") or {}).get(self._keys.model_id, "").strip()
            template = template_of(ref.namespace, controller_of(pod), labels, model_id)
            if (node := self.facts.quarantines.remember(template, said)) is not None:
                self._follow_quarantines(node)
        # Also of a pod that is gone: its last state may be the first that we see of its node.
        freed = node_of(pod) is not None and self.state.set_pod(pod)
        if change.kind is ChangeKind.GONE:
            freed = self.state.remove_pod(pod["metadata"]["uid"]) or freed
        elif (node := node_of(pod)) is not None:
            self._follow_quarantines(node)
        return freed

    def _follow_quarantines(self, node: NodeName) -> None:
        """A report may name a pod before its watch has shown it."""
        if (facts := self.state.facts_of(node)) is not None:
            self.facts.quarantines.follow(node, facts.report, facts.lifted, self._template, self._family)

    def _template(self, uid: PodUid) -> Template | None:
        reservation = self.state.reservation_of(uid)
        return None if reservation is None else reservation.template

    def _family(self, uid: PodUid) -> Family:
        reservation = self.state.reservation_of(uid)
        return "" if reservation is None else reservation.family

    def on_namespace(self, change: Change) -> bool:
        meta = change.object["metadata"]
        labels = meta.get("labels") or {}
        if self.facts.namespaces.get(meta["name"]) == labels and change.kind is ChangeKind.SET:
            return False
        _keep(self.facts.namespaces, meta["name"], labels, change)
        self.namespaces_changed.add(meta["name"])
        return True

    def on_claim(self, change: Change) -> bool:
        meta = change.object["metadata"]
        return self._keep_volume(self.facts.volumes.claims, (meta["namespace"], meta["name"]), change)

    def on_volume(self, change: Change) -> bool:
        return self._keep_volume(self.facts.volumes.volumes, change.object["metadata"]["name"], change)

    def on_class(self, change: Change) -> bool:
        return self._keep_volume(self.facts.volumes.classes, change.object["metadata"]["name"], change)

    def _keep_volume(self, known: dict[Any, Any], key: object, change: Change) -> bool:
        _keep(known, key, change.object, change)
        self.volumes_changed = True
        return True

    def on_budget(self, change: Change) -> bool:
        if change.kind is ChangeKind.GONE:
            return self.budgets.drop(change.object)
        return self.budgets.put(change.object)


def slim(item: JsonObject) -> JsonObject:
    """A pod without what no decision depends on: fifty thousand of them are kept."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    return {
        "metadata": {key: meta[key] for key in _META if key in meta},
        "spec": {key: spec[key] for key in _SPEC if key in spec} | _containers(spec),
        "status": {key: status[key] for key in _STATUS if key in status} | _resized(item),
    }


_META = (
    *("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"),
    *("labels", "annotations", "ownerReferences"),
)
_SPEC = (
    *("nodeName", "schedulerName", "nodeSelector", "affinity", "tolerations", "topologySpreadConstraints"),
    *(
        "schedulingGates",
        "priority",
        "preemptionPolicy",
        "resources",
        "overhead",
        "volumes",
        "resourceClaims",
    ),
)


_STATUS = ("phase", "conditions", "nominatedNodeName", "resources", "allocatedResources")


def _resized(item: JsonObject) -> JsonObject:
    """Of the containers' statuses only those whose requests are not those of the spec."""
    spec, status = item.get("spec") or {}, item.get("status") or {}
    asked = {
        c["name"]: (c.get("resources") or {}).get("requests") or {}
        for kind in ("containers", "initContainers")
        for c in spec.get(kind) or ()
    }
    found = {}
    for kind in ("containerStatuses", "initContainerStatuses"):
        differing = [
            {key: s[key] for key in ("name", "resources", "allocatedResources") if key in s}
            for s in status.get(kind) or ()
            if _differs(s, asked.get(s["name"], {}))
        ]
        if differing:
            found[kind] = differing
    return found


def _differs(status: JsonObject, asked: JsonObject) -> bool:
    has = (status.get("resources") or {}).get("requests")
    return has not in (None, asked) or status.get("allocatedResources") not in (None, asked)


def _containers(spec: JsonObject) -> JsonObject:
    return {
        kind: [
            {key: c[key] for key in ("name", "resources", "ports", "restartPolicy") if key in c}
            for c in spec[kind]
        ]
        for kind in ("containers", "initContainers")
        if kind in spec
    }


def _keep(known: dict[Any, Any], key: object, value: object, change: Change) -> None:
    if change.kind is ChangeKind.GONE:
        known.pop(key, None)
    else:
        known[key] = value
