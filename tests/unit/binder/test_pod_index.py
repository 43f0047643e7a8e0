"""The index of pods by their labels: what it finds, and at how many it looks to find it."""

import random
from collections.abc import Iterable
from typing import Any

import pytest

from berth.contract.ids import NodeName, PodUid
from binder.cache.pod_index import Neighbour, PodIndex
from binder.pod.selectors import Labels, Selector, parse_selector
from binder.pod.topology_terms import Term

COMPONENT, NAME = "app.kubernetes.io/component", "app.kubernetes.io/name"
TEAM = frozenset({"team"})


class Counting(dict[str, str]):
    """Labels that count how often somebody looks at them."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counting.looks += 1
        return super().get(key, default)


def index(pods: Iterable[tuple[str, Labels]], **more: Any) -> PodIndex:
    made = PodIndex()
    for number, (namespace, labels) in enumerate(pods):
        made.put(PodUid(f"p{number}"), Neighbour(namespace, labels, NodeName(f"n{number % 9}"), **more))
    return made


def selector(**what: Any) -> Selector:
    found = parse_selector(what)
    assert found is not None
    return found


def labels(number: int) -> Counting:
    return Counting({COMPONENT: "predictor", NAME: f"m{number // 4}", "z": str(number % 2)})


@pytest.mark.parametrize("rare_first", [True, False])
def test_the_rarest_label_is_looked_up_whatever_its_name(rare_first: bool) -> None:
    rare = NAME if rare_first else "a"
    pods = [("team", Counting({COMPONENT: "predictor", rare: f"m{i // 4}"})) for i in range(2000)]
    made, asked = index(pods), selector(matchLabels={COMPONENT: "predictor", rare: "m7"})
    Counting.looks = 0
    assert len(list(made.in_namespace("team", asked))) == 4
    assert Counting.looks <= 20
    Counting.looks = 0
    assert len(list(made.matching(Term("zone", asked, TEAM, None), {}))) == 4
    assert Counting.looks <= 20


def test_a_list_of_rare_values_is_rarer_than_one_common_value() -> None:
    made = index([("team", labels(i)) for i in range(2000)])
    names = {"key": NAME, "operator": "In", "values": ["m1", "m2", "m3", "nobody"]}
    Counting.looks = 0
    found = made.in_namespace(
        "team", selector(matchLabels={COMPONENT: "predictor"}, matchExpressions=[names])
    )
    assert len(list(found)) == 12
    assert Counting.looks <= 60


def test_what_is_rare_in_one_namespace_may_be_common_in_another() -> None:
    pods = [("a", Counting({"x": "1", "y": str(i)})) for i in range(500)]
    pods += [("b", Counting({"x": str(i), "y": "1"})) for i in range(500)]
    made, asked = index(pods), selector(matchLabels={"x": "1", "y": "1"})
    Counting.looks = 0
    assert len(list(made.matching(Term("zone", asked, frozenset("ab"), None), {}))) == 2
    assert Counting.looks <= 10


def test_a_pod_meets_few_of_the_terms_that_have_a_common_label() -> None:
    made = PodIndex()
    for number in range(500):
        own = selector(matchLabels={COMPONENT: "predictor", NAME: f"m{number}"})
        pod = Neighbour("team", {}, NodeName("n"), keeps_away=(Term("zone", own, TEAM, None),))
        made.put(PodUid(f"p{number}"), pod)
    met = list(made.terms_against("team", {COMPONENT: "predictor", NAME: "m499"}))
    assert len(met) <= 2
    assert any(
        term.selector and term.selector.matches({COMPONENT: "predictor", NAME: "m499"}) for term, _ in met
    )


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_look_at_all_pods_finds(seed: int) -> None:
    chance = random.Random(seed)
    keys, values = ("a", "b", "c"), ("1", "2", "3")

    def some_labels() -> dict[str, str]:
        return {key: chance.choice(values) for key in keys if chance.random() < 0.7}

    def some_selector() -> Selector:
        operators = ("In", "In", "NotIn", "Exists", "DoesNotExist")
        tests = [
            {
                "key": chance.choice(keys),
                "operator": chance.choice(operators),
                "values": chance.sample(values, 2),
            }
            for _ in range(chance.randrange(3))
        ]
        return selector(matchLabels=some_labels() if chance.random() < 0.5 else {}, matchExpressions=tests)

    made, pods = PodIndex(), dict[str, Neighbour]()
    for step in range(150):
        uid = f"p{chance.randrange(30)}"
        if chance.random() < 0.3:
            made.drop(PodUid(uid))
            pods.pop(uid, None)
        else:
            term = Term("zone", some_selector(), frozenset({"x"}), None)
            pods[uid] = Neighbour(
                chance.choice("xy"),
                some_labels(),
                NodeName(f"n{step % 5}"),
                keeps_away=(term,) * chance.randrange(2),
            )
            made.put(PodUid(uid), pods[uid])
        asked, mine = some_selector(), some_labels()
        found = list(made.matching(Term("zone", asked, frozenset("xy"), None), {}))
        assert len(found) == sum(asked.matches(pod.labels) for pod in pods.values())
        speaking = {t for t, _ in made.terms_against("x", mine) if t.selector and t.selector.matches(mine)}
        assert speaking == {
            t for pod in pods.values() for t in pod.keeps_away if t.selector and t.selector.matches(mine)
        }
    for uid in list(pods):
        made.drop(PodUid(uid))
    assert not list(made.terms_against("x", {"a": "1", "b": "1", "c": "1"}))
    assert not made._terms
