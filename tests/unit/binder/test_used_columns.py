"""Labels and resources have a column for as long as a node has them."""

import numpy as np

from berth.contract.ids import NodeName
from berth.kube.informer import Change, ChangeKind
from binder.engine.decision import Placement, Refusal
from binder.pod.demand import parse_demand
from tests.fakes.cluster import cluster_of, sized
from tests.fakes.objects import KEYS, gpu, node, pod, report


def test_a_label_or_resource_that_comes_to_a_node_counts_from_then_on() -> None:
    """binder H1: what no node has gets no column, for as long as that is so."""
    made = cluster_of(sized("n1", 80))
    asks = pod("p", nodeSelector={"new": "1"}, requests={"example.com/fpga": "2"})
    demand = parse_demand(asks, KEYS)
    assert isinstance(made.decider.decide(demand), Refusal)
    assert not made.decider.table.has_label("new")
    amounts = {"cpu": "4", "memory": "8Gi", "pods": "10", "example.com/fpga": "2"}
    new = node("new", says=report(gpu("new-0")), labels={"new": "1"}, allocatable=amounts)
    made.on_node(Change(ChangeKind.SET, new))
    made.decider.table.beat(NodeName("new"), np.inf)
    outcome = made.decider.decide(demand)
    assert isinstance(outcome, Placement)
    assert outcome.node == "new"
    made.on_node(Change(ChangeKind.GONE, new))
    assert isinstance(made.decider.decide(demand), Refusal)
    assert not made.decider.table.has_label("new")
