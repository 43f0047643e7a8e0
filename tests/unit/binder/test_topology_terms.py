"""What a pod asks of the pods around it, as it is read: of whom a term speaks, and what holds where nothing is said."""

from typing import Any

import pytest

from binder.pod import bounds
from binder.pod.topology_terms import ANY_POD_HERE, NONE, Term, parse_neighbours, required_anti_affinity
from tests.fakes.objects import pod
from tests.fakes.zones import apart, spread, term

X, OTHER = {"app": "x"}, {"kind": "o"}


def read(**more: Any) -> Term:
    (found,) = required_anti_affinity(pod(affinity=apart(term("x", **more))))
    return found


@pytest.mark.parametrize(
    ("more", "namespaces"),
    [
        ({}, {"team"}),
        ({"namespaces": ["third"]}, {"third"}),
        ({"namespaceSelector": {"matchLabels": OTHER}}, {"other"}),
        ({"namespaceSelector": {}}, {"team", "other", "third"}),
        ({"namespaceSelector": {"matchLabels": OTHER}, "namespaces": ["third"]}, {"other", "third"}),
    ],
    ids=["its own", "one by name", "by label", "all", "by label or name"],
)
def test_of_which_namespaces_a_term_speaks(more: Any, namespaces: set[str]) -> None:
    labels = {"team": {}, "other": OTHER, "third": {}}
    assert {name for name in labels if read(**more).matches(name, labels[name], X)} == namespaces
    assert not any(read(**more).matches(name, labels[name], {"app": "y"}) for name in labels)


def test_what_holds_where_a_constraint_says_nothing() -> None:
    (found,) = parse_neighbours(pod(topologySpreadConstraints=[spread(None)])).spread
    assert (found.max_skew, found.min_domains, found.required) == (1, 1, True)
    assert (found.honours_affinity, found.honours_taints) == (True, False)
    assert parse_neighbours(pod()) is NONE


def test_terms_beyond_the_bound_keep_everybody_off_the_node() -> None:
    terms = [term(f"x{number}") for number in range(bounds.MOST_TERMS + 1)]
    assert required_anti_affinity(pod(affinity=apart(*terms)))[-1] == ANY_POD_HERE
    assert ANY_POD_HERE not in required_anti_affinity(pod(affinity=apart(*terms[1:])))
