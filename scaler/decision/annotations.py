"""A model's autoscaling annotations: what may stand in them, and what stands in them. Each is one entry of `ANNOTATIONS`.

Source: knative.dev/serving v0.49.1, pkg/apis/autoscaling/{register,annotation_validation}.go; what is accepted and what is
refused here is what is there. The names of several words may also be written in camelCase, the hyphens win.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from berth.contract.errors import InvalidValue
from scaler.decision.defaults import (
    HPA,
    KPA,
    TARGET_LEAST,
    WINDOW_LEAST_NS,
    WINDOW_MOST_NS,
    Defaults,
    Rule,
    at_least,
    between,
    burst,
    parse_int32,
    whole_seconds,
)
from scaler.go import INT32_MAX, parse_duration_ns, parse_float, parse_int

GROUP: Final = "autoscaling.knative.dev/"
CONCURRENCY: Final = "concurrency"
RPS: Final = "rps"
WEIGHTED: Final = ("weighted-exponential", "weightedExponential")
_ALGORITHMS: Final = ("linear", *WEIGHTED)
_MOST_UNKNOWN: Final = 3

_CAPITAL: Final = re.compile(r"[A-Z]")

Problems = Iterator[str]


class Annotation(NamedTuple):
    """`default`: the field of `Defaults` that holds where there is none. What cannot be read fails the first rule; those
    whose rules name other annotations have them in `_together`."""

    read: Callable[[str], Any] = str
    default: str = ""
    rules: tuple[Rule, ...] = ()
    has_camel_case: bool = True


def _whole(default: str = "", *, has_camel_case: bool = True) -> Annotation:
    return Annotation(parse_int32, default, has_camel_case=has_camel_case)


def _percentage(least: float, most: float, default: str = "") -> Annotation:
    return Annotation(parse_float, default, (between(least, most, f"{least:g} to {most:g}"),))


def _seconds(least_ns: int, right: str, default: str, *, has_camel_case: bool = True) -> Annotation:
    range_rule = between(least_ns, WINDOW_MOST_NS, f"a duration, {right}")
    return Annotation(
        parse_duration_ns, default, (range_rule, whole_seconds(f"whole seconds, {right}")), has_camel_case
    )


ANNOTATIONS: Final[Mapping[str, Annotation]] = {
    "class": Annotation(has_camel_case=False),
    "min-scale": _whole("min_scale"),
    "max-scale": _whole("max_scale"),
    "activation-scale": _whole(has_camel_case=False),
    "panic-window-percentage": _percentage(1, 100, "panic_window_percentage"),
    "panic-threshold-percentage": _percentage(110, 1000, "panic_threshold_percentage"),
    "target-utilization-percentage": _percentage(1, 100),
    "target": Annotation(
        parse_float,
        rules=(at_least(TARGET_LEAST, f"a number from {TARGET_LEAST:g} on"),),
        has_camel_case=False,
    ),
    "target-burst-capacity": Annotation(
        parse_float, "target_burst_capacity", (burst("a number from 0 on, or -1 for no limit"),)
    ),
    "window": _seconds(WINDOW_LEAST_NS, "6s to 1h", "stable_window_ns", has_camel_case=False),
    "scale-to-zero-pod-retention-period": Annotation(
        parse_duration_ns,
        "scale_to_zero_pod_retention_period_ns",
        (between(0, WINDOW_MOST_NS, "a duration, 0s to 1h"),),
    ),
    "scale-down-delay": _seconds(0, "0s to 1h", "scale_down_delay_ns"),
    "metric": Annotation(has_camel_case=False),
    "metric-aggregation-algorithm": Annotation(),
    "initial-scale": _whole("initial_scale"),
}
NUMBERS: Final = [name for name, one in ANNOTATIONS.items() if one.read is parse_float]


@dataclass(frozen=True, slots=True)
class Annotations:
    """By the names without their group. What cannot be read is as absent: it has been refused before."""

    all: Mapping[str, str]

    def key(self, name: str) -> str:
        """The one that is there, else the usual one."""
        usual = GROUP + name
        if usual in self.all or not ANNOTATIONS[name].has_camel_case:
            return usual
        first, *others = name.split("-")
        camel = GROUP + first + "".join(word.capitalize() for word in others)
        return camel if camel in self.all else usual

    def text(self, name: str) -> str | None:
        return self.all.get(self.key(name))

    def value(self, name: str) -> Any:
        """None: there is none that can be read."""
        text = self.text(name)
        try:
            return None if text is None else ANNOTATIONS[name].read(text)
        except InvalidValue:
            return None

    def value_or(self, name: str, defaults: Defaults) -> Any:
        value = self.value(name)
        return getattr(defaults, ANNOTATIONS[name].default) if value is None else value


def is_scaled(annotations: Mapping[str, str]) -> bool:
    """Whether a Deployment asks to be scaled at all: by a class."""
    return GROUP + "class" in annotations


def of_deployment(template: Mapping[str, str], deployment: Mapping[str, str]) -> dict[str, str]:
    """Those of autoscaling alone. What the pod template says counts, however either of them spells the name."""
    own = {key: text for key, text in template.items() if key.startswith(GROUP)}
    said = {_hyphenated(key) for key in own}
    others = {key: text for key, text in deployment.items() if key.startswith(GROUP)}
    return {key: text for key, text in others.items() if _hyphenated(key) not in said} | own


def _hyphenated(key: str) -> str:
    """The usual spelling of a name that has two."""
    usual = _CAPITAL.sub(lambda found: "-" + found[0].lower(), key)
    found = ANNOTATIONS.get(usual.removeprefix(GROUP))
    return usual if found is None or found.has_camel_case else key


def unknown(annotations: Mapping[str, str]) -> str:
    """Which of autoscaling's annotations there are not, and which are meant, most likely; "": none."""
    names = sorted(key.removeprefix(GROUP) for key in annotations if key.startswith(GROUP))
    found = [name for name in names if _hyphenated(GROUP + name).removeprefix(GROUP) not in ANNOTATIONS]
    said = [_did_you_mean(name) for name in found[:_MOST_UNKNOWN]]
    return "; ".join(said) + (f"; and {len(found) - len(said)} more" if len(found) > len(said) else "")


def _did_you_mean(name: str) -> str:
    near = get_close_matches(_CAPITAL.sub(lambda found: "-" + found[0].lower(), name), ANNOTATIONS, n=1)
    return f"{GROUP}{name} is not read" + (f"; did you mean {GROUP}{near[0]}?" if near else "")


def check(annotations: Mapping[str, str], defaults: Defaults) -> None:
    """Raises InvalidValue that names each wrong annotation, its value and what would be right."""
    given = Annotations(annotations)
    problems = [*_class(given), *_scales(given, defaults), *_alone(given)]
    problems += [*_metric(given, defaults), *_algorithm(given), *_initial_scale(given, defaults)]
    if problems:
        raise InvalidValue("; ".join(problems))


def _wrong(given: Annotations, name: str, right: str) -> str:
    return f"{given.key(name)}: {given.text(name)!r} is invalid; use {right}"


def _alone(given: Annotations) -> Problems:
    """By their own rules."""
    for name, annotation in ANNOTATIONS.items():
        if not annotation.rules or given.text(name) is None:
            continue
        value = given.value(name)
        broken = [rule for rule in annotation.rules if value is None or rule.fails(value)]
        if broken:
            yield _wrong(given, name, broken[0].right)


def _class(given: Annotations) -> Problems:
    text = given.text("class")
    if text is not None and text.endswith(".knative.dev") and text not in (KPA, HPA):
        yield _wrong(given, "class", f"{KPA}, {HPA}, or a class that is not Knative's")


def _scales(given: Annotations, defaults: Defaults) -> Problems:
    least, most = given.value("min-scale"), given.value("max-scale")
    for name, value in (("min-scale", least), ("max-scale", most)):
        if given.text(name) is not None and (value is None or value < 0):
            yield _wrong(given, name, f"a whole number, 0 to {INT32_MAX}")
    # What cannot be read counts as 0 for the rest.
    least, most = max(least or 0, 0), max(most or 0, 0)
    if most != 0 and most < least:
        yield _wrong(given, "max-scale", f"at least {given.key('min-scale')}, {least}, or 0 for no limit")
    if given.text("max-scale") is not None and not _within(most, defaults.max_scale_limit):
        yield _wrong(given, "max-scale", f"1 to {defaults.max_scale_limit}, the cluster's limit")
    yield from _activation_scale(given, least, most)


def _within(most: int, limit: int) -> bool:
    return limit == 0 or 0 < most <= limit


def _activation_scale(given: Annotations, least: int, most: int) -> Problems:
    if given.text("activation-scale") is None:
        return
    value = given.value("activation-scale")
    if value is None or value < max(least, 2) or 0 < most < value:
        right = f"a whole number from {max(least, 2)} on" if most == 0 else f"{max(least, 2)} to {most}"
        yield _wrong(given, "activation-scale", right)


def _metric(given: Annotations, defaults: Defaults) -> Problems:
    metric = given.text("metric")
    if metric is None:
        return
    kind = given.text("class")
    if kind is None:
        kind = defaults.autoscaler_class
    if kind == KPA and metric not in (CONCURRENCY, RPS):
        yield _wrong(given, "metric", f"{CONCURRENCY} or {RPS}")
    elif kind == HPA and not metric:
        yield _wrong(given, "metric", "the name of a metric")


def _algorithm(given: Annotations) -> Problems:
    """Knative looks at it only where the class is written out."""
    name = "metric-aggregation-algorithm"
    if given.text("class") == KPA and given.text(name) and given.text(name) not in _ALGORITHMS:
        yield _wrong(given, name, " or ".join(_ALGORITHMS[:2]))


def _initial_scale(given: Annotations, defaults: Defaults) -> Problems:
    text = given.text("initial-scale")
    if text is None:
        return
    least = 0 if defaults.allow_zero_initial_scale else 1
    try:
        allowed = parse_int(text) >= least
    except InvalidValue:
        allowed = False
    if not allowed:
        yield _wrong(given, "initial-scale", f"a whole number from {least} on")
