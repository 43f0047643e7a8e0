"""What a step of one model comes to: what is to be written, and what people are told of it. Pure."""

from collections.abc import Iterator
from typing import Final, Literal

from berth.contract.text import one_line
from scaler.core.actions import Action, Event, Kind, WriteScale, WriteStatus
from scaler.core.autoscaler import ModelAutoscaler
from scaler.core.cache import Cache, Counts
from scaler.core.capacity import CapacityLimited, limit
from scaler.core.models_view import DecisionView
from scaler.core.replica_loads import ReplicaLoads
from scaler.core.retention import Evictions
from scaler.decision.bounds import Activity
from scaler.decision.defaults import HPA
from scaler.go import SECOND_NS

# A little less than a tick.
_STATUS_PAUSE_NS: Final = 1_500_000_000
_EVENT_PAUSE_NS: Final = 300 * SECOND_NS
# Replicas of a retained model that nobody needs to go.
_CONFLICT: Final = "ReplicasConflict"
_KEPT_COST: Final = 1_000_000_000


class Outcomes:
    """Of all models."""

    def __init__(self, cache: Cache, copies: ReplicaLoads, evictions: Evictions) -> None:
        self._cache, self._copies, self._evictions = cache, copies, evictions

    def of(self, autoscaler: ModelAutoscaler, now_ns: int, *, silent_ns: int) -> list[Action]:
        """What is to stand in `replicas` and in the annotation, and what people are told of it. `silent_ns`: for how long
        no question to the binder has been answered."""
        counts = self._cache.counts(autoscaler.key)
        wanted = self._copies_of(autoscaler, counts, now_ns, silent_ns)
        replicas = autoscaler.deployment.replicas
        copies = replicas if wanted is None else wanted
        actions: list[Action] = [*self._troubles(autoscaler, copies, now_ns)]
        if wanted is not None:
            actions += _to_and_from_zero(autoscaler, copies, now_ns)
            autoscaler.promise(copies, now_ns)
            # What was told before may still wait to be written.
            if copies != replicas or copies != autoscaler.asked_for:
                actions.append(self._write(autoscaler, copies, now_ns))
            autoscaler.asked_for = copies
        self._note(autoscaler, counts, copies, now_ns)
        scaled = autoscaler.scaled(counts, copies, now_ns, self._cache.held_to(autoscaler.key))
        if scaled != autoscaler.deployment.told and autoscaler.is_due("status", _STATUS_PAUSE_NS, now_ns):
            actions.append(WriteStatus(model=autoscaler.key, uid=autoscaler.deployment.uid, scaled=scaled))
        return actions

    def _copies_of(
        self, autoscaler: ModelAutoscaler, counts: Counts, now_ns: int, silent_ns: int
    ) -> int | None:
        """What `replicas` is to be; None: whatever it is."""
        kind, replicas = autoscaler.deployment.kind, autoscaler.deployment.replicas
        copies = self._wanted_of(autoscaler, counts, now_ns, silent_ns)
        if copies is not None and kind is not Kind.KPA:
            copies = _first_or_none(autoscaler, copies) if kind is Kind.HPA else None
        if copies is None:
            return None
        if copies < replicas:
            return max(copies, min(replicas, self._copies.spared(autoscaler.key, copies, now_ns)))
        return copies

    def _wanted_of(
        self, autoscaler: ModelAutoscaler, counts: Counts, now_ns: int, silent_ns: int
    ) -> int | None:
        evicted_to, autoscaler.evicted_to = autoscaler.evicted_to, None
        if autoscaler.step.write:
            autoscaler.capacity_limited = _capacity_limited(autoscaler, counts, now_ns, silent_ns)
            return autoscaler.capacity_limited.copies
        autoscaler.capacity_limited = CapacityLimited(autoscaler.step.copies)
        if autoscaler.recommended != 0:
            return None
        if evicted_to is not None and autoscaler.activity is Activity.INACTIVE:
            autoscaler.evicted_to = evicted_to
            return min(evicted_to, autoscaler.deployment.replicas)
        # Nobody waits any more for what has no place, or is held back; but a node that has been asked for may still come.
        waiting = min(counts.unschedulable, autoscaler.deployment.options.overflow_pods)
        there = counts.bound + counts.pending + waiting
        return min(there, autoscaler.deployment.replicas) if counts.unschedulable or counts.gated else None

    def _write(self, autoscaler: ModelAutoscaler, copies: int, now_ns: int) -> WriteScale:
        if copies > 0:
            autoscaler.cold_starts.asked(now_ns)
        else:
            autoscaler.cold_starts.end()
        fewer = 0 < copies < autoscaler.deployment.replicas
        return WriteScale(
            model=autoscaler.key,
            uid=autoscaler.deployment.uid,
            copies=copies,
            costs=self._costs(autoscaler, now_ns) if fewer else {},
        )

    def _costs(self, autoscaler: ModelAutoscaler, now_ns: int) -> dict[str, int]:
        costs = {}
        for pod in self._cache.ready(autoscaler.key):
            if autoscaler.evicted_to is None:
                cost = self._copies.cost(pod, now_ns)
            else:
                cost = 0 if self._evictions.is_going(pod.uid) else _KEPT_COST
            if str(cost) != (pod.deletion_cost or "0"):
                costs[pod.name] = cost
        return costs

    # What people are told.

    def _troubles(self, autoscaler: ModelAutoscaler, copies: int, now_ns: int) -> Iterator[Event]:
        if autoscaler.capacity_limited.by > 0 and autoscaler.is_due(
            "CapacityLimited", _EVENT_PAUSE_NS, now_ns
        ):
            why = autoscaler.capacity_limited.why or "the cluster has no capacity for more"
            yield event_on(
                autoscaler,
                "Warning",
                "CapacityLimited",
                f"desired {autoscaler.step.copies} replicas, requested {copies}: {why}",
            )
        if autoscaler.kept_for and autoscaler.is_due("ScaleToZeroBlocked", _EVENT_PAUSE_NS, now_ns):
            yield event_on(
                autoscaler,
                "Warning",
                "ScaleToZeroBlocked",
                f"the last replica is kept: {autoscaler.kept_for}",
            )
        if (waits := autoscaler.waits) is not None and autoscaler.is_due(
            waits.reason, _EVENT_PAUSE_NS, now_ns
        ):
            yield event_on(autoscaler, "Warning", waits.reason, waits.text)
        if autoscaler.rival is not None:
            yield from self._conflict(autoscaler, autoscaler.rival[0], now_ns)

    def _conflict(self, autoscaler: ModelAutoscaler, rival: str, now_ns: int) -> Iterator[Event]:
        if autoscaler.deployment.kind is Kind.KPA and autoscaler.is_due(_CONFLICT, _EVENT_PAUSE_NS, now_ns):
            autoscaler.rival = None
            text = (
                f"{one_line(rival, limit=80)} writes replicas as well, as a HorizontalPodAutoscaler does: two autoscalers"
                f" undo each other. Delete that one, or leave the replicas to it by the class {HPA}, or keda"
            )
            yield event_on(autoscaler, "Warning", _CONFLICT, text)

    def _note(self, autoscaler: ModelAutoscaler, counts: Counts, copies: int, now_ns: int) -> None:
        """The decision, if it differs from the last one."""
        if autoscaler.recommended < 0 and autoscaler.step.copies < 0:
            return
        last = autoscaler.decisions[-1] if autoscaler.decisions else None
        seen = (
            autoscaler.recommended,
            autoscaler.step.copies,
            copies,
            autoscaler.model.in_panic,
            autoscaler.capacity_limited.why,
        )
        if last is not None and seen == (
            last.recommended,
            last.desired,
            last.requested,
            last.in_panic,
            last.message,
        ):
            return
        autoscaler.decisions.append(
            DecisionView(
                at_ns=now_ns,
                recommended=autoscaler.recommended,
                desired=autoscaler.step.copies,
                requested=copies,
                ready=counts.ready,
                in_panic=autoscaler.model.in_panic,
                message=autoscaler.capacity_limited.why,
            )
        )


def _capacity_limited(
    autoscaler: ModelAutoscaler, counts: Counts, now_ns: int, silent_ns: int
) -> CapacityLimited:
    return limit(
        autoscaler.step.copies,
        counts,
        autoscaler.room(counts, now_ns),
        promised=autoscaler.promised(now_ns),
        silent_ns=silent_ns,
        overflow=autoscaler.deployment.options.overflow_pods,
    )


def _first_or_none(autoscaler: ModelAutoscaler, copies: int) -> int | None:
    """Between the first copy and the last another autoscaler decides."""
    if copies == 0:
        return 0
    return (
        min(copies, max(autoscaler.deployment.spec.bounds.min_scale, 1))
        if autoscaler.deployment.replicas == 0
        else None
    )


def _to_and_from_zero(autoscaler: ModelAutoscaler, copies: int, now_ns: int) -> Iterator[Event]:
    """Of what is asked for; what others do is theirs to tell."""
    if copies == autoscaler.asked_for:
        return
    if copies == 0:
        yield event_on(autoscaler, "Normal", "ScaledToZero", _why_zero(autoscaler, now_ns))
    elif autoscaler.asked_for == 0:
        text = f"requested {copies} of {autoscaler.step.copies} desired replicas"
        yield event_on(autoscaler, "Normal", "ScaledFromZero", text)


def event_on(
    autoscaler: ModelAutoscaler, type: Literal["Normal", "Warning"], reason: str, message: str
) -> Event:
    return Event(
        model=autoscaler.key, uid=autoscaler.deployment.uid, type=type, reason=reason, message=message
    )


def _why_zero(autoscaler: ModelAutoscaler, now_ns: int) -> str:
    if hopeless := autoscaler.hopeless(now_ns):
        return f"its replicas cannot serve: {hopeless}"
    if autoscaler.evicted_to is not None:
        return "its memory was needed"
    return "it was idle for its stable window"
