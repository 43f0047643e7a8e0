"""The scaler itself, without its I/O: what is told goes in, what is to be done comes out. Pure.

    cache = Cache(read_defaults(BERTH), keys)      # told by informers, whose lists are complete before what follows
    scaler = Scaler(cache, now_ns)

    scaler.heard(loads, copies, now_ns)            # a gateway has answered; the Scraper's `take`
    scaler.held(activator, report, now_ns)         # an activator has reported            → actions
    scaler.activator_gone(activator)               # its stream has ended
    scaler.asked(model, now_ns)                    # what the model's switch is to look at, each second and after `RouteChanged`
    scaler.led(model, path)                        # what came of it
    scaler.second(now_ns)                          # once a second
    scaler.step(now_ns)                            # every two seconds                    → actions
    scaler.question(now_ns)                        # after what gives actions: what to ask the binder, or None
    scaler.answered(question, answer, now_ns)      # None: it did not answer              → actions

An action that is still needed is told again by the next step, so a writer needs no memory beyond the newest one of each
model. Where more copies are wanted than have a place, `WriteScale` comes with the binder's answer: ask at once, and one
question at a time.

`now_ns` is nanoseconds since 1970 on a clock that does not jump: the wall's at the start, monotonic from there on. One that
goes back goes on here from where it was.
"""

import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Final

from berth.contract.scaling import (
    MOST_ASKED,
    ModelKey,
    ReplicaLoad,
    Report,
    Schedulable,
    SchedulableAnswer,
    SchedulableModel,
    SchedulableRequest,
)
from scaler.activation.switch import Asked
from scaler.core.actions import Action, ColdStarted, Event, Kind, NoRecord, Record, RouteChanged
from scaler.core.autoscaler import ModelAutoscaler, RouteStatus, known
from scaler.core.cache import Cache
from scaler.core.capacity import capacity_of
from scaler.core.deployments import MOST_TEMPLATE_BYTES, Deployment
from scaler.core.models_view import Averages as AveragesView
from scaler.core.models_view import ModelView, PodsView
from scaler.core.outcome import Outcomes, event_on
from scaler.core.replica_loads import ReplicaLoads
from scaler.core.retention import Evictions, Idle, least_recently_used
from scaler.decision.bounds import Activity
from scaler.decision.load import Averages, Stat
from scaler.go import SECOND_NS

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 2.0
_MILLISECOND_NS: Final = 1_000_000
# Of a question's templates; the binder reads twice as much.
_QUESTION_BYTES: Final = 8 * 1024**2
# What the binder counts to.
_MOST_COPIES: Final = 2**31 - 1


class Scaler:
    """All models of one leader. Whoever leads next goes on with what stands on the Deployments."""

    def __init__(self, cache: Cache, now_ns: int, record: Record | None = None) -> None:
        """`record`: who writes down what the deciders are told."""
        self._cache = cache
        self._record: Record = record or NoRecord()
        self._now_ns, self._set_back_ns = now_ns, 0
        self._autoscalers: dict[ModelKey, ModelAutoscaler] = {}
        self._copies = ReplicaLoads(cache)
        self._evictions = Evictions()
        self._outcomes = Outcomes(cache, self._copies, self._evictions)
        # Models whose copies are not asked for before the binder has answered.
        self._unanswered: set[ModelKey] = set()
        self._is_paused = False
        # Since when no question has been answered.
        self._silent_since_ns: int | None = None

    # What is told.

    def heard(self, loads: Iterable[ReplicaLoad], copies: Container[str], now_ns: int) -> bool:
        """What a gateway says, who may speak of these copies (their uids); whether anything of it was new."""
        return self._copies.heard(loads, copies, self._now(now_ns))

    def held(self, activator: str, report: Report, now_ns: int) -> list[Action]:
        """What an activator holds of one model. The first request of one that is at zero decides at once."""
        try:
            return self._held(activator, report, self._now(now_ns))
        except Exception as error:
            _left_out(report.model, error)
            return []

    def _held(self, activator: str, report: Report, now_ns: int) -> list[Action]:
        autoscaler = self._autoscaler(report.model, now_ns)
        stat = None if autoscaler is None else autoscaler.buffered.told(activator, report)
        if autoscaler is None or stat is None:
            return []
        self._tell(autoscaler, stat, now_ns)
        cold_started: list[Action] = self._served(autoscaler, report, now_ns)
        if stat.concurrency <= 0 or autoscaler.recommended > 0 or autoscaler.hopeless(now_ns):
            return cold_started
        if self._cache.counts(autoscaler.key).ready == 0:
            autoscaler.cold_starts.begin(now_ns)
        return [*cold_started, *self._stepped(autoscaler, now_ns)]

    def activator_gone(self, activator: str) -> None:
        for autoscaler in self._autoscalers.values():
            autoscaler.buffered.gone(activator)

    def led(self, model: ModelKey, path: RouteStatus) -> None:
        """Whether the model's requests get to the activators, if they are to."""
        autoscaler = self._autoscalers.get(model)
        if autoscaler is not None:
            autoscaler.route = path if autoscaler.is_away(self._cache.counts(model)) else RouteStatus()

    def second(self, now_ns: int) -> None:
        """What the copies have told in the last second becomes their models' load. Of a model without a copy that
        nobody waits for there is none, so that what was woken in vain goes again."""
        now_ns = self._now(now_ns)
        autoscalers = self._all(now_ns)
        stats = self._copies.second(autoscaler.key for autoscaler in autoscalers)
        for autoscaler in autoscalers:
            try:
                self._second_of(autoscaler, stats.get(autoscaler.key), now_ns)
            except Exception as error:
                _left_out(autoscaler.key, error)

    def _second_of(self, autoscaler: ModelAutoscaler, stat: Stat | None, now_ns: int) -> None:
        ready = self._cache.counts(autoscaler.key).ready
        if stat is None and ready == 0 and self._is_known_idle(autoscaler):
            stat = Stat()
        if stat is not None:
            self._tell(autoscaler, stat, now_ns)
        waiting = self._copies.waiting(autoscaler.key, now_ns)
        if waiting is not None:
            autoscaler.waiting.record(now_ns // SECOND_NS, waiting + autoscaler.buffered.held)

    def _is_known_idle(self, autoscaler: ModelAutoscaler) -> bool:
        """A model without a copy, as far as activators tell."""
        return autoscaler.recommended > 0 and autoscaler.buffered.held == 0 and not self._is_paused

    def _tell(self, autoscaler: ModelAutoscaler, stat: Stat, now_ns: int) -> None:
        """In whole seconds, as the windows are."""
        second_ns = now_ns // SECOND_NS * SECOND_NS
        self._record.stat(autoscaler.key, second_ns, stat)
        autoscaler.record(stat, second_ns)

    def _served(self, autoscaler: ModelAutoscaler, report: Report, now_ns: int) -> list[Action]:
        if report.forwarded <= 0 or not autoscaler.cold_starts.under_way:
            return []
        autoscaler.cold_starts.seen(self._cache.pods(autoscaler.key))
        cold_start = autoscaler.cold_starts.served(now_ns - int(report.served_ago * SECOND_NS))
        return [] if cold_start is None else [ColdStarted(model=autoscaler.key, cold_start=cold_start)]

    def pause(self) -> None:
        """Nobody reports what is held from now on."""
        self._is_paused = True

    def resume(self, now_ns: int) -> None:
        """Activators come back now, and whether requests get to them is to be seen anew."""
        self._is_paused, now_ns = False, self._now(now_ns)
        for autoscaler in self._autoscalers.values():
            autoscaler.resume(self._cache.counts(autoscaler.key), now_ns)

    # What is to be done.

    def step(self, now_ns: int) -> list[Action]:
        """One decision for each model, and what comes of it."""
        now_ns = self._now(now_ns)
        actions: list[Action] = [*self._problems(), *self._gone()]
        self._copies.forget_gone()
        self._evictions.forget_done(lambda uid: self._cache.pod(uid) is not None, now_ns)
        for autoscaler in self._all(now_ns):
            try:
                actions += self._stepped(autoscaler, now_ns)
            except Exception as error:
                _left_out(autoscaler.key, error)
        if not self._unanswered:
            self._silent_since_ns = None  # who is asked nothing is not silent
        return actions

    def question(self, now_ns: int) -> SchedulableRequest | None:
        """All models that lack copies, if one of them waits for an answer."""
        now_ns = self._now(now_ns)
        self._unanswered &= self._autoscalers.keys()
        if not self._unanswered:
            return None
        lacking = (autoscaler for autoscaler in self._autoscalers.values() if self._lacks(autoscaler, now_ns))
        asked = tuple(self._asked_of(autoscaler, now_ns) for autoscaler in _as_many_as_go(lacking))
        if not asked:
            self._unanswered.clear()
            return None
        if self._silent_since_ns is None:
            self._silent_since_ns = now_ns
        idle = least_recently_used(self._idle(now_ns))
        return SchedulableRequest(models=asked, idle=tuple(copy.full_name for copy in idle))

    def answered(
        self, question: SchedulableRequest, answer: SchedulableAnswer | None, now_ns: int
    ) -> list[Action]:
        """What the binder says to a question; None: it says nothing, and its last word counts."""
        now_ns = self._now(now_ns)
        if answer is not None:
            self._silent_since_ns = None
            for autoscaler in self._autoscalers.values():
                autoscaler.capacity = None
        told = {} if answer is None else answer.models
        for asked in question.models:
            self._unanswered.discard(asked.model)
            if asked.model in self._autoscalers and asked.model in told:
                self._autoscalers[asked.model].capacity = capacity_of(asked, told[asked.model])
        self._keep_promises(question, now_ns)
        actions: list[Action] = []
        for asked in question.models:
            if asked.model not in self._autoscalers:
                continue
            try:
                actions += self._placed(asked, told.get(asked.model), now_ns)
            except Exception as error:
                _left_out(asked.model, error)
        return actions

    # What is known.

    def names(self, namespace: str) -> Sequence[str]:
        """Of the Deployments of this namespace that have asked to be scaled."""
        return [key.name for key in self._autoscalers if key.namespace == namespace]

    def models(self) -> Sequence[ModelKey]:
        return list(self._autoscalers)

    def asked(self, model: ModelKey, now_ns: int) -> Asked | None:
        """Who is to take the model's requests, and what activators need to know for it. None: it is not scaled."""
        autoscaler = self._autoscalers.get(model)
        if autoscaler is None or autoscaler.away is None or model not in self._cache.deployments:
            return None
        deployment = autoscaler.deployment
        return Asked(
            model=model,
            away=autoscaler.is_away(self._cache.counts(model)),
            public_name=deployment.public_name,
            endpoints=self._cache.endpoints(model),
            tls=deployment.proxy.tls,
            limits=deployment.options.limits,
            clients=deployment.options.clients,
            hopeless=autoscaler.hopeless(now_ns),
            waits_for="" if autoscaler.waits is None else autoscaler.waits.text,
            last_arrival_ns=self._copies.last_arrival_ns(model, now_ns),
        )

    def view(self, model: ModelKey) -> ModelView | None:
        autoscaler = self._autoscalers.get(model)
        if autoscaler is None:
            return None
        deployment, now_ns, counts = autoscaler.deployment, self._now_ns, self._cache.counts(model)
        autoscaler.cold_starts.seen(self._cache.pods(model))
        concurrency, requests = autoscaler.model.averages(now_ns)
        return ModelView(
            model=model,
            class_name=deployment.class_name,
            spec=deployment.spec,
            invalid=self._cache.refused(model),
            ready=counts.ready,
            pods=PodsView(
                not_ready=counts.starting,
                pending=counts.pending + counts.unschedulable + counts.gated,
                unschedulable=counts.unschedulable,
                gated=counts.gated,
                terminating=counts.leaving,
            ),
            replicas=deployment.replicas,
            recommended=known(autoscaler.recommended),
            desired=known(autoscaler.step.copies),
            requested=autoscaler.asked_for if deployment.kind is Kind.KPA else deployment.replicas,
            capacity_limited=autoscaler.capacity_limited.by,
            message=autoscaler.why(now_ns),
            concurrency=_shown(concurrency),
            requests_per_second=_shown(requests),
            waiting=_shown(autoscaler.waiting.averages(now_ns // SECOND_NS)),
            is_young=autoscaler.is_young(counts, now_ns),
            in_panic=autoscaler.model.in_panic,
            activity=autoscaler.activity,
            since_ns=autoscaler.since_ns,
            buffered=autoscaler.buffered.held,
            decisions=tuple(autoscaler.decisions),
            cold_starts=autoscaler.cold_starts.views(),
        )

    @property
    def binder_silent_ns(self) -> int:
        """For how long no question has been answered."""
        return 0 if self._silent_since_ns is None else self._now_ns - self._silent_since_ns

    # One model.

    def _now(self, now_ns: int) -> int:
        """Never back: a clock that is set back goes on from where it was. In whole milliseconds, so that what a record
        says of a time makes the same decisions."""
        now_ns = now_ns // _MILLISECOND_NS * _MILLISECOND_NS + self._set_back_ns
        if now_ns < self._now_ns:
            self._set_back_ns += self._now_ns - now_ns
        self._now_ns = max(self._now_ns, now_ns)
        return self._now_ns

    def _all(self, now_ns: int) -> list[ModelAutoscaler]:
        found = []
        for deployment in self._cache.deployments.values():
            try:
                found.append(self._autoscaler_of(deployment, now_ns))
            except Exception as error:
                _left_out(deployment.key, error)
        return found

    def _autoscaler(self, key: ModelKey, now_ns: int) -> ModelAutoscaler | None:
        deployment = self._cache.deployments.get(key)
        return None if deployment is None else self._autoscaler_of(deployment, now_ns)

    def _autoscaler_of(self, deployment: Deployment, now_ns: int) -> ModelAutoscaler:
        """Made when it is first needed, and told of its Deployment as it is now."""
        key = deployment.key
        autoscaler = self._autoscalers.get(key)
        if autoscaler is not None and autoscaler.deployment is deployment:
            return autoscaler
        ready = self._cache.counts(key).ready
        if autoscaler is None or autoscaler.deployment.uid != deployment.uid:
            autoscaler = self._autoscalers[key] = ModelAutoscaler(deployment, ready=ready, now_ns=now_ns)
            is_new: bool | None = True
        else:
            is_new = autoscaler.configure(deployment, ready=ready, now_ns=now_ns)
        if is_new is not None:
            self._record.model(
                key,
                now_ns,
                is_new=is_new,
                ready=ready,
                annotations=deployment.annotations,
                container_concurrency=deployment.proxy.container_concurrency,
            )
        return autoscaler

    def _stepped(self, autoscaler: ModelAutoscaler, now_ns: int) -> list[Action]:
        counts = self._cache.counts(autoscaler.key)
        self._record.scale(autoscaler.key, now_ns, ready=counts.ready)
        autoscaler.decide(ready=counts.ready, now_ns=now_ns)
        is_switched = autoscaler.advance(counts, self._cache.pods(autoscaler.key), now_ns)
        actions: list[Action] = [RouteChanged(model=autoscaler.key)] if is_switched else []
        if autoscaler.lacks(counts, now_ns):
            self._unanswered.add(autoscaler.key)
            return actions
        return actions + self._outcome(autoscaler, now_ns)

    def _outcome(self, autoscaler: ModelAutoscaler, now_ns: int) -> list[Action]:
        return self._outcomes.of(autoscaler, now_ns, silent_ns=self.binder_silent_ns)

    # Room.

    def _lacks(self, autoscaler: ModelAutoscaler, now_ns: int) -> bool:
        return autoscaler.lacks(self._cache.counts(autoscaler.key), now_ns)

    def _asked_of(self, autoscaler: ModelAutoscaler, now_ns: int) -> SchedulableModel:
        autoscaler.asked_ns = now_ns
        counts = self._cache.counts(autoscaler.key)
        return SchedulableModel(
            name=str(autoscaler.key),
            desired=min(autoscaler.schedulable(counts), _MOST_COPIES),
            running=counts.ready,
            starting=counts.starting,
            priority=self._cache.priority(autoscaler.key),
            template=autoscaler.deployment.template,
            template_hash=autoscaler.deployment.template_hash,
        )

    def _keep_promises(self, question: SchedulableRequest, now_ns: int) -> None:
        """Replicas that had a place a moment ago and are not bound yet take it, whoever it has been offered to since: what
        is new has to wait until all of them have one."""
        autoscalers = [
            self._autoscalers[asked.model] for asked in question.models if asked.model in self._autoscalers
        ]
        if any(self._is_owed(autoscaler, now_ns) for autoscaler in autoscalers):
            for autoscaler in autoscalers:
                autoscaler.limit_to_promise()

    def _is_owed(self, autoscaler: ModelAutoscaler, now_ns: int) -> bool:
        counts = self._cache.counts(autoscaler.key)
        refused = counts.unschedulable + counts.gated
        return (
            autoscaler.capacity is not None and autoscaler.capacity.copies < autoscaler.owed(now_ns) - refused
        )

    def _placed(self, asked: SchedulableModel, schedulable: Schedulable | None, now_ns: int) -> list[Action]:
        autoscaler, counts = self._autoscalers[asked.model], self._cache.counts(asked.model)
        actions: list[Action] = []
        if schedulable is not None and autoscaler.capacity is not None:
            is_never = autoscaler.capacity.never and counts.bound == 0
            if is_never and not autoscaler.may_wait_for_node(counts, self._cache.pods(asked.model)):
                autoscaler.has_no_place(schedulable.reason, now_ns)
            # Nobody goes for one more copy before those are made that have a place.
            is_made = counts.made >= max(autoscaler.deployment.replicas, autoscaler.capacity.copies)
            if autoscaler.capacity.copies < asked.desired and schedulable.if_idle_go and is_made:
                actions += self._make_room(asked, schedulable.if_idle_go, now_ns)
        return actions + self._outcome(autoscaler, now_ns)

    def _make_room(self, asked: SchedulableModel, named: Sequence[str], now_ns: int) -> list[Action]:
        idle = {copy.full_name: copy for copy in self._idle(now_ns)}
        actions: list[Action] = []
        going = self._evictions.chosen(asked.model, asked.priority, named, idle, now_ns)
        for copy in going:
            victim = self._autoscalers[copy.model]
            left = victim.deployment.replicas if victim.evicted_to is None else victim.evicted_to
            victim.evicted_to = max(left - 1, 0)
            actions.append(
                event_on(
                    victim,
                    "Normal",
                    "IdleReplicaEvicted",
                    f"{copy.pod} was idle, and {asked.model} needs its memory",
                )
            )
        for model in {copy.model for copy in going}:
            actions += self._outcome(self._autoscalers[model], now_ns)
        return actions

    def _idle(self, now_ns: int) -> Iterator[Idle]:
        """Replicas that stay until they are needed, of models whose requests have gone to the activators for so long that
        nobody sends a copy one any more."""
        for key, autoscaler in self._autoscalers.items():
            if not _may_make_room(autoscaler, now_ns):
                continue
            priority = self._cache.priority(key)
            for pod, last_ns in self._copies.idle(key, now_ns):
                yield Idle(pod=pod.name, uid=pod.uid, model=key, priority=priority, last_used_ns=last_ns)

    # Deployments.

    def _problems(self) -> Iterator[Event]:
        for complaint in self._cache.problems():
            yield Event(
                model=complaint.key,
                uid=complaint.uid,
                type="Warning",
                reason=complaint.reason,
                message=complaint.text,
            )

    def _gone(self) -> Iterator[RouteChanged]:
        """Whose class has been taken away keeps its copies as they are."""
        for key in [key for key in self._autoscalers if key not in self._cache.deployments]:
            del self._autoscalers[key]
            self._record.gone(key)
            yield RouteChanged(model=key)


def _left_out(model: ModelKey, error: Exception) -> None:
    """One model that nobody has thought of must not end the scaling of all others: what it is made of is a tenant's."""
    log.error("model left out", extra={"fields": {"model": model}}, exc_info=error)


def _as_many_as_go(autoscalers: Iterable[ModelAutoscaler]) -> Iterator[ModelAutoscaler]:
    """Into one question: one of each namespace, then another of each, so that however many a tenant has, and however
    large, all others are asked for. Of its own those that have not been asked for the longest time."""
    by_namespace: dict[str, list[ModelAutoscaler]] = defaultdict(list)
    for autoscaler in autoscalers:
        if autoscaler.deployment.template_bytes <= MOST_TEMPLATE_BYTES:
            by_namespace[autoscaler.key.namespace].append(autoscaler)
    for found in by_namespace.values():
        found.sort(key=lambda autoscaler: autoscaler.asked_ns)
    left, room = MOST_ASKED, _QUESTION_BYTES
    for turn in zip_longest(*by_namespace.values()):
        for autoscaler in filter(None, turn):
            left, room = left - 1, room - autoscaler.deployment.template_bytes
            if left < 0 or room < 0:
                return
            yield autoscaler


def _may_make_room(autoscaler: ModelAutoscaler, now_ns: int) -> bool:
    deployment = autoscaler.deployment
    if not deployment.options.until_needed or deployment.kind is not Kind.KPA or autoscaler.recommended != 0:
        return False
    return (
        autoscaler.activity is Activity.INACTIVE
        and autoscaler.buffered.held == 0
        and autoscaler.is_proven(now_ns)
    )


def _shown(averages: Averages | None) -> AveragesView:
    if averages is None:
        return AveragesView()
    # What sums and differences leave of a window may be a little less than nothing: neither that nor a -0.0 is a load.
    return AveragesView(max(averages.stable, 0.0) + 0.0, max(averages.panic, 0.0) + 0.0)
