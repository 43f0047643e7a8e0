"""Kubernetes' rules for node selectors and node affinity, over all nodes at once.

Sources: k8s.io/component-helpers/scheduling/corev1 (nodeaffinity) and the API reference of NodeSelectorRequirement.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from binder.cache.column import Bools, Column, Ints, Rows
from binder.cache.table import NAME, NodeTable
from binder.cache.view import NodeView
from binder.pod.demand import Demand, Shape
from binder.rules.rule import Cure, NewNode, ShapeQuery, ShapeRule

JsonObject = Mapping[str, Any]

_INTEGER = re.compile(r"[+-]?\d{1,19}", re.ASCII)


class NodeSelectorMismatch(ShapeRule):
    """The node lacks a label of the pod's `nodeSelector`."""

    name = "NodeSelectorMismatch"
    cures = frozenset({Cure.NODE})
    new_node = NewNode.OTHER_POOL
    moves = True
    lasts = True

    def fails(self, query: ShapeQuery) -> Bools | None:
        matching = matches_selector(query.table, query.shape.node_selector, query.rows)
        return None if matching is None else ~matching

    def why(self, demand: Demand, view: NodeView) -> str:
        return ",".join(f"{k}={v}" for k, v in sorted(demand.shape.node_selector.items()))


class NodeAffinityMismatch(ShapeRule):
    """The node is none that the pod's required node affinity names."""

    name = "NodeAffinityMismatch"
    cures = frozenset({Cure.NODE})
    new_node = NewNode.OTHER_POOL
    moves = True
    lasts = True

    def fails(self, query: ShapeQuery) -> Bools | None:
        matching = matches_affinity(query.table, query.shape.node_affinity, query.rows)
        return None if matching is None else ~matching

    def preference(self, query: ShapeQuery) -> Ints | None:
        """Sum of the weights of the preferred terms that match. An empty term says nothing."""
        preferred = query.shape.node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution")
        if not preferred:
            return None
        matching = [p["weight"] * _matches_term(query.table, p["preference"], query.rows) for p in preferred]
        return np.sum(matching, axis=0)


def selected_nodes(table: NodeTable, shape: Shape) -> Bools:
    """Nodes that the pod's selector and required affinity allow, whatever else is with them."""
    rows = table.all_rows
    masks = (
        matches_selector(table, shape.node_selector, rows),
        matches_affinity(table, shape.node_affinity, rows),
    )
    return np.logical_and.reduce([np.ones(len(table), np.bool_), *(m for m in masks if m is not None)])


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
    return _matches(table.fact(NAME), requirement, rows)


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
    return np.zeros(len(table.live[rows]), np.bool_)
