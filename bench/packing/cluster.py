"""A cluster that takes one task after another, by the binder's own state and decisions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.packing.fgd import FragmentationGradient
from bench.packing.trace import GPU_BYTES, KEYS, Task, demand
from berth.contract.ids import PodUid
from binder.cache.cluster_facts import ClusterFacts
from binder.cache.live_nodes import LiveNodes
from binder.cache.loading import EXPECTED_SECONDS
from binder.cache.state import ClusterState
from binder.engine.decision import Decider, Placement
from binder.engine.dual_prices import price
from binder.engine.score import LeastFragmentation, Strategy, make_strategy

FGD = "fgd"


def strategy_of(name: str, tasks: Sequence[Task], seed: int) -> Strategy:
    """One of the binder's, or the published one to compare with."""
    if name == FGD:
        return FragmentationGradient(tasks)
    return make_strategy(name, np.random.default_rng(seed))


class Packed:
    """`gpus`: how many there are, in GPUs of GPU_BYTES; `allocated`: how much of them is given out. `loading`: so many
    of the last tasks are still being loaded when the next one comes."""

    def __init__(self, nodes: list[dict[str, Any]], strategy: Strategy, *, loading: int = 0) -> None:
        self._now, self._pause = 0.0, EXPECTED_SECONDS / max(loading, 0.5)
        self._state = ClusterState(KEYS, clock=lambda: self._now)
        self._strategy = strategy
        self._decider = Decider(
            LiveNodes(self._state),
            ClusterFacts(state=self._state, clock=lambda: self._now),
            self._strategy,
        )
        for node in nodes:
            self._state.set_node(node)
            self._decider.table.beat(node["metadata"]["name"], np.inf)
        self.gpus = sum(gpu.total_bytes or 0 for view in self._state.views() for gpu in view.gpus) / GPU_BYTES
        self.allocated = 0.0

    def offer(self, task: Task, uid: str) -> bool:
        """Place the task if it fits; nothing waits."""
        self._now += self._pause
        self._state.expire_loads()
        asked = demand(task, uid)
        outcome = self._decider.decide(asked)
        self._learn(asked)
        if not isinstance(outcome, Placement):
            return False
        self._state.assume(asked, outcome.node, outcome.gpu)
        self.allocated += task.gpus
        return True

    def release(self, task: Task, uid: str) -> None:
        """The task has ended, and what it used is free."""
        self._state.forget(PodUid(uid))
        self.allocated -= task.gpus

    def _learn(self, asked: Any) -> None:
        """At once, where the binder does it in the background."""
        strategy = self._strategy
        if isinstance(strategy, LeastFragmentation) and strategy.demand_history.note(asked.shape):
            strategy.learn(price(strategy.demand_history.pricing_problem(self._decider.table)))
