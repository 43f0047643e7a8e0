"""Which of the nodes that fit a strategy takes."""

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from binder.engine.decision import Placement
from binder.engine.score import make_strategy
from tests.fakes.cluster import cluster_of, decide, sized
from tests.fakes.objects import GIB, pod


@pytest.mark.parametrize(("strategy", "slot"), [("binpack", 1), ("spread", 0)])
def test_binpack_takes_the_fullest_gpu_and_spread_the_emptiest(strategy: str, slot: int) -> None:
    nodes = (sized("n1", 16), sized("n2", 24, 2))
    found = decide(cluster_of(*nodes, strategy=make_strategy(strategy, np.random.default_rng(1))), pod())
    assert found == Placement(NodeName("n2"), GpuChoice(GpuUuid(f"n2-{slot}"), slot, GIB))
