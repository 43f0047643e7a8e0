"""What the scaler asks: how many more replicas of each model the nodes would take now, which idle pods would have to go
for one more, and how many replicas no node will ever take. Pure; in small steps (`SchedulableAnswers.answer`).

All from one snapshot, by a decision's own rules, on a mirror of the cluster (`simulate`). Pods that wait to be
placed are served first, whatever their priority: else one memory would be promised twice, to them and to the
scaler. Then models are given replicas, one at a time: the highest priority first, among equals the one that lacks the
largest part of what it wants, then by name. What a ResourceQuota forbids is not seen here; the
scaler sees that no pods come.
"""

import heapq
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.ids import PodUid
from berth.contract.keys import Keys
from berth.contract.scaling import (
    ModelKey,
    Schedulable,
    SchedulableAnswer,
    SchedulableModel,
    SchedulableRequest,
)
from berth.contract.text import one_line
from berth.runtime.logs import fields
from binder.cache.reservations import Reservation
from binder.engine.capacity import most_replicas
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement, Refusal
from binder.engine.explain import summary
from binder.engine.idle import IdlePods
from binder.pod.demand import Demand, parse_demand

log = logging.getLogger(__name__)

JsonObject = Mapping[str, Any]
# An answer in the making: between its steps, each a millisecond or so, others may have their turn.
Steps = Generator[None, None, SchedulableAnswer]

# Pods that wait are decided first, and replicas after them. What is beyond is reported as not looked at: the scaler asks
# again soon.
_MOST_PENDING = 1024
_MOST_REPLICAS = 4096
# Searches for idle pods in one answer, each some milliseconds.
_MOST_SEARCHES = 64
_ROWS_AT_ONCE = 64
_MOST_TEMPLATES = 4096
# What stands in a tenant's template may be quoted in it.
_LONGEST_REASON = 1024


@dataclass(slots=True)
class _Asked:
    """One model while its replicas are given. `refusal`, `why`: of the first replica that found no place."""

    asks: SchedulableModel
    demand: Demand | None
    now: int = 0
    never: int = 0
    why: str = ""
    refusal: Refusal | None = None
    if_idle_go: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        return max(0, self.asks.desired - self.asks.running - self.asks.starting - self.now)

    @property
    def answer(self) -> Schedulable:
        return Schedulable(
            name=self.asks.name,
            now=self.now,
            if_idle_go=self.if_idle_go,
            never=min(self.never, self.missing),
            reason=one_line(self.why, limit=_LONGEST_REASON) if self.missing else "",
        )

    @property
    def turn(self) -> "tuple[int, float, str]":
        """The smallest is next. The deficit is what would still be missing, in parts of what is wanted."""
        return (-self.asks.priority, -self.missing / self.asks.desired, str(self.asks.model))


class SchedulableAnswers:
    """Answers one question at a time. `pending()`: the pods that may be placed soon, in their order; `aside(demand)`:
    reservations that do not count for a pod."""

    def __init__(
        self,
        cluster: Cluster,
        keys: Keys,
        *,
        pending: Callable[[], list[Demand]],
        aside: Callable[[Demand], list[PodUid]],
    ) -> None:
        self._cluster, self._keys = cluster, keys
        self._pending, self._aside = pending, aside
        self._mirror = cluster.snapshot()
        self._decider = cluster.decider_over(self._mirror)
        self._templates: dict[tuple[ModelKey, str, int], Demand] = {}

    def answer(self, request: SchedulableRequest) -> Steps:
        """In steps, to be gone through by one caller at a time. A caller that stops in between closes it. To be asked for
        nothing is to see the cluster as it is, so that the next answer has less to do."""
        try:
            while not self._mirror.follow(most=_ROWS_AT_ONCE):
                yield
            generation = self._cluster.decider.table.clock
            if not request.models:
                return SchedulableAnswer(generation=generation, models={})
            pending = self._pending()
            asked = []
            for model in request.models:
                asked.append(self._asked(model))
                yield
            if len(pending) > _MOST_PENDING:
                for one in asked:
                    one.why = one.why or f"{len(pending)} pods wait to be placed first"
            else:
                yield from self._serve(pending, asked)
                yield from self._give(asked)
                yield from self._look_for_idle(asked, request.idle)
            return SchedulableAnswer(
                generation=generation, models={one.asks.model: one.answer for one in asked}
            )
        finally:
            self._mirror.revert()

    def _asked(self, asks: SchedulableModel) -> _Asked:
        try:
            return _Asked(asks, self._demand(asks))
        except InvalidPod as error:
            return _Asked(asks, None, never=asks.desired, why=f"the pod cannot be placed: {error}")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
            return _Asked(
                asks,
                None,
                never=asks.desired,
                why=f"the pod template cannot be read: {type(error).__name__}: {error}",
            )

    def _demand(self, asks: SchedulableModel) -> Demand:
        """What a replica requests. Raises InvalidPod, and what a thing that is no pod template makes of it."""
        key = (asks.model, asks.template_hash, asks.priority)
        demand = self._templates.get(key)
        if demand is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            demand = self._templates[key] = _replica_of(asks, self._keys)
        return demand

    def _serve(self, pending: Iterable[Demand], asked: Iterable[_Asked]) -> Iterator[None]:
        """Pods that wait take what they will take. A model's own are among those that it requests."""
        refused, by_namespace = set(), _by_namespace(asked)
        for demand in pending:
            if demand.model.ref.uid in self._cluster.state.nominated():
                continue  # its place is kept already
            question = demand.question
            if question in refused:
                continue
            try:
                outcome = self._place(demand)
            except Exception as error:  # the scheduler tells of it
                log.warning("not judged", extra=fields(pod=demand.model.ref, error=error))
                continue
            if not isinstance(outcome, Placement):
                refused.add(question)
            elif (model := _model_of(demand, by_namespace)) is not None and model.missing:
                model.now += 1
            yield

    def _give(self, asked: Iterable[_Asked]) -> Iterator[None]:
        """One replica at a time, until no other can be scheduled or nothing is missing."""
        turns = [(one.turn, one) for one in asked if one.demand is not None and one.missing]
        heap = [(turn, number) for number, (turn, _) in enumerate(turns)]
        heapq.heapify(heap)
        given, broken = 0, False
        while heap:
            _, number = heapq.heappop(heap)
            one = turns[number][1]
            if given == _MOST_REPLICAS:
                one.why = f"{_MOST_REPLICAS} replicas are given at once; ask again"
                continue
            try:
                self._give_one(one)
            except Exception as error:  # an unforeseen template must not spoil the others' answer
                log.error("model not judged", extra=fields(model=one.asks.model), exc_info=not broken)
                broken = True  # whatever it is, it is logged once in full
                one.why = f"the binder could not judge the pod: {error!r}"
                continue
            if one.refusal is None:
                given += 1
                if one.missing:
                    heapq.heappush(heap, (one.turn, number))
            yield

    def _give_one(self, one: _Asked) -> None:
        outcome = self._place(_known(one))
        if isinstance(outcome, Placement):
            one.now += 1
        else:
            one.why, one.refusal = summary(self._decider, _known(one), outcome), outcome
            one.never = max(0, one.asks.desired - most_replicas(self._decider, _known(one)))

    def _place(self, demand: Demand) -> Placement | Refusal:
        """Decide, and suppose what was decided."""
        with self._mirror.without(self._aside(demand)):
            outcome = self._decider.decide(demand)
            if isinstance(outcome, Placement):
                self._mirror.add(demand, outcome.node, outcome.gpu)
        return outcome

    def _look_for_idle(self, asked: Iterable[_Asked], idle: tuple[str, ...]) -> Iterator[None]:
        """For one more replica of each model that waits for room, in the order in which they are served."""
        waiting = sorted(
            (one for one in asked if one.refusal and not one.refusal.because), key=lambda one: one.turn
        )
        if not idle or not waiting:
            return
        reservations = yield from self._reservations(idle)
        pods, has_victims = IdlePods(self._decider, reservations), False
        for one in waiting[:_MOST_SEARCHES]:
            assert one.refusal is not None
            demand = _known(one)
            if has_victims and isinstance(self._place(demand), Placement):
                continue  # beside the replica for which they go; it has its turn once they are gone
            found = yield from pods.find(demand, one.refusal.codes)
            if found is not None:
                has_victims = True
                one.if_idle_go = tuple(f"{h.ref.namespace}/{h.ref.name}" for h in found.victims)
                self._mirror.remove([reservation.ref.uid for reservation in found.victims])
                self._mirror.add(demand, found.placement.node, found.placement.gpu)

    def _reservations(self, idle: tuple[str, ...]) -> Generator[None, None, list[Reservation]]:
        """The pods of these names that have a node and are not on their way out, in the same order."""
        wanted: dict[str, Reservation | None] = dict.fromkeys(idle)
        for number, node in enumerate(list(self._mirror.table.row_of)):
            for reservation in self._cluster.state.living_on(node):
                name = f"{reservation.ref.namespace}/{reservation.ref.name}"
                if name in wanted and reservation.has_model and not reservation.deleting:
                    wanted[name] = reservation
            if number % _ROWS_AT_ONCE == 0:
                yield
        return [reservation for reservation in wanted.values() if reservation is not None]


def _known(one: _Asked) -> Demand:
    assert one.demand is not None
    return one.demand


def _replica_of(asks: SchedulableModel, keys: Keys) -> Demand:
    """A pod of the template, as a controller would make it. Claims that would be made for it are not there yet, and
    are taken for bound by then."""
    meta, spec = asks.template.get("metadata") or {}, asks.template["spec"]
    demand = parse_demand(
        {
            "metadata": {
                "namespace": asks.model.namespace,
                "name": asks.model.name,
                "uid": f"replica of {asks.model}",
                "labels": meta.get("labels") or {},
                "annotations": meta.get("annotations") or {},
            },
            "spec": {**spec, "priority": asks.priority},
        },
        keys,
    )
    hash(demand.question)  # what is no pod of an API server's shows here, and not in the midst of a decision
    bound = tuple(claim for claim in demand.claims if claim not in demand.owned_claims)
    # As pods of the Deployment's ReplicaSets are.
    family = f"ReplicaSet/{asks.model.name}"
    return replace(demand, claims=bound, owned_claims=frozenset(), family=family)


def _by_namespace(asked: Iterable[_Asked]) -> dict[str, list[_Asked]]:
    found: dict[str, list[_Asked]] = {}
    for one in asked:
        if one.demand is not None:
            found.setdefault(one.asks.model.namespace, []).append(one)
    return found


def _model_of(demand: Demand, by_namespace: Mapping[str, list[_Asked]]) -> _Asked | None:
    """Whose replica a pod is: it requests the same and has the template's labels."""
    for one in by_namespace.get(demand.model.ref.namespace, ()):
        replica = _known(one)
        if (
            replica.labels
            and replica.labels.items() <= demand.labels.items()
            and replica.shape == demand.shape
        ):
            return one
    return None
