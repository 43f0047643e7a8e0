"""From wanted to written: Knative's own cases (pkg/reconciler/autoscaling/kpa/scaler_test.go, kpa_test.go)."""

from typing import Any

import pytest

from scaler.decision.bounds import UNKNOWN, Activity, State, Step, activity, ready_to_be_active, step
from scaler.decision.defaults import read_defaults
from scaler.decision.spec import Spec, spec_of

SECOND = 1_000_000_000
GRACE, WINDOW, NOW = 30, 60, 10_000


def spec(config: dict[str, str] | None = None, *, reachable: bool = True, **annotations: str) -> Spec:
    given = {f"autoscaling.knative.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
    defaults = read_defaults({"allow-zero-initial-scale": "true", **(config or {})})
    return spec_of(given, defaults, reachable=reachable)


def state(
    kind: Activity, seconds: int, *, proxied: int | None = None, proven: bool = True, **more: Any
) -> State:
    return State(
        activity=kind,
        since_ns=(NOW - seconds) * SECOND,
        initialised=more.pop("initialised", True),
        proxied_since_ns=None if proxied is None else (NOW - proxied) * SECOND,
        proven=proven,
        **more,
    )


ACTIVE, INACTIVE, ACTIVATING = Activity.ACTIVE, Activity.INACTIVE, Activity.ACTIVATING
LONG_ACTIVE = state(ACTIVE, WINDOW)
IDLE = state(INACTIVE, GRACE)
RETAINED = "scale_to_zero_pod_retention_period"
# Spec, state, desired; replicas, whether they are written.
CASES: dict[str, tuple[Spec, State, int, tuple[int, bool]]] = {
    "active for a window": (spec(), LONG_ACTIVE, 0, (0, False)),
    "just active": (spec(), state(ACTIVE, 0), 0, (1, True)),
    "active, a second too short": (spec(), state(ACTIVE, WINDOW - 1), 0, (1, True)),
    "idle for the grace period": (spec(), IDLE, 0, (0, True)),
    "idle, kept longer": (spec(**{RETAINED: "35s"}), IDLE, 0, (0, False)),
    "idle, kept long enough": (spec(**{RETAINED: "20s"}), state(INACTIVE, 25, proxied=10), 0, (0, False)),
    "idle, kept, not reachable": (spec(reachable=False, **{RETAINED: "35s"}), IDLE, 0, (0, True)),
    "idle, a second too short": (spec(), state(INACTIVE, GRACE - 1, proxied=20), 0, (0, False)),
    "idle, not proxied": (spec(), state(INACTIVE, GRACE - 1), 0, (0, False)),
    "idle, proxied for longer": (spec(), state(INACTIVE, GRACE - 1, proxied=GRACE), 0, (0, True)),
    "not proven": (spec(), state(INACTIVE, GRACE, proven=False), 0, (0, False)),
    "always proxied, nobody asks": (
        spec(target_burst_capacity="-1"),
        state(INACTIVE, GRACE, proven=False),
        0,
        (0, True),
    ),
    "activating for half of the deadline": (spec(), state(ACTIVATING, 315), 0, (UNKNOWN, False)),
    "activating to the deadline": (spec(), state(ACTIVATING, 630), 0, (UNKNOWN, False)),
    "activating beyond the deadline": (spec(), state(ACTIVATING, 631), 0, (0, True)),
    "a deadline of its own": (
        spec(),
        state(ACTIVATING, 51, progress_deadline_ns=20 * SECOND),
        0,
        (0, True),
    ),
    "activating, nothing known": (spec(), state(ACTIVATING, 1), UNKNOWN, (UNKNOWN, False)),
    "activating with a minimum, nothing known": (spec(min_scale="2"), state(ACTIVATING, 1), UNKNOWN, (2, True)),
    "a minimum": (spec(min_scale="2"), LONG_ACTIVE, 0, (2, True)),
    "a minimum, not reachable": (spec(min_scale="2", reachable=False), LONG_ACTIVE, 0, (0, False)),
    "more": (spec(), LONG_ACTIVE, 10, (10, True)),
    "a maximum": (spec(max_scale="8"), LONG_ACTIVE, 10, (8, True)),
    "from zero": (spec(), IDLE, 10, (10, True)),
    "nothing known": (spec(), LONG_ACTIVE, UNKNOWN, (UNKNOWN, False)),
    "initial scale reached once": (spec(initial_scale="2"), state(ACTIVE, 0), 0, (1, True)),
    "initial scale not reached": (spec(initial_scale="2"), state(ACTIVATING, 0, initialised=False), 1, (2, True)),
    "initial scale above the maximum": (
        spec(initial_scale="5", max_scale="3"),
        state(ACTIVATING, 0, initialised=False),
        1,
        (5, True),
    ),
    "initial scale, not reachable": (
        spec(initial_scale="2", reachable=False),
        state(ACTIVE, 0, initialised=False),
        0,
        (1, True),
    ),
    "initial scale zero": (spec(initial_scale="0"), IDLE, 0, (0, True)),
    "never to zero": (spec({"enable-scale-to-zero": "false"}), LONG_ACTIVE, 0, (1, True)),
    "never to zero, a minimum": (spec({"enable-scale-to-zero": "false"}, min_scale="2"), LONG_ACTIVE, 0, (2, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_steps(name: str) -> None:
    of, now, desired, (replicas, write) = CASES[name]
    assert step(of, now, desired, NOW * SECOND) == Step(replicas, write)


@pytest.mark.parametrize(
    ("before", "wanted", "ready", "initialised", "after"),
    [
        (ACTIVE, 0, 3, True, INACTIVE),
        (ACTIVATING, 0, 0, True, INACTIVE),
        (INACTIVE, UNKNOWN, 0, True, INACTIVE),
        (INACTIVE, UNKNOWN, 5, True, INACTIVE),
        (INACTIVE, 1, 0, True, ACTIVATING),
        (ACTIVE, 1, 0, True, ACTIVATING),
        (ACTIVE, UNKNOWN, 1, True, ACTIVATING),
        (ACTIVATING, 1, 2, True, ACTIVE),
        (INACTIVE, 1, 2, True, ACTIVE),
        (ACTIVATING, UNKNOWN, 2, True, ACTIVE),
        (ACTIVATING, 1, 2, False, ACTIVATING),
        (ACTIVATING, 1, 3, False, ACTIVE),
    ],
)
def test_activity(before: Activity, wanted: int, ready: int, initialised: bool, after: Activity) -> None:
    """At least two replicas; three in the beginning."""
    bounds = spec(min_scale="2", initial_scale="3").bounds
    assert activity(bounds, before, wanted=wanted, ready=ready, initialised=initialised) is after


def test_who_needs_no_replica_in_the_beginning_is_inactive() -> None:
    bounds = spec(initial_scale="0").bounds
    assert activity(bounds, ACTIVATING, wanted=UNKNOWN, ready=0, initialised=False) is INACTIVE
    assert (ready_to_be_active(bounds, initialised=False), ready_to_be_active(bounds, initialised=True)) == (
        0,
        1,
    )
