"""What holds for all models unless their annotations say otherwise: Knative's ConfigMap `config-autoscaler`.

Each key is one line of `Defaults`: how it is read, its default, what is allowed. Source: knative.dev/serving v0.49.1,
pkg/autoscaler/config/config.go. Berth differs in one default, see `BERTH`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

from berth.contract.errors import InvalidValue
from scaler.go import SECOND_NS, parse_bool, parse_duration_ns, parse_float, parse_int

KPA: Final = "kpa.autoscaling.knative.dev"
HPA: Final = "hpa.autoscaling.knative.dev"

WINDOW_LEAST_NS: Final = 6 * SECOND_NS
WINDOW_MOST_NS: Final = 3600 * SECOND_NS
TARGET_LEAST: Final = 0.01

# Models are slow and few: with Knative's 211 requests to spare their traffic would never leave the activator.
BERTH: Final = {"target-burst-capacity": "0"}


class Rule(NamedTuple):
    """`fails` tells what is wrong, not what is right: what is no number passes at Knative's wherever a number would fail for
    being too small or too large. `right` says what would be allowed."""

    fails: Callable[[Any], bool]
    right: str


class Key(NamedTuple):
    """Of the ConfigMap. Those whose rules name other keys have them in `_together`."""

    name: str
    field: str
    read: Callable[[str], Any]
    rules: tuple[Rule, ...]


def parse_int32(text: str) -> int:
    return parse_int(text, 32)


def _key(name: str, read: Callable[[str], Any], default: Any, *rules: Rule) -> Any:
    return field(default=default, metadata={"key": (name, read, rules)})


def at_least(least: float, right: str) -> Rule:
    return Rule(lambda value: value < least, right)


def more_than(limit: float, right: str) -> Rule:
    return Rule(lambda value: value <= limit, right)


def between(least: float, most: float, right: str) -> Rule:
    return Rule(lambda value: value < least or value > most, right)


def whole_seconds(right: str = "whole seconds") -> Rule:
    return Rule(lambda duration_ns: duration_ns % SECOND_NS != 0, right)


def burst(right: str) -> Rule:
    return Rule(lambda value: value < 0 and value != -1, right)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Fields as the ConfigMap's keys, without `pod-` and `container-`; a scale of 0 is no limit."""

    autoscaler_class: str = _key("pod-autoscaler-class", str.strip, KPA)
    enable_scale_to_zero: bool = _key("enable-scale-to-zero", parse_bool, True)
    allow_zero_initial_scale: bool = _key("allow-zero-initial-scale", parse_bool, False)
    max_scale_up_rate: float = _key("max-scale-up-rate", parse_float, 1000.0, more_than(1, "more than 1"))
    max_scale_down_rate: float = _key("max-scale-down-rate", parse_float, 2.0, more_than(1, "more than 1"))
    # Of what a pod can hold, how much is the target. The key holds for concurrency only.
    concurrency_target_fraction: float = _key(
        "container-concurrency-target-percentage",
        parse_float,
        0.7,
        Rule(lambda value: value <= 0 or value > 1, "more than 0, at most 100"),
    )
    rps_target_fraction: float = 0.7
    concurrency_target_default: float = _key("container-concurrency-target-default", parse_float, 100.0)
    requests_per_second_target_default: float = _key(
        "requests-per-second-target-default",
        parse_float,
        200.0,
        at_least(TARGET_LEAST, f"at least {TARGET_LEAST}"),
    )
    target_burst_capacity: float = _key(
        "target-burst-capacity", parse_float, 211.0, burst("0 or more, or -1 for no limit")
    )
    panic_window_percentage: float = _key(
        "panic-window-percentage", parse_float, 10.0, between(1, 100, "1 to 100")
    )
    activator_capacity: float = _key("activator-capacity", parse_float, 100.0, at_least(1, "at least 1"))
    panic_threshold_percentage: float = _key("panic-threshold-percentage", parse_float, 200.0)
    initial_scale: int = _key("initial-scale", parse_int32, 1)
    min_scale: int = _key("min-scale", parse_int32, 0, at_least(0, "0 or more"))
    max_scale: int = _key("max-scale", parse_int32, 0)
    max_scale_limit: int = _key("max-scale-limit", parse_int32, 0, at_least(0, "0 or more"))
    stable_window_ns: int = _key(
        "stable-window",
        parse_duration_ns,
        60 * SECOND_NS,
        between(WINDOW_LEAST_NS, WINDOW_MOST_NS, "6s to 1h"),
        whole_seconds(),
    )
    scale_down_delay_ns: int = _key(
        "scale-down-delay", parse_duration_ns, 0, at_least(0, "0s or more"), whole_seconds()
    )
    scale_to_zero_grace_period_ns: int = _key(
        "scale-to-zero-grace-period", parse_duration_ns, 30 * SECOND_NS, more_than(0, "more than 0s")
    )
    scale_to_zero_pod_retention_period_ns: int = _key(
        "scale-to-zero-pod-retention-period", parse_duration_ns, 0, at_least(0, "0s or more")
    )


def _keys() -> Iterator[Key]:
    for one in fields(Defaults):
        if "key" in one.metadata:
            name, read, rules = one.metadata["key"]
            yield Key(name, one.name, read, rules)


KEYS: Final[Mapping[str, Key]] = {key.name: key for key in _keys()}


def read_defaults(data: Mapping[str, str]) -> Defaults:
    """Keys that are none are passed over, as `_example` is. Raises InvalidValue that names the key, its value and
    what would be right."""
    given: dict[str, Any] = {}
    for name, key in KEYS.items():
        if name not in data:
            continue
        try:
            given[key.field] = key.read(data[name])
        except InvalidValue as error:
            raise InvalidValue(f"{name}: {error}") from None
    # Percent, or a fraction as long ago.
    if (fraction := given.get("concurrency_target_fraction", 0.0)) > 1.0:
        given["concurrency_target_fraction"] = fraction / 100.0
    defaults = Defaults(**given)
    for name, right in _problems(defaults):
        raise InvalidValue(f"{name}: {data.get(name, 'the default')!r} is invalid; use {right}")
    return defaults


def _problems(of: Defaults) -> Iterator[tuple[str, str]]:
    for key in KEYS.values():
        value = getattr(of, key.field)
        yield from ((key.name, rule.right) for rule in key.rules if rule.fails(value))
    yield from ((name, right) for name, fails, right in _together(of) if fails)


def _together(of: Defaults) -> Iterator[tuple[str, bool, str]]:
    target = of.concurrency_target_fraction * of.concurrency_target_default
    least_initial, least_max = int(not of.allow_zero_initial_scale), int(of.max_scale_limit > 0)
    yield (
        "container-concurrency-target-default",
        target < TARGET_LEAST,
        f"what makes at least {TARGET_LEAST} with container-concurrency-target-percentage",
    )
    right = "at least 1, or 0 where allow-zero-initial-scale is true"
    yield "initial-scale", of.initial_scale < least_initial, right
    yield "max-scale", of.max_scale < least_max, f"at least {least_max}"
    right = f"at most max-scale-limit, {of.max_scale_limit}"
    yield "max-scale", 0 < of.max_scale_limit < of.max_scale, right
    yield "min-scale", 0 < of.max_scale < of.min_scale, f"at most max-scale, {of.max_scale}"
