"""Kubernetes' matching rules for taints, selectors and node affinity. Pure.

Sources: k8s.io/component-helpers/scheduling/corev1 (nodeaffinity, helpers) and the API reference of
NodeSelectorRequirement and Toleration.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

JsonObject = Mapping[str, Any]

_INTEGER = re.compile(r"[+-]?\d{1,19}", re.ASCII)
_HARD_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


def untolerated_taint(taints: Iterable[JsonObject], tolerations: Sequence[JsonObject]) -> JsonObject | None:
    """The first NoSchedule or NoExecute taint that the pod does not tolerate."""
    return next(
        (t for t in taints if t.get("effect") in _HARD_EFFECTS and not _is_tolerated(t, tolerations)), None
    )


def untolerated_preferences(taints: Iterable[JsonObject], tolerations: Sequence[JsonObject]) -> int:
    """How many PreferNoSchedule taints the pod does not tolerate."""
    return sum(t.get("effect") == "PreferNoSchedule" and not _is_tolerated(t, tolerations) for t in taints)


def matches_selector(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def matches_affinity(name: str, labels: Mapping[str, str], affinity: JsonObject) -> bool:
    """The required node affinity: any of its terms. Without one every node matches."""
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(_matches_term(name, labels, term) for term in required.get("nodeSelectorTerms") or ())


def preference(name: str, labels: Mapping[str, str], affinity: JsonObject) -> int:
    """Sum of the weights of the preferred terms that match."""
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    # An empty preferred term matches every node; it says nothing, so it counts nothing.
    return sum(p["weight"] for p in preferred if _matches_term(name, labels, p["preference"]))


def _is_tolerated(taint: JsonObject, tolerations: Sequence[JsonObject]) -> bool:
    return any(_tolerates(toleration, taint) for toleration in tolerations)


def _tolerates(toleration: JsonObject, taint: JsonObject) -> bool:
    """An empty effect matches all effects; an empty key with Exists matches all taints."""
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    key, operator = toleration.get("key") or "", toleration.get("operator") or "Equal"
    if key and key != taint["key"]:
        return False
    if operator == "Exists":
        return True
    return bool(key) and operator == "Equal" and (toleration.get("value") or "") == (taint.get("value") or "")


def _matches_term(name: str, labels: Mapping[str, str], term: JsonObject) -> bool:
    """All of its expressions and fields; an empty term matches nothing."""
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_matches(labels, e) for e in expressions) and all(
        _matches({"metadata.name": name}, field) for field in fields
    )


def _matches(values: Mapping[str, str], requirement: JsonObject) -> bool:
    test = _OPERATORS.get(requirement["operator"])
    # An operator that is not known here must not let a pod through.
    return test is not None and test(values.get(requirement["key"]), requirement.get("values") or ())


def _in(value: str | None, wanted: Sequence[str]) -> bool:
    return value is not None and value in wanted


def _not_in(value: str | None, unwanted: Sequence[str]) -> bool:
    return value is None or value not in unwanted


def _integer(text: str) -> int | None:
    """As Go's ParseInt(text, 10, 64) reads it: no spaces, no underscores, 64 bits."""
    if not _INTEGER.fullmatch(text):
        return None
    return number if -(2**63) <= (number := int(text)) < 2**63 else None


def _compare(holds: Callable[[int, int], bool]) -> Callable[[str | None, Sequence[str]], bool]:
    def test(value: str | None, bounds: Sequence[str]) -> bool:
        if value is None or len(bounds) != 1:
            return False
        number, bound = _integer(value), _integer(bounds[0])
        return number is not None and bound is not None and holds(number, bound)

    return test


_OPERATORS: Mapping[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": _in,
    "NotIn": _not_in,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": _compare(lambda value, bound: value > bound),
    "Lt": _compare(lambda value, bound: value < bound),
}
