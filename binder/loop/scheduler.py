"""Places pods: takes one from the queue, decides, assumes, and binds in the background.

Between a decision and its assumption there is no await, so no two decisions see the same free
memory. An assumption is given up only when it is certain that the Binding did not happen.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import has_ended, is_deleting, node_of, pod_ref
from berth.contract.wait_reason import WaitReason
from berth.kube.events import EventRecorder
from berth.kube.informer import Change, ChangeKind
from berth.kube.times import utc_now
from berth.runtime.logs import fields
from berth.runtime.tasks import supervise, wait_until_set
from binder.cache.state import ClusterState
from binder.engine.cluster import Cluster, Source, slim
from binder.engine.decision import Placement, Refusal
from binder.engine.explain import summary
from binder.engine.remedy import remedy
from binder.engine.score import Strategy
from binder.loop.bind import BindingCycle
from binder.loop.conditions import ConditionWriter, LastMessage
from binder.loop.evict import EvictionController
from binder.loop.failures import PlacementFailures
from binder.loop.fenced import FencedClient
from binder.loop.invalid_pods import InvalidPods
from binder.loop.metrics import BinderMetrics
from binder.loop.nominate import Nominator
from binder.loop.preempt import Preemptor
from binder.loop.prices import PriceLearner
from binder.loop.queue import SchedulingQueue, Waiting
from binder.loop.requeue import ANY, RESUME_SEARCH, ClusterChanges, QueueingHint, QueueingHints, status_of
from binder.loop.resync import AssumedPodResync
from binder.loop.wait_reasons import WaitReasons
from binder.pod.conditions import reported_message, reported_reason
from binder.pod.demand import Demand, parse_demand

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]

# Stale models and stale heartbeats are matters of time, not of events: look now and then.
_TICK_SECONDS = 1.0
# Woken pods that are looked at in one step: some milliseconds.
_MOST_LOOKS = 32
_NODES_AT_ONCE = 32
# Changes of nodes that need not be weighed at once while no pod waits: some milliseconds.
_MOST_LAG = 64
# Nodes that are searched for what would make a pod fit, before that is reported: some milliseconds.
_CLOSE_LOOKS = 2
_ERROR = WaitReason.SCHEDULER_ERROR


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """What tells the time, in monotonic seconds and by the calendar, and what lets it pass."""

    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = utc_now
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


class Scheduler:
    """`sources()` is what it must hear of, on a standby too; only `run()` writes anything."""

    def __init__(
        self,
        client: FencedClient,
        *,
        keys: Keys,
        scheduler_name: str,
        strategy: Strategy,
        events: EventRecorder,
        metrics: BinderMetrics,
        clocks: Clocks,
    ) -> None:
        self._keys, self._name = keys, scheduler_name
        self._metrics, self._clock = metrics, clocks.monotonic
        self._wake = asyncio.Event()
        self.cluster = Cluster(keys, strategy, clock=self._clock, now=clocks.now)
        self.queue = SchedulingQueue(self._clock)
        self._conditions = ConditionWriter(client, events)
        self._reasons = WaitReasons(self.cluster, clock=self._clock)
        self._invalid = InvalidPods(self._conditions, metrics)
        self.nominator = Nominator(self.cluster, clock=self._clock)
        preemptor = Preemptor(client, self.nominator, events, clock=self._clock)
        self._hints = QueueingHints(
            self.cluster,
            self.nominator.victims,
            aside=self.nominator.aside,
            may_preempt=self.nominator.may_preempt,
            clock=self._clock,
        )
        self.bindings = BindingCycle(
            client, self.state, events, metrics, keys=keys, wake=self._wake, sleep=clocks.sleep
        )
        self._failures = PlacementFailures(self.state, events)
        self._resync = AssumedPodResync(
            client,
            self.state,
            on_pod=self.on_pod,
            on_node=self.on_node,
            freed=self._note,
            clock=self._clock,
        )
        self.evictions = EvictionController(
            client,
            self.cluster,
            events,
            keys=keys,
            scheduler_name=scheduler_name,
            failures=self.cluster.facts.load_failures,
            clock=self._clock,
        )
        self.prices = PriceLearner(self.cluster, strategy)
        self._loops: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "conditions": self._conditions.run,
            "preemption": preemptor.run,
            "evictions": self.evictions.run,
            "resync": self._resync.run,
        }
        metrics.follow(self.queue, self.state, self.cluster.facts.quarantines)
        self._next_tick = 0.0
        self.leads = False

    @property
    def state(self) -> ClusterState:
        return self.cluster.state

    def sources(self, system_namespace: str) -> list[Source]:
        """What the cluster hears, with what the queue makes of it."""
        own: dict[str, Callable[[Change], bool]] = {"pods": self.on_pod, "nodes": self.on_node}
        return [
            Source(source.name, source.path, self._waking(own.get(source.name, source.hear)))
            for source in self.cluster.sources(system_namespace)
        ]

    def on_node(self, change: Change) -> bool:
        helps = self.cluster.on_node(change)
        name = NodeName(change.object["metadata"]["name"])
        self._failures.observe(name)
        view = self.state.find(name)
        if view is None:
            self.evictions.forget(name)
        else:
            self.evictions.observe(view)
        return helps

    def on_pod(self, change: Change) -> bool:
        pod = change.object
        ref = pod_ref(pod)
        helps = self.cluster.on_pod(change)
        if change.kind is ChangeKind.GONE or is_deleting(pod):
            self.evictions.observe_end(pod)
        if change.kind is ChangeKind.GONE or node_of(pod) is not None:
            self._no_longer_waits(ref.uid)
        elif pod["spec"].get("schedulerName") == self._name:
            self._set_pending(pod)
        return helps

    async def run(self) -> None:
        """Place pods until cancelled; nothing is in flight any more when it ends."""
        self._metrics.leader.set(1)
        self.leads = True
        try:
            async with supervise() as tasks:
                for name, work in self.background().items():
                    tasks.eternal(name, work)
                await self._warm_up()
                while True:
                    self._wake.clear()
                    self.step()
                    await asyncio.sleep(0)  # a wait for what is there already would let no other task run
                    await wait_until_set(self._wake, timeout_seconds=self._pause())
        finally:
            self._metrics.leader.set(0)
            self.leads = False
            await self.abandon()

    async def _warm_up(self) -> None:
        """Take over all nodes, a few at a time: a new leader knows of thousands, and its Lease must be renewed meanwhile."""
        while self.state.is_touched:
            self.cluster.decider.refresh(most=_NODES_AT_ONCE)
            self.nominator.victims.renew()
            await asyncio.sleep(0)

    def background(self) -> "dict[str, Coroutine[Any, Any, None]]":
        """What a leader does beside placing pods, for ever."""
        return {name: run() for name, run in self._loops.items()}

    async def drain(self) -> None:
        """Decide nothing more and wait, within bounds, for the Bindings in flight."""
        self.leads = False
        await self.bindings.drain()

    async def abandon(self) -> None:
        """End what still runs: a successor may decide now."""
        await self.bindings.abandon()
        await self.prices.abandon()

    def step(self) -> None:
        """Place one pod that can be placed now; ask to be called again at once if there may be more.

        One at a time, because watch events must be handled between two decisions.
        """
        if not self.bindings.may_write():
            return  # the leadership's own task will end this one
        if self._clock() >= self._next_tick:
            self._tick()
        self.nominator.adopt_all()  # before other pods can take those places
        self._wake_queue()
        self._invalid.report()
        # Asked only now: a pod may have changed or gone while there was no slot.
        waiting = self._next() if self.bindings.has_slot else None
        if waiting is not None:
            self._place(waiting)
            self._wake.set()

    def _tick(self) -> None:
        """What is a matter of time."""
        self._next_tick = self._clock() + _TICK_SECONDS
        self.state.expire_stale_models()
        self.state.expire_loads()
        self.nominator.expire()
        for waiting in self.queue.parked():
            if waiting.status and (hint := self._hints.spared(waiting.demand, waiting.status)):
                self.queue.wake(waiting, hint)
        self._failures.report()
        self._resync.look()
        self._reasons.look()

    def _pause(self) -> float:
        """Until the next pod's time, at most; a slot that comes free wakes, too."""
        may_place = self.bindings.has_slot and self.bindings.may_write()
        due = self.queue.seconds_to_next() if may_place else None
        return _TICK_SECONDS if due is None else min(due, _TICK_SECONDS)

    def _wake_queue(self) -> None:
        """Wake the pods that the changes may help."""
        if not self.queue.has_parked and not self.nominator.has_lost:
            # No pod to requeue. What could be freed is brought up to date now and then, so that the first one that
            # needs it does not wait for all of it.
            self.nominator.victims.renew(lag=_MOST_LAG)
            if self.nominator.victims.is_behind:
                self._wake.set()
            return
        changes = self._hints.take_changes()
        if self.nominator.victims.is_behind:
            self._wake.set()
        if not changes and not self.nominator.has_lost:
            return
        lost, rows = self.nominator.take_lost(), set(changes.rows.tolist())
        for waiting in self.queue.parked():
            if waiting.uid in lost or self.nominator.row_of(waiting.demand) in rows:
                self.queue.wake(waiting, QueueingHint(None))
            elif hint := self._hint(waiting, changes):
                self.queue.wake(waiting, hint)

    def _hint(self, waiting: Waiting, changes: ClusterChanges) -> QueueingHint | None:
        assert waiting.status is not None
        try:
            return self._hints.hint(waiting.demand, waiting.status, changes)
        except Exception:  # reported when the pod is tried
            return QueueingHint(None)

    def _is_worth_a_try(self, waiting: Waiting) -> bool:
        if waiting.status is None or waiting.hint is None:
            return True
        try:
            return self._hints.look(waiting.demand, waiting.status, waiting.hint)
        except Exception:  # reported when the pod is tried
            return True

    def _next(self) -> Waiting | None:
        """The next pod that is worth a try. One whose hint is outdated is put back: another pod was
        faster, perhaps."""
        for _ in range(_MOST_LOOKS):
            waiting = self.queue.pop()
            if waiting is None:
                return None
            if waiting.status is None and (alike := self._refused_alike(waiting)) is not None:
                self._refuse_alike(waiting, alike)
            elif self._is_worth_a_try(waiting):
                return waiting
            else:
                assert waiting.status is not None
                self.queue.park_again(waiting, waiting.status)
        self._wake.set()
        return None

    def _refused_alike(self, waiting: Waiting) -> Waiting | None:
        """A pod that asked the same, was refused, and has no hint since: one of many replicas."""
        known = self.queue.refused_alike(waiting.demand)
        return None if known is None or self.nominator.is_nominated(known.demand) else known

    def _refuse_alike(self, waiting: Waiting, alike: Waiting) -> None:
        assert alike.status is not None
        assert alike.reason is not None
        if not alike.last.statements <= waiting.last.statements:
            self._report(waiting, alike.message, alike.reason, alike.last)
        else:
            self._update_reason(waiting, alike.reason)
        self.queue.park(waiting, alike.status.copy())

    def _place(self, waiting: Waiting) -> None:
        """Decide and assume in one step."""
        try:
            self._decide(waiting)
        except Exception as error:  # what breaks over one pod must not stop the others
            self._break_off(waiting, error)

    def _break_off(self, waiting: Waiting, error: Exception) -> None:
        """A defect of ours, or an object that is not as expected: the pod is tried again later."""
        self._metrics.attempted("broken")
        log.error("decision broke", extra=fields(pod=waiting.demand.model.ref), exc_info=error)
        self.state.forget(waiting.uid)  # no Binding is on its way: that would have been the last step
        self.nominator.give_up(waiting.uid)
        self._report(waiting, f"the binder could not judge the pod, and tries again later: {error!r}", _ERROR)
        self.queue.hold(waiting)

    def _decide(self, waiting: Waiting) -> None:
        with self._metrics.decision_seconds.time():
            outcome = self.nominator.decide(waiting.demand)
        if isinstance(outcome, Placement):
            self.bindings.start(self._bind(waiting, outcome))
        else:
            self._park(waiting, outcome)

    def _park(self, waiting: Waiting, refusal: Refusal) -> None:
        self._metrics.attempted("unschedulable")
        counts = refusal.counts(self.cluster.decider)
        self._metrics.refused(counts)
        reasons, waits = summary(self.cluster.decider, waiting.demand, refusal), ""
        status = status_of(self.cluster.decider, refusal)
        why = ANY if waiting.status is None else waiting.hint
        if waiting.status is not None and why != ANY:
            status.resume_from(waiting.status)
        if candidate := self.nominator.preempt(waiting.demand, refusal, status, why):
            names = ", ".join(str(victim.ref) for victim in candidate.victims)
            waits = f"; waits for preempted pods on node {candidate.placement.node} to end: {names}"
        reason = self._reasons.of(waiting.demand, refusal, is_nominated=candidate is not None)
        if last := waiting.last.then(reasons, waits, now=self._clock()):
            self._report(waiting, self._with_remedy(waiting.demand, refusal, reasons + waits), reason, last)
        else:
            self._update_reason(waiting, reason)
        if waiting.status is None and not self.queue.has_parked:
            self._hints.take_changes()  # not read while no pod was parked: older than this refusal
        self.queue.park(waiting, status)
        if candidate is None and why is not None and len(status.unasked):
            self.queue.wake(waiting, RESUME_SEARCH)
        self.queue.note_refused(waiting)

    def _with_remedy(self, demand: Demand, refusal: Refusal, message: str) -> str:
        help = remedy(self.cluster.decider, demand, refusal, most_nodes=_CLOSE_LOOKS)
        return f"{message}; {help}" if help else message

    def _set_pending(self, pod: JsonObject) -> None:
        ref = pod_ref(pod)
        if is_deleting(pod) or has_ended(pod):
            self._no_longer_waits(ref.uid)
            self._note(self.state.remove_pod(ref.uid))
            return
        if self.state.has_place(ref.uid):
            return  # an assumption settles itself, and a watch that lags takes no node away
        try:
            demand = parse_demand(pod, self._keys)
        except InvalidPod as error:
            self.queue.remove(ref.uid)
            self.nominator.forget_nominated(ref.uid)
            if pod["spec"].get("schedulingGates"):
                return  # the API server's own condition says that it is gated; its change comes as a watch event
            self._invalid.put(pod, error)
        else:
            self._invalid.remove(ref.uid)
            is_new = self.queue.put(demand, message=reported_message(pod), reason=reported_reason(pod))
            if is_new:
                self.prices.note(demand)
            self.nominator.note_nominated(demand, is_new=is_new)
        self._wake.set()

    def _no_longer_waits(self, uid: PodUid) -> None:
        self.queue.remove(uid)
        self._invalid.remove(uid)
        self.nominator.forget_nominated(uid)
        self.nominator.give_up(uid)

    def about_to_be_placed(self) -> list[Demand]:
        """Pods that wait and may have a place by now, in their order."""
        self._wake_queue()
        return self.queue.with_hint()

    async def bind_assumed(self, demand: Demand, placement: Placement) -> str:
        """Bind a pod that was assumed. "" once it is bound there; else why not, and nothing of it is
        left."""
        outcome = await self.bindings.bind(demand, placement)
        self._take_over(outcome.pod)
        return outcome.failure

    async def _bind(self, waiting: Waiting, placement: Placement) -> None:
        await self._conditions.withdraw(waiting.uid)
        outcome = await self.bindings.bind(waiting.demand, placement)
        if self._take_over(outcome.pod):
            return
        if outcome.pod is not None:
            message = f"binding to node {placement.node} failed: {outcome.failure}"
            self._report(waiting, message, _ERROR)
        if outcome.pod is not None or outcome.is_unsent:
            self.queue.hold(waiting)
        if outcome.pod is not None:
            self._set_pending(outcome.pod)  # it may ask for something else by now, or be about to go

    def _take_over(self, pod: JsonObject | None) -> bool:
        """A pod that is bound after all, here or elsewhere, as a watch would show it."""
        is_bound = pod is not None and node_of(pod) is not None
        if pod is not None and is_bound:
            self.on_pod(Change(ChangeKind.SET, slim(pod)))
        return is_bound

    def _report(
        self, waiting: Waiting, message: str, reason: WaitReason, last: LastMessage | None = None
    ) -> None:
        """Once for each message. `last`: which refusal it is about, if it is about one."""
        waiting.last = last or LastMessage()
        if message == waiting.message:
            self._update_reason(waiting, reason)
            return
        ref = waiting.demand.model.ref
        log.info("unschedulable", extra=fields(pod=ref, reason=message))
        self._conditions.report(ref, message, first=not waiting.message, reason=reason)
        waiting.message, waiting.reason = message, reason

    def _update_reason(self, waiting: Waiting, reason: WaitReason) -> None:
        """Whether a new node would help is reported at once, even where the message need not be repeated."""
        if reason is not waiting.reason:
            self._conditions.update_reason(waiting.demand.model.ref, waiting.message, reason=reason)
            waiting.reason = reason

    def _waking(self, hear: Callable[[Change], bool]) -> Callable[[Change], bool]:
        return lambda change: self._note(hear(change))

    def _note(self, helps: bool) -> bool:
        """Something has changed that could let a pod in."""
        if helps or self.state.is_touched:  # a pod that came may be the company that another waits for
            self._wake.set()
        return helps
