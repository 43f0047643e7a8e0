"""The largest number of everything that an API server takes in a pod: what it costs is bounded, whoever's it is.

Counted in calls, which do not depend on what else the machine does.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from berth.contract.errors import InvalidPod
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.scaling import ModelKey, SchedulableModel, SchedulableRequest
from berth.kube.informer import Change, ChangeKind
from binder.cache.pod_index import Neighbour, PodIndex
from binder.engine.cluster import Cluster, slim
from binder.engine.decision import Placement, Refusal
from binder.engine.preemption import find_candidate
from binder.engine.schedulable import SchedulableAnswers
from binder.pod import bounds
from binder.pod.demand import parse_demand
from binder.pod.selectors import parse_selector
from binder.pod.topology_terms import Term
from tests.fakes.binder import Bench
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]
NODES, MANY = 30, 3000
ZONE = "topology.kubernetes.io/zone"
HOST = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def calls(work: Callable[[], object]) -> int:
    """How many functions are called, Python's and C's."""
    count = 0

    def see(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def cluster() -> Cluster:
    made = Cluster(KEYS, clock=lambda: 0.0)
    for number in range(NODES):
        name = f"n{number}"
        labels = {ZONE: f"z{number % 3}", **{f"feature/{i}": str(number) for i in range(100)}}
        amounts = {"cpu": "4", "memory": "8Gi", "pods": "1000"}
        one = node(name, says=report(gpu(f"{name}-0", total=80 * GIB)), labels=labels, allocatable=amounts)
        made.on_node(Change(ChangeKind.SET, one))
        made.decider.table.beat(NodeName(name), np.inf)
    return made


def pods_of(namespace: str, uid: str, labels: Json | None = None, **asks: Any) -> Json:
    one = pod(uid, **asks)
    one["metadata"] |= {"namespace": namespace, "labels": {"app": uid} if labels is None else labels}
    return one


def hear(made: Cluster, one: Json, kind: ChangeKind = ChangeKind.SET) -> None:
    made.on_pod(Change(kind, slim(one)))


def plain_decision(made: Cluster, name: str) -> Callable[[], object]:
    """One that nothing is known of, of another tenant."""
    demand = parse_demand(pods_of("other", name, mem=f"{len(name)}Gi"), KEYS)
    return lambda: made.decider.decide(demand)


def apart(terms: list[Json], kind: str = REQUIRED) -> Json:
    return {"podAntiAffinity": {kind: terms}}


def wide(key: str, number: int) -> Json:
    """It speaks of everybody."""
    test = {"key": f"x{number}", "operator": "DoesNotExist"}
    return {"topologyKey": key, "labelSelector": {"matchExpressions": [test]}, "namespaceSelector": {}}


def asks(number: int, values: int = 1) -> list[Json]:
    listed = [f"v{j}" for j in range(values)]
    return [{"key": f"feature/{i % 100}", "operator": "NotIn", "values": listed} for i in range(number)]


def containers(number: int, **each: Any) -> list[Json]:
    return [{"name": f"c{i}", **each} for i in range(number)]


# What one tenant's pod that has a node may hold, many times over.
BOUND: dict[str, Json] = {
    "terms, keys that no node has": {"affinity": apart([wide(f"k{i}", i) for i in range(MANY)])},
    "terms, keys that nodes have": {"affinity": apart([wide(f"feature/{i % 100}", i) for i in range(MANY)])},
    "terms, few of another namespace's": {
        "affinity": apart(
            [{**wide(ZONE, i), "namespaceSelector": {"matchLabels": {"a": str(i)}}} for i in range(MANY)]
        )
    },
    "tests in one term": {
        "affinity": apart(
            [
                {
                    "topologyKey": ZONE,
                    "labelSelector": {"matchExpressions": asks(MANY)},
                    "namespaceSelector": {},
                }
            ]
        )
    },
    "namespaces in one term": {
        "affinity": apart([{**wide(ZONE, 0), "namespaces": [f"ns{i}" for i in range(2 * MANY)]}])
    },
    "values in one test": {
        "affinity": apart(
            [{"topologyKey": ZONE, "labelSelector": {"matchExpressions": asks(1, values=2 * MANY)}}]
        )
    },
    "matchLabelKeys": {
        "affinity": apart([{**wide(ZONE, 0), "matchLabelKeys": [f"l{i}" for i in range(MANY)]}])
    },
    "labels": {"labels": {f"l{i}": "x" for i in range(MANY)}},
    "host ports": {"containers": containers(1, ports=[{"hostPort": i + 1} for i in range(MANY)])},
    "resources": {
        "containers": containers(1, resources={"requests": {f"example.com/{i}": "1" for i in range(MANY)}})
    },
    "containers": {"containers": containers(MANY, resources={"requests": {"cpu": "1m"}})},
    "init containers": {"initContainers": containers(MANY, resources={"requests": {"cpu": "1m"}})},
    "claims": {
        "volumes": [{"name": f"v{i}", "persistentVolumeClaim": {"claimName": f"c{i}"}} for i in range(MANY)]
    },
    "tolerations": {"tolerations": [{"key": f"t{i}", "operator": "Exists"} for i in range(MANY)]},
    "spreads": {
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": f"k{i}", "whenUnsatisfiable": "DoNotSchedule"} for i in range(MANY)
        ]
    },
}


@pytest.mark.parametrize("case", sorted(BOUND))
def test_a_bound_pod_slows_nobodys_decision(case: str) -> None:
    """binder H1."""
    made = cluster()
    plain_decision(made, "warm")()
    usual = calls(plain_decision(made, "usual1"))
    hostile = pods_of("evil", "hostile", **{"on": "n0", **BOUND[case]})
    hear(made, hostile)
    plain_decision(made, "first")()  # of labels that nodes have a column is made, once
    assert calls(plain_decision(made, "beside12")) <= 2 * usual
    hear(made, hostile, ChangeKind.GONE)
    made.decider.refresh()
    assert calls(plain_decision(made, "after4567")) <= 1.5 * usual


WAITING: dict[str, tuple[Json, str]] = {
    "labels": ({"labels": {f"l{i}": "x" for i in range(MANY)}}, "metadata.labels: 3000"),
    "nodeSelector": ({"nodeSelector": {f"k{i}": "x" for i in range(MANY)}}, "spec.nodeSelector keys: 3000"),
    "tolerations": (BOUND["tolerations"], "spec.tolerations: 3000"),
    "volumes": (BOUND["claims"], "spec.volumes: 3000"),
    "containers": (BOUND["containers"], "containers and initContainers: 3000"),
    "init containers": (BOUND["init containers"], "containers and initContainers: 3001"),
    "ports": (BOUND["host ports"], "ports of all containers: 3000"),
    "resources": (BOUND["resources"], "requested resources: 3000"),
    "overhead": (
        {"overhead": {f"example.com/{i}": "1" for i in range(MANY)}},
        "requested resources: 3001",
    ),
    "terms apart": (
        {"affinity": apart([{"topologyKey": f"k{i}", "labelSelector": {}} for i in range(MANY)])},
        "terms of spec.affinity.podAffinity and podAntiAffinity: 3000",
    ),
    "terms together": (
        {"affinity": {"podAffinity": {REQUIRED: [{"topologyKey": ZONE, "labelSelector": {}}] * MANY}}},
        "terms of spec.affinity.podAffinity and podAntiAffinity: 3000",
    ),
    "preferred terms": (
        {"affinity": apart([{"weight": 1, "podAffinityTerm": {"topologyKey": ZONE}}] * MANY, PREFERRED)},
        "terms of spec.affinity.podAffinity and podAntiAffinity: 3000",
    ),
    "wide terms": (
        {"affinity": apart([wide(ZONE, i) for i in range(9)])},
        "of them terms with namespaces or a namespaceSelector: 9",
    ),
    "tests between pods": (BOUND["tests in one term"], "keys asked about in spec.affinity.podAffinity"),
    "matchLabelKeys": (BOUND["matchLabelKeys"], "keys asked about in spec.affinity.podAffinity"),
    "namespaces": (
        BOUND["namespaces in one term"],
        "values and namespaces listed in spec.affinity.podAffinity",
    ),
    "values": (BOUND["values in one test"], "values and namespaces listed in spec.affinity.podAffinity"),
    "node terms": (
        {
            "affinity": {
                "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": asks(1)}] * MANY}}
            }
        },
        "terms of spec.affinity.nodeAffinity: 3000",
    ),
    "node preferences": (
        {"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": {}}] * MANY}}},
        "terms of spec.affinity.nodeAffinity: 3000",
    ),
    "node tests": (
        {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": asks(MANY)}]}}}},
        "keys asked about in spec.affinity.nodeAffinity: 3000",
    ),
    "node values": (
        {
            "affinity": {
                "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": asks(1, values=5000)}]}}
            }
        },
        "values and namespaces listed in spec.affinity.nodeAffinity: 5000",
    ),
    "spreads": (BOUND["spreads"], "spec.topologySpreadConstraints: 3000"),
    "spread keys": (
        {
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": ZONE, "matchLabelKeys": [f"l{i}" for i in range(MANY)]}
            ]
        },
        "keys asked about in spec.topologySpreadConstraints: 3000",
    ),
}


@pytest.mark.parametrize("case", sorted(WAITING))
async def test_a_pod_that_waits_is_refused_with_the_number_and_the_bound(case: str) -> None:
    """binder H1b."""
    asks, told = WAITING[case]
    async with Bench() as bench:
        bench.node("n1", 80)
        labels, spec = asks.get("labels"), {key: value for key, value in asks.items() if key != "labels"}
        bench.add("hostile", labels=labels, **spec)
        bench.add("next", mem="1Gi")
        await bench.step(3)
        assert bench.is_placed("next")
        assert not bench.is_placed("hostile")
        (said,) = [message for name, _, message in bench.events.said if name == "hostile"]
        assert said.startswith("the pod cannot be placed: ")
        assert told in said
        assert "; the binder takes " in said


@pytest.mark.parametrize("case", sorted(WAITING))
def test_to_refuse_costs_no_more_than_to_count(case: str) -> None:
    asks, _ = WAITING[case]
    one = slim(pods_of("evil", "hostile", **asks))

    def refused() -> None:
        with pytest.raises(InvalidPod):
            parse_demand(one, KEYS)

    assert calls(refused) <= 40 * MANY


AT_THE_BOUND: dict[str, Json] = {
    "node labels": {"nodeSelector": {f"feature/{i}": "1" for i in range(bounds.MOST_NODE_LABELS)}},
    "unknown node labels": {"nodeSelector": {f"k{i}": "1" for i in range(bounds.MOST_NODE_LABELS)}},
    "node tests": {
        "affinity": {
            "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": asks(2, values=15)}] * 64}}
        }
    },
    "terms, one label": {
        "affinity": apart(
            [{"topologyKey": ZONE, "labelSelector": {"matchLabels": {f"l{i}": "x"}}} for i in range(64)]
        )
    },
    "terms, labels that no node has": {
        "affinity": apart([{"topologyKey": f"k{i}", "labelSelector": {}} for i in range(64)])
    },
    "wide terms": {"affinity": apart([wide(ZONE, i) for i in range(bounds.MOST_WIDE)])},
    "tolerations": {
        "tolerations": [{"key": f"t{i}", "operator": "Exists"} for i in range(bounds.MOST_TOLERATIONS)]
    },
    "labels": {"labels": {f"l{i}": "x" for i in range(bounds.MOST_LABELS)}},
}


@pytest.mark.parametrize("case", sorted(AT_THE_BOUND))
def test_a_pod_that_uses_a_bound_to_the_full_is_decided(case: str) -> None:
    made = cluster()
    for number in range(200):
        hear(made, pods_of(f"team{number % 5}", f"r{number}", on=f"n{number % NODES}"))
    demand = parse_demand(slim(pods_of("evil", "greedy", **AT_THE_BOUND[case])), KEYS)
    made.decider.decide(demand)
    usual = max(calls(plain_decision(made, f"usual{'x' * i}")) for i in range(3))
    first = replace(demand, shape=replace(demand.shape, request_bytes=3 * GIB))
    assert isinstance(made.decider.decide(demand), Placement | Refusal)
    assert calls(lambda: made.decider.decide(first)) <= 20 * usual


def test_what_a_bound_pods_first_terms_say_is_honoured_and_for_the_rest_its_node_is_kept_free() -> None:
    """binder H1: conservative, and cheap."""
    made = cluster()
    own = [
        {"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": f"a{i}"}}}
        for i in range(bounds.MOST_TERMS)
    ]
    hear(made, pods_of("team", "full", on="n0", affinity=apart(own)))
    zone = {f"n{i}" for i in range(0, NODES, 3)}
    assert kept_away(made, "a0") == kept_away(made, "a63") == zone
    assert kept_away(made, "other") == set()
    more = [*own, {"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "late"}}}]
    hear(made, pods_of("team", "full", on="n0", affinity=apart(more)))
    assert kept_away(made, "a0") == kept_away(made, "a63") == zone
    assert kept_away(made, "late") == kept_away(made, "other") == {"n0"}
    hear(made, pods_of("team", "full", on="n0", affinity=apart(own)))
    assert kept_away(made, "late") == set()


def kept_away(made: Cluster, app: str, **labels: str) -> set[str]:
    """Nodes that do not take a pod with these labels."""
    codes = made.decider.codes(parse_demand(pods_of("team", f"asks-{app}", {"app": app, **labels}), KEYS))
    return {made.decider.table.view(int(row)).facts.name for row in np.flatnonzero(codes)}


def test_of_a_bound_pod_with_too_many_labels_the_node_is_kept_free_and_its_changes_cost_little() -> None:
    """Each label was filed: 30 000 of them took 13 MiB of the binder's 1 GiB, and 240 ms at each change of one, as often
    as its owner pleases."""
    made = cluster()

    def labelled(number: int) -> Json:
        return pods_of("team", "many", {f"l{i:05}": "x" for i in range(number)}, on="n1")

    hear(made, labelled(bounds.MOST_LABELS))
    assert kept_away(made, "other") == set()
    usual = calls(lambda: hear(made, labelled(bounds.MOST_LABELS - 1)))
    hear(made, labelled(bounds.MOST_LABELS + 1))
    assert kept_away(made, "other") == {"n1"}
    assert calls(lambda: hear(made, labelled(MANY))) <= 2 * usual
    speaks_of = {"topologyKey": HOST, "labelSelector": {"matchLabels": {"l00000": "x"}}}
    demand = parse_demand(pods_of("team", "asks", affinity={"podAffinity": {REQUIRED: [speaks_of]}}), KEYS)
    assert made.decider.decide(demand).counts(made.decider) == {  # type: ignore[union-attr]
        "PodAffinityMismatch": NODES - 1,
        "ExistingPodAntiAffinity": 1,
    }
    hear(made, labelled(bounds.MOST_LABELS))
    assert kept_away(made, "other") == set()


def strangers(number: int) -> list[Json]:
    """Terms that could speak of anybody, and speak of nobody."""
    absent = [{"key": f"a{i}", "operator": "DoesNotExist"} for i in range(31)]
    return [
        {
            "topologyKey": ZONE,
            "labelSelector": {"matchExpressions": [*absent, {"key": f"z{number}-{i}", "operator": "Exists"}]},
            "namespaceSelector": {},
        }
        for i in range(bounds.MOST_WIDE)
    ]


def test_many_bound_pods_that_each_keep_to_the_bounds_slow_nobodys_decision() -> None:
    """2000 pods with 4 terms of 32 tests each: a decision took 113 ms instead of 0.06, for everybody."""
    made = cluster()
    plain_decision(made, "warm")()
    usual = calls(plain_decision(made, "usual1"))
    hostile = [
        pods_of("evil", f"h{i}", on=f"n{i % 4}", affinity=apart(strangers(i)), mem="0") for i in range(300)
    ]
    for one in hostile:
        hear(made, one)
    made.decider.refresh()
    assert calls(plain_decision(made, "beside12")) <= 2 * usual
    for one in hostile:
        hear(made, one, ChangeKind.GONE)
    made.decider.refresh()
    assert calls(plain_decision(made, "after4567")) <= 1.5 * usual


@pytest.mark.parametrize("pods", [bounds.MOST_MET_TERMS, 2 * bounds.MOST_MET_TERMS])
def test_of_too_many_terms_of_one_namespace_their_pods_nodes_are_kept_free(pods: int) -> None:
    """Conservative and cheap, whoever came first; and over as soon as there are few enough."""
    made = cluster()

    def kept(uid: str, term: Json, on: str) -> Json:
        return pods_of("evil", uid, on=on, affinity=apart([{"topologyKey": ZONE, **term}]), mem="0")

    def exists(key: str) -> Json:
        return {"matchExpressions": [{"key": key, "operator": "Exists"}]}

    for number in range(pods):  # of one's own namespace, by labels that nobody else has: met by none
        own = {"labelSelector": {"matchLabels": {"app": f"e{number}"}}}
        hear(made, kept(f"own{number}", own, f"n{5 + number % 25}"))
    wide = [{"labelSelector": exists(f"z{i}"), "namespaceSelector": {}} for i in range(bounds.MOST_MET_TERMS)]
    for number, term in enumerate(wide):
        hear(made, kept(f"wide{number}", term, f"n{number % 3}"))
    zone = {f"n{i}" for i in range(0, NODES, 3)}
    assert kept_away(made, "other") == set()
    assert kept_away(made, "other", z0="") == zone
    one_more = kept("more", {"labelSelector": exists("z"), "namespaceSelector": {}}, "n4")
    hear(made, one_more)
    assert kept_away(made, "other") == kept_away(made, "other", z0="") == {"n0", "n1", "n2", "n4"}
    hear(made, one_more, ChangeKind.GONE)
    assert kept_away(made, "other") == set()
    assert kept_away(made, "other", z0="") == zone


def test_templates_beyond_the_bounds_cost_the_scaler_nothing() -> None:
    """binder H1b: 256 templates with 500 terms each."""
    made = cluster()
    answers = SchedulableAnswers(made, KEYS, pending=list, aside=lambda _: [])
    terms = [{"topologyKey": f"k{i}", "labelSelector": {}} for i in range(500)]

    def asked(number: int, affinity: Json) -> SchedulableModel:
        template = pod("t", affinity=affinity)
        return SchedulableModel(
            name=f"team/m{number}",
            template=template,
            template_hash=str(number),
            priority=0,
            desired=1,
            running=0,
            starting=0,
        )

    for number, affinity in enumerate(({}, apart(terms))):
        steps = answers.answer(SchedulableRequest(models=(asked(number, affinity),), idle=()))
        try:
            while True:
                next(steps)
        except StopIteration as done:
            told = done.value.models[ModelKey("team", f"m{number}")]
        assert told.now == (number == 0)
    assert "terms of spec.affinity.podAffinity and podAntiAffinity: 500; the binder takes 64" in told.reason


@pytest.mark.parametrize("seed", range(20))
def test_what_is_counted_is_what_is_there(seed: int) -> None:
    """binder H1, L9: counts are kept and followed; they are those of a look at all pods."""
    chance = random.Random(seed)
    keys, values, namespaces = ("a", "b", "c"), ("1", "2", "3"), {"x": {"n": "1"}, "y": {"n": "2"}, "z": {}}

    def some_labels() -> dict[str, str]:
        return {key: chance.choice(values) for key in keys if chance.random() < 0.7}

    def some_term() -> Term:
        operators = ("In", "In", "NotIn", "Exists", "DoesNotExist")
        asked = {
            "matchLabels": some_labels() if chance.random() < 0.3 else {},
            "matchExpressions": [
                {
                    "key": chance.choice(keys),
                    "operator": chance.choice(operators),
                    "values": chance.sample(values, 2),
                }
                for _ in range(chance.randrange(3))
            ],
        }
        among = chance.choice((None, {}, {"matchLabels": {"n": "1"}}))
        spaces = frozenset(chance.sample("xyz", chance.randrange(3)))
        return Term("zone", parse_selector(asked), spaces, parse_selector(among))

    made, pods = PodIndex(), dict[PodUid, Neighbour]()
    terms = [some_term() for _ in range(12)]
    for _ in range(200):
        uid = PodUid(f"p{chance.randrange(40)}")
        if chance.random() < 0.3:
            made.drop(uid)
            pods.pop(uid, None)
        else:
            where = NodeName(f"n{chance.randrange(5)}")
            pods[uid] = Neighbour(
                chance.choice("xyz"),
                some_labels(),
                where,
                deleting=chance.random() < 0.3,
                keeps_away=tuple({chance.choice(terms) for _ in range(chance.randrange(3))}),
            )
            made.put(uid, pods[uid])
        term, *others = chance.sample(terms, 3)
        home = chance.choice("xyz")
        hidden = made.hide([uid for uid in pods if chance.random() < 0.2])
        left = [p for uid, p in pods.items() if uid not in hidden]

        def found(*all_of: Term, among: Counter[str], left: list[Neighbour] = left) -> Counter[str]:
            among.update(
                p.node
                for p in left
                if all(t.matches(p.namespace, namespaces[p.namespace], p.labels) for t in all_of)
            )
            return among

        assert made.on_nodes(term, namespaces) == found(term, among=Counter())
        assert made.all_at_once([term, *others], namespaces) == found(term, *others, among=Counter())
        staying = Counter(
            p.node
            for p in left
            if p.namespace == home and not p.deleting and term.selector and term.selector.matches(p.labels)
        )
        assert made.staying(home, term.selector) == staying
        labels = some_labels()
        against = Counter(
            (kept, p.node)
            for p in left
            for kept in p.keeps_away
            if kept.matches(home, namespaces[home], labels)
        )
        told = Counter[tuple[Term, NodeName]]()
        for kept, nodes in made.terms_against(home, labels):
            if kept.matches(home, namespaces[home], labels):
                told.update({(kept, on): number for on, number in nodes.items()})
        assert told == against
        if hidden and chance.random() < 0.3:  # one goes while it and others are hidden
            made.drop(hidden[0])
            del pods[hidden[0]]
        made.show(pods)


def search_cost(**victims: Any) -> int:
    """Of a search for room among nodes that are full of pods like these."""
    made = cluster()
    for number in range(5 * 40):
        on, uid = f"n{number % 5}", f"r{number}"
        choice = GpuChoice(GpuUuid(f"{on}-0"), 0, 2 * GIB)
        hear(made, pods_of("evil", uid, on=on, mem="2Gi", choice=choice, **victims))
    for number in range(5, NODES):
        made.on_node(Change(ChangeKind.GONE, node(f"n{number}")))
    demand = parse_demand(pods_of("other", "vip", mem="60Gi", priority=10), KEYS)
    refusal = made.decider.decide(demand)
    assert isinstance(refusal, Refusal)
    nodes, found = [NodeName(f"n{number}") for number in range(5)], []

    def look() -> None:
        candidate = find_candidate(
            made.decider, demand, nodes, may_go=lambda h: h.priority < 10, budgets=made.budgets
        )
        found.append(candidate)

    cost = calls(look)
    assert found != [None]
    return cost


@pytest.mark.parametrize(
    "victims",
    [
        {"labels": {f"l{i}": "x" for i in range(bounds.MOST_LABELS)}},
        {
            "affinity": apart(
                [{"topologyKey": HOST, "labelSelector": {"matchLabels": {f"x{i}": "1"}}} for i in range(64)]
            )
        },
    ],
    ids=["labels", "terms"],
)
def test_who_looks_for_room_does_not_pay_for_what_the_victims_have_written(victims: Json) -> None:
    """A search supposes hundreds of times that some of a node's pods are gone. Each time each of them was taken out
    of the index, label by label, and put back: 100 pods of a node with 128 labels and 64 terms each held everything up
    for 20 s."""
    assert search_cost(**victims) <= 5 * search_cost()


def test_a_decision_under_spread_costs_the_same_however_many_pods_are_there() -> None:
    """binder L9: each decision went through all pods that the constraint counts."""
    made, costs = cluster(), []
    constraint = {
        "maxSkew": 5,
        "topologyKey": HOST,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "web"}},
    }
    for batch in range(4):
        for number in range(300):
            uid = f"r{batch}-{number}"
            hear(made, pods_of("team", uid, {"app": "web"}, mem="0", on=f"n{number % NODES}"))
        asks = pods_of("team", f"p{batch}", {"app": "web"}, topologySpreadConstraints=[constraint])
        demand = parse_demand(asks, KEYS)
        made.decider.decide(demand)
        costs.append(calls(lambda asked=demand: made.decider.decide(asked)))  # type: ignore[misc]
    assert costs[-1] <= 1.2 * costs[0]
