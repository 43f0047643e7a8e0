"""All models of one leader, without I/O: what is reported goes in, what is to be done comes out. Pure.

    cache = Cache(read_defaults(BERTH), keys)      # kept by informers, whose lists are complete before what follows
    scaler = Scaler(cache, now_ns)

    scaler.record_loads(loads, replicas, now_ns)   # a gateway has answered; the Scraper's `take`
    scaler.report(activator, report, now_ns)       # an activator has reported            → actions
    scaler.activator_gone(activator)               # its stream has ended
    scaler.asked(model, now_ns)                    # the route that a model is to have, each second and after `RouteChanged`
    scaler.set_route(model, route)                 # the route that it has
    scaler.close_second(now_ns)                    # once a second
    scaler.step(now_ns)                            # every two seconds                    → actions
    scaler.question(now_ns)                        # after what gives actions: what to ask the binder, or None
    scaler.answered(question, answer, now_ns)      # None: it did not answer              → actions

An action that is still needed is given again by the next step, so a writer needs no memory beyond the newest one of each
model. Where more replicas are desired than have a node, `WriteScale` comes with the binder's answer: ask at once, and one
question at a time.

`now_ns` is nanoseconds since 1970 on a clock that does not jump: the wall's at the start, monotonic from there on. One that
goes back goes on here from where it was.
"""

import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final

from berth.contract.activation import Report
from berth.contract.scaling import (
    MOST_ASKED,
    ModelKey,
    ReplicaLoad,
    Schedulable,
    SchedulableAnswer,
    SchedulableModel,
    SchedulableRequest,
)
from scaler.activation.route import RouteSpec
from scaler.core.actions import Action, Event, NoRecord, Record, RouteChanged
from scaler.core.autoscaler import ModelAutoscaler
from scaler.core.cache import Cache
from scaler.core.capacity import NOT_ASKED, Capacity, capacity_of
from scaler.core.deployments import MOST_TEMPLATE_BYTES, Deployment
from scaler.core.models_view import ModelView
from scaler.core.reconcile import Observed, RouteStatus, event_on
from scaler.core.replica_loads import ReplicaLoads
from scaler.core.retention import Evictions, IdleReplica, least_recently_used
from scaler.decision.load import Stat
from scaler.go import SECOND_NS

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 2.0
_MILLISECOND_NS: Final = 1_000_000
# Of a question's templates; the binder reads twice as much.
_QUESTION_BYTES: Final = 8 * 1024**2


class Scaler:
    """The next leader goes on with what is recorded on the Deployments."""

    def __init__(self, cache: Cache, now_ns: int, record: Record | None = None) -> None:
        """`record`: what the deciders observe is written there."""
        self._cache = cache
        self._record: Record = record or NoRecord()
        self._now_ns, self._set_back_ns = now_ns, 0
        self._autoscalers: dict[ModelKey, ModelAutoscaler] = {}
        self._loads = ReplicaLoads(cache)
        self._evictions = Evictions()
        # Models whose replicas are not requested before the binder has answered.
        self._unanswered: set[ModelKey] = set()
        self._is_paused = False
        # Since when no question has been answered.
        self._silent_since_ns: int | None = None

    # What is reported.

    def record_loads(self, loads: Iterable[ReplicaLoad], replicas: Container[str], now_ns: int) -> bool:
        """What a gateway reports, on whose node these replicas are (their uids); whether anything of it was new."""
        return self._loads.record(loads, replicas, self._now(now_ns))

    def report(self, activator: str, report: Report, now_ns: int) -> list[Action]:
        """What an activator buffers for one model. The first request of a model at zero decides at once."""
        try:
            return self._report(activator, report, self._now(now_ns))
        except Exception as error:
            _left_out(report.model, error)
            return []

    def _report(self, activator: str, report: Report, now_ns: int) -> list[Action]:
        autoscaler = self._autoscaler(report.model, now_ns)
        stat = None if autoscaler is None else autoscaler.report(activator, report)
        if autoscaler is None or stat is None:
            return []
        self._record_stat(autoscaler, stat, now_ns)
        model = autoscaler.key
        actions = autoscaler.forwarded(report, self._cache.pods(model), now_ns)
        if autoscaler.starts_cold(stat, self._cache.counts(model), now_ns):
            actions += self._step(autoscaler, now_ns)
        return actions

    def activator_gone(self, activator: str) -> None:
        for autoscaler in self._autoscalers.values():
            autoscaler.activator_gone(activator)

    def set_route(self, model: ModelKey, route: RouteStatus) -> None:
        """Whether the model's requests get to the activators, if they are to."""
        autoscaler = self._autoscalers.get(model)
        if autoscaler is not None:
            autoscaler.set_route(route, self._cache.counts(model))

    def close_second(self, now_ns: int) -> None:
        """What the replicas have reported in the last second becomes their models' load. Of a model without a replica for
        which no request waits there is none, so that what was started in vain goes again."""
        now_ns = self._now(now_ns)
        autoscalers = self._all(now_ns)
        stats = self._loads.close(autoscaler.key for autoscaler in autoscalers)
        for autoscaler in autoscalers:
            try:
                self._close(autoscaler, stats.get(autoscaler.key), now_ns)
            except Exception as error:
                _left_out(autoscaler.key, error)

    def _close(self, autoscaler: ModelAutoscaler, stat: Stat | None, now_ns: int) -> None:
        model = autoscaler.key
        if stat is None and not self._is_paused and autoscaler.is_known_idle and not self._cache.ready(model):
            stat = Stat()
        if stat is not None:
            self._record_stat(autoscaler, stat, now_ns)
        queued = self._loads.queued(model, now_ns)
        if queued is not None:
            autoscaler.record_queued(queued, now_ns)

    def _record_stat(self, autoscaler: ModelAutoscaler, stat: Stat, now_ns: int) -> None:
        """In whole seconds, as the windows are."""
        second_ns = now_ns // SECOND_NS * SECOND_NS
        self._record.stat(autoscaler.key, second_ns, stat)
        autoscaler.record(stat, second_ns)

    def pause(self) -> None:
        """No activator reports what it buffers from now on."""
        self._is_paused = True

    def resume(self, now_ns: int) -> None:
        """Activators come back now, and whether requests get to them is to be seen anew."""
        self._is_paused, now_ns = False, self._now(now_ns)
        for autoscaler in self._autoscalers.values():
            autoscaler.resume(self._cache.counts(autoscaler.key), now_ns)

    # What is to be done.

    def step(self, now_ns: int) -> list[Action]:
        """One decision for each model, and what follows from it."""
        now_ns = self._now(now_ns)
        actions: list[Action] = [*self._problems(), *self._gone()]
        self._loads.forget_gone()
        self._evictions.forget_done(lambda uid: self._cache.pod(uid) is not None, now_ns)
        for autoscaler in self._all(now_ns):
            try:
                actions += self._step(autoscaler, now_ns)
            except Exception as error:
                _left_out(autoscaler.key, error)
        if not self._unanswered:
            self._silent_since_ns = None  # a binder that is asked nothing is not silent
        return actions

    def question(self, now_ns: int) -> SchedulableRequest | None:
        """All models that lack replicas, if one of them waits for an answer."""
        now_ns = self._now(now_ns)
        self._unanswered &= self._autoscalers.keys()
        if not self._unanswered:
            return None
        lacking = [one for one in self._autoscalers.values() if self._lacks_capacity(one, now_ns)]
        asked = tuple(self._demand(autoscaler, now_ns) for autoscaler in _as_many_as_fit(lacking))
        if not asked:
            self._unanswered.clear()
            return None
        if self._silent_since_ns is None:
            self._silent_since_ns = now_ns
        idle = least_recently_used(self._idle(now_ns))
        return SchedulableRequest(models=asked, idle=tuple(replica.full_name for replica in idle))

    def answered(
        self, question: SchedulableRequest, answer: SchedulableAnswer | None, now_ns: int
    ) -> list[Action]:
        """The binder's answer to a question; None: there is none, and its last one counts."""
        now_ns = self._now(now_ns)
        self._unanswered.difference_update(asked.model for asked in question.models)
        if answer is not None:
            self._silent_since_ns = None
            for autoscaler in self._autoscalers.values():
                autoscaler.forget_capacity()
        found = {} if answer is None else answer.models
        capacities = self._capacities(question, found, now_ns)
        actions: list[Action] = []
        for asked in question.models:
            if asked.model not in capacities:
                continue
            try:
                capacity = capacities[asked.model]
                actions += self._evict_for(asked, found.get(asked.model), capacity, now_ns)
                actions += self._limit(self._autoscalers[asked.model], capacity, now_ns)
            except Exception as error:
                _left_out(asked.model, error)
        return actions

    def _capacities(
        self, question: SchedulableRequest, found: Mapping[ModelKey, Schedulable], now_ns: int
    ) -> dict[ModelKey, Capacity]:
        """Of the models that are still there. Replicas that could be scheduled a moment ago and are not bound yet take
        their capacity, whichever model it has been offered to since: new ones wait until all of those have a node."""
        capacities = {}
        for asked in question.models:
            if (autoscaler := self._autoscalers.get(asked.model)) is not None:
                answer = found.get(asked.model)
                capacities[asked.model] = (
                    autoscaler.last_capacity if answer is None else capacity_of(asked, answer)
                )
        if any(self._is_owed(model, capacity, now_ns) for model, capacity in capacities.items()):
            return {
                model: self._autoscalers[model].limited_to_promise(capacity)
                for model, capacity in capacities.items()
            }
        return capacities

    def _is_owed(self, model: ModelKey, capacity: Capacity, now_ns: int) -> bool:
        if capacity is NOT_ASKED:
            return False
        return self._autoscalers[model].is_owed(capacity, self._cache.counts(model), now_ns)

    # What is known.

    def names(self, namespace: str) -> Sequence[str]:
        """Of the Deployments of this namespace that have asked to be scaled."""
        return [key.name for key in self._autoscalers if key.namespace == namespace]

    def models(self) -> Sequence[ModelKey]:
        return list(self._autoscalers)

    def asked(self, model: ModelKey, now_ns: int) -> RouteSpec | None:
        """Where the model's requests are to go, and what activators need to know for it. None: it is not scaled."""
        autoscaler = self._autoscalers.get(model)
        if autoscaler is None or not autoscaler.has_route or model not in self._cache.deployments:
            return None
        deployment = autoscaler.deployment
        return RouteSpec(
            model=model,
            needs_proxy=autoscaler.is_routed_away(self._cache.counts(model)),
            public_name=deployment.public_name,
            endpoints=self._cache.endpoints(model),
            tls=deployment.proxy.tls,
            limits=deployment.options.limits,
            clients=deployment.options.clients,
            unavailable=autoscaler.failure(now_ns),
            waiting_for=autoscaler.waits_for,
            last_arrival_ns=self._loads.last_arrival_ns(model, now_ns),
        )

    def view(self, model: ModelKey) -> ModelView | None:
        autoscaler = self._autoscalers.get(model)
        if autoscaler is None:
            return None
        counts, pods = self._cache.counts(model), self._cache.pods(model)
        return autoscaler.view(counts, pods, self._cache.refused(model), self._now_ns)

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
        """Made when it is first needed, with its Deployment as it is now."""
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

    def _observed(self, autoscaler: ModelAutoscaler, now_ns: int) -> Observed:
        model, cache = autoscaler.key, self._cache
        return Observed(
            deployment=autoscaler.deployment,
            counts=cache.counts(model),
            pods=cache.pods(model),
            loads=self._loads.of(model, now_ns, self._evictions.is_going),
            last_valid=cache.last_valid_of(model),
            binder_silent_ns=self.binder_silent_ns,
        )

    def _step(self, autoscaler: ModelAutoscaler, now_ns: int) -> list[Action]:
        observed = self._observed(autoscaler, now_ns)
        self._record.scale(autoscaler.key, now_ns, ready=observed.counts.ready)
        actions = autoscaler.decide(observed, now_ns)
        if autoscaler.lacks_capacity(observed.counts, now_ns):
            self._unanswered.add(autoscaler.key)
        return actions

    def _limit(self, autoscaler: ModelAutoscaler, capacity: Capacity, now_ns: int) -> list[Action]:
        return autoscaler.limit(self._observed(autoscaler, now_ns), capacity, now_ns)

    # The binder.

    def _lacks_capacity(self, autoscaler: ModelAutoscaler, now_ns: int) -> bool:
        return autoscaler.lacks_capacity(self._cache.counts(autoscaler.key), now_ns)

    def _demand(self, autoscaler: ModelAutoscaler, now_ns: int) -> SchedulableModel:
        model = autoscaler.key
        return autoscaler.demand(self._cache.counts(model), self._cache.priority(model), now_ns)

    def _evict_for(
        self, asked: SchedulableModel, answer: Schedulable | None, capacity: Capacity, now_ns: int
    ) -> list[Action]:
        """Idle replicas that the binder has named go for one more replica, once those are created that have a node."""
        if answer is None or not answer.if_idle_go or capacity.replicas >= asked.desired:
            return []
        replicas = self._autoscalers[asked.model].deployment.replicas
        if self._cache.counts(asked.model).made < max(replicas, capacity.replicas):
            return []
        idle = {replica.full_name: replica for replica in self._idle(now_ns)}
        going = self._evictions.chosen(asked.model, asked.priority, answer.if_idle_go, idle, now_ns)
        actions: list[Action] = []
        for replica in going:
            victim = self._autoscalers[replica.model]
            victim.evict_one()
            text = f"{replica.pod} was idle, and {asked.model} needs its memory"
            actions.append(event_on(victim.deployment, "Normal", "IdleReplicaEvicted", text))
        for model in {replica.model for replica in going}:
            actions += self._limit(self._autoscalers[model], self._autoscalers[model].last_capacity, now_ns)
        return actions

    def _idle(self, now_ns: int) -> Iterator[IdleReplica]:
        """Replicas that stay until their memory is needed, of models whose requests have gone to the activators for so long
        that no replica gets one any more."""
        for key, autoscaler in self._autoscalers.items():
            if not autoscaler.is_evictable(now_ns):
                continue
            priority = self._cache.priority(key)
            for pod, last_ns in self._loads.idle(key, now_ns):
                yield IdleReplica(
                    pod=pod.name, uid=pod.uid, model=key, priority=priority, last_used_ns=last_ns
                )

    # Deployments.

    def _problems(self) -> Iterator[Event]:
        for problem in self._cache.problems():
            yield Event(
                model=problem.key,
                uid=problem.uid,
                type="Warning",
                reason=problem.reason,
                message=problem.text,
            )

    def _gone(self) -> Iterator[RouteChanged]:
        """Whose class has been taken away keeps its replicas as they are."""
        for key in [key for key in self._autoscalers if key not in self._cache.deployments]:
            del self._autoscalers[key]
            self._record.gone(key)
            yield RouteChanged(model=key)


def _left_out(model: ModelKey, error: Exception) -> None:
    """An unforeseen error of one model must not end the scaling of all others: what it is made of is a tenant's."""
    log.error("model left out", extra={"fields": {"model": model}}, exc_info=error)


def _as_many_as_fit(autoscalers: Iterable[ModelAutoscaler]) -> Iterator[ModelAutoscaler]:
    """Into one question: one of each namespace, then another of each, so that however many a tenant has, and however
    large, all others are asked about. Of its own those that have waited longest."""
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
