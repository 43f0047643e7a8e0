"""One pass over one model: from its load to what is written. Pure: values in, values out.

    reconcile(state, observed, load, capacity, now_ns) → (state, actions)

1. decide: what bounds and the way to zero make of the recommendation, as Knative's reconciler does (`decision.bounds`),
2. limit:  no replica is requested that cannot be scheduled (`capacity`), none is removed that is busy,
3. act:    `replicas`, the status annotation, events.

Where more replicas are desired than have a node, the pass ends after the first step: the binder is asked, and its answer is
the `capacity` of the pass that goes on with the second. Nothing of all this reaches the decider: it knows its load alone, so
that its answers are Knative's whatever the cluster does. Times are nanoseconds since 1970.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from heapq import nsmallest
from typing import Final, Literal, Protocol

import msgspec  # for its values: made for each model in each pass, they take a tenth of a dataclass's time
from msgspec.structs import replace

from berth.contract.scaling import Scaled
from berth.contract.text import one_line
from scaler.core.actions import Action, Event, Kind, RouteChanged, WriteScale, WriteStatus
from scaler.core.capacity import NOT_ASKED, Capacity, CapacityLimited, limit
from scaler.core.deployments import Deployment
from scaler.core.models_view import KEPT, DecisionView
from scaler.core.pods import Counts, Pod, PodState
from scaler.decision.bounds import UNKNOWN, Activity, State, Step, activity, bounded, ready_to_be_active, step
from scaler.decision.defaults import HPA
from scaler.go import SECOND_NS

# A model whose replicas have failed for good is not started for so long: the failure may be repaired in place.
FAILED_NS: Final = 600 * SECOND_NS
# A node that could run it may be added.
UNSCHEDULABLE_NS: Final = 60 * SECOND_NS
# Requested replicas that are not seen yet count as on their way for so long.
_PROMISE_NS: Final = 10 * SECOND_NS
# If pods are missing for so long, a quota or an admission webhook keeps their controller from creating them. Then no
# capacity is reserved for them, until one is created after all or the second time is over.
_CREATION_NS: Final = 30 * SECOND_NS
_STALLED_NS: Final = 120 * SECOND_NS
# Time in which no pod is missing makes up for only so small a part of the time in which one was.
_MAKES_UP: Final = 8
_STALLED: Final = "requested pods are not created: see the events of the ReplicaSet"
# A little less than the time between two passes.
_STATUS_PAUSE_NS: Final = 1_500_000_000
_EVENT_PAUSE_NS: Final = 300 * SECOND_NS
_MOST_GATES: Final = 3
_CONFLICT: Final = "ReplicasConflict"
_LATEST_SECONDS: Final = 1e10


class RouteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a model's requests get to the activators: since when they do (`proven_ns`), whether no replica has had one
    for a while (`quiet`), and why they cannot be routed there (`failure`)."""

    proven_ns: int | None = None
    quiet: bool = False
    failure: str = ""


class Failure(msgspec.Struct, frozen=True):
    """Why no replica of this template will serve, and until when that is believed."""

    message: str
    until_ns: int
    template_hash: str


class Waits(msgspec.Struct, frozen=True):
    """What pods wait for that neither the binder nor a node can give. `reason`: that of the event."""

    reason: str
    message: str


class Promise(msgspec.Struct, frozen=True):
    """The replicas that were last requested because they could be scheduled."""

    replicas: int
    since_ns: int

    def kept(self, replicas: int, now_ns: int) -> "Promise":
        return self if replicas == self.replicas else Promise(replicas, now_ns)

    def owed(self, now_ns: int) -> int:
        """Those still on their way to be seen."""
        return self.replicas if now_ns - self.since_ns < _PROMISE_NS else 0


class PodCreation(msgspec.Struct, frozen=True):
    """Whether the controller creates the pods that are requested: how many it had, for how long some have been missing, and
    until when no more are expected."""

    pods: int
    missing_ns: int
    stalled_until_ns: int

    def is_stalled(self, now_ns: int) -> bool:
        return now_ns < self.stalled_until_ns

    def after(self, pods: int, replicas: int, passed_ns: int, now_ns: int) -> "PodCreation":
        """`replicas` that go up and down, which their owner can write, are no sign that more pods would be created."""
        if pods > self.pods:
            return PodCreation(pods, 0, now_ns)
        if pods >= replicas:
            if not self.missing_ns and pods == self.pods:
                return self
            return PodCreation(pods, max(self.missing_ns - passed_ns // _MAKES_UP, 0), self.stalled_until_ns)
        if self.is_stalled(now_ns):
            return self
        missing_ns = self.missing_ns + passed_ns
        if missing_ns >= _CREATION_NS:
            return PodCreation(self.pods, 0, now_ns + _STALLED_NS)
        return PodCreation(self.pods, missing_ns, self.stalled_until_ns)


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """What of one model outlives a pass, but for its load."""

    activity: Activity
    since_ns: int
    initialised: bool
    # Of the activation, without the time in which a replica was on its way.
    activating_ns: int = 0
    decided_ns: int
    # Desired replicas, within bounds.
    desired: Step = Step(UNKNOWN, write=False)
    # Its requests go to the activators; None before the first pass.
    is_routed_away: bool | None = None
    route: RouteStatus = RouteStatus()
    # Why the last replica is kept; "": nothing keeps it.
    kept_for: str = ""
    failure: Failure | None = None
    waits: Waits | None = None
    # The binder's last answer, and what of `desired` it leaves.
    capacity: Capacity = NOT_ASKED
    limited: CapacityLimited = CapacityLimited(UNKNOWN)
    promise: Promise
    creation: PodCreation
    # Of a retained model, the replicas that are left to it.
    evicted_to: int | None = None
    requested: int
    # Who has written `replicas` as an autoscaler does since this one scales the model.
    rival: str | None = None
    # When each kind of warning was last reported, and the status written.
    reported_ns: Mapping[str, int] = {}
    status_ns: int = 0
    # The last ones, the newest at the end.
    decisions: tuple[DecisionView, ...] = ()

    def is_proven(self, grace_period_ns: int, now_ns: int) -> bool:
        """Whether its replicas get no request any more: requests have gone to the activators for the grace period, or the
        replicas have had none since. Knative's rule looks at the route alone, however lately it was changed."""
        since_ns = self.route.proven_ns
        return since_ns is not None and (self.route.quiet or now_ns - since_ns >= grace_period_ns)


class ReadyLoads(Protocol):
    """The load of a model's ready replicas, as last reported."""

    def spared(self, replicas: int) -> int:
        """How many are not to be removed if only so many are desired."""
        ...

    def costs(self, *, evicting: bool) -> Mapping[str, int]:
        """Deletion costs by pod, of those in which they differ. `evicting`: the replicas named by the binder go first."""
        ...


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster, as far as it concerns one model."""

    deployment: Deployment
    counts: Counts
    pods: Collection[Pod]
    loads: ReadyLoads
    # The annotations that are in effect where those of the Deployment are invalid.
    last_valid: Mapping[str, str]
    # Since when the binder has answered nothing.
    binder_silent_ns: int = 0


class Recommendation(msgspec.Struct, frozen=True):
    """Of the decider, by load alone. `known_since_ns`: from then on its windows have missed nothing."""

    replicas: int
    in_panic: bool
    known_since_ns: int


_NO_ROUTE: Final = RouteStatus()


def initial_state(deployment: Deployment, now_ns: int) -> ModelState:
    """Where the last scaler was, by the annotation that it wrote; anybody may have written it."""
    last = deployment.recorded
    return ModelState(
        activity=Activity.ACTIVATING if last is None else _activity_of(last.activity),
        since_ns=now_ns if last is None else min(_ns(last.since), now_ns),
        initialised=last is not None and last.initialised,
        decided_ns=now_ns,
        promise=Promise(deployment.replicas, now_ns),
        creation=PodCreation(0, 0, now_ns),
        requested=deployment.replicas,
    )


def reconcile(
    state: ModelState,
    observed: Observed,
    load: Recommendation,
    capacity: Capacity | None,
    now_ns: int,
) -> tuple[ModelState, list[Action]]:
    """`capacity`: the binder's answer to the pass before; None: it has not been asked about this one."""
    actions: list[Action] = []
    if capacity is not None:
        state = replace(state, capacity=capacity, failure=_by_capacity(state, observed, capacity, now_ns))
    else:
        was_routed_away = state.is_routed_away
        state = _decided(state, observed, load, now_ns)
        if state.is_routed_away is not was_routed_away:
            actions.append(RouteChanged(model=observed.deployment.key))
        if lacks_capacity(state, observed.counts, now_ns):
            return state, actions
    state, acted = _acted(state, observed, load, now_ns)
    return state, actions + acted


# Decide.


def _decided(state: ModelState, observed: Observed, load: Recommendation, now_ns: int) -> ModelState:
    deployment, counts = observed.deployment, observed.counts
    passed_ns = now_ns - state.decided_ns
    activating_ns, before = state.activating_ns, state.activity
    if before is Activity.ACTIVATING and not _is_coming(deployment, counts, load):
        activating_ns += passed_ns
    failure = None if counts.ready else _failed(state.failure, observed, now_ns)
    desired, kept_for = _desired(state, deployment, load, failure, activating_ns, now_ns)
    bounds, initialised = deployment.spec.bounds, state.initialised
    # A model whose last replica is kept desires none all the same: its way to zero is looked at until it is free.
    wanted = 0 if kept_for and before is Activity.INACTIVE else desired.replicas
    after = activity(bounds, before, wanted=wanted, ready=counts.ready, initialised=initialised)
    is_changed, is_routed_away = after is not before, counts.ready == 0 or after is Activity.INACTIVE
    return replace(
        state,
        activity=after,
        since_ns=now_ns if is_changed else state.since_ns,
        activating_ns=0 if is_changed else activating_ns,
        initialised=initialised or counts.ready >= ready_to_be_active(bounds, initialised=initialised),
        decided_ns=now_ns,
        desired=desired,
        kept_for=kept_for,
        is_routed_away=is_routed_away,
        route=state.route if is_routed_away else _NO_ROUTE,
        failure=failure,
        waits=_waits(state, observed) if counts.gated or counts.unschedulable else None,
        creation=state.creation.after(counts.made, deployment.replicas, passed_ns, now_ns),
    )


def _is_coming(deployment: Deployment, counts: Counts, load: Recommendation) -> bool:
    """A replica that waits to be scheduled or loads stops the clock: what takes long is not what fails. One that waits for
    a node that is still to be added stops it only while a request waits for the replica."""
    is_wanted = load.replicas != 0
    coming = counts.on_their_way + (counts.gated if is_wanted else 0)
    if deployment.options.overflow_pods and not is_wanted:
        coming -= counts.unschedulable
    return coming != 0


def _desired(
    state: ModelState,
    deployment: Deployment,
    load: Recommendation,
    failure: Failure | None,
    activating_ns: int,
    now_ns: int,
) -> tuple[Step, str]:
    """What bounds and the way to zero leave of the recommendation, and why the last replica is kept."""
    spec, kept_for = deployment.spec, ""
    bounds = spec.bounds
    may_be_zero = bounds.scale_to_zero and bounded(bounds, 0, initialised=state.initialised) == 0
    if may_be_zero and _is_believed(failure, deployment, now_ns):
        return Step(0, write=True), state.kept_for
    if state.route.failure and may_be_zero and load.replicas == 0 and deployment.replicas > 0:
        # No request could start it again. A model that is at zero stays there all the same.
        kept_for = state.route.failure
        spec = dataclasses.replace(spec, bounds=dataclasses.replace(bounds, scale_to_zero=False))
    grace_ns = spec.bounds.grace_period_ns
    proven = state.is_proven(grace_ns, now_ns)
    since_ns = state.since_ns
    if state.activity is Activity.ACTIVATING:
        since_ns = now_ns - activating_ns
    elif state.activity is Activity.ACTIVE:
        # The last replica does not go by windows that have just begun, however long the model has been active.
        since_ns = max(since_ns, load.known_since_ns)
    way = State(
        activity=state.activity,
        since_ns=since_ns,
        initialised=state.initialised,
        proxied_since_ns=now_ns - grace_ns if proven else None,
        proven=proven,
        progress_deadline_ns=deployment.progress_deadline_ns,
    )
    return step(spec, way, load.replicas, now_ns), kept_for


def _failed(before: Failure | None, observed: Observed, now_ns: int) -> Failure | None:
    failed = before
    for pod in observed.pods:
        if pod.failed_load and pod.state is not PodState.LEAVING:
            failed = Failure(pod.failed_load, now_ns + FAILED_NS, observed.deployment.template_hash)
    return failed


def _is_believed(failure: Failure | None, deployment: Deployment, now_ns: int) -> bool:
    """Another template may serve."""
    return (
        failure is not None
        and now_ns < failure.until_ns
        and failure.template_hash == deployment.template_hash
    )


def failure_message(state: ModelState, deployment: Deployment, now_ns: int) -> str:
    """Why no replica will ever serve; "" while one may."""
    failure = state.failure
    return failure.message if failure is not None and _is_believed(failure, deployment, now_ns) else ""


def _waits(state: ModelState, observed: Observed) -> Waits | None:
    counts = observed.counts
    if counts.gated:
        # Of all pods, of which there may be thousands; only those that are shown are made fit for it.
        gates = nsmallest(_MOST_GATES, {gate for pod in observed.pods for gate in pod.gates})
        names = ", ".join(one_line(gate, limit=80) for gate in gates)
        return Waits(
            "SchedulingGated", f"scheduling gates block {counts.gated} of its pods, as a quota does: {names}"
        )
    if counts.unschedulable and observed.deployment.options.overflow_pods:
        why = (state.capacity is not NOT_ASKED and state.capacity.why) or "no node has capacity"
        return Waits("WaitingForNode", f"{counts.unschedulable} of its pods wait for a node: {why}")
    return None


# Limit.


def lacks_capacity(state: ModelState, counts: Counts, now_ns: int) -> bool:
    """Whether more replicas are desired than have a node, and there would be pods to get one."""
    return (
        state.desired.write
        and schedulable(state, counts) > counts.bound
        and not state.creation.is_stalled(now_ns)
    )


def schedulable(state: ModelState, counts: Counts) -> int:
    """The desired replicas that may get a node: no capacity is reserved for a pod that a gate blocks."""
    return min(state.desired.replicas, counts.admitted) if counts.gated else state.desired.replicas


def is_owed(state: ModelState, capacity: Capacity, counts: Counts, now_ns: int) -> bool:
    """Whether the binder has offered less than a promise that is not seen yet."""
    return capacity.replicas < state.promise.owed(now_ns) - counts.unschedulable - counts.gated


def _by_capacity(state: ModelState, observed: Observed, capacity: Capacity, now_ns: int) -> Failure | None:
    """If no node could run a replica, even an empty one, none will serve for a while."""
    if not capacity.never or observed.counts.bound or _may_wait_for_node(observed):
        return state.failure
    return Failure(capacity.why, now_ns + UNSCHEDULABLE_NS, observed.deployment.template_hash)


def _may_wait_for_node(observed: Observed) -> bool:
    """Whether a node may be added for its pods: some may stay Pending, and theirs is the condition that requests one, as far
    as they have one."""
    if not observed.deployment.options.overflow_pods:
        return False
    return not observed.counts.unschedulable or any(pod.asks_for_node for pod in observed.pods)


def _capacity(state: ModelState, counts: Counts, now_ns: int) -> Capacity:
    if state.creation.is_stalled(now_ns):
        return Capacity(counts.made, _STALLED)
    if counts.gated and state.waits is not None:
        # One more than is let through, so that the controller of the gates sees that there is a demand.
        known = max(state.capacity.replicas, counts.bound)
        return Capacity(min(known, counts.admitted) + 1, state.waits.message)
    return state.capacity


def _limited(state: ModelState, observed: Observed, now_ns: int) -> CapacityLimited:
    counts, deployment, promise = observed.counts, observed.deployment, state.promise
    promised = promise.owed(now_ns) or min(promise.replicas, deployment.replicas)
    return limit(
        state.desired.replicas,
        counts,
        _capacity(state, counts, now_ns),
        promised=promised,
        silent_ns=observed.binder_silent_ns,
        overflow=deployment.options.overflow_pods,
    )


def _requested(
    desired: Step,
    observed: Observed,
    load: Recommendation,
    limited: CapacityLimited,
    evicted_to: int | None,
) -> int | None:
    """What `replicas` is to be; None: whatever it is."""
    kind, replicas = observed.deployment.kind, observed.deployment.replicas
    requested = limited.replicas if desired.write else _while_undecided(observed, load, evicted_to)
    if requested is not None and kind is not Kind.KPA:
        requested = _first_or_none(observed.deployment, requested) if kind is Kind.HPA else None
    if requested is None or requested >= replicas:
        return requested
    return max(requested, min(replicas, observed.loads.spared(requested)))


def _while_undecided(observed: Observed, load: Recommendation, evicted_to: int | None) -> int | None:
    replicas, counts = observed.deployment.replicas, observed.counts
    if load.replicas != 0:
        return None
    if evicted_to is not None:
        return min(evicted_to, replicas)
    if not counts.unschedulable and not counts.gated:
        return None
    # No request waits any more for what cannot be scheduled, or is gated; but a node that is requested may still come.
    waiting = min(counts.unschedulable, observed.deployment.options.overflow_pods)
    return min(counts.bound + counts.pending + waiting, replicas)


def _first_or_none(deployment: Deployment, requested: int) -> int | None:
    """Between the first replica and the last another autoscaler decides."""
    if requested == 0:
        return 0
    least = max(deployment.spec.bounds.min_scale, 1)
    return min(requested, least) if deployment.replicas == 0 else None


# Act.


def _acted(
    state: ModelState, observed: Observed, load: Recommendation, now_ns: int
) -> tuple[ModelState, list[Action]]:
    deployment, desired = observed.deployment, state.desired
    limited = _limited(state, observed, now_ns) if desired.write else CapacityLimited(desired.replicas)
    is_retained = not desired.write and load.replicas == 0 and state.activity is Activity.INACTIVE
    evicted_to = state.evicted_to if is_retained else None
    requested = _requested(desired, observed, load, limited, evicted_to)
    replicas = deployment.replicas if requested is None else requested
    due: list[Event] = []
    if limited.by > 0 or state.kept_for or state.waits is not None or state.rival is not None:
        due = [one for one in _warnings(state, deployment, limited, replicas) if _is_due(state, one, now_ns)]
    actions: list[Action] = [*due]
    promise = state.promise
    if requested is not None:
        if requested != state.requested:
            actions += _to_and_from_zero(state, deployment, requested, evicted_to, now_ns)
        promise = promise.kept(requested, now_ns)
        # What was requested before may still wait to be written.
        if requested != deployment.replicas or requested != state.requested:
            actions.append(_write(observed, requested, evicted_to))
    state = replace(
        state,
        limited=limited,
        evicted_to=evicted_to,
        promise=promise,
        requested=state.requested if requested is None else requested,
        decisions=_noted(state, observed, load, limited, replicas, now_ns),
    )
    if due:
        reported_ns = {**state.reported_ns, **{one.reason: now_ns for one in due}}
        rival = None if any(one.reason == _CONFLICT for one in due) else state.rival
        state = replace(state, reported_ns=reported_ns, rival=rival)
    status = _status(state, observed, load, replicas, now_ns)
    if status != deployment.recorded and now_ns - state.status_ns >= _STATUS_PAUSE_NS:
        state = replace(state, status_ns=now_ns)
        actions.append(WriteStatus(model=deployment.key, uid=deployment.uid, scaled=status))
    return state, actions


def _write(observed: Observed, replicas: int, evicted_to: int | None) -> WriteScale:
    deployment = observed.deployment
    is_fewer = 0 < replicas < deployment.replicas
    costs = observed.loads.costs(evicting=evicted_to is not None) if is_fewer else {}
    return WriteScale(model=deployment.key, uid=deployment.uid, replicas=replicas, costs=costs)


def _is_due(state: ModelState, event: Event, now_ns: int) -> bool:
    last_ns = state.reported_ns.get(event.reason)
    return last_ns is None or now_ns - last_ns >= _EVENT_PAUSE_NS


def _warnings(
    state: ModelState, deployment: Deployment, limited: CapacityLimited, replicas: int
) -> Iterator[Event]:
    if limited.by > 0:
        why = limited.why or "the cluster has no capacity for more"
        text = f"desired {state.desired.replicas} replicas, requested {replicas}: {why}"
        yield event_on(deployment, "Warning", "CapacityLimited", text)
    if state.kept_for:
        yield event_on(
            deployment, "Warning", "ScaleToZeroBlocked", f"the last replica is kept: {state.kept_for}"
        )
    if state.waits is not None:
        yield event_on(deployment, "Warning", state.waits.reason, state.waits.message)
    if state.rival is not None and deployment.kind is Kind.KPA:
        text = (
            f"{one_line(state.rival, limit=80)} writes replicas as well, as a HorizontalPodAutoscaler does: two autoscalers"
            f" undo each other. Delete that one, or leave the replicas to it by the class {HPA}, or keda"
        )
        yield event_on(deployment, "Warning", _CONFLICT, text)


def _to_and_from_zero(
    state: ModelState, deployment: Deployment, replicas: int, evicted_to: int | None, now_ns: int
) -> Iterator[Event]:
    """Of what is requested; what others write is theirs to report."""
    if replicas == 0:
        why = "it was idle for its stable window" if evicted_to is None else "its memory was needed"
        if failure := failure_message(state, deployment, now_ns):
            why = f"its replicas cannot serve: {failure}"
        yield event_on(deployment, "Normal", "ScaledToZero", why)
    elif state.requested == 0:
        text = f"requested {replicas} of {state.desired.replicas} desired replicas"
        yield event_on(deployment, "Normal", "ScaledFromZero", text)


def event_on(deployment: Deployment, type: Literal["Normal", "Warning"], reason: str, message: str) -> Event:
    return Event(model=deployment.key, uid=deployment.uid, type=type, reason=reason, message=message)


def _noted(
    state: ModelState,
    observed: Observed,
    load: Recommendation,
    limited: CapacityLimited,
    replicas: int,
    now_ns: int,
) -> tuple[DecisionView, ...]:
    """With this decision, if it differs from the last one."""
    desired, decisions = state.desired.replicas, state.decisions
    if load.replicas < 0 and desired < 0:
        return decisions
    if decisions:
        last = decisions[-1]
        seen = (load.replicas, desired, replicas, load.in_panic, limited.why)
        if seen == (last.recommended, last.desired, last.requested, last.in_panic, last.message):
            return decisions
    decision = DecisionView(
        at_ns=now_ns,
        recommended=load.replicas,
        desired=desired,
        requested=replicas,
        ready=observed.counts.ready,
        in_panic=load.in_panic,
        message=limited.why,
    )
    return (*decisions, decision)[-KEPT:]


def _status(
    state: ModelState, observed: Observed, load: Recommendation, replicas: int, now_ns: int
) -> Scaled:
    """What is shown on the Deployment, and where the next scaler goes on."""
    counts = observed.counts
    return Scaled(
        desired=known(state.desired.replicas),
        requested=replicas,
        ready=counts.ready,
        capacity_limited=state.limited.by,
        message=message(state, observed.deployment, now_ns),
        in_panic=load.in_panic,
        activity=state.activity.value,
        since=state.since_ns / SECOND_NS,
        initialised=state.initialised,
        gated=counts.gated,
        last_valid=dict(observed.last_valid),
    )


def message(state: ModelState, deployment: Deployment, now_ns: int) -> str:
    """Why it has fewer replicas than desired."""
    if failure := failure_message(state, deployment, now_ns):
        return failure
    if state.creation.is_stalled(now_ns):
        return _STALLED
    if state.limited.by > 0:
        return state.limited.why
    if state.waits is not None:
        return state.waits.message
    return state.route.failure if state.is_routed_away else ""


def known(replicas: int) -> int | None:
    return None if replicas < 0 else replicas


def _activity_of(text: str) -> Activity:
    try:
        return Activity(text)
    except ValueError:
        return Activity.ACTIVATING


def _ns(seconds: float) -> int:
    return int(seconds * SECOND_NS) if 0 <= seconds <= _LATEST_SECONDS else 0
