"""From what is recommended to what is desired: bounds, and the way to zero.

Source: knative.dev/serving v0.49.1, pkg/reconciler/autoscaling/kpa/scaler.go (`scale`, `applyBounds`, `handleScaleToZero`),
kpa.go (`computeActiveCondition`, `activeThreshold`). The decider sees nothing of this.
"""

from enum import Enum
from typing import Final, NamedTuple

from scaler.decision.spec import Bounds, Spec
from scaler.go import SECOND_NS

# No data yet: whatever is there stays.
UNKNOWN: Final = -1
# Longer than Kubernetes takes to say itself why a Deployment does not come up.
_ACTIVATION_BUFFER_NS: Final = 30 * SECOND_NS
PROGRESS_DEADLINE_NS: Final = 600 * SECOND_NS


class Activity(Enum):
    """Whether a model serves. In the beginning it is activating."""

    ACTIVATING = "Unknown"
    ACTIVE = "True"
    INACTIVE = "False"


class State(NamedTuple):
    """Of a model, besides what is desired."""

    activity: Activity
    # In `activity`.
    since_ns: int
    # As many replicas as in the beginning have been ready once.
    initialised: bool
    # Requests go to the activator, since then; None: they do not yet.
    proxied_since_ns: int | None = None
    # The activator has been seen in the path.
    proven: bool = False
    progress_deadline_ns: int = PROGRESS_DEADLINE_NS


class Step(NamedTuple):
    """How many replicas a model is to have. Where they are not to be written, whatever is there stays. Knative also says
    when to look again; here each step does."""

    replicas: int
    write: bool


def bounded(bounds: Bounds, desired: int, *, initialised: bool) -> int:
    """What is raised to a minimum is not cut to the maximum: an initial scale above it is applied in full."""
    least = bounds.min_scale
    if bounds.initial_scale > 1 and not initialised and bounds.reachable:
        least = max(least, bounds.initial_scale)
    if desired < least:
        return least
    return min(desired, bounds.max_scale) if bounds.max_scale != 0 else desired


def step(spec: Spec, state: State, desired: int, now_ns: int) -> Step:
    """What becomes of the last decision; `UNKNOWN` before the first one."""
    if desired < 0 and state.activity is not Activity.ACTIVATING:
        return Step(desired, write=False)
    replicas = bounded(spec.bounds, desired, initialised=state.initialised)
    if replicas != 0:
        return Step(replicas, write=True)
    if not spec.bounds.scale_to_zero:
        return Step(1, write=True)
    return _TO_ZERO[state.activity](spec, state, now_ns - state.since_ns)


def _while_activating(spec: Spec, state: State, for_ns: int) -> Step:
    """It may never come up."""
    limit_ns = state.progress_deadline_ns + _ACTIVATION_BUFFER_NS
    return Step(0, write=True) if for_ns > limit_ns else Step(UNKNOWN, write=False)


def _while_active(spec: Spec, state: State, for_ns: int) -> Step:
    """Zero that is not written makes it inactive, and its requests go to the activator."""
    window_ns = spec.stable_window_seconds * SECOND_NS
    if for_ns >= window_ns:
        return Step(0, write=False)
    return Step(1, write=True)


def _while_inactive(spec: Spec, state: State, for_ns: int) -> Step:
    """The last replica goes when no request can reach it any more, and not before it was kept for long enough."""
    bounds = spec.bounds
    if not state.proven and not bounds.activator_always:
        return Step(0, write=False)
    if for_ns >= max(bounds.grace_period_ns, bounds.retention_ns):
        return Step(0, write=True)
    if for_ns < bounds.retention_ns:
        return Step(0, write=False)
    left_ns = bounds.grace_period_ns - _proxied_ns(state, for_ns)
    return Step(0, write=left_ns <= 0)


def _proxied_ns(state: State, for_ns: int) -> int:
    return 0 if state.proxied_since_ns is None else state.since_ns + for_ns - state.proxied_since_ns


_TO_ZERO: Final = {
    Activity.ACTIVATING: _while_activating,
    Activity.ACTIVE: _while_active,
    Activity.INACTIVE: _while_inactive,
}


def activity(bounds: Bounds, before: Activity, *, wanted: int, ready: int, initialised: bool) -> Activity:
    """What a model is, now that `wanted` came out of the last step and so many replicas are ready."""
    least = ready_to_be_active(bounds, initialised=initialised)
    if wanted == 0 or least == 0:
        return Activity.INACTIVE
    if before is Activity.INACTIVE and wanted <= 0:
        return before
    return Activity.ACTIVATING if ready < least else Activity.ACTIVE


def ready_to_be_active(bounds: Bounds, *, initialised: bool) -> int:
    """How many replicas must be ready; when they have been once, the model is initialised."""
    return max(bounds.min_scale, 1 if initialised else bounds.initial_scale)
