"""Which reason a waiting pod's condition gives: whether one more node would help it. Pure.

Asked at each refusal, so that it follows what there is; what it takes to answer is done once for pods of one shape, and for
pods of one question now and then.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from berth.contract.ids import NodeName
from berth.contract.wait_reason import WaitReason
from binder.engine.cluster import Cluster
from binder.engine.decision import Refusal
from binder.pod.demand import Demand
from binder.rules.registry import FITS, RULES, Codes
from binder.rules.rule import NewNode, ShapeQuery

# Nodes of another pool: perhaps one that has no node yet or whose last one went before this binder began. Autoscalers look
# at these by themselves, in the templates of all pools.
_OTHER_POOL, _LARGER = RULES.by_new_node[NewNode.OTHER_POOL], RULES.by_new_node[NewNode.LARGER]
_MOST_ANSWERS = 1024
# What other pods have to do with it changes with each of them; so long an answer stands.
_BESIDE_SECONDS = 10.0
# Longer than the time between two tries of a pod.
_ASKED_SECONDS = 300.0
# Nodes that the mirror takes over at one look, some milliseconds; and kinds that are looked at closely.
_NODES_AT_ONCE, _MOST_KINDS = 256, 32
_T = TypeVar("_T")


class WaitReasons:
    """`of` is one step, without an await. `look` keeps in step what it needs; call it now and then."""

    def __init__(self, cluster: Cluster, *, clock: Callable[[], float]) -> None:
        self._cluster, self._kinds, self._clock = cluster, cluster.kinds, clock
        # By shape, and the state of the kinds that it was found for; by question, and until when it stands.
        self._by_shape: OrderedDict[Hashable, tuple[int, WaitReason]] = OrderedDict()
        self._by_question: OrderedDict[Hashable, tuple[float, WaitReason]] = OrderedDict()
        # Made while nothing is known yet, and followed for as long as it is asked.
        self._mirror, self._asked_until = cluster.snapshot(), float("-inf")
        self._over_mirror = cluster.decider_over(self._mirror)

    def look(self) -> None:
        """Mirror more of the nodes, where that was requested."""
        if self._clock() < self._asked_until:
            self._mirror.follow(most=_NODES_AT_ONCE)

    def of(self, demand: Demand, refusal: Refusal, *, is_nominated: bool = False) -> WaitReason:
        """`is_nominated`: other pods are evicted for it."""
        if is_nominated:
            return WaitReason.WAITING_FOR_CAPACITY
        if refusal.because is not None:
            return WaitReason.POD_REFUSED
        if not self._kinds:
            # What a first node would be like is unknown: a pool that begins with no node must be able to begin.
            return WaitReason.UNSCHEDULABLE
        self._kinds.refresh()
        alone = self._alone(demand)
        if alone is not WaitReason.UNSCHEDULABLE or not self._heeds_others(demand):
            return alone
        return self._with_one_more(demand)

    def _alone(self, demand: Demand) -> WaitReason:
        """As if there were no other pods."""
        if demand.claims:
            return _reason_of(self._codes(demand))
        clock = self._kinds.table.clock
        known = self._by_shape.get(demand.shape)
        if known is None or known[0] != clock:
            known = (clock, _reason_of(self._codes(demand)))
            _keep(self._by_shape, demand.shape, known)
        return known[1]

    def _codes(self, demand: Demand) -> Codes:
        """For each kind of node the first rule by which a fresh node of it refuses a pod, as far as that depends on the
        two alone."""
        table, decider = self._kinds.table, self._cluster.decider
        query = ShapeQuery(table, demand.shape, np.flatnonzero(table.live))
        return decider.rules.fresh(replace(decider.context, table=table), demand, query)

    def _heeds_others(self, demand: Demand) -> bool:
        """Rules between pods can keep it from a fresh node, too."""
        decider = self._cluster.decider
        return any(rule.concerns(decider.context, demand) for rule in decider.rules.neighbours)

    def _with_one_more(self, demand: Demand) -> WaitReason:
        known = self._by_question.get(demand.question)
        if known is None or known[0] <= self._clock():
            before = WaitReason.WAITING_FOR_CAPACITY if known is None else known[1]
            known = (self._clock() + _BESIDE_SECONDS, self._simulated(demand, before))
            _keep(self._by_question, demand.question, known)
        return known[1]

    def _simulated(self, demand: Demand, before: WaitReason) -> WaitReason:
        """By a decision's own rules, in the cluster with one more node of each kind. While the mirror is behind this is
        unknown, and the answer is what it was `before`: no new request for a node."""
        mirror, self._asked_until = self._mirror, self._clock() + _ASKED_SECONDS
        if not mirror.follow(most=_NODES_AT_ONCE):
            return before
        table, names = mirror.table, list[NodeName]()
        codes = self._codes(demand)
        fitting = [
            row
            for row, code in zip(np.flatnonzero(self._kinds.table.live), codes, strict=True)
            if code == FITS
        ]
        try:
            for row in fitting[:_MOST_KINDS]:
                fresh = self._kinds.table.view(int(row))
                names.append(fresh.facts.name)
                table.put(fresh, hypothetical=True)
                table.beat(fresh.facts.name, np.inf)
            rows = np.array([table.row_of[name] for name in names], np.intp)
            fits = bool((self._over_mirror.codes_on(demand, rows) == FITS).any())
        finally:
            for name in names:
                table.beat(name, -np.inf)
                table.drop(name)
        return WaitReason.UNSCHEDULABLE if fits else WaitReason.WAITING_FOR_CAPACITY


def _reason_of(codes: Codes) -> WaitReason:
    if (codes == FITS).any() or _OTHER_POOL[codes].all():
        return WaitReason.UNSCHEDULABLE
    return WaitReason.MODEL_TOO_LARGE if _LARGER[codes].any() else WaitReason.NODES_REFUSE_MODEL


def _keep(answers: "OrderedDict[Hashable, _T]", key: Hashable, answer: _T) -> None:
    answers[key] = answer
    answers.move_to_end(key)
    if len(answers) > _MOST_ANSWERS:
        answers.popitem(last=False)
