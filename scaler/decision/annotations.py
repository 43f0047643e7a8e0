"""A model's autoscaling annotations: what may stand in them, and what stands in them.

Source: knative.dev/serving v0.49.1, pkg/apis/autoscaling/{register,annotation_validation}.go; what is accepted and what is
refused here is what is there. The names of several words may also be written in camelCase, the hyphens win.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Final, TypeVar

from berth.contract.errors import InvalidValue
from scaler.decision.defaults import HPA, KPA, TARGET_LEAST, WINDOW_LEAST_NS, WINDOW_MOST_NS, Defaults
from scaler.go import INT32_MAX, SECOND_NS, parse_duration_ns, parse_float, parse_int

GROUP: Final = "autoscaling.knative.dev/"
CONCURRENCY: Final = "concurrency"
RPS: Final = "rps"
WEIGHTED: Final = ("weighted-exponential", "weightedExponential")
_ALGORITHMS: Final = ("linear", *WEIGHTED)
NAMES: Final = (
    "activation-scale",
    "class",
    "initial-scale",
    "max-scale",
    "metric",
    "metric-aggregation-algorithm",
    "min-scale",
    "panic-threshold-percentage",
    "panic-window-percentage",
    "scale-down-delay",
    "scale-to-zero-pod-retention-period",
    "target",
    "target-burst-capacity",
    "target-utilization-percentage",
    "window",
)
# All that are read as numbers with a fraction.
NUMBERS: Final = (
    "target",
    "target-utilization-percentage",
    "target-burst-capacity",
    "panic-window-percentage",
    "panic-threshold-percentage",
)
_MOST_UNKNOWN: Final = 3
_KEBAB_ONLY: Final = frozenset({"activation-scale", "class", "metric", "target", "window"})

_CAPITAL: Final = re.compile(r"[A-Z]")

Problems = Iterator[str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Annotations:
    """By the names without their group. What cannot be read is as absent: it has been refused before."""

    all: Mapping[str, str]

    def key(self, name: str) -> str:
        """The one that is there, else the usual one."""
        usual = GROUP + name
        if usual in self.all or name in _KEBAB_ONLY:
            return usual
        first, *others = name.split("-")
        camel = GROUP + first + "".join(word.capitalize() for word in others)
        return camel if camel in self.all else usual

    def text(self, name: str) -> str | None:
        return self.all.get(self.key(name))

    def number(self, name: str) -> float | None:
        return self._read(name, parse_float)

    def int32(self, name: str) -> int | None:
        return self._read(name, _int32)

    def duration_ns(self, name: str) -> int | None:
        return self._read(name, parse_duration_ns)

    def _read(self, name: str, parse: Callable[[str], T]) -> T | None:
        text = self.text(name)
        try:
            return None if text is None else parse(text)
        except InvalidValue:
            return None


def is_scaled(annotations: Mapping[str, str]) -> bool:
    """Whether a Deployment has asked for it at all: by a class."""
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
    return key if usual.removeprefix(GROUP) in _KEBAB_ONLY else usual


def unknown(annotations: Mapping[str, str]) -> str:
    """Which of autoscaling's annotations there are not, and which are meant, most likely; "": none."""
    names = sorted(key.removeprefix(GROUP) for key in annotations if key.startswith(GROUP))
    found = [name for name in names if _hyphenated(GROUP + name).removeprefix(GROUP) not in NAMES]
    said = [_did_you_mean(name) for name in found[:_MOST_UNKNOWN]]
    return "; ".join(said) + (f"; and {len(found) - len(said)} more" if len(found) > len(said) else "")


def _did_you_mean(name: str) -> str:
    near = get_close_matches(_CAPITAL.sub(lambda found: "-" + found[0].lower(), name), NAMES, n=1)
    return f"{GROUP}{name} is not read" + (f"; did you mean {GROUP}{near[0]}?" if near else "")


def check(annotations: Mapping[str, str], defaults: Defaults) -> None:
    """Raises InvalidValue that names each wrong annotation, its value and what would be right."""
    given = Annotations(annotations)
    problems = [
        *_class(given),
        *_scales(given, defaults),
        *_numbers(given),
        *_durations(given),
        *_metric(given, defaults),
        *_algorithm(given),
        *_initial_scale(given, defaults),
    ]
    if problems:
        raise InvalidValue("; ".join(problems))


def _wrong(given: Annotations, name: str, right: str) -> str:
    return f"{given.key(name)}: {given.text(name)!r} does not go; write {right}"


def _class(given: Annotations) -> Problems:
    text = given.text("class")
    if text is not None and text.endswith(".knative.dev") and text not in (KPA, HPA):
        yield _wrong(given, "class", f"{KPA}, {HPA}, or a class that is not Knative's")


# Beyond these a number is out of bounds; what is no number at all passes, as it does at Knative's.
_BOUNDS: Final = {
    "panic-window-percentage": (1.0, 100.0),
    "panic-threshold-percentage": (110.0, 1000.0),
    "target-utilization-percentage": (1.0, 100.0),
}


def _numbers(given: Annotations) -> Problems:
    for name, (least, most) in _BOUNDS.items():
        yield from _number(given, name, partial(_is_outside, least, most), f"{least:g} to {most:g}")
    yield from _number(given, "target", lambda x: x < TARGET_LEAST, f"a number from {TARGET_LEAST:g} on")
    right = "a number from 0 on, or -1 for no limit"
    yield from _number(given, "target-burst-capacity", lambda x: x < 0 and x != -1, right)


def _is_outside(least: float, most: float, number: float) -> bool:
    return number < least or number > most


def _number(given: Annotations, name: str, is_wrong: Callable[[float], bool], right: str) -> Problems:
    if given.text(name) is not None:
        number = given.number(name)
        if number is None or is_wrong(number):
            yield _wrong(given, name, right)


def _durations(given: Annotations) -> Problems:
    yield from _duration(given, "window", WINDOW_LEAST_NS, "6s to 1h")
    yield from _duration(given, "scale-to-zero-pod-retention-period", 0, "0s to 1h", whole_seconds=False)
    yield from _duration(given, "scale-down-delay", 0, "0s to 1h")


def _duration(
    given: Annotations, name: str, least_ns: int, right: str, *, whole_seconds: bool = True
) -> Problems:
    if given.text(name) is not None:
        duration = given.duration_ns(name)
        if duration is None or not least_ns <= duration <= WINDOW_MOST_NS:
            yield _wrong(given, name, f"a duration, {right}")
        elif whole_seconds and duration % SECOND_NS:
            yield _wrong(given, name, f"whole seconds, {right}")


def _scales(given: Annotations, defaults: Defaults) -> Problems:
    least, most = given.int32("min-scale"), given.int32("max-scale")
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
    value = given.int32("activation-scale")
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


def _int32(text: str) -> int:
    return parse_int(text, 32)
