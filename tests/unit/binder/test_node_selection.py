"""Kubernetes' rules for node affinity: which terms a node's labels and name match."""

from typing import Any

import pytest

from binder.rules.node_selection import matches_affinity
from tests.fakes.cluster import cluster_of
from tests.fakes.objects import node


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def named(operator: str) -> dict[str, Any]:
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": ["n1"]}]}


@pytest.mark.parametrize(
    ("terms", "matches"),
    [
        ([expression("zone", "In", "a", "b")], True),
        ([expression("zone", "In", "b")], False),
        ([expression("zone", "NotIn", "b")], True),
        ([expression("none", "NotIn", "b")], True),
        ([expression("zone", "Exists")], True),
        ([expression("none", "DoesNotExist")], True),
        ([expression("size", "Gt", "9")], True),
        ([expression("size", "Gt", "10")], False),
        ([expression("size", "Lt", "11")], True),
        ([expression("zone", "Gt", "1")], False),
        ([expression("size", "Gt", "x")], False),
        ([expression("zone", "Like", "a")], False),
        ([{}], False),
        ([], False),
        ([expression("zone", "In", "b"), expression("zone", "In", "a")], True),
        ([named("In")], True),
        ([named("NotIn")], False),
    ],
)
def test_required_affinity(terms: list[Any], matches: bool) -> None:
    cluster = cluster_of(node(labels={"zone": "a", "size": "10"}))
    cluster.decider.refresh()
    table = cluster.decider.table
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    found = matches_affinity(table, required, table.all_rows)
    assert found is not None
    assert found.tolist() == [matches]
