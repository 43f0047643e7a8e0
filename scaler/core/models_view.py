"""What is shown of the models that are scaled: read-only figures of one moment.

What shows them (metrics, external metrics, KEDA, `berth scale`) keeps no figures of its own and decides nothing.
What is not known is None, never 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from berth.contract.scaling import ModelKey
from scaler.decision.bounds import Activity
from scaler.decision.spec import Spec

Json = dict[str, Any]

# Of one model's decisions and cold starts, as many are kept to be shown.
KEPT: Final = 10
# Of the admin port, and what is below it.
MODELS_PATH: Final = "/models/"


@dataclass(frozen=True, slots=True)
class Averages:
    """Over the stable and the panic window, of all replicas together."""

    stable: float | None = None
    panic: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionView:
    """One decision, and what became of it. Kept where it differs from the one before."""

    at_ns: int
    # Of the decider, before any bound.
    recommended: int
    # Within the bounds of the annotations.
    desired: int
    # What of it could be placed.
    requested: int
    ready: int
    in_panic: bool
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdStartView:
    """One way from zero to the first answer. `phases`: seconds each, in their order; one that is not over is not there."""

    at_ns: int
    phases: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PodsView:
    """Those that are not ready. `not_ready`: bound; `pending`: not bound, of which some are `unschedulable` and some
    `gated`: held back by scheduling gates."""

    not_ready: int = 0
    pending: int = 0
    unschedulable: int = 0
    gated: int = 0
    terminating: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelView:
    """One Deployment that has asked to be scaled."""

    model: ModelKey
    # `autoscaling.knative.dev/class`.
    class_name: str
    # The last good annotations; None: there were none yet.
    spec: Spec | None
    # Why those that it has now are refused.
    invalid: str = ""
    # Replicas that serve.
    ready: int = 0
    pods: PodsView = PodsView()
    # The Deployment's own `replicas`.
    replicas: int | None = None
    recommended: int | None = None
    desired: int | None = None
    requested: int | None = None
    # How many of the desired replicas are not requested, because they cannot be scheduled, and why.
    capacity_limited: int = 0
    message: str = ""
    concurrency: Averages = Averages()
    requests_per_second: Averages = Averages()
    # Requests in the queues of replicas, or buffered by an activator.
    waiting: Averages = Averages()
    # There may be requests that are not reported yet: 0 is not known to be 0.
    is_young: bool = False
    in_panic: bool = False
    activity: Activity = Activity.ACTIVATING
    # In `activity`.
    since_ns: int = 0
    # Requests that wait at the activators for a first replica.
    buffered: int = 0
    # The newest comes last.
    decisions: tuple[DecisionView, ...] = ()
    cold_starts: tuple[ColdStartView, ...] = ()


class ModelsView(Protocol):
    """All of them. A view is made when it is read: one model costs one."""

    @property
    def leads(self) -> bool:
        """Whether this process decides. One that does not knows no figures, and shows none."""
        ...

    def names(self, namespace: str) -> Sequence[str]:
        """Of the Deployments of this namespace that have asked to be scaled."""
        ...

    def view(self, model: ModelKey) -> ModelView | None:
        """None: there is no such Deployment, or it has not asked."""
        ...


def models_path(model: ModelKey) -> str:
    """Of the admin port: what `to_json` gives."""
    return f"{MODELS_PATH}{model.namespace}/{model.name}"


def model_of(path: str) -> ModelKey | None:
    """Whose path it is; None: no model's."""
    names = path.removeprefix(MODELS_PATH).split("/")
    return ModelKey(*names) if len(names) == 2 and path.startswith(MODELS_PATH) and all(names) else None


def to_json(view: ModelView) -> Json:
    """What `GET /models/NAMESPACE/NAME` answers and `berth scale -o json` shows."""
    return {
        "namespace": view.model.namespace,
        "model": view.model.name,
        "class": view.class_name,
        "invalid": view.invalid,
        "spec": None if view.spec is None else _spec(view.spec),
        "ready": view.ready,
        "pods": {
            "notReady": view.pods.not_ready,
            "pending": view.pods.pending,
            "unschedulable": view.pods.unschedulable,
            "gated": view.pods.gated,
            "terminating": view.pods.terminating,
        },
        "replicas": view.replicas,
        "recommended": view.recommended,
        "desired": view.desired,
        "requested": view.requested,
        "capacityLimited": view.capacity_limited,
        "message": view.message,
        "concurrency": _averages(view.concurrency),
        "requestsPerSecond": _averages(view.requests_per_second),
        "waiting": _averages(view.waiting),
        "inPanic": view.in_panic,
        "activity": view.activity.value,
        "since": _time(view.since_ns),
        "buffered": view.buffered,
        "decisions": [_decision(one) for one in view.decisions],
        "coldStarts": [{"at": _time(one.at_ns), "phases": dict(one.phases)} for one in view.cold_starts],
    }


def _spec(spec: Spec) -> Json:
    return {
        "metric": spec.metric,
        "target": spec.target,
        "stableWindowSeconds": spec.stable_window_seconds,
        "panicWindowSeconds": spec.panic_window_seconds,
        "panicThreshold": spec.panic_threshold,
        "scaleDownDelaySeconds": spec.scale_down_delay_seconds,
        "minScale": spec.bounds.min_scale,
        "maxScale": spec.bounds.max_scale,
        "initialScale": spec.bounds.initial_scale,
        "scaleToZero": spec.bounds.scale_to_zero,
    }


def _averages(of: Averages) -> Json:
    return {"stable": of.stable, "panic": of.panic}


def _decision(of: DecisionView) -> Json:
    return {
        "at": _time(of.at_ns),
        "recommended": of.recommended,
        "desired": of.desired,
        "requested": of.requested,
        "ready": of.ready,
        "inPanic": of.in_panic,
        "message": of.message,
    }


def _time(ns: int) -> str | None:
    """As Kubernetes writes times; 0 is none."""
    return datetime.fromtimestamp(ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if ns else None
