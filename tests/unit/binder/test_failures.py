"""What the owners of placed pods are told when their node or GPU is in trouble."""

from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from binder.cache.state import ClusterState
from binder.loop.failures import PlacementFailures
from tests.fakes.binder import Events
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

N1 = NodeName("n1")
PLACED = pod("p1", mem="12Gi", on="n1", choice=GpuChoice(GpuUuid("GPU-a"), 0, 12 * GIB))
CASES: dict[str, tuple[Any, str, str]] = {
    "report deleted": (node(), "NodeReportGone", "n1"),
    "GPU off the bus": (node(says=report(gpu("GPU-b"))), "GPULost", "GPU-a"),
    "GPU sick": (node(says=report(gpu(healthy=False, reason="Xid 79"))), "GPUUnhealthy", "Xid 79"),
    "GPU smaller": (node(says=report(gpu(total=10 * GIB))), "GPUOvercommitted", "2 GiB over"),
}


def world() -> tuple[ClusterState, Events, PlacementFailures]:
    state, events = ClusterState(KEYS, clock=lambda: 0.0), Events()
    state.set_node(node(says=report()))
    state.set_pod(PLACED)
    return state, events, PlacementFailures(state, events)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", sorted(CASES))
def test_each_a_failure_is_reported_once_and_again_when_it_comes_back(case: str) -> None:
    after, reason, detail = CASES[case]
    state, events, failures = world()
    for _ in range(2):
        state.set_node(after)
        for _ in range(2):
            failures.observe(N1)
            failures.report()
        state.set_node(node(says=report()))
        failures.observe(N1)
        failures.report()
    assert [said[1] for said in events.said] == [reason, reason]
    assert detail in events.said[0][2]


def test_a_node_that_is_gone() -> None:
    state, events, failures = world()
    state.remove_node(N1)
    failures.observe(N1)
    failures.report()
    assert [said[1] for said in events.said] == ["NodeGone"]
