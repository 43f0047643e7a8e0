"""One model's autoscaler: what is decided of it, how far it is on its way to or from zero, what of it must outlive a step. Pure.

The decider is told of its load alone. What comes behind it (bounds, activity, the way to zero) is told nothing but the last
decision, as in Knative's reconciler, so that the decider's answers are Knative's whatever the cluster does.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Final

from berth.contract.scaling import Scaled
from berth.contract.text import one_line
from scaler.activation.activators import LINGER_NS
from scaler.core.actions import Kind
from scaler.core.buffered import BufferedRequests
from scaler.core.capacity import Capacity, CapacityLimited
from scaler.core.cold_starts import ColdStarts
from scaler.core.deployments import Deployment
from scaler.core.models_view import KEPT, DecisionView
from scaler.core.pods import Counts, Pod, PodState
from scaler.decision.bounds import UNKNOWN, Activity, State, Step, activity, bounded, ready_to_be_active, step
from scaler.decision.load import Averages, Stat
from scaler.decision.model import Model
from scaler.decision.windows import LinearWindow
from scaler.go import SECOND_NS

# A model whose replicas have failed for good is not started for so long: the failure may be repaired in place.
FAILED_NS: Final = 600 * SECOND_NS
# A node that could hold it may come.
NO_PLACE_NS: Final = 60 * SECOND_NS
# Replicas that were asked for and are not seen count as on their way for so long.
_PROMISE_NS: Final = 10 * SECOND_NS
# Who has made no pod of those that are missing for so long is not let make them, by a quota or an admission. Then no
# place is kept for them, until one is made after all or the other time is over.
_MAKING_NS: Final = 30 * SECOND_NS
_UNMADE_NS: Final = 120 * SECOND_NS
_MOST_GATES: Final = 3
_MAKES_UP: Final = 8
_UNMADE: Final = "no pods are made of copies that were asked for: the events of its ReplicaSet say why"
_LATEST_SECONDS: Final = 1e10


@dataclass(frozen=True, slots=True)
class _Hopeless:
    why: str
    until_ns: int
    template_hash: str


@dataclass(frozen=True, slots=True)
class Waits:
    """What its pods wait for that neither the binder nor a node gives them. `reason`: of an event, and the metric."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStatus:
    """What has become of leading a model's requests to the activators: `proven_ns`, since when they get there; `quiet`:
    and no copy has had one for a while. `trouble`: why they cannot be led there."""

    proven_ns: int | None = None
    quiet: bool = False
    trouble: str = ""


class ModelAutoscaler:
    """Times are nanoseconds since 1970."""

    # More attributes than CPython keeps in line, of an object that is looked at for each model each second.
    __slots__ = (
        "_activating_ns",
        "_hopeless",
        "_known_since_ns",
        "_made",
        "_missing_ns",
        "_promised",
        "_promised_ns",
        "_recorded_ns",
        "_stepped_ns",
        "_unmade_until_ns",
        "activity",
        "asked_for",
        "asked_ns",
        "away",
        "buffered",
        "capacity",
        "capacity_limited",
        "cold_starts",
        "decisions",
        "deployment",
        "evicted_to",
        "initialised",
        "kept_for",
        "key",
        "model",
        "recommended",
        "rival",
        "route",
        "since_ns",
        "step",
        "told_ns",
        "waiting",
        "waits",
    )

    def __init__(self, deployment: Deployment, *, ready: int, now_ns: int) -> None:
        """Goes on where the annotation says that the last scaler was."""
        told = deployment.told
        self.key, self.deployment = deployment.key, deployment
        self.model = Model(deployment.spec, ready=ready, now_ns=now_ns)
        self.waiting = _Waiting(deployment.spec.stable_window_seconds, deployment.spec.panic_window_seconds)
        self._recorded_ns = 0
        # Since when its windows have missed nothing: what came before was perhaps somebody's.
        self._known_since_ns = now_ns
        # The decider's last word, and what the bounds made of it.
        self.recommended = UNKNOWN
        self.step = Step(UNKNOWN, write=False)
        self.activity = Activity.ACTIVATING if told is None else _activity_of(told.activity)
        self.since_ns = now_ns if told is None else min(_ns(told.since), now_ns)
        self.initialised = told is not None and told.initialised
        # Of the activation, without the time in which a copy was on its way.
        self._activating_ns = 0
        self._stepped_ns = now_ns
        # Its requests are to go to the activators; None before the first step.
        self.away: bool | None = None
        # Why the last copy does not go; "": nothing keeps it.
        self.kept_for = ""
        self.route = RouteStatus()
        self.buffered = BufferedRequests()
        self.cold_starts = ColdStarts()
        self._hopeless: _Hopeless | None = None
        self.waits: Waits | None = None
        # What there is room for, and what of the wanted copies is asked for.
        self.capacity: Capacity | None = None
        self.capacity_limited = CapacityLimited(UNKNOWN)
        self._promised, self._promised_ns = deployment.replicas, now_ns
        # How many pods there were, for how long fewer than are written, and until when no more are reckoned with.
        self._made, self._missing_ns, self._unmade_until_ns = 0, 0, now_ns
        # Of a retained model, the copies that are left to it.
        self.evicted_to: int | None = None
        # The number that was last told to be written.
        self.asked_for = deployment.replicas
        # When the binder was last asked for its copies.
        self.asked_ns = 0
        # Who has written its replicas as an autoscaler does since this one scales it, and when.
        self.rival: tuple[str, str] | None = None
        self.decisions: deque[DecisionView] = deque(maxlen=KEPT)
        # When people were last told: of each kind of event, and by the annotation.
        self.told_ns: dict[str, int] = {}

    # A step.

    def record(self, stat: Stat, now_ns: int) -> None:
        """The load of one second; several of one second add up. Windows begin with the first one."""
        if not self._recorded_ns:
            self._known_since_ns = now_ns
        self.model.record(stat, now_ns)
        self._recorded_ns = now_ns

    def decide(self, *, ready: int, now_ns: int) -> None:
        """Without a decision the last one stands. A number below 0 is none: somebody's target is no number. Nor does one
        count that is made in the one second in which a window without a value reads 0 and is not empty yet."""
        decision = self.model.decide(ready=ready, now_ns=now_ns)
        if decision is not None and now_ns // SECOND_NS * SECOND_NS - self._recorded_ns < self._window_ns:
            self.recommended = max(decision.desired, UNKNOWN)

    @property
    def _window_ns(self) -> int:
        return self.deployment.spec.stable_window_seconds * SECOND_NS

    def is_young(self, counts: Counts, now_ns: int) -> bool:
        """Whether there may be requests that nobody has told of yet: in the part of the window before its beginning, or,
        where no copy serves, at activators that have not come back to this scaler."""
        return now_ns - self._known_since_ns < (self._window_ns if counts.ready else LINGER_NS)

    def resume(self, counts: Counts, now_ns: int) -> None:
        """The scaler writes again, after a while in which it heard copies and no activators."""
        self.route = RouteStatus()
        if not counts.ready:
            self._known_since_ns = now_ns

    def advance(self, counts: Counts, pods: Iterable[Pod], now_ns: int) -> bool:
        """What becomes of the last decision. True if it has changed who is to take its requests."""
        passed_ns, self._stepped_ns = now_ns - self._stepped_ns, now_ns
        self._count_activation(counts, passed_ns)
        self._look_for_new_ones(counts, passed_ns, now_ns)
        self.waits = self._waits(counts, pods)
        if counts.ready > 0:
            self._hopeless = None
        else:
            self._look_for_failure(pods, now_ns)
        self.step = self._step(counts, now_ns)
        bounds = self.deployment.spec.bounds
        # Whose last copy is kept wants none all the same: its way to zero is looked at until it is free.
        wanted = 0 if self.kept_for and self.activity is Activity.INACTIVE else self.step.copies
        after = activity(
            bounds, self.activity, wanted=wanted, ready=counts.ready, initialised=self.initialised
        )
        if after is not self.activity:
            self.activity, self.since_ns, self._activating_ns = after, now_ns, 0
        if counts.ready >= ready_to_be_active(bounds, initialised=self.initialised):
            self.initialised = True
        return self._switch(counts)

    def _count_activation(self, counts: Counts, passed_ns: int) -> None:
        """A copy that waits for its place or loads stops the clock: what takes long is not what fails. One that waits for
        a node that is still to come stops it only while somebody waits for the copy."""
        if self.activity is not Activity.ACTIVATING:
            return
        is_wanted = self.recommended != 0
        coming = counts.on_their_way + (counts.gated if is_wanted else 0)
        if self.deployment.options.overflow_pods and not is_wanted:
            coming -= counts.unschedulable
        if coming == 0:
            self._activating_ns += passed_ns

    def _waits(self, counts: Counts, pods: Iterable[Pod]) -> Waits | None:
        if counts.gated:
            # Of all pods, of which there may be thousands; only those that are told are made fit for it.
            gates = nsmallest(_MOST_GATES, {gate for pod in pods for gate in pod.gates})
            names = ", ".join(one_line(gate, limit=80) for gate in gates)
            text = f"scheduling gates hold {counts.gated} of its pods back, as a quota does: {names}"
            return Waits("SchedulingGated", text)
        if counts.unschedulable and self.deployment.options.overflow_pods:
            why = self.capacity.why if self.capacity is not None and self.capacity.why else "none has room"
            return Waits("WaitingForNode", f"{counts.unschedulable} of its pods wait for a node: {why}")
        return None

    def _step(self, counts: Counts, now_ns: int) -> Step:
        spec = self.deployment.spec
        if self.hopeless(now_ns) and self._may_be_zero():
            return Step(0, write=True)
        self.kept_for = ""
        would_go = self.recommended == 0 and self._may_be_zero()
        if self.route.trouble and would_go and self.deployment.replicas > 0:
            # Nobody could wake it again. One that is at zero stays there all the same.
            self.kept_for = self.route.trouble
            spec = replace(spec, bounds=replace(spec.bounds, scale_to_zero=False))
        proven = self.is_proven(now_ns)
        state = State(
            activity=self.activity,
            since_ns=self._counted_since_ns(now_ns),
            initialised=self.initialised,
            proxied_since_ns=now_ns - spec.bounds.grace_period_ns if proven else None,
            proven=proven,
            progress_deadline_ns=self.deployment.progress_deadline_ns,
        )
        return step(spec, state, self.recommended, now_ns)

    def _counted_since_ns(self, now_ns: int) -> int:
        """The last copy does not go by windows that have just begun, however long the model has been active."""
        if self.activity is Activity.ACTIVATING:
            return now_ns - self._activating_ns
        if self.activity is Activity.ACTIVE:
            return max(self.since_ns, self._known_since_ns)
        return self.since_ns

    def is_proven(self, now_ns: int) -> bool:
        """Whether nobody sends its copies a request any more: theirs have gone to the activators for the grace period,
        or copies have had none since. Knative's rule looks at the way alone, however lately it was laid."""
        since_ns = self.route.proven_ns
        if since_ns is None:
            return False
        return self.route.quiet or now_ns - since_ns >= self.deployment.spec.bounds.grace_period_ns

    def _may_be_zero(self) -> bool:
        bounds = self.deployment.spec.bounds
        return bounds.scale_to_zero and bounded(bounds, 0, initialised=self.initialised) == 0

    def is_away(self, counts: Counts) -> bool:
        """Whether its requests go past the copies: while none is ready, and before the last one goes."""
        return counts.ready == 0 or self.activity is Activity.INACTIVE

    def _switch(self, counts: Counts) -> bool:
        before, self.away = self.away, self.is_away(counts)
        if not self.away:
            self.route = RouteStatus()
        return self.away is not before

    def configure(self, deployment: Deployment, *, ready: int, now_ns: int) -> bool | None:
        """The Deployment as it is now. Of its decider: None, nothing has changed; False, other values; True, a new one:
        what Knative's takes at its beginning only is a new revision's there."""
        before, after = self.deployment.spec, deployment.spec
        # What an autoscaler wrote while the class left it the replicas is no conflict.
        is_ours = self.deployment.kind is Kind.KPA is deployment.kind
        if is_ours and deployment.scaled_by not in (None, self.deployment.scaled_by):
            self.rival = deployment.scaled_by
        self.deployment = deployment
        if after == before:
            return None
        self.waiting.resize(after.stable_window_seconds, after.panic_window_seconds, now_ns // SECOND_NS)
        kept = after.weighted == before.weighted
        if kept and after.scale_down_delay_seconds == before.scale_down_delay_seconds:
            self.model.update(after, now_ns)
            return False
        self.model = Model(after, ready=ready, now_ns=now_ns)
        self._recorded_ns, self._known_since_ns = 0, now_ns
        return True

    # Hope.

    def hopeless(self, now_ns: int) -> str:
        """Why no copy will ever serve; "" while one may. Another template is another hope."""
        found = self._hopeless
        if found is None or now_ns >= found.until_ns or found.template_hash != self.deployment.template_hash:
            return ""
        return found.why

    def _look_for_failure(self, pods: Iterable[Pod], now_ns: int) -> None:
        for pod in pods:
            if pod.hopeless and pod.state is not PodState.LEAVING:
                self._hopeless = _Hopeless(pod.hopeless, now_ns + FAILED_NS, self.deployment.template_hash)

    def has_no_place(self, why: str, now_ns: int) -> None:
        """No node could hold a copy, even an empty one."""
        self._hopeless = _Hopeless(why, now_ns + NO_PLACE_NS, self.deployment.template_hash)

    # What has been asked for.

    def lacks(self, counts: Counts, now_ns: int) -> bool:
        """Whether more copies are wanted than have a place, and there would be pods to take one."""
        return self.step.write and self.schedulable(counts) > counts.bound and not self.is_unmade(now_ns)

    def schedulable(self, counts: Counts) -> int:
        """Of the wanted copies, those that may take a place: none is kept for a pod that a gate holds back."""
        return min(self.step.copies, counts.admitted) if counts.gated else self.step.copies

    def may_wait_for_node(self, counts: Counts, pods: Iterable[Pod]) -> bool:
        """Whether a node may come for its pods: it lets some be Pending, and theirs is the condition that asks for one, as
        far as they have one."""
        if not self.deployment.options.overflow_pods:
            return False
        return not counts.unschedulable or any(pod.asks_for_node for pod in pods)

    def is_unmade(self, now_ns: int) -> bool:
        """Replicas that were asked for are not made. A place that is kept for one is taken from others for nothing."""
        return now_ns < self._unmade_until_ns

    def room(self, counts: Counts, now_ns: int) -> Capacity | None:
        """As the binder has said last; None: it has not."""
        if self.is_unmade(now_ns):
            return Capacity(counts.made, _UNMADE)
        if counts.gated and self.waits is not None:
            # One more than is let through, so that whoever lifts the gates sees that there is a demand.
            known = counts.bound if self.capacity is None else max(self.capacity.copies, counts.bound)
            return Capacity(min(known, counts.admitted) + 1, self.waits.text)
        return self.capacity

    def _look_for_new_ones(self, counts: Counts, passed_ns: int, now_ns: int) -> None:
        """Time in which no pod is missing makes up for little: `replicas` that come and go, which their owner can write,
        are no sign that more would be made."""
        if counts.made > self._made:
            self._made, self._missing_ns, self._unmade_until_ns = counts.made, 0, now_ns
        elif counts.made >= self.deployment.replicas:
            self._made, self._missing_ns = counts.made, max(self._missing_ns - passed_ns // _MAKES_UP, 0)
        elif not self.is_unmade(now_ns):
            self._missing_ns += passed_ns
            if self._missing_ns >= _MAKING_NS:
                self._missing_ns, self._unmade_until_ns = 0, now_ns + _UNMADE_NS

    def promised(self, now_ns: int) -> int:
        """Replicas that were asked for because they had a place."""
        if now_ns - self._promised_ns < _PROMISE_NS:
            return self._promised
        return min(self._promised, self.deployment.replicas)

    def owed(self, now_ns: int) -> int:
        """Of those, what is still on its way to be seen."""
        return self._promised if now_ns - self._promised_ns < _PROMISE_NS else 0

    def limit_to_promise(self) -> None:
        if self.capacity is not None:
            self.capacity = replace(self.capacity, copies=min(self.capacity.copies, self._promised))

    def promise(self, copies: int, now_ns: int) -> None:
        if copies != self._promised:
            self._promised, self._promised_ns = copies, now_ns

    def is_due(self, what: str, pause_ns: int, now_ns: int) -> bool:
        """Whether people may be told again; if so they are."""
        last_ns = self.told_ns.get(what)
        if last_ns is not None and now_ns - last_ns < pause_ns:
            return False
        self.told_ns[what] = now_ns
        return True

    def scaled(self, counts: Counts, copies: int, now_ns: int, good: Mapping[str, str]) -> Scaled:
        """What people read on the Deployment, and the next scaler. `good`: what it is held to, where its own do not go."""
        return Scaled(
            desired=known(self.step.copies),
            requested=copies,
            ready=counts.ready,
            capacity_limited=self.capacity_limited.by,
            message=self.why(now_ns),
            in_panic=self.model.in_panic,
            activity=self.activity.value,
            since=self.since_ns / SECOND_NS,
            initialised=self.initialised,
            gated=counts.gated,
            last_valid=dict(good),
        )

    def why(self, now_ns: int) -> str:
        """It has not as many copies as are wanted."""
        if hopeless := self.hopeless(now_ns):
            return hopeless
        if self.is_unmade(now_ns):
            return _UNMADE
        if self.capacity_limited.by > 0:
            return self.capacity_limited.why
        if self.waits is not None:
            return self.waits.text
        return self.route.trouble if self.away else ""


class _Waiting:
    """Requests that wait, in copies and activators, over both windows. None decides by it but other autoscalers."""

    __slots__ = ("panic", "stable")

    def __init__(self, stable: int, panic: int) -> None:
        self.stable, self.panic = LinearWindow(stable), LinearWindow(panic)

    def record(self, second: int, waiting: float) -> None:
        self.stable.record(second, waiting)
        self.panic.record(second, waiting)

    def averages(self, second: int) -> Averages | None:
        if self.stable.is_empty(second):
            return None
        return Averages(self.stable.average(second), self.panic.average(second))

    def resize(self, stable: int, panic: int, second: int) -> None:
        self.stable.resize(stable, second)
        self.panic.resize(panic, second)


def known(copies: int) -> int | None:
    return None if copies < 0 else copies


def _activity_of(text: str) -> Activity:
    try:
        return Activity(text)
    except ValueError:
        return Activity.ACTIVATING


def _ns(seconds: float) -> int:
    """Of a time that anybody may have written."""
    return int(seconds * SECOND_NS) if 0 <= seconds <= _LATEST_SECONDS else 0
