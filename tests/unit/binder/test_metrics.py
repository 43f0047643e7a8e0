"""What a scrape of the binder shows, and that the guide explains it."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import Cluster
from binder.loop.metrics import RESULTS, BinderMetrics
from binder.loop.queue import SchedulingQueue
from binder.pod.demand import parse_demand
from binder.rules.registry import RULES
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

GUIDE = (Path(__file__).parents[3] / "docs/operating.md").read_text()


def test_every_result_of_a_try_is_explained_in_the_guide() -> None:
    (line,) = re.findall(r"^\| `berth_binder_attempts_total\{result\}` \| (.*) \|$", GUIDE, re.MULTILINE)
    assert re.findall(r"\b(?:scheduled|unschedulable|invalid|error|broken)\b", line) == list(RESULTS)


def test_the_figures_of_a_scrape() -> None:
    registry, now = CollectorRegistry(), [0.0]
    metrics, queue = BinderMetrics(registry), SchedulingQueue(lambda: now[0])

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"berth_binder_{name}", labels)

    for result in RESULTS:
        assert value("attempts_total", result=result) == 0
    for name in RULES.codes:
        assert value("refusals_total", reason=name) == 0
    assert value("leader") == 0
    cluster = Cluster(KEYS)
    for one in (
        node("n1", says=report(gpu("a", other_use_bytes=GIB), gpu("b", index=1, other_use_bytes=3 * GIB))),
        node("n2", says=report(gpu(total=None))),
        node("n3"),
    ):
        cluster.on_node(Change(ChangeKind.SET, one))
    stale = pod("stale", on="n1", choice=GpuChoice(GpuUuid("b"), 1, GIB))
    cluster.on_pod(Change(ChangeKind.SET, stale))
    metrics.follow(queue, cluster.state, cluster.facts.quarantines)
    metrics.attempted("error")
    metrics.refused({"StaleNodeFacts": 3, "NoGPU": 1})
    metrics.refused({"StaleNodeFacts": 2})
    assert (value("attempts_total", result="error"), value("attempts_total", result="scheduled")) == (1, 0)
    assert value("refusals_total", reason="StaleNodeFacts") == 5
    assert value("refusals_total", reason="NoGPU") == 1
    assert value("node_free_bytes", node="n1") == 15 * GIB
    assert value("node_free_bytes", node="n2") is value("node_free_bytes", node="n3") is None
    assert [value("waiting_pods", queue=q) for q in ("ready", "parked", "gated")] == [0, 0, 0]
    queue.put(parse_demand(pod("new"), KEYS))
    queue.put(parse_demand(pod("gated", schedulingGates=[{"name": "g"}]), KEYS))
    for uid in ("p1", "p2"):
        queue.put(parse_demand(pod(uid, priority=1), KEYS))
        waiting = queue.pop()
        assert waiting is not None
        queue.hold(waiting)
    assert [value("waiting_pods", queue=q) for q in ("ready", "parked", "gated")] == [1, 2, 1]
    now[0] = 1.0
    assert [value("waiting_pods", queue=q) for q in ("ready", "parked", "gated")] == [3, 0, 1]
    assert (value("stale_models"), value("assumed_pods")) == (0, 0)
    cluster.on_pod(Change(ChangeKind.GONE, pod("stale", on="n1", choice="{")))
    demand = parse_demand(pod("assumed"), KEYS)
    cluster.state.assume(demand, NodeName("n1"), GpuChoice(GpuUuid("a"), 0, GIB))
    assert (value("stale_models"), value("assumed_pods")) == (1, 1)
    cluster.on_node(Change(ChangeKind.GONE, node("n1")))
    assert value("node_free_bytes", node="n1") is None
    with metrics.decision_seconds.time(), metrics.bind_seconds.time():
        pass
    assert (value("decision_seconds_count"), value("bind_seconds_count")) == (1, 1)
    for name in ("decision_seconds", "bind_seconds"):
        assert value(f"{name}_bucket", le="0.1") == 1
