"""The binder's decisions alone: no API server, no sockets; everything from the JSON on.

For each size a process of its own takes nodes and ten bound pods a node as the watches would tell
them, then decides for several mixes of pods. For each pod that is placed another one departs, as in a cluster
that is in its steady state.
"""

import argparse
import gc
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.binder import objects
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import PodUid
from berth.kube.informer import Change, ChangeKind, Mirror
from binder.engine.cluster import Cluster, slim
from binder.engine.decision import Placement
from binder.engine.dual_prices import price
from binder.engine.explain import summary
from binder.engine.score import LeastFragmentation
from binder.pod.demand import Demand, parse_demand

SIZES = (100, 1000, 5000, 20000)
_PODS_PER_NODE, _WARM_UP = 10, 500
_DEPLOYMENTS, _ZONES = 200, 6
_PRODUCTS = ("NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3", "NVIDIA-L40S")
# What is decided for, and how often.
_USUAL, _DIFFERENT, _REFUSED = "usual mix", "sizes all different", "refused"
_DECISIONS = {_USUAL: 4000, _DIFFERENT: 1000, _REFUSED: 1000}
_PRODUCT_LABEL, _ZONE_LABEL = "nvidia.com/gpu.product", "topology.kubernetes.io/zone"


def run(options: argparse.Namespace) -> int:
    """Print the table; write it as JSON, too, where that is requested."""
    sizes = [options.nodes] if options.nodes else list(SIZES)
    rows = [_measured_apart(size) for size in sizes]
    print(_table(rows))
    if options.json:
        options.json.write_text(json.dumps({"sizes": rows}, indent=2))
    return 0


def _measured_apart(size: int) -> dict[str, Any]:
    """In a fresh process, for its memory's sake."""
    print(f"{size} nodes …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "bench.binder.core", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure(size: int) -> dict[str, Any]:
    nodes, pods = [json.dumps(n) for n in _nodes(size)], [json.dumps(p) for p in _bound_pods(size)]
    before = _rss_mib()
    started = time.perf_counter()
    strategy = LeastFragmentation()
    cluster = Cluster(objects.KEYS, strategy)
    mirror = Mirror(slim)
    for text in nodes:
        cluster.on_node(Change(ChangeKind.SET, json.loads(text)))
    for index in range(size):
        cluster.on_lease(Change(ChangeKind.SET, objects.lease(index)))
    for text in pods:
        for change in mirror.apply("ADDED", json.loads(text)):
            cluster.on_pod(change)
    asks = {mix: list(_demands(mix, _WARM_UP + count)) for mix, count in _DECISIONS.items()}
    cluster.decider.decide(asks[_USUAL][0])
    first = time.perf_counter() - started
    _require_truth(cluster)
    del nodes, pods
    gc.collect()
    gc.freeze()  # as the binder does
    bench = _Steady(cluster, strategy, size)
    mixes = {mix: bench.measure(demands) for mix, demands in asks.items()}
    return {
        "nodes": size,
        "pods": size * _PODS_PER_NODE,
        "mixes": mixes,
        "first_decision_s": round(first, 2),
        "rss_mib": round(_rss_mib()),
        "rss_before_mib": round(before),
    }


def _require_truth(cluster: Cluster) -> None:
    """Every bound pod must count on the GPU that it is on, and on no other."""
    if any(view.reserved_anywhere for view in cluster.state.views()):
        raise SystemExit("bench.binder: bound pods name GPUs that their nodes do not have")


class _Steady:
    """A cluster that is neither filled nor emptied."""

    def __init__(self, cluster: Cluster, strategy: LeastFragmentation, size: int) -> None:
        self._cluster, self._strategy = cluster, strategy
        self._chance = random.Random(3)
        self._there = [f"bound-{number}" for number in range(size * _PODS_PER_NODE)]

    def measure(self, demands: Sequence[Demand]) -> int:
        """CPU µs of a decision and all that belongs to it, a departure too."""
        began = time.process_time()
        for demand in demands:
            self._decide(demand)
        return round((time.process_time() - began) / len(demands) * 1e6)

    def _decide(self, demand: Demand) -> None:
        """With the assumption, or with the sentence why not."""
        decider = self._cluster.decider
        outcome = decider.decide(demand)
        if isinstance(outcome, Placement):
            self._cluster.state.assume(demand, outcome.node, outcome.gpu)
        else:
            summary(decider, demand, outcome)
        self._go_on(demand, placed=isinstance(outcome, Placement))

    def _go_on(self, demand: Demand, *, placed: bool) -> None:
        self._there.append(demand.model.ref.uid)
        gone = self._chance.randrange(len(self._there)) if placed else -1
        self._there[gone], self._there[-1] = self._there[-1], self._there[gone]
        uid = self._there.pop()
        if placed:
            self._cluster.state.remove_pod(PodUid(uid))
        if self._strategy.demand_history.note(demand.shape):  # the binder learns in a thread
            self._strategy.learn(
                price(self._strategy.demand_history.pricing_problem(self._cluster.decider.table))
            )


def _nodes(size: int) -> Iterator[objects.Json]:
    for index in range(size):
        node = objects.node(index)
        node["metadata"]["uid"] = f"node-{index}"
        node["metadata"]["labels"] |= {
            _ZONE_LABEL: f"zone-{index % _ZONES}",
            _PRODUCT_LABEL: _PRODUCTS[index % len(_PRODUCTS)],
        }
        if index % 20 == 0:
            node["spec"] = {"taints": [{"key": "dedicated", "value": "batch", "effect": "NoSchedule"}]}
        yield node


def _bound_pods(size: int) -> Iterator[objects.Json]:
    """As they stand in the API, with a status of the usual size."""
    chance = random.Random(2)
    asks = objects.asks(size * _PODS_PER_NODE)
    for number, ask in enumerate(asks):
        pod = objects.berth_pod(f"bound-{number}", ask)
        gpu = chance.randrange(objects.GPUS)
        index = number % size
        choice = GpuChoice(objects.gpu_uuid(index, gpu), gpu, ask.gpu_gib * objects.GIB)
        pod["metadata"] |= {
            "uid": f"bound-{number}",
            "namespace": f"team-{number % 50}",
            "resourceVersion": "1",
        }
        pod["metadata"]["annotations"][objects.KEYS.gpu] = choice.encode()
        pod["metadata"]["labels"]["app"] = f"app-{number % 1000}"
        pod["metadata"]["managedFields"] = [
            {"manager": "kubectl", "fieldsV1": {f"f:{i}": {} for i in range(40)}}
        ]
        pod["spec"]["nodeName"] = objects.node_name(index)
        pod["status"] = {
            "phase": "Running",
            "conditions": [{"type": t, "status": "True"} for t in ("PodScheduled", "Initialized", "Ready")],
        }
        yield pod


def _demands(mix: str, count: int) -> Iterator[Demand]:
    """Pods of 200 Deployments, the first ones far larger than the last; in one mix each requests other
    bytes, in one for more than any GPU has."""
    chance = random.Random(1)
    kinds = [_kind(number, chance) for number in range(_DEPLOYMENTS)]
    weights = [1 / (rank + 1) for rank in range(_DEPLOYMENTS)]
    for number in range(count):
        (kind,) = chance.choices(kinds, weights)
        pod = json.loads(kind)
        name = f"{mix} {number}"
        pod["metadata"] |= {"uid": name, "name": name}
        pod["metadata"]["annotations"][objects.KEYS.model_id] = name.replace(" ", "-")
        if mix == _DIFFERENT:
            objects.set_gpu_mem(pod, mib_each=2048 + number)
        elif mix == _REFUSED:
            objects.set_gpu_mem(pod, mib_each=(objects.GPU_GIB + 1) * 1024)
        yield parse_demand(pod, objects.KEYS)


def _kind(number: int, chance: random.Random) -> str:
    """One Deployment's pod; every third has some constraint."""
    (ask,) = list(objects.asks(number + 1))[-1:]
    pod = objects.berth_pod("new", ask)
    labels = {"app": f"deployment-{number}"}
    pod["metadata"] |= {"namespace": f"team-{number % 50}", "labels": labels}
    spec, selector = pod["spec"], {"matchLabels": labels}
    match chance.randrange(15):
        case 0:
            spec["nodeSelector"] = {_PRODUCT_LABEL: chance.choice(_PRODUCTS)}
        case 1:
            terms = [{"matchExpressions": [_in(_ZONE_LABEL, "zone-1", "zone-2")]}]
            spec["affinity"] = {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": terms}}}
        case 2:
            term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
            spec["affinity"] = {"podAntiAffinity": {_REQUIRED: [term]}}
        case 3:
            spec["topologySpreadConstraints"] = [
                {
                    "maxSkew": 2,
                    "topologyKey": _ZONE_LABEL,
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": selector,
                }
            ]
        case 4:
            pod["metadata"]["annotations"][objects.KEYS.gpu_count] = "2"
            objects.set_gpu_mem(pod, mib_each=ask.gpu_gib * 1024)
    return json.dumps(pod)


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def _in(key: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}


def _rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _table(rows: Sequence[dict[str, Any]]) -> str:
    mixes = (f"{mix}, CPU µs" for mix in _DECISIONS)
    lines = [
        f"| nodes | pods | {' | '.join(mixes)} | start, s | peak RSS, MiB |",
        "|---" * (len(_DECISIONS) + 4) + "|",
    ]
    for row in rows:
        cells = [row["nodes"], row["pods"], *row["mixes"].values(), row["first_decision_s"], row["rss_mib"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
