"""Nodes that were there and are gone: whoever has seen them must judge as if they had never been."""

import math
from collections.abc import Iterable, Mapping

from berth.contract.ids import NodeName
from berth.contract.keys import Keys
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import Cluster
from binder.pod.demand import parse_demand
from binder.rules.registry import FITS
from tests.cluster.differential.draw import TOPOLOGY_KEYS
from tests.cluster.differential.objects import Json, Objects, name_of

Answers = Mapping[str, frozenset[str]]


def vanished(nodes: Iterable[Json]) -> list[Json]:
    """Like these nodes, but in domains of their own, without taints and not cordoned: nothing keeps a spread
    constraint from counting them."""
    return [
        {
            **node,
            "metadata": {
                **node["metadata"],
                "name": f"{name_of(node)}-gone",
                "uid": f"uid-{name_of(node)}-gone",
                "labels": {**node["metadata"]["labels"], **dict.fromkeys(TOPOLOGY_KEYS, f"gone{number}")},
            },
            "spec": {},
        }
        for number, node in enumerate(nodes)
    ]


def answers(world: Objects, pods: Mapping[str, Json], keys: Keys, *, gone: Iterable[Json] = ()) -> Answers:
    """The nodes that the binder's filters leave, by pod. `gone`: nodes that it has seen, and whose end."""
    cluster, gone = Cluster(keys), list(gone)
    for hear, objects in (
        (cluster.on_node, [*gone, *world.nodes]),
        (cluster.on_namespace, world.namespaces),
        (cluster.on_volume, world.volumes),
        (cluster.on_claim, world.claims),
        (cluster.on_class, world.storage_classes),
        (cluster.on_pod, world.pods),
    ):
        for one in objects:
            hear(Change(ChangeKind.SET, one))
    for node in [*gone, *world.nodes]:
        cluster.decider.table.beat(NodeName(name_of(node)), math.inf)
    if gone:
        for pod in pods.values():
            _allowed(cluster, pod, keys)
        for node in gone:
            cluster.on_node(Change(ChangeKind.GONE, node))
    return {name: _allowed(cluster, pod, keys) for name, pod in pods.items()}


def _allowed(cluster: Cluster, pod: Json, keys: Keys) -> frozenset[str]:
    codes = cluster.decider.codes(parse_demand(pod, keys))
    return frozenset(name for name, row in cluster.decider.table.row_of.items() if codes[row] == FITS)
