"""Kubernetes' rules for taints, node selectors and node affinity, over all nodes at once.

Sources: k8s.io/component-helpers/scheduling/corev1 (nodeaffinity, helpers) and the API reference of
NodeSelectorRequirement and Toleration.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from binder.cache.table import Bools, Column, Ints, NodeTable, Rows

JsonObject = Mapping[str, Any]
# (key, value, effect)
Taint = tuple[str, str, str]

CORDON: Taint = ("node.kubernetes.io/unschedulable", "", "NoSchedule")
_INTEGER = re.compile(r"[+-]?\d{1,19}", re.ASCII)
_HARD_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


def untolerated_taint(taints: Iterable[Taint], tolerations: Sequence[JsonObject]) -> Taint | None:
    """The first NoSchedule or NoExecute taint that the pod does not tolerate."""
    return next((t for t in taints if t[2] in _HARD_EFFECTS and not _is_tolerated(t, tolerations)), None)


def tolerates_taints(table: NodeTable, tolerations: Sequence[JsonObject], rows: Rows) -> Bools:
    return table.taints.map(
        rows, lambda taints: untolerated_taint(taints or (), tolerations) is None, np.bool_
    )


def untolerated_preferences(table: NodeTable, tolerations: Sequence[JsonObject], rows: Rows) -> Ints:
    """How many PreferNoSchedule taints of each node the pod does not tolerate."""

    def count(taints: Iterable[Taint] | None) -> int:
        soft = (taint for taint in taints or () if taint[2] == "PreferNoSchedule")
        return sum(not _is_tolerated(taint, tolerations) for taint in soft)

    return table.taints.map(rows, count, np.int64)


def tolerates_cordon(table: NodeTable, tolerations: Sequence[JsonObject], rows: Rows) -> Bools:
    """Whoever tolerates the cordon's taint may pass, as with Kubernetes' own NodeUnschedulable."""
    if untolerated_taint((CORDON,), tolerations) is None:
        return np.ones(len(table.cordon.codes[rows]), np.bool_)
    return table.cordon.codes[rows] == 0


def matches_selector(table: NodeTable, selector: Mapping[str, str], rows: Rows) -> Bools | None:
    """Every label of the selector; None where there is none, and every node matches."""
    masks = [table.label(key).is_one_of((value,), rows) for key, value in selector.items()]
    return np.logical_and.reduce(masks) if masks else None


def matches_affinity(table: NodeTable, affinity: JsonObject, rows: Rows) -> Bools | None:
    """The required node affinity: any of its terms. None without one."""
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return None if required is None else matches_node_selector(table, required, rows)


def matches_node_selector(table: NodeTable, selector: JsonObject, rows: Rows) -> Bools:
    """A NodeSelector: any of its terms."""
    terms = [_matches_term(table, term, rows) for term in selector.get("nodeSelectorTerms") or ()]
    return np.logical_or.reduce(terms) if terms else _none(table, rows)


def preference(table: NodeTable, affinity: JsonObject, rows: Rows) -> Ints | None:
    """Sum of the weights of the preferred terms that match. An empty term says nothing."""
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution")
    if not preferred:
        return None
    return np.sum([p["weight"] * _matches_term(table, p["preference"], rows) for p in preferred], axis=0)


def _is_tolerated(taint: Taint, tolerations: Sequence[JsonObject]) -> bool:
    return any(_tolerates(toleration, taint) for toleration in tolerations)


def _tolerates(toleration: JsonObject, taint: Taint) -> bool:
    """An empty effect matches all effects; an empty key with Exists matches all taints."""
    taint_key, taint_value, effect = taint
    if toleration.get("effect") and toleration["effect"] != effect:
        return False
    key, operator = toleration.get("key") or "", toleration.get("operator") or "Equal"
    if key and key != taint_key:
        return False
    if operator == "Exists":
        return True
    return bool(key) and operator == "Equal" and (toleration.get("value") or "") == taint_value


def _matches_term(table: NodeTable, term: JsonObject, rows: Rows) -> Bools:
    """All of its expressions and fields; an empty term matches nothing."""
    tests = [
        *(_matches(table.label(e["key"]), e, rows) for e in term.get("matchExpressions") or ()),
        *(_matches_field(table, field, rows) for field in term.get("matchFields") or ()),
    ]
    return np.logical_and.reduce(tests) if tests else _none(table, rows)


def _matches_field(table: NodeTable, requirement: JsonObject, rows: Rows) -> Bools:
    if requirement["key"] != "metadata.name":  # the only field that there is
        return _none(table, rows)
    return _matches(table.name, requirement, rows)


def _matches(column: Column, requirement: JsonObject, rows: Rows) -> Bools:
    values = requirement.get("values") or ()
    match requirement["operator"]:
        case "In":
            return column.is_one_of(values, rows)
        case "NotIn":  # also where the label is missing
            return ~column.is_one_of(values, rows)
        case "Exists":
            return column.codes[rows] != 0
        case "DoesNotExist":
            return column.codes[rows] == 0
        case "Gt":
            return _compared(column, rows, values, np.greater)
        case "Lt":
            return _compared(column, rows, values, np.less)
    # An operator that is not known here must not let a pod through.
    return np.zeros(len(column.codes[rows]), np.bool_)


def _compared(column: Column, rows: Rows, bounds: Sequence[str], holds: np.ufunc) -> Bools:
    """Where the value and the one bound are numbers of which it holds."""
    codes = column.codes[rows]
    bound = _integer(bounds[0]) if len(bounds) == 1 else None
    if bound is None:
        return np.zeros(len(codes), np.bool_)
    known, numbers = column.integers(lambda value: None if value is None else _integer(value))
    found: Bools = (known & holds(numbers, bound))[codes]
    return found


def _integer(text: str) -> int | None:
    """As Go's ParseInt(text, 10, 64) reads it: no spaces, no underscores, 64 bits."""
    if not _INTEGER.fullmatch(text):
        return None
    return number if -(2**63) <= (number := int(text)) < 2**63 else None


def _none(table: NodeTable, rows: Rows) -> Bools:
    return np.zeros(len(table.name.codes[rows]), np.bool_)
