"""One decision: a pod in, a node and its GPUs or the reasons out. Pure and synchronous.

What the pod's owner prefers comes first, then that replicas are spread, then the strategy, then a fixed order, so
that equal cases are always decided alike.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import NodeName, PodUid
from berth.runtime.logs import fields
from binder.cache.state import ClusterState
from binder.cache.table import Bools, Floats, Ints, NodeTable
from binder.engine.rank import Ranking, Rankings
from binder.engine.score import Strategy, best_gpus, waits
from binder.pod.demand import Demand
from binder.pod.selectors import Labels
from binder.rules.filters import (
    CODE,
    FITS,
    KIND,
    Codes,
    affinity_mask,
    code_misfits,
    first_failing,
    gpu_fit,
    shape_codes,
)
from binder.rules.node_selection import tolerates_taints
from binder.rules.reasons import Kind, Reason
from binder.rules.topology import NodePolicy, Pods, Surroundings, crowded, misfits, wishes
from binder.rules.volumes import Volumes

log = logging.getLogger(__name__)

_ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - the API's wildcard


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

    def counts(self, table: NodeTable) -> Counter[Kind]:
        """How many nodes refuse for each reason."""
        numbers = np.bincount(self.codes[table.live[: len(self.codes)]], minlength=FITS + 1)
        return Counter({KIND[code]: int(n) for code, n in enumerate(numbers) if n and code != FITS})


class Decider:
    """Decides over all nodes of a state, whose one decider it is. `excluded`: nodes that a pod must not go to for now;
    `quarantined`: why it must go to none."""

    def __init__(
        self,
        state: ClusterState,
        strategy: Strategy,
        *,
        clock: Callable[[], float],
        volumes: Volumes | None = None,
        namespaces: Mapping[str, Labels] | None = None,
        excluded: Callable[[Demand], Iterable[NodeName]] = lambda _: (),
        quarantined: Callable[[Demand], str] = lambda _: "",
        pods: Pods | None = None,
        table: NodeTable | None = None,
    ) -> None:
        self.state, self.table = state, NodeTable() if table is None else table
        self.volumes = volumes or Volumes()
        self._strategy, self._rankings = strategy, Rankings(strategy)
        self._clock, self._excluded, self._quarantined = clock, excluded, quarantined
        for view in state.views():
            self.table.put(view)
        self._around = Surroundings(pods or state.pods, namespaces if namespaces is not None else {})

    def decide(self, demand: Demand) -> Placement | Refusal:
        """Choose among all nodes and their GPUs."""
        self.refresh()
        if because := self.because(demand):
            return Refusal(np.full(len(self.table), CODE[because.kind], np.int8), because)
        ranking = self._ranking(demand)
        codes = self._codes(ranking, demand)
        row = self._best(ranking, codes, demand)
        return Refusal(codes) if row is None else self._placement(demand, row)

    def codes(self, demand: Demand) -> Codes:
        """For each row of the table the first rule that it fails."""
        self.refresh()
        if because := self.because(demand):
            return np.full(len(self.table), CODE[because.kind], np.int8)
        return self._codes(self._ranking(demand), demand)

    def codes_on(self, demand: Demand, rows: NDArray[np.intp]) -> Codes:
        """For each of some rows the first rule that it fails: what `codes` says, without a look at the
        other nodes where no rule asks for one."""
        self.refresh()
        if because := self.because(demand):
            return np.full(len(rows), CODE[because.kind], np.int8)
        codes = shape_codes(self.table, demand.shape, rows)
        return first_failing(len(rows), [(kind, fails[rows]) for kind, fails in self._misfits(demand)], codes)

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
            return Reason(Kind.NO_REPORT, f"node {node} is not known")
        code = int(self.codes_on(demand, np.array([row]))[0])
        return Reason(KIND[code]) if code != FITS else self._placement(demand, row)

    @contextmanager
    def without(self, uids: Collection[PodUid]) -> Iterator[None]:
        """As if these pods and their models were not there. For a question, never over an await.

        The table is in step with the state before and after: it tells what is eased by comparing, and
        must compare what is with what was.
        """
        if not uids:
            yield
            return
        self.refresh()
        try:
            with self.state.without(uids):
                yield
        finally:
            self.refresh()

    def refresh(self, *, most: int | None = None) -> None:
        """Take over what has changed in the state, of `most` nodes."""
        for name in sorted(self.state.take_touched(most)):  # rows in one order, whatever the sets' is
            try:
                self._take(name)
            except Exception as error:  # one node must not hide what has changed on the others
                log.error("node left out", extra=fields(node=name), exc_info=error)
                self.table.drop(name)

    def _take(self, name: NodeName) -> None:
        view = self.state.find(name)
        if view is None:
            self.table.drop(name)
        else:
            self.table.put(view, hypothetical=self.state.hides)

    def because(self, demand: Demand) -> Reason | None:
        """What no node can help."""
        if demand.unsupported is not None:
            return Reason(Kind.UNSUPPORTED, demand.unsupported)
        if why := self._quarantined(demand):
            return Reason(Kind.QUARANTINED, why)
        if not demand.claims:
            return None
        if because := self.volumes.refusal(demand):
            return because
        for claim in self.volumes.exclusive(demand):
            if self.is_claimed(demand.model.ref.namespace, claim):
                return Reason(Kind.VOLUME_IN_USE, f"claim {claim!r} is ReadWriteOncePod and in use")
        return None

    def labels_of(self, namespace: str) -> Labels:
        return self._around.labels_of(namespace)

    def is_claimed(self, namespace: str, claim: str) -> bool:
        """A pod that has a node mounts this volume claim."""
        return bool(self.state.claims[namespace, claim])

    def _ranking(self, demand: Demand) -> Ranking:
        return self._rankings.of(demand.shape, self.table, awaited=self._is_awaited(demand))

    def _is_awaited(self, demand: Demand) -> bool:
        """No other replica of its model has a node: if there are requests for it, they wait for this one."""
        if demand.model.model_id is not None:
            return not self.model_rows(demand)
        return not self._around.pods.owned(demand.model.ref.namespace, demand.owner)

    def _codes(self, ranking: Ranking, demand: Demand) -> Codes:
        """The shape's codes, and what depends on who the pod is and on the time."""
        more = list(self._misfits(demand))
        return first_failing(len(self.table), more, ranking.codes) if more else ranking.codes

    def _misfits(self, demand: Demand) -> Iterator[tuple[Kind, Bools]]:
        table = self.table
        stale = table.deadline <= self._clock()
        if stale.any():
            yield Kind.STALE, stale
        if rows := self.model_rows(demand):
            yield Kind.MODEL_ON_NODE, self._mask(rows)
        if rows := self.excluded_rows(demand):
            yield Kind.EXCLUDED, self._mask(rows)
        yield from code_misfits(table, demand)
        if rows := self.port_rows(demand):
            yield Kind.HOST_PORT, self._mask(rows)
        if demand.claims:
            yield from self.volumes.misfits(table, demand)
        yield from misfits(table, self._around, demand, self._policy(demand))

    def model_rows(self, demand: Demand) -> list[int]:
        """Where the pod's model is already."""
        model = demand.model
        return (
            []
            if model.model_id is None
            else self.table.rows_with_model((model.ref.namespace, model.model_id))
        )

    def excluded_rows(self, demand: Demand) -> list[int]:
        """Where the pod must not go for now."""
        return [self.table.row_of[n] for n in self._excluded(demand) if n in self.table.row_of]

    def port_rows(self, demand: Demand) -> list[int]:
        """Where one of the pod's host ports is taken."""
        return sorted({row for port in demand.host_ports for row in self._rows_with(port)})

    def _rows_with(self, port: tuple[str, str, int]) -> list[int]:
        """Nodes where the host port is taken on the same address or on all."""
        address, protocol, number = port
        rows = self.table.rows_with_port(protocol, number)
        if address == _ANY_ADDRESS:
            return rows
        clashing = {(address, protocol, number), (_ANY_ADDRESS, protocol, number)}
        return [row for row in rows if clashing & self.table.view(row).host_ports]

    def _policy(self, demand: Demand) -> NodePolicy:
        table, shape = self.table, demand.shape
        return NodePolicy(
            affinity=lambda: affinity_mask(table, shape),
            taints=lambda: tolerates_taints(table, shape.tolerations, table.all_rows),
        )

    def _best(self, ranking: Ranking, codes: Codes, demand: Demand) -> int | None:
        # A shape's own codes are in its score already.
        score = ranking.score if codes is ranking.codes else np.where(codes == FITS, ranking.score, -np.inf)
        if not len(score):
            return None
        preferred = _sum_of(ranking.wishes, wishes(self.table, self._around, demand))
        if preferred is not None:
            among = np.where(score > -np.inf, preferred, -np.inf)
            score = np.where(among == among.max(), score, -np.inf)
        if demand.has_code:
            # Where the namespace's code is already, it takes the node from nobody.
            own = self.table.coders.is_one_of((demand.model.ref.namespace,), self.table.all_rows)
            if (score[own] > -np.inf).any():
                score = np.where(own, score, -np.inf)
        crowding = crowded(self.table, self._around, demand, among=score > -np.inf)
        if crowding is not None:
            score = np.where(crowding == crowding.min(), score, -np.inf)
        row = int(score.argmax())
        return None if score[row] == -np.inf else row

    def _placement(self, demand: Demand, row: int) -> Placement:
        table, shape, rows = self.table, demand.shape, np.array([row])
        gpus = gpu_fit(table, shape, rows)
        gains = self._strategy.gains(table, shape, rows, gpus.after)
        cost = waits(table, self._strategy, rows, awaited=self._is_awaited(demand))
        if cost is not None:
            gains = gains - cost
        slots = best_gpus(gains[0], gpus.fits[0], gpus.after[0], shape.gpu_count)
        chosen = [table.view(row).gpus[slot] for slot in slots]
        first, *others = [GpuRef(gpu.uuid, gpu.index) for gpu in chosen]
        choice = GpuChoice(first.uuid, first.index, shape.request_bytes, tuple(others))
        return Placement(table.view(row).facts.name, choice)

    def _mask(self, rows: list[int]) -> Bools:
        mask = np.zeros(len(self.table), np.bool_)
        mask[rows] = True
        return mask


def _sum_of(one: Ints | None, other: Floats | None) -> Floats | None:
    if one is None or other is None:
        return other if one is None else one.astype(float)
    return one + other
