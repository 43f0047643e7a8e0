"""The autoscaler of one model: its load, its state, and what `reconcile` makes of them. Pure.

It alone changes what it holds; the cluster and the time are passed to it.
"""

from collections.abc import Collection
from typing import Final

from msgspec.structs import replace

from berth.contract.activation import Report
from berth.contract.scaling import ModelKey, SchedulableModel
from scaler.activation.activators import LINGER_NS
from scaler.core.actions import Action, ColdStarted, Kind, WriteScale
from scaler.core.buffered import BufferedRequests
from scaler.core.capacity import NOT_ASKED, Capacity
from scaler.core.cold_starts import ColdStarts
from scaler.core.deployments import Deployment
from scaler.core.models_view import Averages as AveragesView
from scaler.core.models_view import ModelView, PodsView
from scaler.core.pods import Counts, Pod
from scaler.core.reconcile import (
    Observed,
    Recommendation,
    RouteStatus,
    failure_message,
    initial_state,
    is_owed,
    known,
    lacks_capacity,
    message,
    reconcile,
    schedulable,
)
from scaler.decision.bounds import UNKNOWN, Activity
from scaler.decision.decider import ModelDecider
from scaler.decision.load import Averages, Stat
from scaler.decision.windows import LinearWindow
from scaler.go import SECOND_NS

# What the binder counts to.
_MOST_REPLICAS: Final = 2**31 - 1


class ModelAutoscaler:
    """Times are nanoseconds since 1970."""

    # More attributes than CPython keeps in line, of an object that is looked at for each model each second.
    __slots__ = (
        "_asked_ns",
        "_buffered",
        "_cold_starts",
        "_decider",
        "_deployment",
        "_known_since_ns",
        "_queued",
        "_recommended",
        "_recorded_ns",
        "_state",
    )

    def __init__(self, deployment: Deployment, *, ready: int, now_ns: int) -> None:
        """Goes on where the annotation says that the last scaler was."""
        self._deployment = deployment
        self._state = initial_state(deployment, now_ns)
        self._decider = ModelDecider(deployment.spec, ready=ready, now_ns=now_ns)
        self._queued = _Queued(deployment.spec.stable_window_seconds, deployment.spec.panic_window_seconds)
        # When a load was last recorded, and since when its windows have missed none.
        self._recorded_ns, self._known_since_ns = 0, now_ns
        # The decider's last answer.
        self._recommended = UNKNOWN
        self._buffered = BufferedRequests()
        self._cold_starts = ColdStarts()
        # When the binder was last asked about its replicas.
        self._asked_ns = 0

    @property
    def key(self) -> ModelKey:
        return self._deployment.key

    @property
    def deployment(self) -> Deployment:
        return self._deployment

    @property
    def asked_ns(self) -> int:
        return self._asked_ns

    def configure(self, deployment: Deployment, *, ready: int, now_ns: int) -> bool | None:
        """The Deployment as it is now. Of its decider: None, nothing has changed; False, other values; True, a new one:
        what Knative's takes at its beginning only is a new revision's there."""
        before, after = self._deployment.spec, deployment.spec
        # What an autoscaler wrote while the class left it the replicas is no conflict.
        is_ours = self._deployment.kind is Kind.KPA is deployment.kind
        if is_ours and deployment.scaled_by not in (None, self._deployment.scaled_by):
            self._state = replace(self._state, rival=deployment.scaled_by and deployment.scaled_by[0])
        self._deployment = deployment
        if after == before:
            return None
        self._queued.resize(after.stable_window_seconds, after.panic_window_seconds, now_ns // SECOND_NS)
        kept = after.weighted == before.weighted
        if kept and after.scale_down_delay_seconds == before.scale_down_delay_seconds:
            self._decider.update(after, now_ns)
            return False
        self._decider = ModelDecider(after, ready=ready, now_ns=now_ns)
        self._recorded_ns, self._known_since_ns = 0, now_ns
        return True

    # Its load.

    def record(self, stat: Stat, now_ns: int) -> None:
        """The load of one second; several of one second add up. Windows begin with the first one."""
        if not self._recorded_ns:
            self._known_since_ns = now_ns
        self._decider.record(stat, now_ns)
        self._recorded_ns = now_ns

    def record_queued(self, requests: float, now_ns: int) -> None:
        """Those in the queues of its replicas."""
        self._queued.record(now_ns // SECOND_NS, requests + self._buffered.requests)

    def report(self, activator: str, report: Report) -> Stat | None:
        """The load that a report of an activator stands for; None: it is invalid."""
        return self._buffered.report(activator, report)

    def activator_gone(self, activator: str) -> None:
        self._buffered.activator_gone(activator)

    @property
    def is_known_idle(self) -> bool:
        """While it has no replica, as far as activators report."""
        return self._recommended > 0 and self._buffered.requests == 0

    def is_young(self, counts: Counts, now_ns: int) -> bool:
        """Whether there may be requests that are not reported yet: in the part of the window before its beginning, or,
        where no replica serves, at activators that have not come back to this scaler."""
        return now_ns - self._known_since_ns < (self._window_ns if counts.ready else LINGER_NS)

    @property
    def _window_ns(self) -> int:
        return self._deployment.spec.stable_window_seconds * SECOND_NS

    # Cold starts.

    def starts_cold(self, stat: Stat, counts: Counts, now_ns: int) -> bool:
        """Whether this load is a first request that waits: it is decided at once."""
        if stat.concurrency <= 0 or self._recommended > 0 or self.failure(now_ns):
            return False
        if counts.ready == 0:
            self._cold_starts.begin(now_ns)
        return True

    def forwarded(self, report: Report, pods: Collection[Pod], now_ns: int) -> list[Action]:
        """A replica has accepted buffered requests: the cold start is over, if there was one."""
        if report.forwarded <= 0 or not self._cold_starts.is_under_way:
            return []
        self._cold_starts.observe(pods)
        over = self._cold_starts.served(now_ns - int(report.served_ago * SECOND_NS))
        return [] if over is None else [ColdStarted(model=self.key, cold_start=over)]

    # Its replicas.

    def decide(self, observed: Observed, now_ns: int) -> list[Action]:
        """A decision, and what follows from it before the binder is asked."""
        decision = self._decider.decide(ready=observed.counts.ready, now_ns=now_ns)
        # Without a decision the last one stands. A number below 0 is none: the target is no number. Nor does a decision
        # count that is made in the one second in which a window without a value reads 0 and is not empty yet.
        if decision is not None and now_ns // SECOND_NS * SECOND_NS - self._recorded_ns < self._window_ns:
            self._recommended = max(decision.desired, UNKNOWN)
        return self._reconcile(observed, None, now_ns)

    def limit(self, observed: Observed, capacity: Capacity, now_ns: int) -> list[Action]:
        """What follows once the binder has been asked."""
        return self._reconcile(observed, capacity, now_ns)

    def _reconcile(self, observed: Observed, capacity: Capacity | None, now_ns: int) -> list[Action]:
        load = Recommendation(self._recommended, self._decider.in_panic, self._known_since_ns)
        self._state, actions = reconcile(self._state, observed, load, capacity, now_ns)
        for action in actions:
            if isinstance(action, WriteScale) and action.replicas > 0:
                self._cold_starts.requested(now_ns)
            elif isinstance(action, WriteScale):
                self._cold_starts.end()
        return actions

    def set_route(self, route: RouteStatus, counts: Counts) -> None:
        """Whether its requests get to the activators, if they are to."""
        self._state = replace(self._state, route=route if self.is_routed_away(counts) else RouteStatus())

    def resume(self, counts: Counts, now_ns: int) -> None:
        """The scaler writes again, after a while in which replicas reported to it and activators did not."""
        self._state = replace(self._state, route=RouteStatus())
        if not counts.ready:
            self._known_since_ns = now_ns

    def evict_one(self) -> None:
        """A replica fewer is left to a retained model."""
        left = self._state.evicted_to
        left = self._deployment.replicas if left is None else left
        self._state = replace(self._state, evicted_to=max(left - 1, 0))

    def is_evictable(self, now_ns: int) -> bool:
        """Whether its replicas stay only until their memory is needed, and requests no longer reach them."""
        deployment, state = self._deployment, self._state
        if not deployment.options.until_needed or deployment.kind is not Kind.KPA or self._recommended != 0:
            return False
        is_idle = state.activity is Activity.INACTIVE and self._buffered.requests == 0
        return is_idle and state.is_proven(deployment.spec.bounds.grace_period_ns, now_ns)

    # The binder.

    def lacks_capacity(self, counts: Counts, now_ns: int) -> bool:
        return lacks_capacity(self._state, counts, now_ns)

    def demand(self, counts: Counts, priority: int, now_ns: int) -> SchedulableModel:
        """What the binder is asked now."""
        self._asked_ns = now_ns
        return SchedulableModel(
            name=str(self.key),
            desired=min(schedulable(self._state, counts), _MOST_REPLICAS),
            running=counts.ready,
            starting=counts.starting,
            priority=priority,
            template=self._deployment.template,
            template_hash=self._deployment.template_hash,
        )

    @property
    def last_capacity(self) -> Capacity:
        capacity = self._state.capacity
        return capacity if not capacity.never else Capacity(capacity.replicas, capacity.why)

    def forget_capacity(self) -> None:
        """The binder has answered, and was not asked about this one."""
        if self._state.capacity is not NOT_ASKED:
            self._state = replace(self._state, capacity=NOT_ASKED)

    def is_owed(self, capacity: Capacity, counts: Counts, now_ns: int) -> bool:
        return is_owed(self._state, capacity, counts, now_ns)

    def limited_to_promise(self, capacity: Capacity) -> Capacity:
        if capacity is NOT_ASKED:
            return capacity
        return replace(capacity, replicas=min(capacity.replicas, self._state.promise.replicas))

    # What is shown.

    @property
    def has_route(self) -> bool:
        """Whether it has been decided yet who is to take its requests."""
        return self._state.is_routed_away is not None

    def is_routed_away(self, counts: Counts) -> bool:
        """Whether its requests go past the replicas: while none is ready, and before the last one goes."""
        return counts.ready == 0 or self._state.activity is Activity.INACTIVE

    def failure(self, now_ns: int) -> str:
        return failure_message(self._state, self._deployment, now_ns)

    @property
    def waits_for(self) -> str:
        return "" if self._state.waits is None else self._state.waits.message

    def view(self, counts: Counts, pods: Collection[Pod], invalid: str, now_ns: int) -> ModelView:
        """`invalid`: why its annotations are not those in effect."""
        deployment, state = self._deployment, self._state
        self._cold_starts.observe(pods)
        concurrency, requests = self._decider.averages(now_ns)
        return ModelView(
            model=self.key,
            class_name=deployment.class_name,
            spec=deployment.spec,
            invalid=invalid,
            ready=counts.ready,
            pods=PodsView(
                not_ready=counts.starting,
                pending=counts.pending + counts.unschedulable + counts.gated,
                unschedulable=counts.unschedulable,
                gated=counts.gated,
                terminating=counts.leaving,
            ),
            replicas=deployment.replicas,
            recommended=known(self._recommended),
            desired=known(state.desired.replicas),
            requested=state.requested if deployment.kind is Kind.KPA else deployment.replicas,
            capacity_limited=state.limited.by,
            message=message(state, deployment, now_ns),
            concurrency=_shown(concurrency),
            requests_per_second=_shown(requests),
            waiting=_shown(self._queued.averages(now_ns // SECOND_NS)),
            is_young=self.is_young(counts, now_ns),
            in_panic=self._decider.in_panic,
            activity=state.activity,
            since_ns=state.since_ns,
            buffered=self._buffered.requests,
            decisions=state.decisions,
            cold_starts=self._cold_starts.views(),
        )


class _Queued:
    """Requests that wait, in replicas and activators, over both windows. Only other autoscalers decide by it."""

    __slots__ = ("_panic", "_stable")

    def __init__(self, stable: int, panic: int) -> None:
        self._stable, self._panic = LinearWindow(stable), LinearWindow(panic)

    def record(self, second: int, requests: float) -> None:
        self._stable.record(second, requests)
        self._panic.record(second, requests)

    def averages(self, second: int) -> Averages | None:
        if self._stable.is_empty(second):
            return None
        return Averages(self._stable.average(second), self._panic.average(second))

    def resize(self, stable: int, panic: int, second: int) -> None:
        self._stable.resize(stable, second)
        self._panic.resize(panic, second)


def _shown(averages: Averages | None) -> AveragesView:
    if averages is None:
        return AveragesView()
    # What sums and differences leave of a window may be a little less than nothing: neither that nor a -0.0 is a load.
    return AveragesView(max(averages.stable, 0.0) + 0.0, max(averages.panic, 0.0) + 0.0)
