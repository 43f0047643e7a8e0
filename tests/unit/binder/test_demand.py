"""What a pod takes of a node and asks of it, read from its JSON as kube-scheduler reads it."""

from typing import Any

import pytest

from binder.pod.demand import Demand, parse_demand, pod_claims
from binder.pod.selectors import parse_selector
from tests.fakes.objects import KEYS, pod
from tests.fakes.whole_pod import everything

Json = dict[str, Any]


def test_who_a_pod_is_to_others() -> None:
    demand = parse_demand(everything(), KEYS)
    assert (demand.owner, demand.priority, demand.preempts, demand.gated) == ("rs", 7, False, True)
    assert (demand.claims, demand.owned_claims) == (("c",), frozenset())
    assert demand.host_ports == {("0.0.0.0", "UDP", 80), ("0.0.0.0", "TCP", 81)}
    assert demand.unsupported == "spec.resourceClaims"
    plain = parse_demand(pod(), KEYS)
    assert (plain.owner, plain.priority, plain.preempts, plain.gated) == (None, 0, True, False)
    assert (plain.created, plain.unsupported, plain.nominated) == ("2026-01-01T00:00:00Z", None, None)


def claim(name: str, volume: str = "v") -> Json:
    return {"name": volume, "persistentVolumeClaim": {"claimName": name}}


def test_claims_of_a_pod() -> None:
    volumes = [
        claim("a"),
        {"name": "e", "ephemeral": {}},
        {"name": "s", "secret": {}},
        claim("b"),
        claim("a"),
    ]
    assert pod_claims(pod("p1", volumes=volumes)) == (("a", "b", "p1-e"), frozenset({"p1-e"}))
    assert pod_claims(pod()) == ((), frozenset())


def asking(**changes: Any) -> Demand:
    """A pod of a model that has a name: two of them ask the same but for the change."""
    labels, owner = changes.pop("labels", None), changes.pop("owner", "rs")
    namespace, uid = changes.pop("namespace", "team"), changes.pop("uid", "p1")
    marks = {KEYS.model_id: "m", **changes.pop("annotations", {})}
    made = pod(uid, annotations=marks, **changes)
    made["metadata"] |= {"labels": labels, "namespace": namespace}
    made["metadata"]["ownerReferences"] = [{"uid": owner, "controller": True}]
    return parse_demand(made, KEYS)


DIFFERENT: dict[str, Json] = {
    "namespace": {"namespace": "other"},
    "model": {"annotations": {KEYS.model_id: "n"}},
    "name in Triton": {"annotations": {KEYS.model_name: "n"}},
    "owner": {"owner": "other"},
    "memory": {"mem": "2Gi"},
    "labels": {"labels": {"app": "y"}},
    "rules between pods": {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 2}]},
    "node selector": {"nodeSelector": {"zone": "a"}},
    "host port": {"containers": [{"name": "proxy", "ports": [{"hostPort": 80}]}]},
    "claims": {"volumes": [claim("a")]},
    "unsupported": {"resourceClaims": [{"name": "r"}]},
    "priority": {"priority": 1},
    "preemption": {"preemptionPolicy": "Never"},
    "gates": {"schedulingGates": [{"name": "g"}]},
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_who_requests_something_else_is_not_answered_alike(case: str) -> None:
    assert asking().question == asking(uid="p2", created="2027-01-01T00:00:00Z").question
    assert asking().question != asking(**DIFFERENT[case]).question


SELECTED: list[tuple[Json | None, str]] = [
    (None, ""),
    ({}, "a ab c -"),
    ({"matchLabels": {"x": "a"}}, "a ab"),
    ({"matchLabels": {"x": "a", "y": "b"}}, "ab"),
    ({"matchExpressions": [{"key": "x", "operator": "In", "values": ["a", "c"]}]}, "a ab c"),
    ({"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["a"]}]}, "c -"),
    ({"matchExpressions": [{"key": "y", "operator": "Exists"}]}, "ab"),
    ({"matchExpressions": [{"key": "y", "operator": "DoesNotExist"}]}, "a c -"),
    ({"matchExpressions": [{"key": "x", "operator": "Gt", "values": ["0"]}]}, ""),
    ({"matchLabels": {"x": "a"}, "matchExpressions": [{"key": "y", "operator": "DoesNotExist"}]}, "a"),
]


@pytest.mark.parametrize(("selector", "found"), SELECTED)
def test_label_selectors(selector: Json | None, found: str) -> None:
    labelled = {"a": {"x": "a"}, "ab": {"x": "a", "y": "b"}, "c": {"x": "c"}, "-": {}}
    parsed = parse_selector(selector)
    assert " ".join(n for n, labels in labelled.items() if parsed and parsed.matches(labels)) == found


def test_selectors_that_mean_the_same_are_the_same() -> None:
    """They are compared to tell whether something has changed."""
    tests = [{"key": k, "operator": "In", "values": [v, v]} for k, v in (("y", "b"), ("x", "a"))]
    assert parse_selector({"matchExpressions": tests}) == parse_selector(
        {"matchLabels": {"x": "a", "y": "b"}}
    )
