"""What a model's decisions go by, from its annotations, the defaults and its proxy's limit.

Source: knative.dev/serving v0.49.1, pkg/reconciler/autoscaling/resources/{target,metric}.go, kpa/resources/decider.go,
pkg/apis/autoscaling/v1alpha1/pa_lifecycle.go.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scaler.decision.annotations import CONCURRENCY, RPS, WEIGHTED, Annotations, check
from scaler.decision.defaults import HPA, KPA, TARGET_LEAST, Defaults
from scaler.go import SECOND_NS, larger, round_to_second, smaller


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What limits a decision: the fewest replicas and the most, and when the last one goes."""

    min_scale: int
    # 0: no limit.
    max_scale: int
    initial_scale: int
    reachable: bool
    scale_to_zero: bool
    # Always in the path: this need not be proven.
    activator_always: bool
    grace_period_ns: int
    # Of the last copy, from when it is idle on.
    retention_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """Of one model. `target` is how much of `metric` a replica is to have, `total` how much it can have."""

    metric: str
    target: float
    total: float
    target_burst_capacity: float
    panic_threshold: float
    stable_window_seconds: int
    panic_window_seconds: int
    weighted: bool
    scale_down_delay_seconds: int
    # 0: none.
    activation_scale: int
    max_scale_up_rate: float
    max_scale_down_rate: float
    reachable: bool
    # The replicas' load is scraped, so that no answer means that it is unknown.
    scraped: bool
    bounds: Bounds


def spec_of(
    annotations: Mapping[str, str],
    defaults: Defaults,
    *,
    container_concurrency: int = 0,
    reachable: bool = True,
    scraped: bool = True,
) -> Spec:
    """Raises InvalidValue that names each wrong annotation, its value and what would be right.

    `container_concurrency` is how many requests a copy takes at once; 0 is no limit.
    """
    check(annotations, defaults)
    given = Annotations(annotations)
    metric = _metric(given)
    target, total = _target(given, defaults, metric, container_concurrency)
    window_ns = given.value_or("window", defaults)
    burst = given.value_or("target-burst-capacity", defaults)
    delay_ns = given.value_or("scale-down-delay", defaults)
    return Spec(
        metric=metric,
        target=target,
        total=total,
        target_burst_capacity=burst,
        panic_threshold=given.value_or("panic-threshold-percentage", defaults) / 100.0,
        stable_window_seconds=window_ns // SECOND_NS,
        panic_window_seconds=_panic_window_seconds(
            window_ns, given.value_or("panic-window-percentage", defaults)
        ),
        weighted=given.text("metric-aggregation-algorithm") in WEIGHTED,
        scale_down_delay_seconds=delay_ns // SECOND_NS,
        activation_scale=given.value("activation-scale") or 0,
        max_scale_up_rate=defaults.max_scale_up_rate,
        max_scale_down_rate=defaults.max_scale_down_rate,
        reachable=reachable,
        scraped=scraped,
        bounds=_bounds(given, defaults, reachable, burst),
    )


def _metric(given: Annotations) -> str:
    """Whatever it is called: what is not rps is decided by concurrency."""
    metric = given.text("metric")
    if metric is not None:
        return metric
    kind = given.text("class")
    return {None: CONCURRENCY, KPA: CONCURRENCY, HPA: "cpu"}.get(kind, "")


def _target(
    given: Annotations, defaults: Defaults, metric: str, container_concurrency: int
) -> tuple[float, float]:
    """How much a replica is to have, and how much it can have (ResolveMetricTarget)."""
    if metric == RPS:
        total, fraction = defaults.requests_per_second_target_default, defaults.rps_target_fraction
    else:
        total = float(container_concurrency) or defaults.concurrency_target_default
        fraction = defaults.concurrency_target_fraction
    asked = given.value("target")
    if asked is not None:
        limited = metric == CONCURRENCY and container_concurrency != 0
        total = smaller(asked, float(container_concurrency)) if limited else asked
    percentage = given.value("target-utilization-percentage")
    if percentage is not None:
        fraction = percentage / 100
    return larger(TARGET_LEAST, total * fraction), total


def _panic_window_seconds(window_ns: int, percentage: float) -> int:
    share = window_ns * percentage / 100.0
    return 1 if math.isnan(share) else max(round_to_second(int(share)), 1)


def _bounds(given: Annotations, defaults: Defaults, reachable: bool, burst: float) -> Bounds:
    initial = given.value("initial-scale")
    if initial is None or (initial == 0 and not defaults.allow_zero_initial_scale):
        initial = defaults.initial_scale
    retention_ns = given.value_or("scale-to-zero-pod-retention-period", defaults)
    return Bounds(
        min_scale=given.value_or("min-scale", defaults) if reachable else 0,
        max_scale=given.value_or("max-scale", defaults),
        initial_scale=initial,
        reachable=reachable,
        scale_to_zero=defaults.enable_scale_to_zero,
        activator_always=burst == -1,
        grace_period_ns=defaults.scale_to_zero_grace_period_ns,
        retention_ns=retention_ns if reachable else 0,
    )
