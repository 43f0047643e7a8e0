"""What holds for all models unless their annotations say otherwise: Knative's ConfigMap `config-autoscaler`.

Source: knative.dev/serving v0.49.1, pkg/autoscaler/config/config.go. Berth differs in one default, see `BERTH`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from berth.contract.errors import InvalidValue
from scaler.go import SECOND_NS, parse_bool, parse_duration_ns, parse_float, parse_int

KPA: Final = "kpa.autoscaling.knative.dev"
HPA: Final = "hpa.autoscaling.knative.dev"

WINDOW_LEAST_NS: Final = 6 * SECOND_NS
WINDOW_MOST_NS: Final = 3600 * SECOND_NS
TARGET_LEAST: Final = 0.01

# Models are slow and few: with Knative's 211 requests to spare their traffic would never leave the activator.
BERTH: Final = {"target-burst-capacity": "0"}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Fields as the ConfigMap's keys, without `pod-` and `container-`."""

    autoscaler_class: str = KPA
    enable_scale_to_zero: bool = True
    allow_zero_initial_scale: bool = False
    max_scale_up_rate: float = 1000.0
    max_scale_down_rate: float = 2.0
    # Of what a pod can hold, how much is aimed at. The key holds for concurrency only.
    concurrency_target_fraction: float = 0.7
    rps_target_fraction: float = 0.7
    concurrency_target_default: float = 100.0
    requests_per_second_target_default: float = 200.0
    target_burst_capacity: float = 211.0
    panic_window_percentage: float = 10.0
    activator_capacity: float = 100.0
    panic_threshold_percentage: float = 200.0
    initial_scale: int = 1
    min_scale: int = 0
    # 0: no limit.
    max_scale: int = 0
    max_scale_limit: int = 0
    stable_window_ns: int = 60 * SECOND_NS
    scale_down_delay_ns: int = 0
    scale_to_zero_grace_period_ns: int = 30 * SECOND_NS
    scale_to_zero_pod_retention_period_ns: int = 0


def _int32(text: str) -> int:
    return parse_int(text, 32)


_READERS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "pod-autoscaler-class": ("autoscaler_class", str.strip),
    "enable-scale-to-zero": ("enable_scale_to_zero", parse_bool),
    "allow-zero-initial-scale": ("allow_zero_initial_scale", parse_bool),
    "max-scale-up-rate": ("max_scale_up_rate", parse_float),
    "max-scale-down-rate": ("max_scale_down_rate", parse_float),
    "container-concurrency-target-percentage": ("concurrency_target_fraction", parse_float),
    "container-concurrency-target-default": ("concurrency_target_default", parse_float),
    "requests-per-second-target-default": ("requests_per_second_target_default", parse_float),
    "target-burst-capacity": ("target_burst_capacity", parse_float),
    "panic-window-percentage": ("panic_window_percentage", parse_float),
    "activator-capacity": ("activator_capacity", parse_float),
    "panic-threshold-percentage": ("panic_threshold_percentage", parse_float),
    "initial-scale": ("initial_scale", _int32),
    "min-scale": ("min_scale", _int32),
    "max-scale": ("max_scale", _int32),
    "max-scale-limit": ("max_scale_limit", _int32),
    "stable-window": ("stable_window_ns", parse_duration_ns),
    "scale-down-delay": ("scale_down_delay_ns", parse_duration_ns),
    "scale-to-zero-grace-period": ("scale_to_zero_grace_period_ns", parse_duration_ns),
    "scale-to-zero-pod-retention-period": ("scale_to_zero_pod_retention_period_ns", parse_duration_ns),
}


# The keys of the ConfigMap, with the fields of `Defaults`.
KEYS: Final = {key: field for key, (field, _) in _READERS.items()}


def read_defaults(data: Mapping[str, str]) -> Defaults:
    """Keys that are none are passed over, as `_example` is. Raises InvalidValue that names the key, its value and
    what would be right."""
    given: dict[str, Any] = {}
    for key, (field, read) in _READERS.items():
        if key in data:
            try:
                given[field] = read(data[key])
            except InvalidValue as error:
                raise InvalidValue(f"{key}: {error}") from None
    # Percent, or a fraction as long ago.
    if (fraction := given.get("concurrency_target_fraction", 0.0)) > 1.0:
        given["concurrency_target_fraction"] = fraction / 100.0
    defaults = Defaults(**given)
    for key, allowed, right in _rules(defaults):
        if not allowed:
            raise InvalidValue(f"{key}: {data.get(key, 'the default')!r} does not go; write {right}")
    return defaults


def _rules(of: Defaults) -> list[tuple[str, bool, str]]:
    """Each key with whether its value is allowed, and what would be. They are Knative's, which lets pass what is no
    number wherever a number would be refused for being too small or too large."""
    target = of.concurrency_target_fraction * of.concurrency_target_default
    least_max = 1 if of.max_scale_limit > 0 else 0
    return [
        ("scale-to-zero-grace-period", of.scale_to_zero_grace_period_ns > 0, "more than 0s"),
        ("scale-down-delay", of.scale_down_delay_ns >= 0, "0s or more"),
        ("scale-down-delay", of.scale_down_delay_ns % SECOND_NS == 0, "whole seconds"),
        ("scale-to-zero-pod-retention-period", of.scale_to_zero_pod_retention_period_ns >= 0, "0s or more"),
        (
            "target-burst-capacity",
            not of.target_burst_capacity < 0 or of.target_burst_capacity == -1,
            "0 or more, or -1 for no limit",
        ),
        (
            "container-concurrency-target-percentage",
            not (of.concurrency_target_fraction <= 0 or of.concurrency_target_fraction > 1),
            "more than 0, at most 100",
        ),
        (
            "container-concurrency-target-default",
            not target < TARGET_LEAST,
            f"what makes at least {TARGET_LEAST} with container-concurrency-target-percentage",
        ),
        (
            "requests-per-second-target-default",
            not of.requests_per_second_target_default < TARGET_LEAST,
            f"at least {TARGET_LEAST}",
        ),
        ("activator-capacity", not of.activator_capacity < 1, "at least 1"),
        ("max-scale-up-rate", not of.max_scale_up_rate <= 1, "more than 1"),
        ("max-scale-down-rate", not of.max_scale_down_rate <= 1, "more than 1"),
        ("stable-window", WINDOW_LEAST_NS <= of.stable_window_ns <= WINDOW_MOST_NS, "6s to 1h"),
        ("stable-window", of.stable_window_ns % SECOND_NS == 0, "whole seconds"),
        (
            "panic-window-percentage",
            not (of.panic_window_percentage < 1 or of.panic_window_percentage > 100),
            "1 to 100",
        ),
        (
            "initial-scale",
            of.initial_scale >= (0 if of.allow_zero_initial_scale else 1),
            "at least 1, or 0 where allow-zero-initial-scale is true",
        ),
        ("min-scale", of.min_scale >= 0, "0 or more"),
        ("max-scale", of.max_scale >= least_max, f"at least {least_max}"),
        (
            "max-scale",
            not 0 < of.max_scale_limit < of.max_scale,
            f"at most max-scale-limit, {of.max_scale_limit}",
        ),
        ("max-scale-limit", of.max_scale_limit >= 0, "0 or more"),
        ("min-scale", not 0 < of.max_scale < of.min_scale, f"at most max-scale, {of.max_scale}"),
    ]
