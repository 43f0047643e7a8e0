"""Learns what GPUs are worth from what is requested; in the background, one problem at a time."""

import asyncio

from berth.runtime.tasks import in_thread
from binder.engine.cluster import Cluster
from binder.engine.dual_prices import price
from binder.engine.score import LeastFragmentation, Strategy
from binder.pod.demand import Demand


class PriceLearner:
    """Does nothing for a strategy without prices."""

    def __init__(self, cluster: Cluster, strategy: Strategy) -> None:
        self._cluster = cluster
        self._strategy = strategy if isinstance(strategy, LeastFragmentation) else None
        self._learning: asyncio.Task[None] | None = None

    def note(self, demand: Demand) -> None:
        """A pod has come, once for each."""
        strategy = self._strategy
        if strategy is None or not strategy.demand_history.note(demand.shape):
            return
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._learn(strategy), name="prices")

    async def _learn(self, strategy: LeastFragmentation) -> None:
        self._cluster.decider.refresh()
        problem = strategy.demand_history.pricing_problem(self._cluster.decider.table)
        strategy.learn(await in_thread(price, problem))

    async def abandon(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)
