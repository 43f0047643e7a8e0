"""The state on which the binder's decisions are timed."""

import json

import pytest

from bench.binder import core, objects
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import Cluster
from binder.engine.score import LeastFragmentation

NODES = 3


def cluster_of(*pods: objects.Json) -> Cluster:
    cluster = Cluster(objects.KEYS, LeastFragmentation())
    for one in core._nodes(NODES):
        cluster.on_node(Change(ChangeKind.SET, one))
    for one in pods:
        cluster.on_pod(Change(ChangeKind.SET, one))
    return cluster


def test_every_bound_pod_counts_on_the_gpu_that_it_is_on() -> None:
    pods = list(core._bound_pods(NODES))
    cluster, held = cluster_of(*pods), dict[GpuUuid, int]()
    core._require_truth(cluster)
    for one in pods:
        choice = GpuChoice.decode(one["metadata"]["annotations"][objects.KEYS.gpu])
        held[choice.uuid] = held.get(choice.uuid, 0) + choice.bytes
    for index in range(NODES):
        view = cluster.state.view(NodeName(objects.node_name(index)))
        assert {gpu.uuid: view.reserved_on(gpu.uuid) for gpu in view.gpus} == {
            gpu.uuid: held.pop(gpu.uuid, 0) for gpu in view.gpus
        }
    assert not held


def test_a_state_that_is_not_true_is_not_timed() -> None:
    one = json.loads(json.dumps(next(core._bound_pods(NODES))))
    choice = GpuChoice(GpuUuid("GPU-0-1"), 1, objects.GIB)
    one["metadata"]["annotations"][objects.KEYS.gpu] = choice.encode()
    with pytest.raises(SystemExit, match="do not have"):
        core._require_truth(cluster_of(one))
