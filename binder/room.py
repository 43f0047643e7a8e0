"""Preemption as it runs: who waits for which place, and the evictions that make it.

While a pod waits for others to go, its place is held in its name (`ClusterState.nominate`), so that no
pod of the same or a lower priority slips in. It gives its place back after NOMINATION_SECONDS at most.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from berth.kube.client import KubeClient
from berth.kube.errors import KubeError
from berth.kube.events import EventRecorder
from berth.runtime.logs import fields
from binder.cluster import Cluster
from binder.decision import Placement, Refusal
from binder.demand import Demand
from binder.evictions import evict, set_nominated_node
from binder.holders import Holder
from binder.preemption import Sacrifice, find_sacrifice

log = logging.getLogger(__name__)

NOMINATION_SECONDS = 300.0
_QUEUE_LIMIT = 256


@dataclass(frozen=True, slots=True)
class _Nomination:
    demand: Demand
    sacrifice: Sacrifice
    until: float


class RoomMaker:
    """`decide` and `make_room` are one step each, without an await; `run` writes."""

    def __init__(
        self, client: KubeClient, cluster: Cluster, events: EventRecorder, clock: Callable[[], float]
    ) -> None:
        self._client, self._cluster, self._events, self._clock = client, cluster, events, clock
        self._waiting: dict[PodUid, _Nomination] = {}
        self._jobs: asyncio.Queue[_Nomination] = asyncio.Queue(_QUEUE_LIMIT)

    def waits_for_room(self, demand: Demand) -> bool:
        return demand.model.ref.uid in self._waiting

    def decide(self, demand: Demand) -> Placement | Refusal:
        """Decide, and assume what was decided. The pod's own reservation is its to use; those of
        lower priority do not count."""
        state, uid = self._cluster.state, demand.model.ref.uid
        state.withdraw(uid)
        lower = [other for other, holder in state.nominated().items() if holder.priority < demand.priority]
        with state.without(lower):
            outcome = self._cluster.decider.decide(demand)
            if isinstance(outcome, Placement):
                state.assume(demand, outcome.node, outcome.gpu)
                self._waiting.pop(uid, None)
        if isinstance(outcome, Refusal):
            self._keep_waiting(demand)
        return outcome

    def make_room(self, demand: Demand, refusal: Refusal) -> Sacrifice | None:
        """Look for pods of lower priority that can go, and begin to end them. Also told again while
        the pod waits for those that are on their way out."""
        known = self._waiting.get(demand.model.ref.uid)
        if known is not None:
            return known.sacrifice
        if not demand.preempts or refusal.because is not None or self._jobs.full():
            return None
        sacrifice = find_sacrifice(
            self._cluster.decider,
            demand,
            refusal,
            may_go=lambda holder: holder.priority < demand.priority and not holder.deleting,
            budgets=self._cluster.budgets,
        )
        if sacrifice is not None:
            self._nominate(_Nomination(demand, sacrifice, self._clock() + NOMINATION_SECONDS))
        return sacrifice

    def give_up(self, uid: PodUid) -> None:
        """The pod is gone or has a place."""
        self._waiting.pop(uid, None)
        self._cluster.state.withdraw(uid)

    def expire(self) -> bool:
        """Give back places that were held for too long. True if there were any."""
        now = self._clock()
        old = [uid for uid, one in self._waiting.items() if one.until <= now]
        for uid in old:
            self.give_up(uid)
        return bool(old)

    async def run(self) -> None:
        """Evict for ever."""
        while True:
            job = await self._jobs.get()
            if job.demand.model.ref.uid in self._waiting:
                await self._clear(job)

    async def _clear(self, job: _Nomination) -> None:
        ref, node = job.demand.model.ref, job.sacrifice.placement.node
        try:
            await set_nominated_node(self._client, ref, node)
            for victim in job.sacrifice.victims:
                await evict(self._client, victim.ref)
                self._tell_evicted(ref, victim)
        except KubeError as error:  # 429: a budget does not allow it after all
            log.warning("no room made", extra=fields(pod=ref, node=node, error=error))
            self.give_up(ref.uid)
            await self._forget_nominated(ref)

    async def _forget_nominated(self, ref: PodRef) -> None:
        try:
            await set_nominated_node(self._client, ref, "")
        except KubeError as error:
            log.warning("nominated node not cleared", extra=fields(pod=ref, error=error))

    def _tell_evicted(self, ref: PodRef, victim: Holder) -> None:
        log.info("evicted", extra=fields(pod=victim.ref, node=victim.node, beneficiary=ref))
        self._events.record(
            victim.ref, "Normal", "Preempted", f"preempted by pod {ref} on node {victim.node}"
        )

    def _keep_waiting(self, demand: Demand) -> None:
        """Hold the place on, for as long as somebody who is to go is still there."""
        uid = demand.model.ref.uid
        known = self._waiting.get(uid)
        if known is None:
            return
        if self._clock() < known.until and any(self._is_there(v) for v in known.sacrifice.victims):
            placement = known.sacrifice.placement
            self._cluster.state.nominate(demand, placement.node, placement.gpu)
        else:
            del self._waiting[uid]

    def _is_there(self, victim: Holder) -> bool:
        return self._cluster.state.holds(victim.ref.uid)

    def _nominate(self, nomination: _Nomination) -> None:
        demand, placement = nomination.demand, nomination.sacrifice.placement
        self._waiting[demand.model.ref.uid] = nomination
        self._cluster.state.nominate(demand, placement.node, placement.gpu)
        self._jobs.put_nowait(nomination)
