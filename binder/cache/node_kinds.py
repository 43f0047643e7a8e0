"""What one more node would offer: each kind of node that the cluster has or had, as a fresh one. Pure.

A fresh node is like one that is known, with nothing on it but its DaemonSets' pods, and with a name of its own. Nodes are
of one pool by what the binder alone knows (their GPUs, what they serve, lasting taints), and of one kind with their labels.
Pools that have no node any more are remembered: a cluster autoscaler can bring them back. What is remembered is bounded,
pool by pool: labels that differ from node to node make a pool forget kinds of its own only.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from msgspec import structs

from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import CodeReport, GpuReport, NodeReport
from binder.cache.state import ClusterState
from binder.cache.table import NodeTable
from binder.cache.view import NodeFacts, NodeView
from binder.pod.resources import total

MOST_POOLS, MOST_KINDS = 32, 16
# How often it is looked what the DaemonSets take of each kind.
_RENEW_SECONDS = 10.0
_HOSTNAME = "kubernetes.io/hostname"
# Taints that controllers set and take away as nodes come and go: a fresh node loses them, or is not to have them.
_PASSING_TAINTS = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "ToBeDeletedByClusterAutoscaler",
    "DeletionCandidateOfClusterAutoscaler",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
    "karpenter.sh/",
)


@dataclass(slots=True)
class _Kind:
    """`sample`: the node of this kind that was seen last."""

    sample: NodeName
    fresh: NodeView


class NodeKinds:
    """`see` takes every state of every node, on a standby too. `table`: a row for each kind; its clock grows with every
    change."""

    def __init__(self, state: ClusterState, *, clock: Callable[[], float]) -> None:
        self._state, self._clock = state, clock
        self._pools: OrderedDict[Hashable, OrderedDict[Hashable, _Kind]] = OrderedDict()
        self._next_renewal, self._made = float("-inf"), 0
        self.table = NodeTable()

    def __bool__(self) -> bool:
        """Any kind is known."""
        return bool(self._pools)

    def see(self, facts: NodeFacts) -> None:
        """A node as its object tells it now. One whose GPUs are unknown says nothing about its kind."""
        report = facts.report
        if report is None or not report.gpus or any(gpu.total_bytes is None for gpu in report.gpus):
            return
        pool, labels = _pool_of(facts, report), _shared_labels(facts)
        kinds = self._pools.setdefault(pool, OrderedDict())
        kind = kinds.get(labels)
        if kind is None:
            self._made += 1
            name = NodeName(f"one more node ({self._made})")  # no node can be called so
            kind = kinds[labels] = _Kind(facts.name, fresh_node(facts, report, name))
            self.table.put(kind.fresh, hypothetical=True)
        kind.sample = facts.name
        kinds.move_to_end(labels)
        self._pools.move_to_end(pool)
        self._forget()

    def refresh(self) -> None:
        """Take over, now and then, what nodes of each kind can give to pods, and what their DaemonSets take of it."""
        if self._clock() < self._next_renewal:
            return
        self._next_renewal = self._clock() + _RENEW_SECONDS
        for kind in self._kinds():
            facts = self._state.facts_of(kind.sample)
            if facts is None:
                continue  # as it was
            staying = [one for one in self._state.reservations_on(kind.sample) if one.stays_with_node]
            fresh = replace(
                kind.fresh,
                facts=replace(kind.fresh.facts, allocatable=facts.allocatable),
                used=total(one.amounts for one in staying),
                host_ports=frozenset().union(*(one.ports for one in staying)),
            )
            if fresh != kind.fresh:
                kind.fresh = fresh
                self.table.put(fresh, hypothetical=True)

    def _kinds(self) -> list[_Kind]:
        return [kind for kinds in self._pools.values() for kind in kinds.values()]

    def _forget(self) -> None:
        """Those that were not seen for longest."""
        if len(self._pools) > MOST_POOLS:
            _, kinds = self._pools.popitem(last=False)
            for kind in kinds.values():
                self.table.drop(kind.fresh.facts.name)
        newest = next(reversed(self._pools.values()))
        if len(newest) > MOST_KINDS:
            self.table.drop(newest.popitem(last=False)[1].fresh.facts.name)


def fresh_node(facts: NodeFacts, report: NodeReport, name: NodeName) -> NodeView:
    """A node like this one that has just come."""
    gpus = tuple(_fresh_gpu(gpu, name) for gpu in sorted(report.gpus, key=lambda gpu: gpu.index))
    return NodeView(
        replace(
            facts,
            name=name,
            labels={**dict(_shared_labels(facts)), _HOSTNAME: name},
            taints=tuple(taint for taint in facts.taints if not taint["key"].startswith(_PASSING_TAINTS)),
            unschedulable=False,
            report=structs.replace(
                report,
                gpus=gpus,
                models=(),
                triton=structs.replace(report.triton, ready=True),
                code=CodeReport(report.code.rule),
            ),
        )
    )


def _fresh_gpu(gpu: GpuReport, node: NodeName) -> GpuReport:
    uuid = GpuUuid(f"{node}, GPU {gpu.index}")
    return structs.replace(gpu, uuid=uuid, other_use_bytes=0, healthy=True, broken=False, reason="")


def _pool_of(facts: NodeFacts, report: NodeReport) -> Hashable:
    return (
        tuple(sorted((gpu.product, gpu.total_bytes or 0, gpu.headroom_bytes) for gpu in report.gpus)),
        frozenset(
            (taint["key"], taint.get("value") or "", taint.get("effect") or "")
            for taint in facts.taints
            if not taint["key"].startswith(_PASSING_TAINTS)
        ),
        (report.server, frozenset(report.capabilities), report.code.rule),
    )


def _shared_labels(facts: NodeFacts) -> frozenset[tuple[str, str]]:
    """Without those that are the node's own."""
    return frozenset(
        (key, value) for key, value in facts.labels.items() if key != _HOSTNAME and value != facts.name
    )
