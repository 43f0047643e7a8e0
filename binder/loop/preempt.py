"""Preemption as it runs: the writes by which nominated pods get their places.

No pod is evicted before the API server has said of all victims that they may be, and before the next leader can know for
which pod they go.
"""

import logging
from collections.abc import Callable

from berth.kube.errors import Conflict, Invalid, KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from binder.cache.reservations import Reservation
from binder.loop.fenced import FencedClient
from binder.loop.nominate import Nomination, Nominator
from binder.loop.pod_writes import evict, set_nominated_node

log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0


class Preemptor:
    """Evicts the victims of nominations, and writes for which node a pod waits."""

    def __init__(
        self,
        client: FencedClient,
        nominator: Nominator,
        events: EventRecorder,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._client, self._nominator, self._events, self._clock = client, nominator, events, clock
        self._next_clear = float("-inf")
        self._clear_retries = Backoff(initial_seconds=1.0, cap_seconds=30.0)

    async def run(self) -> None:
        """Evict for ever."""
        while True:
            await wait_until_set(self._nominator.wake, timeout_seconds=_TICK_SECONDS)
            self._nominator.wake.clear()
            for nomination in self._nominator.nominations():
                await self._clear(nomination)
            await self._clear_nominated()

    async def _clear(self, one: Nomination) -> None:
        """Evict those who are still to go, as far as it is granted."""
        if one.to_go and one.next_try <= self._clock() and await self._is_granted(one):
            while one.to_go and self._is_wanted(one):
                if not await self._evict(one, one.to_go[0]):
                    one.next_try = self._clock() + one.retries.next()
                    return
                one.retries.reset()
                one.to_go.pop(0)

    async def _is_granted(self, one: Nomination) -> bool:
        """No victim goes unless all may: a pod that is gone makes no room if its neighbour stays."""
        for victim in () if one.granted else one.to_go:
            if not self._is_wanted(one):
                return False
            try:
                await evict(self._client, victim.ref, dry_run=True)
            except KubeError as error:
                self._warn("preemption refused", one, error, victim)
                self._nominator.refuse(one, victim)
                return False
        if not one.granted and self._is_wanted(one):
            one.granted = await self._write_nominated(one)
        return one.granted

    async def _evict(self, one: Nomination, victim: Reservation) -> bool:
        try:
            await evict(self._client, victim.ref)
        except KubeError as error:  # 429: a budget does not allow it any more
            self._warn("not evicted", one, error, victim)
            return False
        ref = one.demand.model.ref
        log.info("evicted", extra=fields(pod=victim.ref, node=victim.node, beneficiary=ref))
        self._events.record(
            victim.ref, "Normal", "Preempted", f"preempted by pod {ref} on node {victim.node}"
        )
        return True

    async def _write_nominated(self, one: Nomination) -> bool:
        """The next leader must know of it before any victim goes."""
        one.is_reported = True  # whether or not an answer comes
        try:
            await set_nominated_node(self._client, one.demand.model.ref, one.node)
        except KubeError as error:
            self._warn("preemption not begun", one, error)
            self._nominator.lose(one)
            return False
        return True

    async def _clear_nominated(self) -> None:
        """Until one cannot be written: then all wait for a while."""
        to_clear = self._nominator.to_clear
        for uid in list(to_clear) if self._next_clear <= self._clock() else ():
            ref = to_clear.get(uid)
            if ref is None or not self._client.may_write():
                continue
            try:
                await set_nominated_node(self._client, ref, "")
            except (NotFound, Conflict, Invalid):  # gone, or a successor of the same name by now
                pass
            except KubeError as error:
                log.warning("nominated node not cleared", extra=fields(pod=ref, error=error))
                self._next_clear = self._clock() + self._clear_retries.next()
                return
            self._clear_retries.reset()
            to_clear.pop(uid, None)

    def _is_wanted(self, one: Nomination) -> bool:
        """Asked before every write: the pod still waits for it, and no other replica can lead by now."""
        return self._nominator.stands(one) and self._client.may_write()

    def _warn(self, what: str, one: Nomination, error: KubeError, victim: Reservation | None = None) -> None:
        names = {} if victim is None else {"victim": victim.ref}
        log.warning(what, extra=fields(pod=one.demand.model.ref, node=one.node, error=error, **names))
