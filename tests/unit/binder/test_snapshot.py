"""Questions that begin with "if": what is supposed counts until it is taken back."""

import numpy as np

from berth.contract.ids import PodUid
from binder.engine.decision import Placement
from binder.pod.demand import parse_demand
from tests.fakes.cluster import Json, cluster_of, resident, sized
from tests.fakes.objects import KEYS, pod

NODES = ("a0", "b0", "c0")


def of_one_controller(one: Json) -> Json:
    one["metadata"]["ownerReferences"] = [{"uid": "rs", "controller": True}]
    return one


def test_a_question_spreads_what_it_supposes() -> None:
    first = of_one_controller(resident("r0", "a0", 1, annotations={KEYS.model_id: None}))
    cluster = cluster_of(*(sized(name, 16) for name in NODES), pods=(first,))
    mirror = cluster.snapshot()
    decider = cluster.decider_over(mirror)
    while not mirror.follow(most=100):
        pass
    demand = parse_demand(of_one_controller(pod("next", annotations={KEYS.model_id: None})), KEYS)

    def placed() -> Placement:
        outcome = decider.decide(demand)
        assert isinstance(outcome, Placement)
        return outcome

    nodes = list[str]()
    for _ in range(2):
        nodes.append(placed().node)
        mirror.add(demand, placed().node, placed().gpu)
    assert sorted(nodes) == ["b0", "c0"]
    with mirror.without([PodUid("r0")]):
        assert placed().node == "a0"
    mirror.revert()
    assert placed().node != "a0"
    assert np.isfinite(decider.scores(demand)).all()
