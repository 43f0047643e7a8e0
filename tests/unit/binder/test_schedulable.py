"""What may be placed: what is promised the scheduler keeps, no more and no less."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.report import CodeReport, CodeRule, NodeReport, TritonReport
from berth.contract.scaling import (
    Schedulable,
    SchedulableAnswer,
    SchedulableModel,
    SchedulableRequest,
)
from berth.kube.informer import Change, ChangeKind
from binder.engine import schedulable as schedulable
from binder.engine.decision import Placement
from binder.engine.schedulable import SchedulableAnswers
from binder.pod.demand import Demand, parse_demand
from tests.fakes.binder import Api, scheduler_of
from tests.fakes.cluster import resident
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.fakes.schedulable import ask, cluster_with, finish, given, model, template
from tests.fakes.values import replace
from tests.fakes.zones import HOST, apart, term

Json = dict[str, Any]


# Who is served, and in which order.


def test_copies_are_given_as_far_as_there_is_room_and_the_rest_is_told_in_the_binders_words() -> None:
    found = ask(cluster_with({"n1": [16]}), model("a", 5))["a"]
    assert (found.now, found.never) == (4, 1)
    assert found.reason == "0/1 nodes: 1 GPUMemoryInsufficient (4 GiB short on the best GPU)"


def test_who_asks_for_nothing_has_the_cluster_seen_as_it_is_and_nobody_judged() -> None:
    cluster = cluster_with({"n1": [16]})

    def judged() -> list[Demand]:
        raise AssertionError("nobody is to be judged")

    answers = SchedulableAnswers(cluster, KEYS, pending=judged, aside=lambda _: [])
    answer = finish(answers.answer(SchedulableRequest(models=())))
    assert answer == SchedulableAnswer(generation=cluster.decider.table.clock, models={})
    assert answers._mirror.follow(most=0)  # nothing is left to be taken over


def test_what_is_there_or_bound_is_not_given_again() -> None:
    assert given(cluster_with({"n1": [64]}), model("a", 5, running=2, starting=1)) == {"a": 2}
    assert given(cluster_with({"n1": [64]}), model("a", 2, running=2, starting=1)) == {"a": 0}


# Four places. (name, wanted, running, priority) → given.
ORDER: dict[str, tuple[list[tuple[str, int, int, int]], dict[str, int]]] = {
    "the higher priority first, to the last replica": (
        [("a", 4, 0, 0), ("b", 3, 0, 1)],
        {"a": 1, "b": 3},
    ),
    "equal priority and equal deficit share": ([("a", 4, 0, 0), ("b", 4, 0, 0)], {"a": 2, "b": 2}),
    "by name where all is equal": (
        [("c", 1, 0, 0), ("b", 1, 0, 0), ("a", 1, 0, 0), ("e", 1, 0, 0), ("d", 1, 0, 0)],
        {"a": 1, "b": 1, "c": 1, "d": 1, "e": 0},
    ),
    "the larger part of what is wanted first": ([("a", 8, 4, 0), ("b", 4, 0, 0)], {"a": 1, "b": 3}),
    "the part counts, not the number": ([("a", 10, 0, 0), ("b", 2, 0, 0)], {"a": 3, "b": 1}),
    "a part of a part": ([("a", 16, 8, 0), ("b", 4, 1, 0)], {"a": 2, "b": 2}),
    "a negative priority is the last": ([("a", 3, 0, -1), ("b", 3, 0, 0)], {"a": 1, "b": 3}),
}


@pytest.mark.parametrize("case", ORDER)
def test_models_that_compete_are_served_in_one_order(case: str) -> None:
    models, expected = ORDER[case]
    asked = [model(name, wanted, running=running, priority=p) for name, wanted, running, p in models]
    for order in (asked, asked[::-1]):
        assert given(cluster_with({"n1": [8], "n2": [8]}), *order) == expected


def test_a_model_that_finds_no_place_holds_up_nobody() -> None:
    asked = (model("big", 2, 17, priority=9), model("small", 4))
    assert given(cluster_with({"n1": [16]}), *asked) == {"big": 0, "small": 4}


def test_all_models_are_judged_by_one_snapshot_and_nothing_of_it_is_left() -> None:
    cluster = cluster_with({"n1": [16]})
    cluster.decider.refresh()
    clock, eased = cluster.decider.table.clock, cluster.decider.table.eased_since(0).tolist()
    answers = SchedulableAnswers(cluster, KEYS, pending=list, aside=lambda _: [])
    request = SchedulableRequest(models=(model("a", 3), model("b", 3)))
    first = finish(answers.answer(request))
    assert sum(one.now for one in first.models.values()) == 4
    assert finish(answers.answer(request)) == first
    assert first.generation == clock
    steps = answers.answer(request)
    for _ in range(5):
        next(steps)
    cluster.state.set_node(node("n2", says=report(gpu("n2-0"))))  # in the midst of it
    steps.close()  # the caller has gone
    cluster.state.remove_node(NodeName("n2"))
    assert finish(answers.answer(request)).models == first.models
    assert cluster.decider.table.eased_since(0).tolist() == eased, "somebody would be woken for nothing"
    assert cluster.state.assumed_count == 0


def test_a_pod_that_waits_is_served_before_any_replica_even_of_a_higher_priority() -> None:
    """Else one memory would be promised twice."""
    cluster = cluster_with({"n1": [16]})
    assert given(cluster, model("a", 4, priority=9), pending=[pod("p", mem="12Gi")]) == {"a": 1}
    refused = [pod(f"p{i}", mem="17Gi") for i in range(3)]
    assert given(cluster, model("a", 4), pending=refused) == {"a": 4}


def test_a_pod_whose_place_is_being_made_takes_no_second_one() -> None:
    cluster, waits = cluster_with({"n1": [16], "n2": [16]}), pod("p", mem="12Gi")
    place = GpuChoice(GpuUuid("n1-0"), 0, 12 * GIB)
    cluster.state.nominate(parse_demand(waits, KEYS), NodeName("n1"), place)
    assert given(cluster, model("a", 9), pending=[waits]) == {"a": 5}


def test_what_is_reserved_and_does_not_count_for_a_pod_does_not_count_for_a_copy() -> None:
    cluster, place = cluster_with({"n1": [16]}), GpuChoice(GpuUuid("n1-0"), 0, 12 * GIB)
    cluster.state.nominate(parse_demand(pod("p", mem="12Gi"), KEYS), NodeName("n1"), place)
    for aside, replicas in (([], 1), ([PodUid("p")], 4)):
        answers = SchedulableAnswers(cluster, KEYS, pending=list, aside=lambda _, aside=aside: aside)
        answer = finish(answers.answer(SchedulableRequest(models=(model("a", 9),))))
        assert [one.now for one in answer.models.values()] == [replicas]


def test_a_models_own_waiting_pods_are_among_those_that_it_asks_for() -> None:
    cluster, labels = cluster_with({"n1": [16]}), {"app": "a"}
    own = pod("a-1", mem="4Gi")
    own["metadata"]["labels"] = {**labels, "pod-template-hash": "x"}
    assert given(cluster, model("a", 9, labels=labels), pending=[own]) == {"a": 4}
    assert given(cluster, model("a", 9, labels={"app": "b"}), pending=[own]) == {"a": 3}
    second = pod("a-2", mem="4Gi", annotations={KEYS.model_id: None})
    second["metadata"]["labels"] = labels
    assert given(cluster, model("a", 1, labels=labels), pending=[own, second]) == {"a": 1}
    larger = pod("a-3", mem="5Gi")
    larger["metadata"]["labels"] = labels
    assert given(cluster, model("a", 9, labels=labels), pending=[larger]) == {"a": 2}, "of an older template"
    assert given(cluster, model("a", 9), pending=[own]) == {"a": 3}, "without labels nobody knows whose it is"


def test_a_pod_that_cannot_be_judged_keeps_nobody_from_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SchedulableAnswers._place

    def breaks(self: SchedulableAnswers, demand: Demand) -> Any:
        if demand.model.ref.name == "odd":
            raise ArithmeticError("odd")
        return place(self, demand)

    monkeypatch.setattr(SchedulableAnswers, "_place", breaks)
    assert given(cluster_with({"n1": [16]}), model("a", 9), pending=[pod("odd", mem="4Gi")]) == {"a": 4}


def test_a_question_answered_before_says_nothing_of_the_next() -> None:
    """Another template or priority of a model, and another namespace's model of an equal template, are others."""
    cluster = cluster_with({"n1": [16], "n2": [16]}, resident("x", "n2", 16, priority=5))
    cluster.state.set_pod(resident("y", "n1", 12, annotations={KEYS.model_id: "m"}))
    answers = SchedulableAnswers(cluster, KEYS, pending=list, aside=lambda _: [])

    def asked(one: SchedulableModel) -> Schedulable:
        request = SchedulableRequest(models=(one,), idle=("team/x",))
        (found,) = finish(answers.answer(request)).models.values()
        return found

    one = model("a", 1, 4, model_id="m")
    assert asked(one).now == 0
    assert asked(replace(one, name="other/a")).now == 1
    assert asked(replace(one, template=template(4), template_hash="other")).now == 1
    large = model("b", 1, 16)
    for _ in range(2):
        assert asked(replace(large, priority=4)).if_idle_go == ()
        assert asked(replace(large, priority=5)).if_idle_go == ("team/x",)


def test_what_is_remembered_of_templates_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulable, "_MOST_TEMPLATES", 3)
    answers = SchedulableAnswers(cluster_with({"n1": [16]}), KEYS, pending=list, aside=lambda _: [])
    for number in range(8):
        finish(answers.answer(SchedulableRequest(models=(model(f"m{number}", 1),))))
        assert len(answers._templates) <= 3


def test_so_many_replicas_are_given_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedulable._MOST_REPLICAS == 4096
    monkeypatch.setattr(schedulable, "_MOST_REPLICAS", 3)
    found = ask(cluster_with({"n1": [64]}), model("a", 5, priority=1), model("b", 1))
    assert (found["a"].now, found["a"].never) == (3, 0)
    assert found["a"].reason == found["b"].reason == "3 replicas are given at once; ask again"


def test_what_is_missing_bounds_what_is_told_of_it() -> None:
    full = cluster_with({"n1": [8]}, resident("x", "n1", 8))
    found = ask(full, model("a", 5, running=4))["a"]
    assert (found.now, found.never) == (0, 1), "three of its replicas are where no other would have a place"
    pending = [pod(f"p{i}") for i in range(1025)]
    assert ask(full, model("a", 1, running=1), pending=pending)["a"].reason == ""


def test_a_tenants_words_in_a_reason_are_bounded_and_on_one_line() -> None:
    one = model("a", 1)
    one.template["metadata"]["annotations"][KEYS.gpu_product] = "H\x1b[2J" * 2000
    found = ask(cluster_with({"n1": [16]}), one)["a"]
    assert found.now == 0
    assert len(found.reason) <= 1024
    assert found.reason.isprintable()


def test_a_claim_that_would_be_made_for_the_replica_is_not_missing() -> None:
    made = {"name": "v", "ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}}
    assert given(cluster_with({"n1": [16]}), model("a", 9, volumes=[made])) == {"a": 4}


def test_so_many_pods_that_wait_are_served_first_that_nothing_is_promised() -> None:
    pending = [pod(f"p{i}") for i in range(1025)]
    found = ask(cluster_with({"n1": [16]}), model("a", 1), pending=pending)["a"]
    assert (found.now, found.never, found.reason) == (0, 0, "1025 pods wait to be placed first")


# Rules.


RULES: dict[str, tuple[Json, Json, int]] = {
    "one of a model id on a node": ({}, {"model_id": "m"}, 2),
    "anti-affinity to itself": ({}, {"labels": {"app": "a"}, "affinity": apart(term("a", HOST))}, 2),
    "a taint": ({"taints": [{"key": "k", "effect": "NoSchedule"}]}, {}, 0),
    "a cordon": ({"unschedulable": True}, {}, 0),
    "CPU": ({"allocatable": {"cpu": "2", "memory": "8Gi", "pods": "10"}}, {"requests": {"cpu": "1500m"}}, 2),
    "pods": ({"allocatable": {"cpu": "2", "memory": "8Gi", "pods": "3"}}, {}, 6),
    "a claim that is not there": (
        {},
        {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
        0,
    ),
    "a host port": ({}, {"containers": [{"name": "c", "ports": [{"hostPort": 80}]}]}, 2),
}


@pytest.mark.parametrize("case", RULES)
def test_every_rule_of_a_decision_counts(case: str) -> None:
    nodes, asks, expected = RULES[case]
    cluster = cluster_with({"n1": [16, 16], "n2": [16, 16]}, **nodes)
    assert given(cluster, model("a", 99, **asks)) == {"a": expected}


def test_a_model_that_cannot_be_read_is_reported_and_the_others_are_answered() -> None:
    broken = replace(model("a", 2), template={"spec": {"containers": 7}})
    annotated = template()
    annotated["metadata"]["annotations"][KEYS.gpu_count] = "many"
    wrong = replace(model("b", 2), template=annotated)
    uneven = model("e", 2)  # ecosystem A4
    uneven.template["metadata"]["annotations"][KEYS.gpu_count] = "3"
    unhashable = replace(
        model("d", 2), template={"metadata": {"labels": {"a": ["b"]}}, "spec": template()["spec"]}
    )
    found = ask(cluster_with({"n1": [16]}), broken, wrong, model("c", 2), unhashable, uneven)
    assert found["c"].now == 2
    for name, said in (
        ("a", "the pod template cannot be read"),
        ("b", "the pod cannot be placed: "),
        ("d", "the pod template"),
        ("e", f"the pod cannot be placed: limit {KEYS.gpu_mem} is the pod's total, 4294967296 bytes, "),
    ):
        assert (found[name].now, found[name].never) == (0, 2)
        assert found[name].reason.startswith(said)


# What no node will ever take.


NEVER: dict[str, tuple[Json, int, int]] = {
    "more than any GPU has": ({"gib": 17}, 3, 3),
    "as many as the GPUs hold when they are empty": ({"gib": 8}, 9, 4),
    "one of an id on each node": ({"gib": 1, "model_id": "m"}, 3, 1),
    "more GPUs than any node has": ({"gib": 1, "annotations": "3"}, 2, 2),
    "two GPUs for each replica": ({"gib": 8, "annotations": "2"}, 3, 2),
    "a product that is not there": ({"gib": 1, "product": "H100"}, 1, 1),
    "a label that no node has": ({"gib": 1, "nodeSelector": {"a": "b"}}, 1, 1),
    "a field that is not decided": ({"gib": 1, "resourceClaims": [{"name": "c"}]}, 1, 1),
    "a claim that may come": (
        {"gib": 1, "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
        1,
        0,
    ),
    "all that fits": ({"gib": 16}, 3, 1),
}


@pytest.mark.parametrize("case", NEVER)
def test_never_is_what_no_node_takes_even_when_it_is_empty(case: str) -> None:
    """n1 has 16 and 8 GiB, n2 16; all of it is taken."""
    asks, wanted, never = NEVER[case]
    asks = dict(asks)
    count, product = asks.pop("annotations", None), asks.pop("product", None)
    asks["gib"] *= int(count or 1)
    cluster = cluster_with(
        {"n1": [16, 8], "n2": [16]},
        resident("x", "n1", 16),
        resident("y", "n1", 8, 1),
        resident("z", "n2", 16),
    )
    one = model("a", wanted, **asks)
    marks = {KEYS.gpu_count: count, KEYS.gpu_product: product}
    one.template["metadata"]["annotations"].update({k: v for k, v in marks.items() if v})
    found = ask(cluster, one)["a"]
    assert (found.now, found.never) == (0, never)
    assert found.reason.startswith("0/2 nodes: ")


def test_a_host_port_is_one_replica_a_node() -> None:
    one = model("a", 5, 1)
    one.template["spec"]["containers"][0]["ports"] = [{"containerPort": 80, "hostPort": 80}]
    found = ask(cluster_with({"n1": [16, 16], "n2": [16]}), one)["a"]
    assert (found.now, found.never) == (2, 3)


@pytest.mark.parametrize(("modes", "now", "never"), [(["ReadWriteOncePod"], 1, 2), (["ReadWriteMany"], 3, 0)])
def test_a_claim_of_one_pod_alone_is_one_copy(modes: list[str], now: int, never: int) -> None:
    cluster = cluster_with({"n1": [16], "n2": [16]})
    cluster.on_claim(
        Change(
            ChangeKind.SET,
            {
                "metadata": {
                    "namespace": "team",
                    "name": "c",
                    "uid": "c",
                    "annotations": {"pv.kubernetes.io/bind-completed": "yes"},
                },
                "spec": {"accessModes": modes, "volumeName": "v"},
                "status": {"phase": "Bound"},
            },
        )
    )
    cluster.on_volume(Change(ChangeKind.SET, {"metadata": {"name": "v", "uid": "v"}, "spec": {}}))
    one = model("a", 3, 1, volumes=[{"name": "d", "persistentVolumeClaim": {"claimName": "c"}}])
    answers = SchedulableAnswers(cluster, KEYS, pending=list, aside=lambda _: [])
    for _ in range(2):  # what was supposed is taken back
        (found,) = finish(answers.answer(SchedulableRequest(models=(one,)))).models.values()
        assert (found.now, found.never) == (now, never)


@pytest.mark.parametrize(
    "says",
    [
        report(gpu("n1-0", total=16 * GIB), triton=TritonReport(False, "")),
        report(gpu("n1-0", total=None)),
    ],
)
def test_what_is_not_known_or_not_ready_yet_is_no_never(says: NodeReport) -> None:
    cluster = cluster_with({})
    cluster.state.set_node(node("n1", says=says))
    cluster.decider.table.beat(NodeName("n1"), np.inf)
    found = ask(cluster, model("a", 1))["a"]
    assert (found.now, found.never) == (0, 0)


def test_never_is_what_no_node_takes_that_its_volume_can_be_mounted_on() -> None:
    cluster = cluster_with({"n1": [4], "n2": [16]})
    meta: Json = {"namespace": "team", "name": "c", "uid": "c"}
    meta["annotations"] = {"pv.kubernetes.io/bind-completed": "yes"}
    cluster.on_claim(Change(ChangeKind.SET, {"metadata": meta, "spec": {"volumeName": "v"}}))
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}}
    pv = {"metadata": {"name": "v", "uid": "v"}, "spec": {"nodeAffinity": affinity}}
    cluster.on_volume(Change(ChangeKind.SET, pv))
    one = model("a", 1, 8, volumes=[{"name": "d", "persistentVolumeClaim": {"claimName": "c"}}])
    found = ask(cluster, one)["a"]
    assert (found.now, found.never) == (0, 1)


def test_a_copy_that_stands_where_no_other_would_be_placed_is_one_of_those_that_can_be() -> None:
    there = resident("x", "n1", 1, annotations={KEYS.model_id: "m"})
    cluster = cluster_with({"n1": [16]}, there, taints=[{"key": "mine", "effect": "NoSchedule"}])
    cluster.state.set_node(node("n2", says=report(gpu("n2-0", total=16 * GIB))))
    cluster.decider.table.beat(NodeName("n2"), np.inf)
    cluster.state.set_pod(resident("y", "n2", 16))
    found = ask(cluster, model("a", 2, 1, running=1, model_id="m"))["a"]
    assert (found.now, found.never) == (0, 0)
    assert ask(cluster, model("a", 3, 1, running=1, model_id="m"))["a"].never == 1


@pytest.mark.parametrize(
    "failure",
    [
        {"unschedulable": True},
        {"taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]},
    ],
)
def test_a_node_that_comes_back_is_no_never(failure: Json) -> None:
    found = ask(cluster_with({"n1": [16]}, **failure), model("a", 1))["a"]
    assert (found.now, found.never) == (0, 0)
    lasting = cluster_with({"n1": [16]}, taints=[{"key": "mine", "effect": "NoSchedule"}])
    assert ask(lasting, model("a", 1))["a"].never == 1


def test_a_node_without_a_heartbeat_is_no_never() -> None:
    cluster = cluster_with({"n1": [16]})
    cluster.decider.table.beat(NodeName("n1"), -np.inf)
    assert ask(cluster, model("a", 2))["a"].never == 0


def test_a_copy_on_a_cordoned_node_is_one_of_those_that_there_are() -> None:
    cluster = cluster_with({"n1": [16], "n2": [16]}, resident("x", "n2", 16))
    cluster.state.set_node(node("n3", says=report(gpu("n3-0")), labels={"zone": "old"}))
    cluster.decider.table.beat(NodeName("n3"), np.inf)
    one = model("a", 3, model_id="m", running=1, nodeSelector={"kubernetes.io/hostname": "n1"})
    mine = resident("a-1", "n3", 4, annotations={KEYS.model_id: "m"})
    cluster.state.set_pod(mine)
    assert (ask(cluster, one)["a"].now, ask(cluster, one)["a"].never) == (1, 1)


# Who is idle and goes.


# The mirror decides as the scheduler does.


class World:
    """A scheduler with nodes, pods and pods that wait, drawn by chance; and models that want replicas."""

    def __init__(self, seed: int, strategy: str) -> None:
        self.chance = random.Random(seed)
        self.api = Api()
        self.scheduler = scheduler_of(
            self.api,
            strategy=strategy,
            monotonic=lambda: 0.0,
        )
        self._made = 0
        for number in range(self.chance.randint(1, 6)):
            self._node(f"n{number}")
        for _ in range(self.chance.randint(0, 8)):
            self._bind()
        self._touch_nodes()
        for _ in range(self.chance.choice((0, 0, 1, 4))):
            self.create(self._template(), priority=self.chance.randint(0, 2), created="2025")
        self.models = [
            model(
                f"m{number}",
                self.chance.randint(1, 6),
                priority=self.chance.choice((0, 0, 1)),
            )
            for number in range(self.chance.randint(1, 5))
        ]
        self.models = [replace(one, template=self._template(one.model.name)) for one in self.models]

    def _node(self, name: str) -> None:
        chance = self.chance
        gpus = [
            gpu(
                f"{name}-{i}",
                total=chance.choice((8, 16, 24)) * GIB,
                index=i,
                other_use_bytes=chance.choice((0, 0, GIB)),
            )
            for i in range(chance.randint(1, 4))
        ]
        facts: Json = {"labels": {"zone": chance.choice("ab")}}
        if chance.random() < 0.15:
            facts["taints"] = [{"key": "k", "value": "v", "effect": "NoSchedule"}]
        if chance.random() < 0.1:
            facts["unschedulable"] = True
        rule = CodeReport(chance.choice((CodeRule.ANY, CodeRule.ANY, CodeRule.NAMESPACE)))
        facts["allocatable"] = {
            "cpu": str(chance.randint(1, 8)),
            "memory": "64Gi",
            "pods": str(chance.randint(3, 12)),
        }
        self.scheduler.on_node(Change(ChangeKind.SET, node(name, says=report(*gpus, code=rule), **facts)))
        if chance.random() > 0.1:
            self.scheduler.cluster.decider.table.beat(NodeName(name), np.inf)

    def _touch_nodes(self) -> None:
        self.scheduler.cluster.decider.refresh()

    def _template(self, name: str = "p") -> Json:
        chance = self.chance
        requests = {"cpu": f"{chance.choice((0, 100, 900))}m"}
        count = 2 if chance.random() < 0.2 else 1
        made = template(
            chance.choice((1, 3, 4, 7, 8, 12)) * count,
            model_id=chance.choice((None, name)),
            labels={"app": name},
            requests=requests,
            preemptionPolicy="Never",
        )
        made["metadata"]["annotations"][KEYS.gpu_count] = str(count)
        if chance.random() < 0.2:
            made["metadata"]["annotations"][KEYS.requirements] = "python"
        if chance.random() < 0.2:
            made["spec"]["nodeSelector"] = {"zone": "a"}
        if chance.random() < 0.3:
            made["spec"]["affinity"] = apart(term(chance.choice((name, "m0")), HOST))
        if chance.random() < 0.3:
            made["spec"]["tolerations"] = [{"operator": "Exists"}]
        return made

    def _bind(self) -> None:
        demand = parse_demand(self._pod(self._template(), 0, "2024"), KEYS)
        outcome = self.scheduler.cluster.decider.decide(demand)
        if isinstance(outcome, Placement):
            self.scheduler.state.assume(demand, outcome.node, outcome.gpu)

    def _pod(self, made: Json, priority: int, created: str) -> Json:
        self._made += 1
        uid = f"p{self._made:05}"
        meta = {
            "namespace": "team",
            "name": uid,
            "uid": uid,
            "creationTimestamp": f"{created}-{self._made:05}",
        }
        return {
            "metadata": {**meta, **made["metadata"]},
            "spec": {**made["spec"], "priority": priority, "schedulerName": "trtis-scheduler"},
            "status": {"phase": "Pending"},
        }

    def create(self, made: Json, *, priority: int, created: str) -> str:
        one = self._pod(made, priority, created)
        self.scheduler.on_pod(Change(ChangeKind.SET, one))
        return str(one["metadata"]["uid"])

    def copy(self, one: SchedulableModel) -> str:
        return self.create(dict(one.template), priority=one.priority, created="2026")

    def places(self, uid: str) -> bool:
        return self.scheduler.state.has_place(PodUid(uid))

    async def settle(self) -> None:
        for _ in range(4 * len(self.scheduler.queue) + 8):
            self.scheduler.step()
            await asyncio.sleep(0)


def in_order(models: Sequence[SchedulableModel], answer: dict[str, Schedulable]) -> list[SchedulableModel]:
    """The replicas that were promised, in the order of the promise; written out anew, from the words of the rule."""
    found, given_to = [], dict.fromkeys((one.model.name for one in models), 0)
    while left := [one for one in models if given_to[one.model.name] < answer[one.model.name].now]:
        best = min(
            left,
            key=lambda one: (
                -one.priority,
                -(one.desired - given_to[one.model.name]) / one.desired,
                str(one.model),
            ),
        )
        given_to[best.model.name] += 1
        found.append(best)
    return found


@pytest.mark.parametrize("strategy", ["binpack", "spread"])
@pytest.mark.parametrize("seed", range(40))
async def test_what_is_promised_is_placed_and_one_more_is_not(seed: int, strategy: str) -> None:
    world = World(seed, strategy)
    cluster = world.scheduler.cluster
    answers = SchedulableAnswers(
        cluster, KEYS, pending=world.scheduler.about_to_be_placed, aside=world.scheduler.nominator.aside
    )
    answer = finish(answers.answer(SchedulableRequest(models=tuple(world.models))))
    found = {key.name: one for key, one in answer.models.items()}
    await world.settle()  # those who waited
    replicas = [(one, world.copy(one)) for one in in_order(world.models, found)]
    await world.settle()
    assert [one.model.name for one, uid in replicas if not world.places(uid)] == []
    for one in world.models:
        told = found[one.model.name]
        assert bool(told.reason) == (told.now < one.desired), told
        if told.now < one.desired:
            more = world.copy(one)
            await world.settle()
            assert not world.places(more), told
    await world.scheduler.abandon()
