"""One decision: a pod in, a node and its GPUs or the reasons out. Pure and synchronous.

What the pod's owner prefers comes first, then that replicas are spread, then the strategy, then a fixed order, so
that equal cases are always decided alike.
"""

from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import NodeName, PodUid
from binder.cache.cluster_facts import ClusterFacts
from binder.cache.column import Ints
from binder.cache.table import Floats, NodeTable
from binder.engine.rank import Ranking, Rankings
from binder.engine.replica_spread import replicas_nearby
from binder.engine.score import Strategy, best_gpus, waits
from binder.pod.demand import Demand
from binder.rules.gpu import gpu_fit
from binder.rules.model_id import rows_with_replica
from binder.rules.registry import FITS, RULES, Codes, Registry, first_failing, sum_of
from binder.rules.report import NoNodeReport
from binder.rules.rule import Context, Pods, Reason, ShapeQuery


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pod goes."""

    node: NodeName
    gpu: GpuChoice


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nowhere. `codes`: for each row of the table the first rule that it fails; `because`: what no
    node can help."""

    codes: Codes
    because: Reason | None = None

    def counts(self, decider: "Decider") -> Counter[str]:
        """How many nodes refuse for each reason."""
        return decider.rules.counts(self.codes[decider.table.live[: len(self.codes)]])


class Nodes(Protocol):
    """The nodes to decide over, as they are (`LiveNodes`) or would be (`ClusterSnapshot`)."""

    @property
    def table(self) -> NodeTable: ...

    @property
    def pods(self) -> Pods: ...

    def is_claimed(self, namespace: str, claim: str) -> bool: ...

    def refresh(self, *, most: int | None = None) -> None:
        """Take over what has changed, of `most` nodes."""

    def without(self, uids: Collection[PodUid]) -> AbstractContextManager[None]:
        """As if these pods and their models were not there. For a question, never over an await."""


class Decider:
    """Decides over all nodes."""

    def __init__(
        self, nodes: Nodes, facts: ClusterFacts, strategy: Strategy, *, rules: Registry = RULES
    ) -> None:
        self._nodes, self.rules, self.state = nodes, rules, facts.state
        self.table = nodes.table
        self.context = Context(nodes.table, facts, nodes.pods, nodes.is_claimed)
        self._strategy, self._rankings = strategy, Rankings(strategy, rules)

    def decide(self, demand: Demand) -> Placement | Refusal:
        """Choose among all nodes and their GPUs."""
        self.refresh()
        if because := self.because(demand):
            return Refusal(self._all_refuse(because, len(self.table)), because)
        ranking = self._ranking(demand)
        codes = self._codes(ranking, demand)
        row = self._best(ranking, codes, demand)
        return Refusal(codes) if row is None else self._placement(demand, row)

    def codes(self, demand: Demand) -> Codes:
        """For each row of the table the first rule that it fails."""
        self.refresh()
        if because := self.because(demand):
            return self._all_refuse(because, len(self.table))
        return self._codes(self._ranking(demand), demand)

    def codes_on(self, demand: Demand, rows: NDArray[np.intp]) -> Codes:
        """For each of some rows the first rule that it fails: what `codes` says, without a look at the
        other nodes where no rule requires one."""
        self.refresh()
        if because := self.because(demand):
            return self._all_refuse(because, len(rows))
        codes = self.rules.shape(ShapeQuery(self.table, demand.shape, rows))
        pairs = ((code, fails[rows]) for code, fails in self.rules.pairs(self.context, demand))
        return first_failing(len(rows), pairs, codes)

    def scores(self, demand: Demand) -> Floats:
        """The strategy's figure for each row, the larger the better; -inf where the pod does not fit
        by its shape alone."""
        self.refresh()
        return self._ranking(demand).score

    def place_on(self, demand: Demand, node: NodeName) -> Placement | Reason:
        """The best GPUs of one node, or why it does not take the pod."""
        self.refresh()
        row = self.table.row_of.get(node)
        if row is None:
            return Reason(NoNodeReport.name, f"node {node} is not known")
        code = int(self.codes_on(demand, np.array([row]))[0])
        return Reason(self.rules.rule(code).name) if code != FITS else self._placement(demand, row)

    def without(self, uids: Collection[PodUid]) -> AbstractContextManager[None]:
        """As if these pods and their models were not there. For a question, never over an await."""
        return self._nodes.without(uids)

    def refresh(self, *, most: int | None = None) -> None:
        """Take over what has changed, of `most` nodes."""
        self._nodes.refresh(most=most)

    def because(self, demand: Demand) -> Reason | None:
        """What no node can help."""
        return self.rules.refuses(self.context, demand)

    def _all_refuse(self, because: Reason, rows: int) -> Codes:
        return np.full(rows, self.rules.codes[because.rule], np.int8)

    def _ranking(self, demand: Demand) -> Ranking:
        return self._rankings.of(demand.shape, self.table, awaited=self._is_awaited(demand))

    def _is_awaited(self, demand: Demand) -> bool:
        """No other replica of its model has a node: if there are requests for it, they wait for this one."""
        if demand.model.model_id is not None:
            return not rows_with_replica(self.table, demand)
        return not self.context.pods.owned(demand.model.ref.namespace, demand.owner)

    def _codes(self, ranking: Ranking, demand: Demand) -> Codes:
        """The shape's codes, and what depends on who the pod is and on the time."""
        more = list(self.rules.pairs(self.context, demand))
        return first_failing(len(self.table), more, ranking.codes) if more else ranking.codes

    def _best(self, ranking: Ranking, codes: Codes, demand: Demand) -> int | None:
        # A shape's own codes are in its score already.
        score = ranking.score if codes is ranking.codes else np.where(codes == FITS, ranking.score, -np.inf)
        if not len(score):
            return None
        preferred = _together(ranking.preference, self.rules.preference(self.context, demand))
        if preferred is not None:
            among = np.where(score > -np.inf, preferred, -np.inf)
            score = np.where(among == among.max(), score, -np.inf)
        for better in self.rules.favoured(self.context, demand):
            if (score[better] > -np.inf).any():
                score = np.where(better, score, -np.inf)
        beside = replicas_nearby(self.context, demand, among=score > -np.inf)
        if beside is not None:
            score = np.where(beside == beside.min(), score, -np.inf)
        row = int(score.argmax())
        return None if score[row] == -np.inf else row

    def _placement(self, demand: Demand, row: int) -> Placement:
        table, shape, rows = self.table, demand.shape, np.array([row])
        gpus = gpu_fit(ShapeQuery(table, shape, rows))
        gains = self._strategy.gains(table, shape, rows, gpus.after)
        cost = waits(table, self._strategy, rows, awaited=self._is_awaited(demand))
        if cost is not None:
            gains = gains - cost
        slots = best_gpus(gains[0], gpus.fits[0], gpus.after[0], shape.gpu_count)
        chosen = [table.view(row).gpus[slot] for slot in slots]
        first, *others = [GpuRef(gpu.uuid, gpu.index) for gpu in chosen]
        choice = GpuChoice(first.uuid, first.index, shape.request_bytes, tuple(others))
        return Placement(table.view(row).facts.name, choice)


def _together(one: Ints | None, other: Floats | None) -> Floats | None:
    return sum_of(
        figure for figure in (None if one is None else one.astype(float), other) if figure is not None
    )
