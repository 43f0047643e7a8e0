"""Affinity and anti-affinity between pods, and what they prefer: which nodes a pod may go to."""

from typing import Any

import pytest

from binder.engine.cluster import Cluster
from binder.engine.decision import Placement
from binder.pod.demand import parse_demand
from tests.fakes.objects import KEYS
from tests.fakes.zones import (
    EVERYWHERE,
    HOST,
    PREFERRED,
    allowed,
    apart,
    asks,
    near,
    neighbour,
    spread,
    term,
    three,
    zoned_cluster,
)

Json = dict[str, Any]


def chosen(cluster: Cluster, one: Json) -> str:
    outcome = cluster.decider.decide(parse_demand(one, KEYS))
    assert isinstance(outcome, Placement)
    return outcome.node


OTHERS = {"namespaceSelector": {"matchLabels": {"kind": "o"}}}
ALL = {"namespaceSelector": {}}
KEEPS_AWAY = {"affinity": apart(term("me"))}
# Who is there, what is asked (labels app=me, rev=1; namespace team), where it may go.
BETWEEN: dict[str, tuple[list[Json], Json, str]] = {
    "beside company in its zone": ([neighbour("r", "a1")], {"affinity": near(term())}, "a1 a2"),
    "beside company on its host": ([neighbour("r", "a1")], {"affinity": near(term(key=HOST))}, "a1"),
    "company outside every zone": ([neighbour("r", "x")], {"affinity": near(term())}, ""),
    "no company": ([neighbour("r", "a1", "y")], {"affinity": near(term())}, ""),
    "company that is going is company": (
        [neighbour("r", "a1", going=True)],
        {"affinity": near(term())},
        "a1 a2",
    ),
    "company to itself goes first, where the label is": ([], {"affinity": near(term("me"))}, "a1 a2 b1"),
    "and then to the others": ([neighbour("r", "b1", "me")], {"affinity": near(term("me"))}, "b1"),
    "company to itself by one term only": ([], {"affinity": near(term("me"), term("x", HOST))}, ""),
    "two terms, one pod for both": (
        [neighbour("r", "a1"), neighbour("s", "a2")],
        {"affinity": near(term(), term(key=HOST))},
        "a1 a2",
    ),
    "two terms, no pod for both": (
        [neighbour("r", "a1"), neighbour("s", "a1", "y")],
        {"affinity": near(term(), term("y"))},
        "",
    ),
    "company in another namespace": ([neighbour("r", "a1", ns="other")], {"affinity": near(term())}, ""),
    "in a namespace that is named": (
        [neighbour("r", "a1", ns="other"), neighbour("s", "b1")],
        {"affinity": near(term(namespaces=["other"]))},
        "a1 a2",
    ),
    "in namespaces by label": (
        [neighbour("r", "a1", ns="other"), neighbour("s", "b1", ns="third"), neighbour("t", "b1")],
        {"affinity": near(term(**OTHERS))},
        "a1 a2",
    ),
    "by label or name": (
        [neighbour("r", "a1", ns="other"), neighbour("s", "b1", ns="third")],
        {"affinity": near(term(namespaces=["third"], **OTHERS))},
        "a1 a2 b1",
    ),
    "in all namespaces": ([neighbour("r", "b1", ns="third")], {"affinity": near(term(**ALL))}, "b1"),
    "in a namespace that nobody has told of": (
        [neighbour("r", "b1", ns="fourth")],
        {"affinity": near(term(**ALL))},
        "b1",
    ),
    "a term without a selector speaks of nobody": (
        [neighbour("r", "a1")],
        {"affinity": near(term(None))},
        "",
    ),
    "alike by a label": (
        [neighbour("r", "a1", "x")],
        {"affinity": near(term("x", matchLabelKeys=["rev"]))},
        "",
    ),
    "alike by a label that it lacks": (
        [neighbour("r", "a1", "x")],
        {"affinity": near(term("x", matchLabelKeys=["lacking"]))},
        "a1 a2",
    ),
    "unlike by a label": (
        [neighbour("r", "a1", "x")],
        {"affinity": near(term("x", mismatchLabelKeys=["rev"]))},
        "a1 a2",
    ),
    "apart in the zone": ([neighbour("r", "a1")], {"affinity": apart(term())}, "b1 x"),
    "apart on the host": ([neighbour("r", "a1")], {"affinity": apart(term(key=HOST))}, "a2 b1 x"),
    "apart from either": (
        [neighbour("r", "a1"), neighbour("s", "b1", "y")],
        {"affinity": apart(term(), term("y"))},
        "x",
    ),
    "apart from one who is going": (
        [neighbour("r", "a1", going=True)],
        {"affinity": apart(term())},
        "b1 x",
    ),
    "apart from those of another namespace": (
        [neighbour("r", "a1", ns="other")],
        {"affinity": apart(term())},
        EVERYWHERE,
    ),
    "apart from one outside every zone": ([neighbour("r", "x")], {"affinity": apart(term())}, EVERYWHERE),
    "kept away from the zone": ([neighbour("r", "a1", **KEEPS_AWAY)], {}, "b1 x"),
    "kept away by two": (
        [
            neighbour("r", "a1", **KEEPS_AWAY),
            neighbour("s", "x", affinity=apart(term("me", HOST))),
        ],
        {},
        "b1",
    ),
    "others are kept away": ([neighbour("r", "a1", affinity=apart(term("x")))], {}, EVERYWHERE),
    "kept away in another namespace": ([neighbour("r", "a1", ns="other", **KEEPS_AWAY)], {}, EVERYWHERE),
    "kept away from all namespaces": (
        [neighbour("r", "a1", ns="other", affinity=apart(term("me", **ALL)))],
        {},
        "b1 x",
    ),
    "kept away by the namespace's label": (
        [
            neighbour(
                "r",
                "a1",
                ns="other",
                affinity=apart(term("me", namespaceSelector={"matchLabels": {"team": "1"}})),
            ),
        ],
        {},
        "b1 x",
    ),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_rules_between_pods(case: str) -> None:
    there, what, where = BETWEEN[case]
    fits, kinds = allowed(zoned_cluster(*there), asks(**what))
    assert fits == where
    affinity = what.get("affinity", {})
    expected = (
        "PodAffinityMismatch"
        if "podAffinity" in affinity
        else "PodAntiAffinity"
        if affinity
        else "ExistingPodAntiAffinity"
    )
    assert kinds <= {expected}


def weighted(weight: int, **what: Any) -> Json:
    return {"weight": weight, "podAffinityTerm": term(**what)}


SOFT = {"whenUnsatisfiable": "ScheduleAnyway"}
# Who is there, what is wished, where it goes. Without a wish it goes to a1, the first.
WISHES: dict[str, tuple[list[Json], Json, str]] = {
    "nothing": ([], {}, "a1"),
    "company": ([neighbour("r", "b1")], {"affinity": {"podAffinity": {PREFERRED: [weighted(1)]}}}, "b1"),
    "to be apart": (
        [neighbour("r", "a1"), neighbour("s", "x")],
        {"affinity": {"podAntiAffinity": {PREFERRED: [weighted(1)]}}},
        "b1",
    ),
    "company more than being apart": (
        [neighbour("r", "b1"), neighbour("s", "b1", "y")],
        {
            "affinity": {
                "podAffinity": {PREFERRED: [weighted(3)]},
                "podAntiAffinity": {PREFERRED: [weighted(2, app="y")]},
            }
        },
        "b1",
    ),
    "being apart more than company": (
        [neighbour("r", "b1"), neighbour("s", "b1", "y")],
        {
            "affinity": {
                "podAffinity": {PREFERRED: [weighted(2)]},
                "podAntiAffinity": {PREFERRED: [weighted(3, app="y")]},
            }
        },
        "a1",
    ),
    "more company": (
        [neighbour("r", "a1"), neighbour("s", "b1"), neighbour("t", "b1")],
        {"affinity": {"podAffinity": {PREFERRED: [weighted(1)]}}},
        "b1",
    ),
    "to be spread": ([neighbour("r", "a1", "me")], {"topologySpreadConstraints": [spread(**SOFT)]}, "b1"),
    "to be spread, if too many are everywhere": (
        [*three(), neighbour("more", "b1", "me"), neighbour("most", "b1", "me")],
        {"topologySpreadConstraints": [spread(**SOFT)]},
        "a1",
    ),
    "spread with a large skew counts less": (
        [neighbour("r", "a1", "me"), neighbour("s", "b1")],
        {
            "topologySpreadConstraints": [spread(10, **SOFT)],
            "affinity": {"podAntiAffinity": {PREFERRED: [weighted(10)]}},
        },
        "a1",
    ),
    "a node in no domain is the last choice": (
        [neighbour(f"r{i}", on, "me") for i, on in enumerate(("a1", "b1") * 5)],
        {"topologySpreadConstraints": [spread(**SOFT)]},
        "a1",
    ),
    "a wish of nodes and one of company": (
        [neighbour("r", "b1")],
        {
            "affinity": {
                "podAffinity": {PREFERRED: [weighted(5)]},
                "nodeAffinity": {
                    PREFERRED: [
                        {
                            "weight": 9,
                            "preference": {
                                "matchExpressions": [{"key": HOST, "operator": "In", "values": ["a2"]}]
                            },
                        }
                    ]
                },
            }
        },
        "a2",
    ),
}


@pytest.mark.parametrize("case", WISHES)
def test_what_a_pod_would_rather_have(case: str) -> None:
    there, what, where = WISHES[case]
    assert chosen(zoned_cluster(*there), asks(**what)) == where
