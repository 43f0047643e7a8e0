"""Which node a pod gets: the owner's preferences, then the strategy, and always the same one."""

from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from binder.engine.decision import Placement
from binder.engine.score import make_strategy
from tests.fakes.cluster import cluster_of, decide, sized
from tests.fakes.objects import GIB, pod


def choose(strategy: str, asks: dict[str, Any], *nodes: dict[str, Any]) -> Placement:
    found = decide(cluster_of(*nodes, strategy=make_strategy(strategy, np.random.default_rng(1))), asks)
    assert isinstance(found, Placement)
    return found


@pytest.mark.parametrize(
    ("strategy", "node", "slot"), [("binpack", "n2", 1), ("spread", "n2", 0)], ids=["binpack", "spread"]
)
def test_binpack_takes_the_fullest_and_spread_the_emptiest(strategy: str, node: str, slot: int) -> None:
    found = choose(strategy, pod(), sized("n1", 16), sized("n2", 24, 2))
    assert found == Placement(node, GpuChoice(GpuUuid(f"{node}-{slot}"), slot, GIB))  # type: ignore[arg-type]


def test_equal_cases_are_always_decided_alike() -> None:
    nodes = (sized("n2", 16, 16), sized("n1", 16))
    assert choose("binpack", pod(), *nodes) == choose("binpack", pod(), *nodes)


def test_what_the_owner_prefers_comes_before_the_strategy() -> None:
    nodes = (
        sized("n1", 2, taints=[{"key": "k", "effect": "PreferNoSchedule"}]),
        sized("n2", 16),
        sized("n3", 16, labels={"zone": "a"}),
    )
    assert choose("binpack", pod(), *nodes).node == "n2"
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    weighted = {"weight": 5, "preference": zone}
    preferred = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}
    assert choose("binpack", pod(affinity=preferred), *nodes).node == "n3"
