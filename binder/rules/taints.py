"""Kubernetes' rules for taints and cordons.

Sources: k8s.io/component-helpers/scheduling/corev1 (helpers.go), the API reference of Toleration.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from binder.cache.column import Bools, Ints, Rows
from binder.cache.table import Fact, NodeTable
from binder.cache.view import NodeView, Taint
from binder.pod.demand import Demand
from binder.rules.rule import Context, Cure, NewNode, ShapeQuery, ShapeRule

JsonObject = Mapping[str, Any]

_CORDON: Taint = ("node.kubernetes.io/unschedulable", "", "NoSchedule")
_HARD_EFFECTS = frozenset({"NoSchedule", "NoExecute"})
# Set and taken away by controllers, as nodes go and come.
_PASSING_TAINTS = "node.kubernetes.io/"
# One untolerated PreferNoSchedule taint outweighs all preferred terms: 100 terms of weight 100 at most.
_TAINT_WEIGHT = 1_000_000
TAINTS = Fact(lambda view: view.facts.taint_keys or None)
CORDONED = Fact(lambda view: view.facts.unschedulable or None)


class NodeUnschedulable(ShapeRule):
    """The node is cordoned. A pod that tolerates the cordon's taint may pass, as with Kubernetes' own NodeUnschedulable."""

    name = "NodeUnschedulable"
    cures = frozenset({Cure.NODE})
    moves = True

    def fails(self, query: ShapeQuery) -> Bools | None:
        if untolerated_taint((_CORDON,), query.shape.tolerations) is None:
            return None
        return query.table.fact(CORDONED).where(query.rows, bool)


class TaintNotTolerated(ShapeRule):
    """The node has a taint that the pod does not tolerate."""

    name = "TaintNotTolerated"
    cures = frozenset({Cure.NODE})
    new_node = NewNode.OTHER_POOL
    tells_for_all = True
    moves = True

    def fails(self, query: ShapeQuery) -> Bools | None:
        return untolerated(query.table, query.shape.tolerations, query.rows)

    def preference(self, query: ShapeQuery) -> Ints | None:
        """Against nodes with PreferNoSchedule taints that the pod does not tolerate."""
        tolerations = query.shape.tolerations

        def count(taints: Iterable[Taint] | None) -> int:
            soft = (taint for taint in taints or () if taint[2] == "PreferNoSchedule")
            return sum(not _is_tolerated(taint, tolerations) for taint in soft)

        counts: Ints = query.table.fact(TAINTS).map(query.rows, count, np.int64)
        return -_TAINT_WEIGHT * counts

    def never_fits(self, context: Context, demand: Demand) -> Bools | None:
        def forbid(taints: Iterable[Taint] | None) -> bool:
            lasting = [taint for taint in taints or () if not taint[0].startswith(_PASSING_TAINTS)]
            return untolerated_taint(lasting, demand.shape.tolerations) is not None

        return context.table.fact(TAINTS).where(context.table.all_rows, forbid)

    def why(self, demand: Demand, view: NodeView) -> str:
        found = untolerated_taint(view.facts.taint_keys, demand.shape.tolerations)
        if found is None:
            return ""
        key, value, effect = found
        return f"{key}{'=' if value else ''}{value}:{effect}"


def untolerated(table: NodeTable, tolerations: Sequence[JsonObject], rows: Rows) -> Bools | None:
    """Which of these rows have a taint that keeps such pods away; None where none has."""
    return table.fact(TAINTS).where(
        rows, lambda taints: untolerated_taint(taints or (), tolerations) is not None
    )


def untolerated_taint(taints: Iterable[Taint], tolerations: Sequence[JsonObject]) -> Taint | None:
    """The first NoSchedule or NoExecute taint that the pod does not tolerate."""
    return next((t for t in taints if t[2] in _HARD_EFFECTS and not _is_tolerated(t, tolerations)), None)


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
