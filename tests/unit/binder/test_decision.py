"""Which node a pod gets: the owner's preferences, then the strategy, and always the same one."""

from typing import Any

import numpy as np

from binder.engine.decision import Placement
from binder.engine.score import make_strategy
from tests.fakes.cluster import cluster_of, decide, sized
from tests.fakes.objects import pod


def choose(asks: dict[str, Any], *nodes: dict[str, Any]) -> Placement:
    found = decide(cluster_of(*nodes, strategy=make_strategy("binpack", np.random.default_rng(1))), asks)
    assert isinstance(found, Placement)
    return found


def test_equal_cases_are_always_decided_alike() -> None:
    nodes = (sized("n2", 16, 16), sized("n1", 16))
    assert choose(pod(), *nodes) == choose(pod(), *nodes)


def test_what_the_owner_prefers_comes_before_the_strategy() -> None:
    nodes = (
        sized("n1", 2, taints=[{"key": "k", "effect": "PreferNoSchedule"}]),
        sized("n2", 16),
        sized("n3", 16, labels={"zone": "a"}),
    )
    assert choose(pod(), *nodes).node == "n2"
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    weighted = {"weight": 5, "preference": zone}
    preferred = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}
    assert choose(pod(affinity=preferred), *nodes).node == "n3"
