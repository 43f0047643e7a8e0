"""Affinity, anti-affinity and spread between pods, claims and budgets: which nodes a pod may go to.

Zone a: a1, a2; zone b: b1; x is in no zone. Each has room for everything.
"""

from typing import Any

import numpy as np
import pytest

from berth.kube.informer import Change, ChangeKind
from binder.cache.disruption_budgets import Budgets
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement
from binder.engine.preemption import find_candidate
from binder.pod.demand import parse_demand
from binder.rules.registry import FITS, RULES
from binder.rules.rule import Cure
from tests.fakes.objects import KEYS, gpu, node, pod, report

Json = dict[str, Any]
ZONE, HOST = "zone", "kubernetes.io/hostname"
REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)
EVERYWHERE = "a1 a2 b1 x"


def resident(
    uid: str, on: str, app: str = "x", *, ns: str = "team", going: bool = False, **more: Any
) -> Json:
    made = pod(uid, mem=None, on=on, annotations={KEYS.model_id: None}, **more)
    made["metadata"] |= {"namespace": ns, "labels": {"app": app}}
    if going:
        made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return made


def cluster_of(*pods: Json, **nodes: Json) -> Cluster:
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    for name in EVERYWHERE.split():
        labels = {} if name == "x" else {ZONE: name[0]}
        facts = {"labels": labels, **nodes.get(name, {})}
        cluster.on_node(Change(ChangeKind.SET, node(name, says=report(gpu(f"GPU-{name}")), **facts)))
        cluster.decider.table.beat(name, 1.0)  # type: ignore[arg-type]
    for name, labels in (("team", {"team": "1"}), ("other", {"kind": "o"}), ("third", {"kind": "t"})):
        cluster.on_namespace(Change(ChangeKind.SET, {"metadata": {"name": name, "labels": labels}}))
    for one in pods:
        cluster.on_pod(Change(ChangeKind.SET, one))
    return cluster


def asks(app: str = "me", **spec: Any) -> Json:
    made = pod("p", **spec)
    made["metadata"]["labels"] = {"app": app, "rev": "1"}
    return made


def allowed(cluster: Cluster, one: Json) -> tuple[str, set[str]]:
    """Where it may go, and why not to the others."""
    codes, table = cluster.decider.codes(parse_demand(one, KEYS)), cluster.decider.table
    fits = sorted(name for name, row in table.row_of.items() if codes[row] == FITS)
    return " ".join(fits), {RULES.rule(int(code)).name for code in codes if code != FITS}


def chosen(cluster: Cluster, one: Json) -> str:
    outcome = cluster.decider.decide(parse_demand(one, KEYS))
    assert isinstance(outcome, Placement)
    return outcome.node


def term(app: str | None = "x", key: str = ZONE, **more: Any) -> Json:
    selector = {} if app is None else {"labelSelector": {"matchLabels": {"app": app}}}
    return {"topologyKey": key, **selector, **more}


def near(*terms: Json) -> Json:
    return {"podAffinity": {REQUIRED: list(terms)}}


def apart(*terms: Json) -> Json:
    return {"podAntiAffinity": {REQUIRED: list(terms)}}


OTHERS = {"namespaceSelector": {"matchLabels": {"kind": "o"}}}
ALL = {"namespaceSelector": {}}
KEEPS_AWAY = {"affinity": apart(term("me"))}
# Who is there, what is asked (labels app=me, rev=1; namespace team), where it may go.
BETWEEN: dict[str, tuple[list[Json], Json, str]] = {
    "beside company in its zone": ([resident("r", "a1")], {"affinity": near(term())}, "a1 a2"),
    "beside company on its host": ([resident("r", "a1")], {"affinity": near(term(key=HOST))}, "a1"),
    "company outside every zone": ([resident("r", "x")], {"affinity": near(term())}, ""),
    "no company": ([resident("r", "a1", "y")], {"affinity": near(term())}, ""),
    "company that is going is company": (
        [resident("r", "a1", going=True)],
        {"affinity": near(term())},
        "a1 a2",
    ),
    "company to itself goes first, where the label is": ([], {"affinity": near(term("me"))}, "a1 a2 b1"),
    "and then to the others": ([resident("r", "b1", "me")], {"affinity": near(term("me"))}, "b1"),
    "company to itself by one term only": ([], {"affinity": near(term("me"), term("x", HOST))}, ""),
    "two terms, one pod for both": (
        [resident("r", "a1"), resident("s", "a2")],
        {"affinity": near(term(), term(key=HOST))},
        "a1 a2",
    ),
    "two terms, no pod for both": (
        [resident("r", "a1"), resident("s", "a1", "y")],
        {"affinity": near(term(), term("y"))},
        "",
    ),
    "company in another namespace": ([resident("r", "a1", ns="other")], {"affinity": near(term())}, ""),
    "in a namespace that is named": (
        [resident("r", "a1", ns="other"), resident("s", "b1")],
        {"affinity": near(term(namespaces=["other"]))},
        "a1 a2",
    ),
    "in namespaces by label": (
        [resident("r", "a1", ns="other"), resident("s", "b1", ns="third"), resident("t", "b1")],
        {"affinity": near(term(**OTHERS))},
        "a1 a2",
    ),
    "by label or name": (
        [resident("r", "a1", ns="other"), resident("s", "b1", ns="third")],
        {"affinity": near(term(namespaces=["third"], **OTHERS))},
        "a1 a2 b1",
    ),
    "in all namespaces": ([resident("r", "b1", ns="third")], {"affinity": near(term(**ALL))}, "b1"),
    "in a namespace that nobody has told of": (
        [resident("r", "b1", ns="fourth")],
        {"affinity": near(term(**ALL))},
        "b1",
    ),
    "a term without a selector speaks of nobody": (
        [resident("r", "a1")],
        {"affinity": near(term(None))},
        "",
    ),
    "alike by a label": (
        [resident("r", "a1", "x")],
        {"affinity": near(term("x", matchLabelKeys=["rev"]))},
        "",
    ),
    "alike by a label that it lacks": (
        [resident("r", "a1", "x")],
        {"affinity": near(term("x", matchLabelKeys=["lacking"]))},
        "a1 a2",
    ),
    "unlike by a label": (
        [resident("r", "a1", "x")],
        {"affinity": near(term("x", mismatchLabelKeys=["rev"]))},
        "a1 a2",
    ),
    "apart in the zone": ([resident("r", "a1")], {"affinity": apart(term())}, "b1 x"),
    "apart on the host": ([resident("r", "a1")], {"affinity": apart(term(key=HOST))}, "a2 b1 x"),
    "apart from either": (
        [resident("r", "a1"), resident("s", "b1", "y")],
        {"affinity": apart(term(), term("y"))},
        "x",
    ),
    "apart from one who is going": (
        [resident("r", "a1", going=True)],
        {"affinity": apart(term())},
        "b1 x",
    ),
    "apart from those of another namespace": (
        [resident("r", "a1", ns="other")],
        {"affinity": apart(term())},
        EVERYWHERE,
    ),
    "apart from one outside every zone": ([resident("r", "x")], {"affinity": apart(term())}, EVERYWHERE),
    "kept away from the zone": ([resident("r", "a1", **KEEPS_AWAY)], {}, "b1 x"),
    "kept away by two": (
        [
            resident("r", "a1", **KEEPS_AWAY),
            resident("s", "x", affinity=apart(term("me", HOST))),
        ],
        {},
        "b1",
    ),
    "others are kept away": ([resident("r", "a1", affinity=apart(term("x")))], {}, EVERYWHERE),
    "kept away in another namespace": ([resident("r", "a1", ns="other", **KEEPS_AWAY)], {}, EVERYWHERE),
    "kept away from all namespaces": (
        [resident("r", "a1", ns="other", affinity=apart(term("me", **ALL)))],
        {},
        "b1 x",
    ),
    "kept away by the namespace's label": (
        [
            resident(
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
    fits, kinds = allowed(cluster_of(*there), asks(**what))
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


def spread(skew: int | None = 1, key: str = ZONE, app: str | None = "me", **more: Any) -> Json:
    selector = {} if app is None else {"labelSelector": {"matchLabels": {"app": app} if app else {}}}
    figure = {} if skew is None else {"maxSkew": skew}
    return {"topologyKey": key, **figure, **selector, **more}


def three(**more: Any) -> list[Json]:
    """Two in zone a, one in zone b."""
    return [resident(f"r{i}", on, "me", **more) for i, on in enumerate(("a1", "a2", "b1"))]


TAINT: Json = {"taints": [{"key": "k", "effect": "NoSchedule"}]}
CORDONED = {"unschedulable": True}
# Who is there, the constraints, more that is asked, what nodes are, where it may go.
SPREADS: dict[str, tuple[list[Json], list[Json], Json, Json, str]] = {
    "nobody there": ([], [spread()], {}, {}, "a1 a2 b1"),
    "one more where fewer are": (three(), [spread()], {}, {}, "b1"),
    "a skew of one is the default": (three(), [spread(None)], {}, {}, "b1"),
    "a larger skew": (three(), [spread(2)], {}, {}, "a1 a2 b1"),
    "others do not count": ([resident("r", "a1")], [spread()], {}, {}, "a1 a2 b1"),
    "other namespaces do not count": (three(ns="other"), [spread()], {}, {}, "a1 a2 b1"),
    "who is going does not count": (three(going=True), [spread()], {}, {}, "a1 a2 b1"),
    "one that it does not count itself in": ([resident("r", "a1")], [spread(app="x")], {}, {}, "a1 a2 b1"),
    "an excess that is there without it": (
        [resident("r", "a1"), resident("s", "a1")],
        [spread(app="x")],
        {},
        {},
        "b1",
    ),
    "no selector counts nobody": (three(), [spread(app=None)], {}, {}, "a1 a2 b1"),
    "an empty selector counts nobody who is there": (three(), [spread(app="")], {}, {}, "a1 a2 b1"),
    "alike by a label": (three(), [spread(matchLabelKeys=["rev"])], {}, {}, "a1 a2 b1"),
    "over hosts": ([resident("r", "a1", "me")], [spread(key=HOST)], {}, {}, "a2 b1 x"),
    "over zones and hosts": (
        [resident("r", "b1", "me"), resident("s", "a1", "me")],
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
        [resident("r", "a1", "me"), resident("s", "b1", "me"), resident("t", "b1", "me")],
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
    assert allowed(cluster_of(*there, **nodes), one)[0] == where


def weighted(weight: int, **what: Any) -> Json:
    return {"weight": weight, "podAffinityTerm": term(**what)}


SOFT = {"whenUnsatisfiable": "ScheduleAnyway"}
# Who is there, what is wished, where it goes. Without a wish it goes to a1, the first.
WISHES: dict[str, tuple[list[Json], Json, str]] = {
    "nothing": ([], {}, "a1"),
    "company": ([resident("r", "b1")], {"affinity": {"podAffinity": {PREFERRED: [weighted(1)]}}}, "b1"),
    "to be apart": (
        [resident("r", "a1"), resident("s", "x")],
        {"affinity": {"podAntiAffinity": {PREFERRED: [weighted(1)]}}},
        "b1",
    ),
    "company more than being apart": (
        [resident("r", "b1"), resident("s", "b1", "y")],
        {
            "affinity": {
                "podAffinity": {PREFERRED: [weighted(3)]},
                "podAntiAffinity": {PREFERRED: [weighted(2, app="y")]},
            }
        },
        "b1",
    ),
    "being apart more than company": (
        [resident("r", "b1"), resident("s", "b1", "y")],
        {
            "affinity": {
                "podAffinity": {PREFERRED: [weighted(2)]},
                "podAntiAffinity": {PREFERRED: [weighted(3, app="y")]},
            }
        },
        "a1",
    ),
    "more company": (
        [resident("r", "a1"), resident("s", "b1"), resident("t", "b1")],
        {"affinity": {"podAffinity": {PREFERRED: [weighted(1)]}}},
        "b1",
    ),
    "to be spread": ([resident("r", "a1", "me")], {"topologySpreadConstraints": [spread(**SOFT)]}, "b1"),
    "to be spread, if too many are everywhere": (
        [*three(), resident("more", "b1", "me"), resident("most", "b1", "me")],
        {"topologySpreadConstraints": [spread(**SOFT)]},
        "a1",
    ),
    "spread with a large skew counts less": (
        [resident("r", "a1", "me"), resident("s", "b1")],
        {
            "topologySpreadConstraints": [spread(10, **SOFT)],
            "affinity": {"podAntiAffinity": {PREFERRED: [weighted(10)]}},
        },
        "a1",
    ),
    "a node in no domain is the last choice": (
        [resident(f"r{i}", on, "me") for i, on in enumerate(("a1", "b1") * 5)],
        {"topologySpreadConstraints": [spread(**SOFT)]},
        "a1",
    ),
    "a wish of nodes and one of company": (
        [resident("r", "b1")],
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
    assert chosen(cluster_of(*there), asks(**what)) == where


# --- claims

BOUND = {"pv.kubernetes.io/bind-completed": "yes"}
OLD_ZONE, NEW_ZONE = "failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"


def claim(
    name: str = "c", *, volume: str = "v", bound: bool = True, meta: Json | None = None, **spec: Any
) -> Json:
    annotations = BOUND if bound else {}
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": name,
            "annotations": annotations,
            **(meta or {}),
        },
        "spec": {"volumeName": volume, **spec},
    }


def volume(name: str = "v", *, labels: Json | None = None, **spec: Any) -> Json:
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


def only_on(*names: str) -> Json:
    expression = {"key": HOST, "operator": "In", "values": list(names)}
    return {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}}


MOUNTS = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
EPHEMERAL = [{"name": "e", "ephemeral": {}}]
OWNED = {"ownerReferences": [{"uid": "p", "controller": True}]}
DISOWNED = {"ownerReferences": [{"uid": "p"}, {"uid": "q", "controller": True}]}
LATE = {"metadata": {"name": "late"}, "volumeBindingMode": "WaitForFirstConsumer"}
ZONES: Json = {
    "a1": {"labels": {OLD_ZONE: "a"}},
    "a2": {"labels": {NEW_ZONE: "a"}},
    "b1": {"labels": {NEW_ZONE: "b", OLD_ZONE: "c"}},
    "x": {"labels": {}},
}
# Objects, volumes of the pod, labels of nodes; where it may go, why it may not.
CLAIMS: dict[str, tuple[list[Json], list[Json], Json, str, str]] = {
    "bound": ([claim(), volume()], MOUNTS, {}, EVERYWHERE, ""),
    "not there": ([volume()], MOUNTS, {}, "", "persistentvolumeclaim 'c' does not exist or is being deleted"),
    "of another namespace": (
        [claim(meta={"namespace": "other"}), volume()],
        MOUNTS,
        {},
        "",
        "does not exist",
    ),
    "being deleted": ([claim(meta={"deletionTimestamp": "x"}), volume()], MOUNTS, {}, "", "is being deleted"),
    "not bound": ([claim(volume=""), volume()], MOUNTS, {}, "", "claim 'c' is not bound yet"),
    "binding not completed": ([claim(bound=False), volume()], MOUNTS, {}, "", "claim 'c' is not bound yet"),
    "waits for its consumer": (
        [claim(volume="", storageClassName="late"), LATE],
        MOUNTS,
        {},
        "",
        "claim 'c' (class 'late') waits for its first consumer; place the pod with kube-scheduler",
    ),
    "volume gone": ([claim()], MOUNTS, {}, "", "persistentvolume 'v' of claim 'c' does not exist"),
    "ephemeral": ([claim("p-e", meta=OWNED), volume()], EPHEMERAL, {}, EVERYWHERE, ""),
    "ephemeral of another": ([claim("p-e"), volume()], EPHEMERAL, {}, "", "was not made for this pod"),
    "ephemeral of another controller": (
        [claim("p-e", meta=DISOWNED), volume()],
        EPHEMERAL,
        {},
        "",
        "was not made for this pod",
    ),
    "somebody else's claim that it mounts": ([claim(meta=DISOWNED), volume()], MOUNTS, {}, EVERYWHERE, ""),
    "on some nodes": ([claim(), volume(**only_on("a2", "x"))], MOUNTS, {}, "a2 x", "elsewhere"),
    "two volumes": (
        [claim(), volume(**only_on("a2", "x")), claim("d", volume="w"), volume("w", **only_on("a1", "x"))],
        [*MOUNTS, {"name": "w", "persistentVolumeClaim": {"claimName": "d"}}],
        {},
        "x",
        "elsewhere",
    ),
    "in a zone, old label": (
        [claim(), volume(labels={OLD_ZONE: "a"})],
        MOUNTS,
        ZONES,
        "a1 a2 x",
        "elsewhere",
    ),
    "a node's old label counts": ([claim(), volume(labels={OLD_ZONE: "b"})], MOUNTS, ZONES, "x", "elsewhere"),
    "in a zone, new label": ([claim(), volume(labels={NEW_ZONE: "b"})], MOUNTS, ZONES, "b1 x", "elsewhere"),
    "in several zones": (
        [claim(), volume(labels={OLD_ZONE: "a__c"})],
        MOUNTS,
        ZONES,
        EVERYWHERE,
        "",
    ),
    "in a zone and a region": (
        [claim(), volume(labels={NEW_ZONE: "b", "topology.kubernetes.io/region": "r"})],
        MOUNTS,
        ZONES,
        "x",
        "elsewhere",
    ),
    "other labels are no zones": ([claim(), volume(labels={"zone": "q"})], MOUNTS, {}, EVERYWHERE, ""),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_claims(case: str) -> None:
    objects, volumes, nodes, where, why = CLAIMS[case]
    cluster = cluster_of(**nodes)
    for one in objects:
        hear = (
            cluster.on_class
            if "volumeBindingMode" in one
            else cluster.on_claim
            if "namespace" in one["metadata"]
            else cluster.on_volume
        )
        assert hear(Change(ChangeKind.SET, one))
    made = asks(volumes=volumes)
    fits, kinds = allowed(cluster, made)
    assert fits == where
    because = cluster.decider.because(parse_demand(made, KEYS))
    if why in ("", "elsewhere"):
        assert because is None
        assert kinds <= {"VolumeNodeAffinityConflict"}
    else:
        assert because is not None
        assert why in because.detail
        unbound = "bound" in why or "consumer" in why
        assert because.rule is ("VolumeClaimNotBound" if unbound else "VolumeClaimNotFound")


@pytest.mark.parametrize("modes", [["ReadWriteOncePod"], ["ReadWriteOnce"], None])
def test_a_claim_for_one_pod_alone(modes: list[str] | None) -> None:
    cluster, exclusive = cluster_of(), modes == ["ReadWriteOncePod"]
    cluster.on_volume(Change(ChangeKind.SET, volume()))
    cluster.on_claim(Change(ChangeKind.SET, claim(accessModes=modes)))
    demand = parse_demand(asks(volumes=MOUNTS), KEYS)
    assert cluster.decider.because(demand) is None
    for other in (resident("o", "a1", ns="other", volumes=MOUNTS), resident("d", "a1")):
        cluster.on_pod(Change(ChangeKind.SET, other))
    assert cluster.decider.because(demand) is None
    reservation = resident("r", "a1", volumes=MOUNTS)
    cluster.on_pod(Change(ChangeKind.SET, reservation))
    because = cluster.decider.because(demand)
    assert (because is not None and because.rule == "VolumeInUse") is exclusive
    cluster.on_pod(Change(ChangeKind.GONE, reservation))
    assert cluster.decider.because(demand) is None


# --- budgets


def budget(allowed: int | None = 1, *, uid: str = "b", app: str = "x", ns: str = "team", **more: Any) -> Json:
    return {
        "metadata": {"uid": uid, "namespace": ns, "name": uid},
        "spec": {"selector": {"matchLabels": {"app": app}}},
        "status": {"disruptionsAllowed": allowed},
        **more,
    }


def labelled(*names: str, app: str = "x", ns: str = "team") -> list[Any]:
    cluster = cluster_of(*(resident(name, "a1", app, ns=ns) for name in names))
    return [cluster.state.labelled(one) for one in cluster.state.living_on("a1")]  # type: ignore[arg-type]


# Budgets, pods that would go together, whether they may.
GOING: dict[str, tuple[list[Json], list[Any], bool]] = {
    "no budget": ([], labelled("p", "q"), True),
    "as many as are allowed": ([budget(2)], labelled("p", "q"), True),
    "one more": ([budget(1)], labelled("p", "q"), False),
    "none": ([budget(0)], labelled("p"), False),
    "fewer than none": ([budget(-3), budget(9, uid="c", app="y")], labelled("p"), False),
    "a budget that nobody has looked at yet": ([budget(None)], labelled("p"), False),
    "a budget without a status": ([budget(status=None)], labelled("p"), False),
    "others": ([budget(0)], labelled("p", app="y"), True),
    "of another namespace": ([budget(0)], labelled("p", ns="other"), True),
    "a budget of nobody": ([budget(0, spec={})], labelled("p"), True),
    "a budget of everybody": ([budget(0, spec={"selector": {}})], labelled("p", app="y"), False),
    "two budgets for one pod": ([budget(9), budget(9, uid="c")], labelled("p"), False),
    "two budgets for two pods": (
        [budget(1), budget(1, uid="c", app="y")],
        [*labelled("p"), *labelled("q", app="y")],
        True,
    ),
}


@pytest.mark.parametrize("case", GOING)
def test_who_may_go_together(case: str) -> None:
    there, pods, may_go = GOING[case]
    budgets = Budgets()
    for one in there:
        budgets.put(one)
    assert budgets.allow(pods) is may_go
    for one in there:
        budgets.drop(one)
    assert budgets.allow(pods)


# What is told of a budget, one after another: whether a pod may go now that could not.
NEWS: list[tuple[Json | None, bool]] = [
    (budget(1), False),
    (budget(1), False),
    (budget(2), True),
    (budget(1), False),
    (budget(1, app="y"), True),
    (None, True),
    (None, False),
]


def test_a_budget_is_news_where_somebody_may_go_who_could_not() -> None:
    budgets = Budgets()
    for number, (one, helps) in enumerate(NEWS):
        told = budgets.drop(budget()) if one is None else budgets.put(one)
        assert told is helps, number
        silent = number in (1, 6)
        assert {namespace for namespace, _ in budgets.take_changed()} == (set() if silent else {"team"}), (
            number
        )
        assert budgets.take_changed() == set()


# --- what a pod's end can cure


def test_only_what_other_pods_take_is_cured_by_their_end() -> None:
    cured = {rule.name for rule in RULES.rules if Cure.POD_ENDS in rule.cures}
    assert cured == {
        "ResourceInsufficient",
        "TooManyPods",
        "HostPortTaken",
        "ModelAlreadyOnNode",
        "CodeOfAnotherNamespace",
        "ModelsOfOtherNamespaces",
        "GPUMemoryInsufficient",
        "PodAntiAffinity",
        "ExistingPodAntiAffinity",
        "TopologySpread",
    }


CURED: dict[str, tuple[Json, Json]] = {
    "host port": (
        {
            "containers": [
                {"name": "c", "ports": [{"hostPort": 80}], "resources": {"limits": {KEYS.gpu_mem: "1Gi"}}}
            ]
        },
    )
    * 2,
    "CPU": ({"requests": {"cpu": "3"}}, {"requests": {"cpu": "2"}}),
    "a spread": (
        {},
        {
            "topologySpreadConstraints": [spread(key=HOST, app="victim", nodeAffinityPolicy="Ignore")],
            "app": "victim",
        },
    ),
    "to be apart": ({}, {"affinity": apart(term("victim"))}),
    "to be kept away": ({"affinity": apart(term("me"))}, {}),
}


@pytest.mark.parametrize("case", CURED)
def test_a_pod_s_end_cures_what_it_stood_for(case: str) -> None:
    has, wants = CURED[case]
    victim = pod("victim", mem="1Gi", on="a1", choice="{", **has)
    victim["metadata"]["labels"] = {"app": "victim"}
    cluster = cluster_of(victim)
    one = asks(**{"nodeSelector": {HOST: "a1"}, "priority": 5, **wants})
    demand = parse_demand(one, KEYS)
    assert FITS not in np.unique(cluster.decider.codes(demand))
    found = find_candidate(cluster.decider, demand, ["a1"], may_go=lambda _: True, budgets=Budgets())  # type: ignore[list-item]
    assert found is not None
    assert [reservation.ref.name for reservation in found.victims] == ["victim"]
    assert found.placement.node == "a1"
