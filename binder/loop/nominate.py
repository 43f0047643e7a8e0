"""Nominations: which pod waits for which place, and for whose end.

While a pod waits for others to go, its place is reserved in its name (`ClusterState.nominate`), so that no pod of the same
or a lower priority slips in. From the first eviction on the pod waits for this place and looks for no other: as long as its
victims are on their way out, and NOMINATION_SECONDS for those that may not go after all. The next leader takes the place
over from the pod's `status.nominatedNodeName`. What is decided here `preempt` carries out.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from berth.contract.ids import NodeName, PodUid
from berth.contract.pod import PodRef
from berth.runtime.backoff import Backoff
from binder.cache.reservations import Reservation
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement, Refusal
from binder.engine.preemption import (
    MOST_QUESTIONS,
    PreemptionCandidate,
    Questions,
    find_candidate,
    names,
    promising,
    ranked,
    search,
)
from binder.engine.victims import Victims
from binder.loop.requeue import ANY, NodeToStatus, QueueingHint
from binder.loop.token_bucket import TokenBucket
from binder.pod.demand import Demand
from binder.rules.registry import Codes

log = logging.getLogger(__name__)

NOMINATION_SECONDS = 300.0
# A pod whose eviction was refused is no victim for so long.
_BARRED_SECONDS = 60.0
# Questions of searches that nothing has called for, for all pods together: a part of one core at worst.
_REPEATED_A_SECOND, _REPEATED_AT_ONCE = 250.0, 1024
_OVER = float("-inf")
_MOST_WAITING = 256
_TICK_SECONDS = 1.0


def _retries() -> Backoff:
    return Backoff(initial_seconds=1.0, cap_seconds=30.0)


@dataclass(slots=True)
class Nomination:
    """`to_go`: the victims that are yet to be evicted; `granted`: all of them may be, and the pod's status says for which
    node it waits; `is_reported`: the status may name the node."""

    demand: Demand
    candidate: PreemptionCandidate
    until: float
    to_go: list[Reservation]
    granted: bool = False
    is_reported: bool = False
    next_try: float = 0.0
    retries: Backoff = field(default_factory=_retries)

    @property
    def node(self) -> NodeName:
        return self.candidate.placement.node


class Nominator:
    """Each method is one step, without an await and without a write. `wake` is set when there is something to write."""

    def __init__(self, cluster: Cluster, *, clock: Callable[[], float]) -> None:
        self._cluster, self._clock = cluster, clock
        self.wake = asyncio.Event()
        self.victims = Victims(cluster.state, cluster.decider.table, cluster.budgets)
        self._waiting: dict[PodUid, Nomination] = {}
        self._lost: set[PodUid] = set()
        # Pods whose status names a node that they do not wait for any more.
        self.to_clear: dict[PodUid, PodRef] = {}
        # Pods for which an earlier leader has begun to preempt others.
        self._to_adopt: dict[PodUid, Demand] = {}
        self._was_leader = False
        self._repeats = TokenBucket(per_second=_REPEATED_A_SECOND, most=_REPEATED_AT_ONCE, clock=clock)
        # Pods whose eviction was refused: until when they are no victims. Known for as long as they live.
        self._barred: dict[PodUid, float] = {}

    def nominations(self) -> list[Nomination]:
        """Those that stand."""
        return list(self._waiting.values())

    def stands(self, one: Nomination) -> bool:
        """The pod still waits for this place."""
        return self._waiting.get(one.demand.model.ref.uid) is one

    def refuse(self, one: Nomination, victim: Reservation) -> None:
        """The API server does not let one of the victims go: the pod looks for another place."""
        self._bar(victim, seconds=_BARRED_SECONDS)
        self.lose(one)

    def is_nominated(self, demand: Demand) -> bool:
        return demand.model.ref.uid in self._waiting

    def row_of(self, demand: Demand) -> int | None:
        """The node that the pod waits for, as a row."""
        known = self._waiting.get(demand.model.ref.uid)
        return None if known is None else self._cluster.decider.table.row_of.get(known.node)

    @property
    def has_lost(self) -> bool:
        return bool(self._lost)

    def take_lost(self) -> set[PodUid]:
        """Pods that have lost their place since the last call."""
        lost, self._lost = self._lost, set()
        return lost

    def aside(self, demand: Demand) -> list[PodUid]:
        """Whose reservations do not count for a pod: its own, and those of lower priority."""
        return [
            uid
            for uid, reservation in self._cluster.state.nominated().items()
            if uid == demand.model.ref.uid or reservation.priority < demand.priority
        ]

    def decide(self, demand: Demand) -> Placement | Refusal:
        """Decide, and assume what was decided."""
        state, decider = self._cluster.state, self._cluster.decider
        with decider.without(self.aside(demand)):
            outcome = decider.decide(demand)
            if isinstance(outcome, Placement):
                state.assume(demand, outcome.node, outcome.gpu)
        if isinstance(outcome, Placement):
            self._forget(demand.model.ref.uid)
            self._displace(outcome.node, demand)
        else:
            self._keep_waiting(demand)
        return outcome

    def may_preempt(self, demand: Demand, rows: NDArray[np.intp], codes: Codes) -> bool:
        """Whether it is worth to look on these rows for pods that could go. A pod that waits for no victim
        any more must look anew. `codes`: of all rows."""
        known = self._waiting.get(demand.model.ref.uid)
        if known is not None:
            return not self._may_come_free(known)
        found = promising(self._cluster.decider, self.victims, demand, codes, rows)
        return demand.preempts and next(found, None) is not None

    def preempt(
        self, demand: Demand, refusal: Refusal, status: NodeToStatus, hint: QueueingHint | None = ANY
    ) -> PreemptionCandidate | None:
        """Look for pods of lower priority that can go, and begin to end them: on nodes that have become better since
        `status` was searched or were not asked then, on all of them where it was not. Also returned again while the pod
        waits for those that are on their way out.

        `hint`: why it is tried. Without a change the search goes on where it was left off, or begins anew, because not
        everything that helps is foreseen; as often as there is time for it.
        """
        known = self._waiting.get(demand.model.ref.uid)
        if known is not None:
            return known.candidate
        if not demand.preempts or refusal.because is not None or len(self._waiting) >= _MOST_WAITING:
            return None
        is_called_for = hint is not None and hint.is_change
        most = MOST_QUESTIONS if is_called_for else min(MOST_QUESTIONS, self._repeats.left())
        if not most:
            return None
        if hint is None and not len(status.unasked):
            status.restart_search()
        questions = Questions(self._cluster.decider, demand, most=most)
        candidate = self._search(demand, refusal, status, questions)
        if not is_called_for:
            self._repeats.spend(questions.asked)
        if candidate is not None:
            self._nominate(demand, candidate, to_go=candidate.victims)
        return candidate

    def _search(
        self, demand: Demand, refusal: Refusal, status: NodeToStatus, questions: Questions
    ) -> PreemptionCandidate | None:
        decider, table = self._cluster.decider, self._cluster.decider.table
        rows = ranked(decider, self.victims, demand, refusal.codes, status.to_search(table))
        left = iter(rows.tolist())
        nodes = names(decider, self.victims, demand, refusal.codes, left)
        with decider.without(self.aside(demand) if len(rows) else ()):
            candidate = search(
                questions, nodes, may_go=self._may_go_for(demand), budgets=self._cluster.budgets
            )
        status.note_search(table.clock, np.fromiter(left, np.intp), questions.met)
        return candidate

    def note_nominated(self, demand: Demand, *, is_new: bool) -> None:
        """An earlier leader preempts others for the pod, or does not any more. A standby has known most pods for long
        when they are nominated; a leader hears in this way of its own nominations only."""
        if not is_new and self._was_leader:
            return
        if demand.nominated:
            self._to_adopt[demand.model.ref.uid] = demand
        else:
            self.forget_nominated(demand.model.ref.uid)

    def forget_nominated(self, uid: PodUid) -> None:
        self._to_adopt.pop(uid, None)

    def adopt_all(self) -> None:
        """Take over what an earlier leader has begun."""
        self._was_leader = True
        for demand in self._to_adopt.values():
            self.adopt(demand)
        self._to_adopt.clear()

    def adopt(self, demand: Demand) -> None:
        """Take over the place for which the pod waits since an earlier leader, if it can still have it:
        pods that terminate there already count as its victims."""
        uid, node, decider = demand.model.ref.uid, demand.nominated, self._cluster.decider
        if not node or uid in self._waiting or self._cluster.state.has_place(uid):
            return
        reservations = self._cluster.state.reservations_on(node)
        going = [
            h for h in reservations if h.has_model and h.priority < demand.priority and self._is_going(h)
        ]
        with decider.without([*self.aside(demand), *(reservation.ref.uid for reservation in going)]):
            outcome = decider.place_on(demand, node)
            found = (
                PreemptionCandidate(outcome, ())
                if isinstance(outcome, Placement)
                else self._find(demand, [node])
            )
        if found is None:
            self._take_back(demand)
        else:
            to_go, everybody = found.victims, (*going, *found.victims)
            self._nominate(demand, PreemptionCandidate(found.placement, everybody), to_go=to_go)

    def give_up(self, uid: PodUid) -> None:
        """The pod is gone or has a place."""
        self._forget(uid)
        self._cluster.state.withdraw(uid)

    def expire(self) -> None:
        """Release places for which no victim terminates, and retry what has failed."""
        now = self._clock()
        for nomination in list(self._waiting.values()):
            if nomination.until <= now and not self._is_victim_leaving(nomination):
                self.lose(nomination)
                self._bar(*nomination.to_go, seconds=NOMINATION_SECONDS)
            elif nomination.to_go and nomination.next_try <= now:
                self.wake.set()
        if self.to_clear:
            self.wake.set()
        for uid, until in list(self._barred.items()):
            if (reservation := self._cluster.state.reservation_of(uid)) is None:
                del self._barred[uid]
            elif _OVER < until <= now:
                self._barred[uid] = _OVER
                self._cluster.decider.table.ease(reservation.node)

    def _find(self, demand: Demand, nodes: list[NodeName]) -> PreemptionCandidate | None:
        return find_candidate(
            self._cluster.decider,
            demand,
            nodes,
            may_go=self._may_go_for(demand),
            budgets=self._cluster.budgets,
        )

    def _may_go_for(self, demand: Demand) -> Callable[[Reservation], bool]:
        return lambda h: h.priority < demand.priority and not h.deleting and not self._is_barred(h)

    def _is_barred(self, victim: Reservation) -> bool:
        return self._barred.get(victim.ref.uid, _OVER) > self._clock()

    def _keep_waiting(self, demand: Demand) -> None:
        """Keep the place reserved, for as long as it can still become free."""
        known = self._waiting.get(demand.model.ref.uid)
        if known is None:
            return
        placement = self._place_of(known) if self._may_come_free(known) else None
        if placement is None:
            self.lose(known)
        else:
            known.candidate = PreemptionCandidate(placement, known.candidate.victims)
            self._cluster.state.nominate(demand, placement.node, placement.gpu)

    def _place_of(self, one: Nomination) -> Placement | None:
        """The place, once those who go have gone; None if something else is in the way by now."""
        uids = [*self.aside(one.demand), *(victim.ref.uid for victim in one.candidate.victims)]
        with self._cluster.decider.without(uids):
            outcome = self._cluster.decider.place_on(one.demand, one.node)
        return outcome if isinstance(outcome, Placement) else None

    def _displace(self, node: NodeName, demand: Demand) -> None:
        """Pods of lower priority that waited for a place that is taken now wait for another."""
        for one in list(self._waiting.values()):
            if (
                one.node == node
                and one.demand.priority < demand.priority
                and (uid := one.demand.model.ref.uid) in self._cluster.state.nominated()
            ):
                self._cluster.state.withdraw(uid)
                self._keep_waiting(one.demand)

    def _may_come_free(self, one: Nomination) -> bool:
        there = any(self._cluster.state.holds(victim.ref.uid) for victim in one.candidate.victims)
        return there and (self._clock() < one.until or self._is_victim_leaving(one))

    def _is_victim_leaving(self, one: Nomination) -> bool:
        reservations = (
            self._cluster.state.reservation_of(victim.ref.uid) for victim in one.candidate.victims
        )
        return any(reservation is not None and self._is_going(reservation) for reservation in reservations)

    def _is_going(self, reservation: Reservation) -> bool:
        """Being deleted, or gone but for its model."""
        return reservation.deleting or not self._cluster.state.has_place(reservation.ref.uid)

    def _bar(self, *victims: Reservation, seconds: float) -> None:
        for victim in victims:
            self._barred[victim.ref.uid] = self._clock() + seconds

    def lose(self, one: Nomination) -> None:
        """The pod waits for this place no more."""
        ref = one.demand.model.ref
        self.give_up(ref.uid)
        self._lost.add(ref.uid)
        if one.retries.failures:
            self._bar(one.to_go[0], seconds=NOMINATION_SECONDS)
        if one.is_reported:
            self._take_back(one.demand)

    def _take_back(self, demand: Demand) -> None:
        """Say in the pod's status that it waits for no node any more: cluster autoscalers take it for placed there."""
        self.to_clear[demand.model.ref.uid] = demand.model.ref
        self.wake.set()

    def _forget(self, uid: PodUid) -> None:
        self._waiting.pop(uid, None)
        self.to_clear.pop(uid, None)
        self._lost.discard(uid)

    def _nominate(
        self, demand: Demand, candidate: PreemptionCandidate, *, to_go: tuple[Reservation, ...]
    ) -> None:
        uid, placement = demand.model.ref.uid, candidate.placement
        self._forget(uid)
        until = self._clock() + NOMINATION_SECONDS
        granted = not to_go  # an earlier leader's work
        # A victim that was refused before goes first: if that fails again, no other has been evicted in vain.
        first = sorted(to_go, key=lambda victim: victim.ref.uid not in self._barred)
        self._waiting[uid] = Nomination(
            demand, candidate, until, first, granted, is_reported=demand.nominated is not None
        )
        self._cluster.state.nominate(demand, placement.node, placement.gpu)
        self._displace(placement.node, demand)
        self.wake.set()
