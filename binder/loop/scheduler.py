"""Places pods: takes one from the queue, decides, assumes, and binds in the background.

Between a decision and its assumption there is no await, so no two decisions see the same free
memory. An assumption is given up only when it is certain that the Binding did not happen.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from berth.contract.errors import InvalidPod
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, has_ended, is_deleting, node_of, pod_ref
from berth.contract.quantity import format_bytes
from berth.contract.wait_reason import WaitReason
from berth.kube.client import KubeClient
from berth.kube.errors import KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.kube.informer import Change, ChangeKind
from berth.kube.times import utc_now
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import in_thread, supervise, wait_until_set
from binder.api.metrics import BinderMetrics
from binder.cache.cluster import Cluster, Source, slim
from binder.engine.decision import Placement, Refusal
from binder.engine.dual_prices import price
from binder.engine.remedy import remedy
from binder.engine.score import LeastFragmentation, Strategy
from binder.loop.bind import current_pod, is_answer, may_have_happened, post_binding
from binder.loop.conditions import ConditionWriter, LastMessage
from binder.loop.evict import EvictionController
from binder.loop.failures import PlacementFailures
from binder.loop.fenced import FencedClient, NotLeading
from binder.loop.nominate import Preemptor
from binder.loop.queue import SchedulingQueue, Waiting
from binder.loop.requeue import ANY, RESUME_SEARCH, ClusterChanges, QueueingHint, QueueingHints, status_of
from binder.loop.resync import AssumedPodResync
from binder.loop.wait_reasons import WaitReasons
from binder.pod.conditions import reported_message, reported_reason
from binder.pod.demand import Demand, parse_demand
from binder.rules.explain import summary
from binder.rules.load_failures import LoadFailures

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]
T = TypeVar("T")

BINDS_AT_ONCE = 64
# Stale models and stale heartbeats are matters of time, not of events: look now and then.
_TICK_SECONDS = 1.0
_STOP_SECONDS = 20.0
# Woken pods that are looked at in one step: some milliseconds.
_MOST_LOOKS = 32
_NODES_AT_ONCE = 32
# Changes of nodes that need not be weighed at once while nobody waits: some milliseconds.
_MOST_LAG = 64
_MOST_QUESTIONS = 4096
# Nodes that are searched for what would make a pod fit, before its owner is told: some milliseconds.
_CLOSE_LOOKS = 2
_ERROR = WaitReason.SCHEDULER_ERROR


@dataclass(slots=True)
class _Unreadable:
    """A pod that only its owner's change can help."""

    ref: PodRef
    message: str
    told: str


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a pod was not bound, and the pod as it is, where it still waits. `unsent`: nothing was tried."""

    why: str
    pod: JsonObject | None = None
    unsent: bool = False


def _can_be_bound(pod: JsonObject | None) -> bool:
    """A Binding that is under way may still be written."""
    return pod is not None and node_of(pod) is None and not is_deleting(pod)


def _posting_again() -> Backoff:
    """The pauses between the tries of one Binding."""
    return Backoff(initial_seconds=0.5, cap_seconds=15.0)


class Scheduler:
    """`sources()` is what it must hear of, on a standby too; only `run()` writes anything."""

    def __init__(
        self,
        client: KubeClient,
        *,
        keys: Keys,
        scheduler_name: str,
        strategy: Strategy,
        events: EventRecorder,
        metrics: BinderMetrics,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.may_write: Callable[[], bool] = lambda: True
        fenced = FencedClient(client, lambda: self.may_write())
        self._client, self._keys, self._name, self._strategy = fenced, keys, scheduler_name, strategy
        self._events, self._metrics, self._clock = events, metrics, clock
        self._notices = ConditionWriter(fenced, events)
        failures = LoadFailures(clock)
        self.cluster = Cluster(keys, strategy, clock=clock, excluded=failures.excluded, now=now)
        self.state = self.cluster.state
        self._reasons = WaitReasons(self.cluster, clock=clock)
        self.queue = SchedulingQueue(clock)
        self.preemptor = Preemptor(
            fenced, self.cluster, events, may_write=lambda: self.may_write(), clock=clock
        )
        self._hints = QueueingHints(
            self.cluster,
            self.preemptor.victims,
            aside=self.preemptor.aside,
            may_preempt=self.preemptor.may_preempt,
            clock=clock,
        )
        # Who was refused last of those who ask the same.
        self._refused: OrderedDict[Hashable, PodUid] = OrderedDict()
        # Pods that an earlier leader has begun to make room for.
        self._to_adopt: dict[PodUid, Demand] = {}
        self._has_led = False
        self._failures = PlacementFailures(self.state, events)
        self._doubts = AssumedPodResync(
            fenced, self.state, on_pod=self.on_pod, on_node=self.on_node, freed=self._note, clock=clock
        )
        self.evictions = EvictionController(
            fenced,
            self.cluster,
            events,
            keys=keys,
            scheduler_name=scheduler_name,
            failures=failures,
            clock=clock,
        )
        metrics.follow(self.queue, self.state, self.cluster.quarantines)
        self._unreadable: dict[PodUid, _Unreadable] = {}
        self._wake = asyncio.Event()
        self._binds: set[asyncio.Task[Any]] = set()
        # Bindings on their way or without an answer, and the pauses between the tries of some of them.
        self._in_doubt: set[PodUid] = set()
        self._pauses: set[asyncio.Future[object]] = set()
        self._sleep, self._posts = sleep, asyncio.Semaphore(BINDS_AT_ONCE)
        self._next_tick = 0.0
        self._learning: asyncio.Task[None] | None = None
        self._stopping = False
        self.leads = False

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
                    await asyncio.sleep(0)  # a wait for what is there already would let nobody else run
                    await wait_until_set(self._wake, timeout_seconds=self._pause())
        finally:
            self._metrics.leader.set(0)
            self.leads = False
            await self.abandon()

    async def _warm_up(self) -> None:
        """Take over all nodes, a few at a time: who begins to lead knows of thousands, and must be heard of."""
        while self.state.is_touched:
            self.cluster.decider.refresh(most=_NODES_AT_ONCE)
            self.preemptor.victims.renew()
            await asyncio.sleep(0)

    def background(self) -> "dict[str, Coroutine[Any, Any, None]]":
        """What a leader does beside placing pods, for ever."""
        return {
            "notices": self._notices.run(),
            "room": self.preemptor.run(),
            "evictions": self.evictions.run(),
            "doubts": self._doubts.run(),
        }

    @property
    def in_doubt(self) -> bool:
        """Some Binding may still be written that nobody waits for any more."""
        return bool(self._in_doubt)

    async def drain(self) -> None:
        """Decide nothing more and wait, within bounds, for the Bindings in flight."""
        self._stopping, self.leads = True, False
        for pause in self._pauses:
            pause.cancel()
        if self._binds:
            await asyncio.wait(self._binds, timeout=_STOP_SECONDS)

    def step(self) -> None:
        """Place one pod that can be placed now; ask to be called again at once if there may be more.

        One at a time, because the watches must be heard between two decisions.
        """
        if not self.may_write():
            return  # the leadership's own task will end this one
        if self._clock() >= self._next_tick:
            self._tick()
        self._adopt()
        self._wake_queue()
        self._tell_unreadable()
        # Asked only now: a pod may have changed or gone while there was no slot.
        waiting = None if self._stopping or self._is_busy() else self._next()
        if waiting is not None:
            self._place(waiting)
            self._wake.set()

    def _tick(self) -> None:
        """What is a matter of time."""
        self._next_tick = self._clock() + _TICK_SECONDS
        self.state.expire_stale_models()
        self.state.expire_loads()
        self.preemptor.expire()
        for waiting in self.queue.parked():
            if waiting.status and (hint := self._hints.spared(waiting.demand, waiting.status)):
                self.queue.wake(waiting, hint)
        self._failures.report()
        self._doubts.look()
        self._reasons.look()

    def _pause(self) -> float:
        """Until the next pod's time, at most; a slot that comes free wakes, too."""
        waits = self._stopping or self._is_busy() or not self.may_write()
        due = None if waits else self.queue.seconds_to_next()
        return _TICK_SECONDS if due is None else min(due, _TICK_SECONDS)

    def _adopt(self) -> None:
        """Before anybody else can take their places."""
        self._has_led = True
        for demand in self._to_adopt.values():
            self.preemptor.adopt(demand)
        self._to_adopt.clear()

    def _wake_queue(self) -> None:
        """Wake the pods that the changes may help."""
        if not self.queue.has_parked and not self.preemptor.has_lost:
            # Nobody to wake. What could be freed is brought up to date now and then, so that the first one who
            # asks for it has not everything to wait for.
            self.preemptor.victims.renew(lag=_MOST_LAG)
            if self.preemptor.victims.is_behind:
                self._wake.set()
            return
        changes = self._hints.take_changes()
        if self.preemptor.victims.is_behind:
            self._wake.set()
        if not changes and not self.preemptor.has_lost:
            return
        lost, rows = self.preemptor.take_lost(), set(changes.rows.tolist())
        for waiting in self.queue.parked():
            if waiting.uid in lost or self.preemptor.row_of(waiting.demand) in rows:
                self.queue.wake(waiting, QueueingHint(None))
            elif hint := self._hope(waiting, changes):
                self.queue.wake(waiting, hint)

    def _hope(self, waiting: Waiting, changes: ClusterChanges) -> QueueingHint | None:
        assert waiting.status is not None
        try:
            return self._hints.hint(waiting.demand, waiting.status, changes)
        except Exception:  # heard of when the pod is tried
            return QueueingHint(None)

    def _is_worth_a_try(self, waiting: Waiting) -> bool:
        if waiting.status is None or waiting.hint is None:
            return True
        try:
            return self._hints.look(waiting.demand, waiting.status, waiting.hint)
        except Exception:  # heard of when the pod is tried
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
        uid = self._refused.get(waiting.demand.question)
        known = None if uid is None else self.queue.find(uid)
        if known is None or known.status is None or (known.hint is not None and known.hint.is_change):
            return None
        same = known.demand.question == waiting.demand.question
        return known if same and not self.preemptor.is_nominated(known.demand) else None

    def _refuse_alike(self, waiting: Waiting, alike: Waiting) -> None:
        assert alike.status is not None
        assert alike.reason is not None
        if not alike.said.statements <= waiting.said.statements:
            self._tell(waiting, alike.message, alike.reason, alike.said)
        else:
            self._correct(waiting, alike.reason)
        self.queue.park(waiting, alike.status.copy())

    def _is_busy(self) -> bool:
        return len(self._binds) - len(self._pauses) >= BINDS_AT_ONCE

    def _place(self, waiting: Waiting) -> None:
        """Decide and assume in one step."""
        try:
            self._decide(waiting)
        except Exception as error:  # what breaks over one pod must not stop the others
            self._break_off(waiting, error)

    def _break_off(self, waiting: Waiting, error: Exception) -> None:
        """A defect of ours, or an object that nobody has thought of: the pod is tried again later."""
        self._metrics.attempted("broken")
        log.error("decision broke", extra=fields(pod=waiting.demand.model.ref), exc_info=error)
        self.state.forget(waiting.uid)  # no Binding is on its way: that would have been the last step
        self.preemptor.give_up(waiting.uid)
        self._tell(waiting, f"the binder could not judge the pod, and tries again later: {error!r}", _ERROR)
        self.queue.hold(waiting)

    def _decide(self, waiting: Waiting) -> None:
        with self._metrics.decision_seconds.time():
            outcome = self.preemptor.decide(waiting.demand)
        if isinstance(outcome, Placement):
            self._bind_in_background(waiting, outcome)
        else:
            self._park(waiting, outcome)

    def _park(self, waiting: Waiting, refusal: Refusal) -> None:
        self._metrics.attempted("unschedulable")
        counts = refusal.counts(self.cluster.decider.table)
        self._metrics.refused(counts)
        reasons, waits = summary(self.cluster.decider, waiting.demand, refusal), ""
        status = status_of(self.cluster.decider, refusal)
        why = ANY if waiting.status is None else waiting.hint
        if waiting.status is not None and why != ANY:
            status.resume_from(waiting.status)
        if candidate := self.preemptor.preempt(waiting.demand, refusal, status, why):
            names = ", ".join(str(victim.ref) for victim in candidate.victims)
            waits = f"; waits for node {candidate.placement.node} to be rid of {names}"
        reason = self._reasons.of(waiting.demand, refusal, makes_room=candidate is not None)
        if said := waiting.said.then(reasons, waits, now=self._clock()):
            self._tell(waiting, self._with_remedy(waiting.demand, refusal, reasons + waits), reason, said)
        else:
            self._correct(waiting, reason)
        if waiting.status is None and not self.queue.has_parked:
            self._hints.take_changes()  # not asked for while nobody was parked: older than this refusal
        self.queue.park(waiting, status)
        if candidate is None and why is not None and len(status.unasked):
            self.queue.wake(waiting, RESUME_SEARCH)
        self._refused[waiting.demand.question] = waiting.uid
        if len(self._refused) > _MOST_QUESTIONS:
            self._refused.popitem(last=False)

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
            self._to_adopt.pop(ref.uid, None)
            if pod["spec"].get("schedulingGates"):
                return  # the API server's own condition says that it is gated; its change is heard of
            known = self._unreadable.get(ref.uid)
            before = reported_message(pod) if known is None else known.told
            self._unreadable[ref.uid] = _Unreadable(ref, f"the pod cannot be placed: {error}", before)
        else:
            self._unreadable.pop(ref.uid, None)
            if is_new := self.queue.put(demand, told=reported_message(pod), reason=reported_reason(pod)):
                self.learn(demand)
            if is_new or not self._has_led:
                self._note_nominated(demand)
        self._wake.set()

    def _note_nominated(self, demand: Demand) -> None:
        """An earlier leader makes room for the pod, or does not any more. A standby has known most pods for long when
        they are nominated; a leader hears in this way of its own nominations only."""
        if demand.nominated:
            self._to_adopt[demand.model.ref.uid] = demand
        else:
            self._to_adopt.pop(demand.model.ref.uid, None)

    def _no_longer_waits(self, uid: PodUid) -> None:
        self.queue.remove(uid)
        self._unreadable.pop(uid, None)
        self._to_adopt.pop(uid, None)
        self.preemptor.give_up(uid)

    def learn(self, demand: Demand) -> None:
        """What is asked for decides what GPUs are worth. Learned in the background, one at a time."""
        strategy = self._strategy
        if not isinstance(strategy, LeastFragmentation) or not strategy.demand_history.note(demand.shape):
            return
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._renew_prices(strategy), name="prices")

    async def _renew_prices(self, strategy: LeastFragmentation) -> None:
        self.cluster.decider.refresh()
        strategy.learn(
            await in_thread(price, strategy.demand_history.pricing_problem(self.cluster.decider.table))
        )

    def about_to_be_placed(self) -> list[Demand]:
        """Pods that wait and may have a place by now, in their order."""
        self._wake_queue()
        return self.queue.with_hint()

    async def read(self, path: str) -> JsonObject:
        """One object as it is now. Raises KubeError."""
        return await self._client.get(path)

    async def in_flight(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that writes: it is waited for at the end, and ends with the leadership."""
        task = asyncio.create_task(work)
        self._binds.add(task)
        task.add_done_callback(self._binds.discard)
        return await asyncio.shield(task)

    async def bind_assumed(self, demand: Demand, placement: Placement) -> str:
        """Bind a pod that was assumed. "" once it is bound there; else why not, and nothing of it is
        left."""
        failure = await self._try_to_bind(demand, placement)
        return failure.why if failure is not None else ""

    def _bind_in_background(self, waiting: Waiting, placement: Placement) -> None:
        task = asyncio.create_task(self._bind(waiting, placement))
        self._binds.add(task)
        task.add_done_callback(self._bind_done)

    async def _bind(self, waiting: Waiting, placement: Placement) -> None:
        await self._notices.withdraw(waiting.uid)
        failure = await self._try_to_bind(waiting.demand, placement)
        if failure is None:
            return
        if failure.pod is not None:
            self._tell(waiting, f"binding to node {placement.node} failed: {failure.why}", _ERROR)
        if failure.pod is not None or failure.unsent:
            self.queue.hold(waiting)
        if failure.pod is not None:
            self._set_pending(failure.pod)  # it may ask for something else by now, or be about to go

    async def _try_to_bind(self, demand: Demand, placement: Placement) -> _Failure | None:
        """None once the pod is bound, here or elsewhere; the assumption is settled either way.

        No answer says nothing: the API server may hold the request and write it later. The same Binding is
        posted again then, and the assumption stands, until it is certain what becomes of all tries: the pod
        has a node, or none can be given to it any more. A refusal settles only what was not in doubt before.
        """
        ref, backoff = demand.model.ref, _posting_again()
        while self.may_write() and not (backoff.failures and self._stopping):
            try:
                await self._post(ref, placement)
            except NotLeading:
                break
            except KubeError as error:
                self._metrics.attempted("error")
                log.warning("binding failed", extra=fields(pod=ref, node=placement.node, error=error))
                pod = None if isinstance(error, NotFound) else await current_pod(self._client, ref)
                if not _can_be_bound(pod) or (is_answer(error) and ref.uid not in self._in_doubt):
                    return self._settle(ref, placement, error, pod)
                if not backoff.failures:
                    message = f"binding to node {placement.node} has no answer and is sent again: {error}"
                    self._events.record(ref, "Warning", "FailedScheduling", message)
                await self._pause_between_posts(backoff.next())
            else:
                self._bound(ref, placement)
                return None
        return await self._give_way(demand, placement)

    async def _post(self, ref: PodRef, placement: Placement) -> None:
        """One try. Raises KubeError. The pod is in doubt until an answer says what became of all tries."""
        async with self._posts:
            doubted = ref.uid in self._in_doubt
            self._in_doubt.add(ref.uid)
            try:
                with self._metrics.bind_seconds.time():
                    await post_binding(self._client, self._keys, ref, placement)
            except KubeError as error:
                if not doubted and not may_have_happened(error):
                    self._in_doubt.discard(ref.uid)
                raise

    async def _pause_between_posts(self, seconds: float) -> None:
        """Not longer than the process has left."""
        pause = asyncio.ensure_future(self._sleep(seconds))
        self._pauses.add(pause)
        self._wake.set()  # somebody else can have the slot
        try:
            await asyncio.wait({pause})
        finally:
            pause.cancel()
            self._pauses.discard(pause)

    async def _give_way(self, demand: Demand, placement: Placement) -> _Failure | None:
        """Not sure to lead: stopped, suspended or starved for so long that somebody else may lead soon."""
        if demand.model.ref.uid not in self._in_doubt:
            self.state.forget(demand.model.ref.uid)
            return _Failure("this replica is not sure to lead any more", unsent=True)
        if self._stopping:
            return _Failure("this replica ends, and nothing says whether the pod is bound")
        await self._pause_between_posts(_TICK_SECONDS)
        return await self._try_to_bind(demand, placement)

    def _bound(self, ref: PodRef, placement: Placement) -> None:
        self._in_doubt.discard(ref.uid)
        self._metrics.attempted("scheduled")
        self._tell_placed(ref, placement)

    def _settle(
        self, ref: PodRef, placement: Placement, error: KubeError, pod: JsonObject | None
    ) -> _Failure | None:
        """After an error only the pod itself can tell whether it is bound, and where."""
        doubted = ref.uid in self._in_doubt
        self._in_doubt.discard(ref.uid)
        self._note(True)
        if pod is not None and node_of(pod) is not None:
            self.on_pod(Change(ChangeKind.SET, slim(pod)))
            if node_of(pod) != placement.node:
                return _Failure(str(error))
            self._bound(ref, placement)
            return None
        if pod is None and doubted:
            self.state.remove_pod(ref.uid)  # bound and deleted since, perhaps: a stale model
        else:
            self.state.forget(ref.uid)
        return _Failure(str(error), pod)

    def _tell(
        self, waiting: Waiting, message: str, reason: WaitReason, said: LastMessage | None = None
    ) -> None:
        """Once for each message. `said`: which refusal it tells of, if it does."""
        waiting.said = said or LastMessage()
        if message == waiting.message:
            self._correct(waiting, reason)
            return
        ref = waiting.demand.model.ref
        log.info("no place", extra=fields(pod=ref, reason=message))
        self._notices.tell(ref, message, first=not waiting.message, reason=reason)
        waiting.message, waiting.reason = message, reason

    def _correct(self, waiting: Waiting, reason: WaitReason) -> None:
        """Whether a new node would help is told at once, whatever else need not be repeated."""
        if reason is not waiting.reason:
            self._notices.correct(waiting.demand.model.ref, waiting.message, reason=reason)
            waiting.reason = reason

    def _tell_unreadable(self) -> None:
        for pod in self._unreadable.values():
            if pod.message != pod.told:
                self._metrics.attempted("invalid")
                self._notices.tell(pod.ref, pod.message, first=not pod.told, reason=WaitReason.POD_REFUSED)
                pod.told = pod.message

    def _tell_placed(self, ref: PodRef, placement: Placement) -> None:
        node, gpu = placement.node, placement.gpu
        where = ", ".join(f"GPU {one.index} ({one.uuid})" for one in gpu.gpus)
        log.info("placed", extra=fields(pod=ref, node=node, gpu=gpu.uuid, bytes=gpu.bytes))
        message = f"placed {ref} on {node}, {where}, {format_bytes(gpu.bytes)}"
        self._events.record(ref, "Normal", "Scheduled", message)

    def _bind_done(self, task: "asyncio.Task[None]") -> None:
        self._binds.discard(task)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("binding broke", exc_info=error)

    async def abandon(self) -> None:
        """A leader that is not sure to lead any more must not write: its successor decides now."""
        tasks = [*self._binds, *([] if self._learning is None else [self._learning])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _waking(self, hear: Callable[[Change], bool]) -> Callable[[Change], bool]:
        return lambda change: self._note(hear(change))

    def _note(self, helps: bool) -> bool:
        """Something has changed that could let a pod in."""
        if helps or self.state.is_touched:  # a pod that came may be the company that another waits for
            self._wake.set()
        return helps
