"""Which idle pods go for a model that finds no room: the fewest, the least recently used first."""

import random
from collections.abc import Iterable
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import pytest

from berth.contract.ids import NodeName
from berth.contract.scaling import SchedulableModel, SchedulableRequest
from binder.cache.reservations import Reservation
from binder.engine import schedulable as schedulable
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement
from binder.engine.idle import IdlePods
from binder.engine.preemption import Questions
from binder.engine.schedulable import SchedulableAnswers
from binder.pod.demand import parse_demand
from tests.fakes.cluster import resident
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.fakes.schedulable import ask, cluster_with, finish, model
from tests.fakes.zones import HOST, apart, term

Json = dict[str, Any]


def idle_cluster() -> Cluster:
    """n1 is full of three, n2 of one large one that is used, n3 of one that is idle."""
    return cluster_with(
        {"n1": [16], "n2": [16], "n3": [16]},
        resident("a1", "n1", 4),
        resident("a2", "n1", 4),
        resident("a3", "n1", 8),
        resident("busy", "n2", 16),
        resident("c", "n3", 16),
    )


IDLE: dict[str, tuple[int, list[str], tuple[str, ...]]] = {
    "the one that was not used for longest": (4, ["c", "a2", "a1", "a3"], ("c",)),
    "one rather than two": (8, ["a1", "a2", "a3", "c"], ("a3",)),
    "none where it does not help": (8, ["a1"], ()),
    "two where it must be": (8, ["a1", "a2"], ("a1", "a2")),
    "never who is not named": (16, ["a1", "a2"], ()),
    "three, if there is nothing else": (16, ["a1", "a3", "a2"], ("a1", "a3", "a2")),
    "names of nobody": (8, ["nobody", "a3"], ("a3",)),
}


@pytest.mark.parametrize("case", IDLE)
def test_the_fewest_idle_pods_go_the_least_recently_used_first(case: str) -> None:
    gib, idle, expected = IDLE[case]
    found = ask(idle_cluster(), model("new", 2, gib), idle=[f"team/{name}" for name in idle])["new"]
    assert found.now == 0
    assert set(found.if_idle_go) == {f"team/{name}" for name in expected}


def test_an_idle_pod_of_a_higher_priority_stays_and_one_that_goes_already_is_not_named() -> None:
    cluster = cluster_with({"n1": [16]}, resident("x", "n1", 16, priority=5))
    for priority, expected in ((4, ()), (5, ("team/x",)), (6, ("team/x",))):
        assert ask(cluster, model("a", 1, priority=priority), idle=["team/x"])["a"].if_idle_go == expected
    going = resident("x", "n1", 16)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert ask(cluster_with({"n1": [16]}, going), model("a", 1), idle=["team/x"])["a"].if_idle_go == ()


def test_two_models_are_not_told_of_one_idle_pod() -> None:
    idle = ["team/c", "team/a3", "team/busy"]
    found = ask(idle_cluster(), model("x", 1, 8), model("y", 1, 8), idle=idle)
    assert found["x"].if_idle_go == ("team/c",)
    assert found["y"].if_idle_go == (), "what x leaves of it is enough for y"
    found = ask(idle_cluster(), model("x", 1, 16), model("y", 1, 8), idle=idle)
    assert (found["x"].if_idle_go, found["y"].if_idle_go) == (("team/c",), ("team/a3",))


def test_who_is_served_first_is_the_one_for_whom_somebody_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (model("a", 1, 16), model("b", 1, 16, priority=5))
    found = ask(idle_cluster(), *asked, idle=["team/c"])
    assert (found["a"].if_idle_go, found["b"].if_idle_go) == ((), ("team/c",))
    idle = ["team/c", "team/busy"]
    assert ask(idle_cluster(), *asked, idle=idle)["a"].if_idle_go == ("team/busy",)
    monkeypatch.setattr(schedulable, "_MOST_SEARCHES", 1)
    found = ask(idle_cluster(), *asked, idle=idle)
    assert (found["a"].if_idle_go, found["b"].if_idle_go) == ((), ("team/c",))


def test_a_pod_that_is_no_models_does_not_go_for_one() -> None:
    """Whoever calls it idle: its processors are not what memory is kept for."""
    plain = pod("plain", on="n1", requests={"cpu": "2"})
    cluster = cluster_with({"n1": [16]}, plain, allocatable={"cpu": "2", "memory": "8Gi", "pods": "9"})
    found = ask(cluster, model("a", 1, requests={"cpu": "1"}), idle=["team/plain"])["a"]
    assert (found.now, found.if_idle_go) == (0, ())


def test_of_those_who_would_go_nothing_is_left_in_the_next_answer() -> None:
    cluster = idle_cluster()
    cluster.state.set_node(node("n4", says=report(gpu("n4-0", total=16 * GIB))))
    cluster.decider.table.beat(NodeName("n4"), np.inf)
    answers = SchedulableAnswers(cluster, KEYS, pending=list, aside=lambda _: [])
    models = (model("a", 3, 16, priority=5), model("b", 1, 8), model("d", 9, 4))
    request = SchedulableRequest(models=models, idle=("team/c", "team/a3", "team/a1"))
    first = finish(answers.answer(request))
    assert sum(len(one.if_idle_go) for one in first.models.values()) > 1
    for _ in range(3):
        assert finish(answers.answer(request)) == first


def test_of_groups_of_one_size_that_stays_of_which_somebody_was_used_last() -> None:
    pods = [resident(f"p{rank}", "n1", 8, slot) for rank, slot in enumerate((0, 1, 1, 0))]
    idle = [f"team/p{rank}" for rank in range(4)]
    found = ask(cluster_with({"n1": [16, 16]}, *pods), model("a", 1, 16), idle=idle)["a"]
    assert set(found.if_idle_go) == {"team/p1", "team/p2"}


def labelled(one: Json, label: str, **spec: Any) -> Json:
    one["metadata"]["labels"] = {"app": label}
    one["spec"] |= spec
    return one


def test_who_would_be_gone_keeps_nobody_away() -> None:
    """Neither by what others say of it, nor by what it says of others; and only as long as it is supposed."""
    asked = model("a", 2, 8, labels={"app": "a"}, affinity=apart(term("b", HOST)))
    for there in (
        labelled(resident("x", "n1", 16), "b"),
        labelled(resident("x", "n1", 16), "c", affinity=apart(term("a", HOST))),
    ):
        cluster = cluster_with({"n1": [16]}, there)
        answers = SchedulableAnswers(cluster, KEYS, pending=list, aside=lambda _: [])
        request = SchedulableRequest(models=(asked, model("b", 1, 8, labels={"app": "c"})), idle=("team/x",))
        first = finish(answers.answer(request))
        assert first.models[asked.model].if_idle_go == ("team/x",)
        assert finish(answers.answer(request)) == first


def test_a_copy_that_was_supposed_keeps_nobody_away_from_the_next_answer() -> None:
    asked = model("a", 9, labels={"app": "a"}, affinity=apart(term("a", HOST)))
    answers = SchedulableAnswers(
        cluster_with({"n1": [16], "n2": [16]}), KEYS, pending=list, aside=lambda _: []
    )
    for _ in range(2):
        (found,) = finish(answers.answer(SchedulableRequest(models=(asked,)))).models.values()
        assert found.now == 2


def test_nobody_goes_where_there_is_room() -> None:
    cluster = cluster_with({"n1": [16]}, resident("x", "n1", 8))
    found = ask(cluster, model("a", 1, 8), idle=["team/x"])["a"]
    assert (found.now, found.if_idle_go) == (1, ())


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each question whether a copy has a place without some: how many those are."""
    asked, place = list[int](), Questions.place

    def counting(self: Questions, node: NodeName, gone: Iterable[Reservation]) -> Placement | None:
        without = list(gone)
        asked.append(len(without))
        return place(self, node, without)

    monkeypatch.setattr(Questions, "place", counting)
    return asked


def crowded(nodes: int, each: int, *, gpu_gib: int) -> tuple[Cluster, list[str]]:
    """So many idle pods on each node, which have all its processors and a GiB each of its GPU; and their names."""
    names = [(f"n{i}", f"p{i}-{j}") for i in range(nodes) for j in range(each)]
    pods = [resident(uid, on, 1, requests={"cpu": "1"}) for on, uid in names]
    room = {"cpu": str(each), "memory": "8Gi", "pods": "110"}
    cluster = cluster_with({f"n{i}": [gpu_gib] for i in range(nodes)}, *pods, allocatable=room)
    return cluster, [f"team/{uid}" for _, uid in names]


def test_where_many_must_go_few_nodes_are_searched(questions: list[int]) -> None:
    cluster, idle = crowded(nodes=30, each=16, gpu_gib=16)
    assert len(ask(cluster, model("a", 1, 6), idle=idle)["a"].if_idle_go) == 6
    assert 64 <= len(questions) < 64 + 2 * 16, "what is begun on a node is ended, and then no other is begun"


def test_where_one_is_enough_eight_nodes_are_compared(questions: list[int]) -> None:
    cluster, idle = crowded(nodes=30, each=1, gpu_gib=1)
    assert ask(cluster, model("a", 1, 1), idle=idle)["a"].if_idle_go == ("team/p0-0",)
    assert len(questions) == 3 * 8


def test_where_more_would_have_to_go_than_elsewhere_nobody_searches(questions: list[int]) -> None:
    pods = [resident(f"p{i}-{half}", f"n{i}", 8) for i in range(5) for half in "ab"]
    cluster = cluster_with(
        {name: [16] for name in ("n0", "n1", "n2", "n3", "n4", "large")}, *pods, resident("x", "large", 16)
    )
    idle = [*(f"team/{one['metadata']['name']}" for one in pods), "team/x"]
    assert ask(cluster, model("a", 1, 16), idle=idle)["a"].if_idle_go == ("team/x",)
    assert len(questions) == 3


def test_what_bytes_do_not_tell_is_not_asked_of_every_group(questions: list[int]) -> None:
    """There is memory without any of them going, and the processors are not there before six of them go."""
    cluster, idle = crowded(nodes=1, each=16, gpu_gib=64)
    found = ask(cluster, model("a", 1, 4, requests={"cpu": "6"}), idle=idle)["a"]
    assert len(found.if_idle_go) == 6
    assert len(questions) < 64 + 2 * 16


def test_of_many_idle_pods_the_sixteen_longest_idle_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not among them would be enough alone: a group goes of which nobody can stay."""
    looked, judge = list[int](), IdlePods._may_be_enough

    def counting(*of: Any) -> bool:
        looked.append(1)
        return judge(*of)

    monkeypatch.setattr(IdlePods, "_may_be_enough", counting)
    small = [resident(f"p{i}", "n1", 1) for i in range(30)]
    room = {"cpu": "4", "memory": "8Gi", "pods": "110"}
    cluster = cluster_with({"n1": [38]}, *small, resident("large", "n1", 8), allocatable=room)
    idle = [f"team/p{i}" for i in range(30)] + ["team/large"]
    assert len(ask(cluster, model("a", 1, 8), idle=idle)["a"].if_idle_go) == 8
    assert len(looked) == sum(comb(16, size) for size in range(1, 5))


def random_full_cluster(chance: random.Random) -> tuple[Cluster, list[str]]:
    sizes = {
        f"n{i}": [chance.choice((6, 8, 12)) for _ in range(chance.randint(1, 3))]
        for i in range(chance.randint(1, 3))
    }
    pods, names = [], []
    for name, gpus in sizes.items():
        for slot, size in enumerate(gpus):
            left = size
            while left > 0 and len(pods) < 14:
                take = chance.randint(1, left)
                uid = f"p{len(pods)}"
                pods.append(resident(uid, name, take, slot, priority=chance.randint(0, 1)))
                if chance.random() < 0.7:
                    names.append(f"team/{uid}")
                left -= take
    chance.shuffle(names)
    return cluster_with(sizes, *pods), names


def brute_force(cluster: Cluster, asks: SchedulableModel, idle: list[str]) -> tuple[int, list[int]] | None:
    """How few have to go, and the best of the smallest groups: by who was used last of it."""
    demand = parse_demand(
        {
            "metadata": {"namespace": "team", "name": "x", "uid": "x", **asks.template["metadata"]},
            "spec": asks.template["spec"],
        },
        KEYS,
    )
    questions = Questions(cluster.decider, demand)
    by_node: dict[str, list[int]] = {}
    reservations = {
        f"team/{h.ref.name}": h
        for name in cluster.decider.table.row_of
        for h in cluster.state.living_on(name)
    }
    for rank, name in enumerate(idle):
        if reservations[name].priority <= asks.priority:
            by_node.setdefault(reservations[name].node, []).append(rank)
    found = []
    for name, ranks in by_node.items():
        for size in range(1, len(ranks) + 1):
            for group in combinations(ranks, size):
                if questions.place(NodeName(name), [reservations[idle[rank]] for rank in group]) is not None:
                    found.append((size, sorted(group, reverse=True)))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_nobody_goes_who_need_not(seed: int) -> None:
    chance = random.Random(seed)
    cluster, idle = random_full_cluster(chance)
    each, priority = chance.randint(1, 12), chance.randint(0, 1)
    count = 2 if chance.random() < 0.3 else 1
    asks = model("new", 1, each * count, priority=priority)
    asks.template["metadata"]["annotations"][KEYS.gpu_count] = str(count)
    cluster.decider.refresh()
    answer = ask(cluster, asks, idle=idle)["new"]
    expected = None if answer.now else brute_force(cluster, asks, idle)
    ranks = sorted((idle.index(name) for name in answer.if_idle_go), reverse=True)
    assert (None if not ranks else (len(ranks), ranks)) == expected
