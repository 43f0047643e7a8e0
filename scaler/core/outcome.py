"""What a step of one model comes to: what is to be written, and what people are told of it. Pure."""

from collections.abc import Iterator
from typing import Final, Literal

from berth.contract.text import one_line
from scaler.core.clip import Clipped, clip
from scaler.core.copies import Copies
from scaler.core.course import Course
from scaler.core.fleet import Counts, Fleet
from scaler.core.models_view import DecisionView
from scaler.core.plan import Action, Event, Kind, WriteScale, WriteStatus
from scaler.core.retention import Evictions
from scaler.decision.bounds import Activity
from scaler.decision.defaults import HPA
from scaler.go import SECOND_NS

# A little less than a tick.
_STATUS_PAUSE_NS: Final = 1_500_000_000
_EVENT_PAUSE_NS: Final = 300 * SECOND_NS
# Copies of a retained model that nobody needs to go.
_CONFLICT: Final = "ReplicasConflict"
_KEPT_COST: Final = 1_000_000_000


class Outcomes:
    """Of all models."""

    def __init__(self, fleet: Fleet, copies: Copies, evictions: Evictions) -> None:
        self._fleet, self._copies, self._evictions = fleet, copies, evictions

    def of(self, course: Course, now_ns: int, *, silent_ns: int) -> list[Action]:
        """What is to stand in `replicas` and in the annotation, and what people are told of it. `silent_ns`: for how long
        no question to the binder has been answered."""
        counts = self._fleet.counts(course.key)
        wanted = self._copies_of(course, counts, now_ns, silent_ns)
        replicas = course.deployment.replicas
        copies = replicas if wanted is None else wanted
        actions: list[Action] = [*self._troubles(course, copies, now_ns)]
        if wanted is not None:
            actions += _to_and_from_zero(course, copies, now_ns)
            course.promise(copies, now_ns)
            # What was told before may still wait to be written.
            if copies != replicas or copies != course.asked_for:
                actions.append(self._write(course, copies, now_ns))
            course.asked_for = copies
        self._note(course, counts, copies, now_ns)
        scaled = course.scaled(counts, copies, now_ns, self._fleet.held_to(course.key))
        if scaled != course.deployment.told and course.is_due("status", _STATUS_PAUSE_NS, now_ns):
            actions.append(WriteStatus(model=course.key, uid=course.deployment.uid, scaled=scaled))
        return actions

    def _copies_of(self, course: Course, counts: Counts, now_ns: int, silent_ns: int) -> int | None:
        """What `replicas` is to be; None: whatever it is."""
        kind, replicas = course.deployment.kind, course.deployment.replicas
        copies = self._wanted_of(course, counts, now_ns, silent_ns)
        if copies is not None and kind is not Kind.KPA:
            copies = _first_or_none(course, copies) if kind is Kind.HPA else None
        if copies is None:
            return None
        if copies < replicas:
            return max(copies, min(replicas, self._copies.spared(course.key, copies, now_ns)))
        return copies

    def _wanted_of(self, course: Course, counts: Counts, now_ns: int, silent_ns: int) -> int | None:
        evicted_to, course.evicted_to = course.evicted_to, None
        if course.step.write:
            course.clipped = _clipped(course, counts, now_ns, silent_ns)
            return course.clipped.copies
        course.clipped = Clipped(course.step.copies)
        if course.desired != 0:
            return None
        if evicted_to is not None and course.activity is Activity.INACTIVE:
            course.evicted_to = evicted_to
            return min(evicted_to, course.deployment.replicas)
        # Nobody waits any more for what has no place, or is held back; but a node that has been asked for may still come.
        waiting = min(counts.unschedulable, course.deployment.options.overflow_pods)
        there = counts.bound + counts.pending + waiting
        return min(there, course.deployment.replicas) if counts.unschedulable or counts.gated else None

    def _write(self, course: Course, copies: int, now_ns: int) -> WriteScale:
        if copies > 0:
            course.wakes.asked(now_ns)
        else:
            course.wakes.end()
        fewer = 0 < copies < course.deployment.replicas
        return WriteScale(
            model=course.key,
            uid=course.deployment.uid,
            copies=copies,
            costs=self._costs(course, now_ns) if fewer else {},
        )

    def _costs(self, course: Course, now_ns: int) -> dict[str, int]:
        costs = {}
        for pod in self._fleet.ready(course.key):
            if course.evicted_to is None:
                cost = self._copies.cost(pod, now_ns)
            else:
                cost = 0 if self._evictions.is_going(pod.uid) else _KEPT_COST
            if str(cost) != (pod.deletion_cost or "0"):
                costs[pod.name] = cost
        return costs

    # What people are told.

    def _troubles(self, course: Course, copies: int, now_ns: int) -> Iterator[Event]:
        if course.clipped.by > 0 and course.is_due("Clipped", _EVENT_PAUSE_NS, now_ns):
            why = course.clipped.why or "there is no room for more"
            yield event_on(
                course,
                "Warning",
                "Clipped",
                f"{course.step.copies} copies are wanted, {copies} asked for: {why}",
            )
        if course.kept_for and course.is_due("NotToZero", _EVENT_PAUSE_NS, now_ns):
            yield event_on(course, "Warning", "NotToZero", f"its last copy stays: {course.kept_for}")
        if (waits := course.waits) is not None and course.is_due(waits.reason, _EVENT_PAUSE_NS, now_ns):
            yield event_on(course, "Warning", waits.reason, waits.text)
        if course.rival is not None:
            yield from self._conflict(course, course.rival[0], now_ns)

    def _conflict(self, course: Course, rival: str, now_ns: int) -> Iterator[Event]:
        if course.deployment.kind is Kind.KPA and course.is_due(_CONFLICT, _EVENT_PAUSE_NS, now_ns):
            course.rival = None
            text = (
                f"{one_line(rival, limit=80)} writes replicas as well, as a HorizontalPodAutoscaler does: two autoscalers"
                f" undo each other. Delete that one, or leave the replicas to it by the class {HPA}, or keda"
            )
            yield event_on(course, "Warning", _CONFLICT, text)

    def _note(self, course: Course, counts: Counts, copies: int, now_ns: int) -> None:
        """The decision, if it differs from the last one."""
        if course.desired < 0 and course.step.copies < 0:
            return
        last = course.decisions[-1] if course.decisions else None
        seen = (course.desired, course.step.copies, copies, course.model.in_panic, course.clipped.why)
        if last is not None and seen == (last.desired, last.wanted, last.written, last.in_panic, last.why):
            return
        course.decisions.append(
            DecisionView(
                at_ns=now_ns,
                desired=course.desired,
                wanted=course.step.copies,
                written=copies,
                ready=counts.ready,
                in_panic=course.model.in_panic,
                why=course.clipped.why,
            )
        )


def _clipped(course: Course, counts: Counts, now_ns: int, silent_ns: int) -> Clipped:
    return clip(
        course.step.copies,
        counts,
        course.room(counts, now_ns),
        promised=course.promised(now_ns),
        silent_ns=silent_ns,
        overflow=course.deployment.options.overflow_pods,
    )


def _first_or_none(course: Course, copies: int) -> int | None:
    """Between the first copy and the last another autoscaler decides."""
    if copies == 0:
        return 0
    return (
        min(copies, max(course.deployment.spec.bounds.min_scale, 1))
        if course.deployment.replicas == 0
        else None
    )


def _to_and_from_zero(course: Course, copies: int, now_ns: int) -> Iterator[Event]:
    """Of what is asked for; what others do is theirs to tell."""
    if copies == course.asked_for:
        return
    if copies == 0:
        yield event_on(course, "Normal", "ScaledToZero", _why_zero(course, now_ns))
    elif course.asked_for == 0:
        text = f"{copies} of {course.step.copies} wanted copies are asked for"
        yield event_on(course, "Normal", "Woken", text)


def event_on(course: Course, type: Literal["Normal", "Warning"], reason: str, message: str) -> Event:
    return Event(model=course.key, uid=course.deployment.uid, type=type, reason=reason, message=message)


def _why_zero(course: Course, now_ns: int) -> str:
    if hopeless := course.hopeless(now_ns):
        return f"its copies cannot serve: {hopeless}"
    if course.evicted_to is not None:
        return "its memory was needed"
    return "nobody has asked it for a while"
