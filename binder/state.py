"""What the binder knows of the cluster: nodes, pods, its own assumptions, and ghosts.

Memory is held until the *model* is gone, not the pod. Three kinds of holders, one per pod uid:

- a pod that is bound to the node and has not ended;
- an *assumed* pod: decided and not yet seen bound;
- a *ghost*: a pod that was one of these and is gone. It stays until a report that had listed it no
  longer does. The agent writes a report that lists a pod before it loads anything for it, so a
  ghost that no report has ever listed holds nothing; it is dropped after GHOST_GRACE_SECONDS, which
  covers the delay between the watches of pods and nodes.

Besides, whatever a report lists is held, also when this binder never saw its pod.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import has_ended, node_of, pod_ref
from berth.contract.report import ModelReport, NodeReport
from binder.demand import Demand
from binder.holders import Holder, assumed_holder, bound_holder, held_by_gpu
from binder.view import NodeFacts, NodeView, parse_node

JsonObject = Mapping[str, Any]

GHOST_GRACE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Ghost:
    """A holder whose pod is gone, and since when."""

    holder: Holder
    since: float


class ClusterState:
    """Pure but for its clock. Every change returns whether it could let a waiting pod in.

    A uid is in one of `_bound`, `_assumed` and `_ghosts` at most; `_by_node` holds the uids of all three.
    """

    def __init__(self, keys: Keys, *, clock: Callable[[], float]) -> None:
        self._keys, self._clock = keys, clock
        self._nodes: dict[NodeName, NodeFacts] = {}
        self._bound: dict[PodUid, Holder] = {}
        self._assumed: dict[PodUid, Holder] = {}
        self._ghosts: dict[PodUid, Ghost] = {}
        # Holders that some report of their node has listed.
        self._listed: set[PodUid] = set()
        self._by_node: dict[NodeName, set[PodUid]] = {}
        self._views: dict[NodeName, NodeView] = {}

    @property
    def assumed_count(self) -> int:
        return len(self._assumed)

    def has_place(self, uid: PodUid) -> bool:
        """The pod is bound or assumed. A pod that has a node never loses it again."""
        return uid in self._bound or uid in self._assumed

    def set_node(self, node: JsonObject) -> bool:
        facts = parse_node(node, self._keys)
        known = self._nodes.get(facts.name)
        if known == facts:
            return False
        self._nodes[facts.name] = facts
        self._views.pop(facts.name, None)
        if facts.report is not None:
            self._follow_report(facts.name, facts.report)
        return known is None or known.content != facts.content

    def remove_node(self, name: NodeName) -> None:
        """A node that is gone holds nothing; its pods follow on their own."""
        self._nodes.pop(name, None)
        self._views.pop(name, None)
        for uid in self._ghosts_on(name):
            self._lift(uid)

    def set_pod(self, pod: JsonObject) -> bool:
        """Take a pod that has a node. True if something became free."""
        uid, node = pod_ref(pod).uid, node_of(pod)
        if node is None:
            return False
        if has_ended(pod):
            return self.remove_pod(uid)
        holder = bound_holder(pod, node, self._keys)
        if self._bound.get(uid) == holder:
            return False
        was_listed = uid in self._listed
        before = self._lift(uid)
        self._bound[uid] = holder
        # What another node has listed says nothing of this one.
        self._put_on_node(uid, holder, listed=was_listed and before is not None and before.node == node)
        return before is not None and before != holder

    def remove_pod(self, uid: PodUid) -> bool:
        """The pod is gone or has ended. True if something became free at once."""
        if not self.has_place(uid):
            return False
        self.expire_ghosts()  # here too, so that a standby does not gather them
        was_listed = uid in self._listed
        holder = self._lift(uid)
        assert holder is not None
        report = self._report_of(holder.node)
        unloaded = was_listed and report is not None and report.model_of(uid) is None
        if holder.has_model and not unloaded:
            self._ghosts[uid] = Ghost(holder, self._clock())
            self._put_on_node(uid, holder, listed=was_listed)
        return True

    def assume(self, demand: Demand, node: NodeName, gpu: GpuChoice) -> None:
        """Count a decision as done, in the same step in which it was made."""
        uid = demand.model.ref.uid
        assert not self.has_place(uid), f"pod {demand.model.ref} has a place already"
        self._lift(uid)
        holder = self._assumed[uid] = assumed_holder(demand, node, gpu)
        self._put_on_node(uid, holder, listed=False)

    def forget(self, uid: PodUid) -> None:
        """The assumed binding did not happen: nothing was ever there. A pod seen bound stays."""
        if uid in self._assumed:
            self._lift(uid)

    def expire_ghosts(self) -> bool:
        """Drop ghosts that no report ever listed and whose grace is over. True if there were any."""
        end = self._clock() - GHOST_GRACE_SECONDS
        old = [u for u, ghost in self._ghosts.items() if u not in self._listed and ghost.since <= end]
        for uid in old:
            self._lift(uid)
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
        uids = self._by_node.get(name, set())
        living = {uid: holder for uid in uids if (holder := self._living(uid)) is not None}
        holders = living | {uid: self._ghosts[uid].holder for uid in uids if uid in self._ghosts}
        report = facts.report
        listed = {model.pod_uid: model for model in report.models} if report is not None else {}
        gpus = frozenset(gpu.uuid for gpu in report.gpus) if report is not None else frozenset()
        held, anywhere = held_by_gpu(holders, listed, gpus)
        models: list[Holder | ModelReport] = [*holders.values(), *listed.values()]
        return NodeView(
            facts=facts,
            used=_total(holder.amounts for holder in living.values()),
            held=held,
            held_anywhere=anywhere,
            model_ids=frozenset(model.model_id for model in models if model.model_id is not None),
            model_names=frozenset(model.model_name for model in models if model.model_name is not None),
            host_ports=frozenset().union(*(holder.ports for holder in living.values())),
        )

    def _living(self, uid: PodUid) -> Holder | None:
        return self._bound.get(uid) or self._assumed.get(uid)

    def _report_of(self, node: NodeName) -> NodeReport | None:
        facts = self._nodes.get(node)
        return None if facts is None else facts.report

    def _ghosts_on(self, node: NodeName) -> list[PodUid]:
        return [uid for uid in self._by_node.get(node, ()) if uid in self._ghosts]

    def _follow_report(self, node: NodeName, report: NodeReport) -> None:
        """Note who is listed, and let go of the ghosts that were and are not any more."""
        now_listed = {model.pod_uid for model in report.models}
        for uid in self._ghosts_on(node):
            if uid in self._listed and uid not in now_listed:
                self._lift(uid)
        self._listed |= now_listed & self._by_node.get(node, set())

    def _put_on_node(self, uid: PodUid, holder: Holder, *, listed: bool) -> None:
        """`listed`: some report of this node has named it, the last one perhaps not."""
        self._by_node.setdefault(holder.node, set()).add(uid)
        self._views.pop(holder.node, None)
        report = self._report_of(holder.node)
        if listed or (report is not None and report.model_of(uid) is not None):
            self._listed.add(uid)

    def _lift(self, uid: PodUid) -> Holder | None:
        """Take a holder off its node, whatever kind it is."""
        holder = self._bound.pop(uid, None) or self._assumed.pop(uid, None)
        if holder is None and (ghost := self._ghosts.pop(uid, None)) is not None:
            holder = ghost.holder
        if holder is None:
            return None
        self._listed.discard(uid)
        self._by_node[holder.node].discard(uid)
        if not self._by_node[holder.node]:
            del self._by_node[holder.node]
        self._views.pop(holder.node, None)
        return holder


def _total(amounts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in amounts:
        for resource, amount in one.items():
            total[resource] = total.get(resource, 0) + amount
    return total
