"""Which budgets count a pod, and that a tenant's many or long ones cost others nothing."""

import random
from typing import Any

import pytest

from berth.contract.pod import PodRef
from binder.cache import disruption_budgets as budgets
from binder.cache.disruption_budgets import Budgets
from binder.pod import bounds
from binder.pod.selectors import Selector, parse_selector
from tests.unit.binder.test_bounds import calls

Json = dict[str, Any]


def budget(uid: str, selector: Json | None, *, allowed: int | None = 1, namespace: str = "team") -> Json:
    return {
        "metadata": {"namespace": namespace, "name": uid, "uid": uid},
        "spec": {"selector": selector},
        "status": {"disruptionsAllowed": allowed},
    }


def ref(name: str = "p", namespace: str = "team") -> PodRef:
    return PodRef(namespace, name, name)  # type: ignore[arg-type]


def of_app(allowed: int | None = 1, *, uid: str = "b", app: str = "x", **more: Any) -> Json:
    return budget(uid, {"matchLabels": {"app": app}}, allowed=allowed) | more


def labelled(*names: str, app: str = "x", namespace: str = "team") -> list[tuple[PodRef, Json]]:
    return [(ref(name, namespace), {"app": app}) for name in names]


# The budgets that there are, the pods, whether they may go together.
GOING: dict[str, tuple[list[Json], list[tuple[PodRef, Json]], bool]] = {
    "no budget": ([], labelled("p", "q"), True),
    "as many as are allowed": ([of_app(2)], labelled("p", "q"), True),
    "one more": ([of_app(1)], labelled("p", "q"), False),
    "none": ([of_app(0)], labelled("p"), False),
    "fewer than none": ([of_app(-3), of_app(9, uid="c", app="y")], labelled("p"), False),
    "a budget that nobody has looked at yet": ([of_app(None)], labelled("p"), False),
    "a budget without a status": ([of_app(status=None)], labelled("p"), False),
    "others": ([of_app(0)], labelled("p", app="y"), True),
    "of another namespace": ([of_app(0)], labelled("p", namespace="other"), True),
    "a budget of nobody": ([of_app(0, spec={})], labelled("p"), True),
    "a budget of everybody": ([of_app(0, spec={"selector": {}})], labelled("p", app="y"), False),
    "two budgets for one pod": ([of_app(9), of_app(9, uid="c")], labelled("p"), False),
    "two budgets for two pods": (
        [of_app(1), of_app(1, uid="c", app="y")],
        [*labelled("p"), *labelled("q", app="y")],
        True,
    ),
}


@pytest.mark.parametrize("case", GOING)
def test_who_may_go_together(case: str) -> None:
    there, pods, may_go = GOING[case]
    made = Budgets()
    for one in there:
        made.put(one)
    assert made.allow(pods) is may_go
    for one in there:
        made.drop(one)
    assert made.allow(pods)


def test_a_budget_is_news_where_somebody_may_go_who_could_not() -> None:
    made = Budgets()

    def changed() -> set[str]:
        return {namespace for namespace, _ in made.take_changed()}

    for one, helps, changes in (
        (of_app(1), False, True),
        (of_app(1), False, False),
        (of_app(2), True, True),
        (of_app(1), False, True),
        (of_app(1, app="y"), True, True),
    ):
        assert (made.put(one), changed()) == (helps, {"team"} if changes else set())
    assert (made.drop(of_app()), changed()) == (True, {"team"})
    assert (made.drop(of_app()), changed()) == (False, set())


def unlike(number: int, tests: int = 1) -> Json:
    """It asks for no label, and counts whoever has none of these."""
    return {"matchExpressions": [{"key": f"a{number}-{i}", "operator": "DoesNotExist"} for i in range(tests)]}


@pytest.mark.parametrize("seed", range(20))
def test_who_counts_a_pod_is_found_however_budgets_come_and_go(seed: int) -> None:
    chance = random.Random(seed)
    made, there = Budgets(), dict[str, Json | None]()

    def some_selector() -> Json | None:
        operators = ("In", "NotIn", "Exists", "DoesNotExist")
        tests = [
            {
                "key": chance.choice("ab"),
                "operator": chance.choice(operators),
                "values": chance.sample("123", 2),
            }
            for _ in range(chance.randrange(3))
        ]
        return chance.choice(
            (None, {"matchExpressions": tests}, {"matchLabels": {"a": chance.choice("123")}})
        )

    for _ in range(200):
        uid = f"b{chance.randrange(8)}"
        if chance.random() < 0.3:
            made.drop(budget(uid, None))
            there.pop(uid, None)
        else:
            there[uid] = some_selector()
            made.put(budget(uid, there[uid], allowed=chance.randrange(3)))
        labels = {key: chance.choice("123") for key in "ab" if chance.random() < 0.7}
        count = {uid for uid, one in there.items() if (asks := parse_selector(one)) and asks.matches(labels)}
        found = {one.uid for one in made.of((ref(), labels))}
        assert found <= count
        assert len(found) == min(2, len(count))
        assert made.of((ref(namespace="other"), labels)) == []


def test_of_too_many_budgets_that_could_count_a_pod_none_is_looked_at_and_it_stays() -> None:
    """A thousand budgets of a tenant held up everybody's search for room for seconds."""
    made = Budgets()
    for number in range(budgets.MOST_MET):
        made.put(budget(f"b{number}", {"matchExpressions": [{"key": f"k{number}", "operator": "Exists"}]}))
        made.put(budget(f"c{number}", {"matchLabels": {"app": f"c{number}"}}))
    pod = (ref(), {"app": "mine"})
    assert made.of(pod) == []
    assert made.allow([pod])
    made.put(budget("more", {"matchExpressions": [{"key": "k", "operator": "Exists"}]}))
    assert not made.allow([pod])
    for number in range(2000):
        made.put(budget(f"d{number}", unlike(number)))
    assert calls(lambda: made.allow([pod])) < 100
    assert made.allow([(ref(namespace="other"), {"app": "mine"})])
    for number in range(2000):
        made.drop(budget(f"d{number}", None))
    made.drop(budget("more", None))
    assert made.allow([pod])


@pytest.mark.parametrize(
    "selector",
    [
        unlike(0, tests=bounds.MOST_TESTS + 1),
        {
            "matchExpressions": [
                {"key": "a", "operator": "NotIn", "values": [f"v{i}" for i in range(bounds.MOST_VALUES + 1)]}
            ]
        },
    ],
    ids=["tests", "values"],
)
def test_a_budget_that_is_too_long_to_look_at_keeps_its_namespace(selector: Json) -> None:
    made = Budgets()
    made.put(budget("long", selector, allowed=5))
    assert not made.allow([(ref(), {})])
    assert calls(lambda: made.of((ref(), {"b": "1"}))) < 50
    assert made.allow([(ref(namespace="other"), {})])


def test_many_budgets_that_change_at_once_are_one_look_at_their_namespace() -> None:
    """Each was a look at all pods of the namespace, all in one step."""
    made = Budgets()
    for number in range(3):
        made.put(budget(f"b{number}", unlike(number)))
    assert len(made.take_changed()) == 3
    for number in range(100):
        made.put(budget(f"c{number}", unlike(number, tests=2)))
    made.put(budget("other", unlike(0), namespace="other"))
    assert made.take_changed() == {
        ("team", Selector(())),
        ("other", parse_selector(unlike(0))),
    }
    assert not made.have_changed
