"""Topology spread: where one more pod of an app may go."""

from typing import Any

import pytest

from tests.fakes.zones import (
    HOST,
    ZONE,
    allowed,
    asks,
    neighbour,
    spread,
    three,
    zoned_cluster,
)

Json = dict[str, Any]


TAINT: Json = {"taints": [{"key": "k", "effect": "NoSchedule"}]}
# Who is there, the constraints, more that is asked, what nodes are, where it may go.
SPREADS: dict[str, tuple[list[Json], list[Json], Json, Json, str]] = {
    "nobody there": ([], [spread()], {}, {}, "a1 a2 b1"),
    "one more where fewer are": (three(), [spread()], {}, {}, "b1"),
    "a skew of one is the default": (three(), [spread(None)], {}, {}, "b1"),
    "a larger skew": (three(), [spread(2)], {}, {}, "a1 a2 b1"),
    "others do not count": ([neighbour("r", "a1")], [spread()], {}, {}, "a1 a2 b1"),
    "other namespaces do not count": (three(ns="other"), [spread()], {}, {}, "a1 a2 b1"),
    "who is going does not count": (three(going=True), [spread()], {}, {}, "a1 a2 b1"),
    "one that it does not count itself in": ([neighbour("r", "a1")], [spread(app="x")], {}, {}, "a1 a2 b1"),
    "an excess that is there without it": (
        [neighbour("r", "a1"), neighbour("s", "a1")],
        [spread(app="x")],
        {},
        {},
        "b1",
    ),
    "no selector counts nobody": (three(), [spread(app=None)], {}, {}, "a1 a2 b1"),
    "an empty selector counts nobody who is there": (three(), [spread(app="")], {}, {}, "a1 a2 b1"),
    "alike by a label": (three(), [spread(matchLabelKeys=["rev"])], {}, {}, "a1 a2 b1"),
    "over hosts": ([neighbour("r", "a1", "me")], [spread(key=HOST)], {}, {}, "a2 b1 x"),
    "over zones and hosts": (
        [neighbour("r", "b1", "me"), neighbour("s", "a1", "me")],
        [spread(), spread(key=HOST)],
        {},
        {},
        "a2",
    ),
    "too few domains": (three()[:1], [spread(minDomains=3)], {}, {}, "b1"),
    "enough domains": (three()[:1], [spread(minDomains=2)], {}, {}, "b1"),
    "everywhere one, too few domains": (three()[1:], [spread(minDomains=3)], {}, {}, ""),
    "everywhere one, enough domains": (three()[1:], [spread(minDomains=2)], {}, {}, "a1 a2 b1"),
    "no node has the label": ([], [spread(key="rack")], {}, {}, ""),
    "a zone that the pod may not go to is no domain": (
        three(),
        [spread()],
        {"nodeSelector": {ZONE: "a"}},
        {},
        "a1 a2",
    ),
    "unless it is to count": (
        three(),
        [spread(nodeAffinityPolicy="Ignore")],
        {"nodeSelector": {ZONE: "a"}},
        {},
        "",
    ),
    "a tainted zone is a domain": (three(), [spread()], {}, {"b1": {"labels": {ZONE: "b"}, **TAINT}}, ""),
    "unless it is not to count": (
        three(),
        [spread(nodeTaintsPolicy="Honor")],
        {},
        {"b1": {"labels": {ZONE: "b"}, **TAINT}},
        "a1 a2",
    ),
    "a tainted zone that the pod tolerates counts": (
        three(),
        [spread(nodeTaintsPolicy="Honor")],
        {"tolerations": [{"operator": "Exists"}]},
        {"b1": {"labels": {ZONE: "b"}, **TAINT}},
        "b1",
    ),
    "on a node without one of the labels nobody is counted": (
        [neighbour("r", "a1", "me"), neighbour("s", "b1", "me"), neighbour("t", "b1", "me")],
        [spread(), spread(key="rack")],
        {},
        {"a1": {"labels": {ZONE: "a", "rack": "1"}}, "a2": {"labels": {ZONE: "a", "rack": "2"}}},
        "a2",
    ),
}


@pytest.mark.parametrize("case", SPREADS)
def test_topology_spread(case: str) -> None:
    there, constraints, more, nodes, where = SPREADS[case]
    one = asks(topologySpreadConstraints=constraints, **more)
    assert allowed(zoned_cluster(*there, **nodes), one)[0] == where
