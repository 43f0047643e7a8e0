"""A cluster as the binder's decisions see it, without an API server and without the loop."""

import math
from typing import Any

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement, Refusal
from binder.engine.explain import NodeVerdict, verdicts
from binder.engine.score import Strategy
from binder.pod.demand import parse_demand
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

Json = dict[str, Any]


def cluster_of(*nodes: Json, pods: tuple[Json, ...] = (), strategy: Strategy | None = None) -> Cluster:
    """The heartbeat of every node's agent is alive."""
    cluster = Cluster(KEYS, strategy, clock=lambda: 0.0)
    for one in nodes:
        cluster.on_node(Change(ChangeKind.SET, one))
        cluster.decider.table.beat(NodeName(one["metadata"]["name"]), math.inf)
    for one in pods:
        cluster.on_pod(Change(ChangeKind.SET, one))
    return cluster


def sized(name: str, *sizes: int, **more: Any) -> Json:
    """A node with GPUs of so many GiB."""
    gpus = [gpu(f"{name}-{i}", total=size * GIB, index=i) for i, size in enumerate(sizes)]
    return node(name, says=report(*gpus), **more)


def resident(uid: str, on: str, gib: int, slot: int = 0, **more: Any) -> Json:
    """A pod on a GPU of such a node."""
    return pod(uid, mem=f"{gib}Gi", on=on, choice=GpuChoice(GpuUuid(f"{on}-{slot}"), slot, gib * GIB), **more)


def decide(cluster: Cluster, asks: Json) -> Placement | Refusal:
    return cluster.decider.decide(parse_demand(asks, KEYS))


def verdict(cluster: Cluster, asks: Json) -> NodeVerdict:
    """Of the only node."""
    (found,) = verdicts(cluster.decider, parse_demand(asks, KEYS))
    return found


def rule_of(cluster: Cluster, asks: Json) -> str | None:
    """By which rule the only node refuses the pod."""
    reason = verdict(cluster, asks).reason
    return None if reason is None else reason.rule
