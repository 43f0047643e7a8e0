"""What the binder knows of the cluster: nodes, pods, heartbeats, its own assumptions, and ghosts.

Memory is held until the *model* is gone, not the pod. Three kinds of holders, one per pod uid:

- a pod that is bound to the node and has not ended (what its GPU annotation says);
- an *assumed* pod: decided and not yet seen bound;
- a *ghost*: a pod that was one of these and is gone. It stays until a report that had listed it no
  longer does. The agent writes a report that lists a pod before it loads anything for it, so a
  ghost that no report has ever listed holds nothing; it is dropped after GHOST_GRACE_SECONDS, which
  covers the delay between the watches of pods and nodes.

Besides, whatever a report lists is held, also when this binder never saw its pod.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.memory import Held
from berth.contract.pod import (
    PodRef,
    effective_request,
    has_ended,
    is_model_pod,
    node_of,
    parse_model_pod,
    pod_ref,
)
from berth.contract.report import ModelReport, NodeReport
from binder.demand import Demand, host_ports, pod_amounts
from binder.view import NodeFacts, NodeView, parse_node

JsonObject = Mapping[str, Any]

GHOST_GRACE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Holder:
    """A pod's share of a node. `gpu` None with bytes: it is on some GPU, and nobody can tell which."""

    ref: PodRef
    node: NodeName
    amounts: Mapping[str, int]
    ports: frozenset[tuple[str, str, int]]
    model_id: ModelId | None = None
    model_name: ModelName | None = None
    gpu: GpuUuid | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ghost:
    """A holder whose pod is gone. `listed`: a report has named it."""

    holder: Holder
    since: float
    listed: bool


class ClusterState:
    """Pure but for its clock. Every change returns whether it could let a waiting pod in."""

    def __init__(self, keys: Keys, *, clock: Callable[[], float]) -> None:
        self._keys, self._clock = keys, clock
        self._nodes: dict[NodeName, NodeFacts] = {}
        self._bound: dict[PodUid, Holder] = {}
        self._assumed: dict[PodUid, Holder] = {}
        self._ghosts: dict[PodUid, Ghost] = {}
        self._by_node: dict[NodeName, set[PodUid]] = {}
        self._views: dict[NodeName, NodeView] = {}

    @property
    def assumed_count(self) -> int:
        return len(self._assumed)

    def is_assumed(self, uid: PodUid) -> bool:
        return uid in self._assumed

    def set_node(self, node: JsonObject) -> bool:
        facts = parse_node(node, self._keys)
        if self._nodes.get(facts.name) == facts:
            return False
        self._nodes[facts.name] = facts
        self._views.pop(facts.name, None)
        if facts.report is not None:
            self._lay_ghosts(facts.name, facts.report)
        return True

    def remove_node(self, name: NodeName) -> None:
        """A node that is gone holds nothing; its pods follow on their own."""
        self._nodes.pop(name, None)
        self._views.pop(name, None)
        for uid in [uid for uid, ghost in self._ghosts.items() if ghost.holder.node == name]:
            self._drop_ghost(uid)

    def set_pod(self, pod: JsonObject) -> bool:
        """Take a pod that has a node. True if something became free."""
        uid, node = pod_ref(pod).uid, node_of(pod)
        if node is None:
            return False
        if has_ended(pod):
            return self.remove_pod(uid)
        holder = self._holder(pod, node)
        if self._bound.get(uid) != holder:
            self._assumed.pop(uid, None)
            self._bound[uid] = holder
            self._changed(holder)
        return False

    def remove_pod(self, uid: PodUid) -> bool:
        """The pod is gone or has ended. True if something became free at once."""
        holder = self._bound.pop(uid, None) or self._assumed.pop(uid, None)
        if holder is None:
            return False
        if holder.bytes or holder.model_id or holder.model_name:
            report = self._report_of(holder.node)
            listed = report is not None and report.model_of(uid) is not None
            self._ghosts[uid] = Ghost(holder, self._clock(), listed)
        else:
            self._by_node.get(holder.node, set()).discard(uid)
        self._views.pop(holder.node, None)
        return True

    def assume(self, demand: Demand, node: NodeName, gpu: GpuChoice) -> None:
        """Count a decision as done, in the same step in which it was made."""
        model = demand.model
        holder = Holder(
            ref=model.ref,
            node=node,
            amounts=demand.amounts,
            ports=demand.host_ports,
            model_id=model.model_id,
            model_name=model.model_name,
            gpu=gpu.uuid,
            bytes=gpu.bytes,
        )
        self._assumed[model.ref.uid] = holder
        self._changed(holder)

    def forget(self, uid: PodUid) -> None:
        """The assumed binding did not happen: nothing was ever there."""
        holder = self._assumed.pop(uid, None)
        if holder is not None:
            self._by_node.get(holder.node, set()).discard(uid)
            self._views.pop(holder.node, None)

    def expire_ghosts(self) -> bool:
        """Drop ghosts that no report ever listed and whose grace is over. True if there were any."""
        now = self._clock()
        old = [
            uid
            for uid, ghost in self._ghosts.items()
            if not ghost.listed and now - ghost.since >= GHOST_GRACE_SECONDS
        ]
        for uid in old:
            self._drop_ghost(uid)
        return bool(old)

    def views(self) -> Iterator[NodeView]:
        """Every node, by name."""
        return (self.view(name) for name in sorted(self._nodes))

    def view(self, name: NodeName) -> NodeView:
        """One node. Kept until something on it changes."""
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._make_view(name)
        return view

    def _make_view(self, name: NodeName) -> NodeView:
        facts = self._nodes[name]
        living = {uid: h for uid in self._by_node.get(name, ()) if (h := self._living(uid)) is not None}
        ghosts = {uid: g.holder for uid, g in self._ghosts.items() if g.holder.node == name}
        listed = {m.pod_uid: m for m in facts.report.models} if facts.report is not None else {}
        holders = {**ghosts, **living}
        return NodeView(
            facts=facts,
            used=_total(living.values()),
            held=_held(holders, listed),
            held_anywhere=tuple(Held(h.bytes) for h in holders.values() if h.gpu is None and h.bytes),
            model_ids=frozenset(
                found
                for found in (*(h.model_id for h in holders.values()), *(m.model_id for m in listed.values()))
                if found is not None
            ),
            model_names=frozenset(
                found
                for found in (
                    *(h.model_name for h in holders.values()),
                    *(m.model_name for m in listed.values()),
                )
                if found is not None
            ),
            host_ports=frozenset().union(*(h.ports for h in living.values())),
        )

    def _living(self, uid: PodUid) -> Holder | None:
        return self._bound.get(uid) or self._assumed.get(uid)

    def _holder(self, pod: JsonObject, node: NodeName) -> Holder:
        """Fails closed: a model pod whose GPU cannot be read is counted on every GPU."""
        ref = pod_ref(pod)
        try:
            plain = Holder(ref, node, pod_amounts(pod, self._keys), host_ports(pod))
            if not is_model_pod(pod, self._keys):
                return plain
            model = parse_model_pod(pod, self._keys)
        except InvalidPod:
            return Holder(ref, node, {}, frozenset(), bytes=self._asked(pod))
        return replace(
            plain,
            model_id=model.model_id,
            model_name=model.model_name,
            gpu=None if model.gpu is None else model.gpu.uuid,
            # What the pod asks for, which a quota can bound; its owner can edit the annotation.
            bytes=model.request_bytes,
        )

    def _asked(self, pod: JsonObject) -> int:
        try:
            return effective_request(pod, self._keys.gpu_mem)
        except InvalidPod:
            return 0

    def _report_of(self, node: NodeName) -> NodeReport | None:
        facts = self._nodes.get(node)
        return None if facts is None else facts.report

    def _lay_ghosts(self, node: NodeName, report: NodeReport) -> None:
        for uid, ghost in list(self._ghosts.items()):
            if ghost.holder.node != node:
                continue
            if report.model_of(uid) is not None:
                self._ghosts[uid] = replace(ghost, listed=True)
            elif ghost.listed:
                self._drop_ghost(uid)

    def _drop_ghost(self, uid: PodUid) -> None:
        ghost = self._ghosts.pop(uid)
        self._by_node.get(ghost.holder.node, set()).discard(uid)
        self._views.pop(ghost.holder.node, None)

    def _changed(self, holder: Holder) -> None:
        self._by_node.setdefault(holder.node, set()).add(holder.ref.uid)
        self._views.pop(holder.node, None)


def _total(holders: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for holder in holders:
        for resource, amount in holder.amounts.items():
            total[resource] = total.get(resource, 0) + amount
    return total


def _held(
    holders: Mapping[PodUid, Holder], listed: Mapping[PodUid, ModelReport]
) -> dict[GpuUuid, tuple[Held, ...]]:
    """Per GPU, one entry a pod: the larger of what its pod and its report say. Where the two name
    different GPUs it is counted on both."""
    held: dict[GpuUuid, dict[PodUid, Held]] = {}
    for uid, holder in holders.items():
        if holder.gpu is not None:
            held.setdefault(holder.gpu, {})[uid] = Held(holder.bytes)
    for uid, model in listed.items():
        if model.gpu is not None:
            requested = holders[uid].bytes if uid in holders else 0
            bytes_ = Held(max(requested, model.requested_bytes), model.measured_bytes)
            held.setdefault(model.gpu, {})[uid] = bytes_
    return {gpu: tuple(models.values()) for gpu, models in held.items()}
