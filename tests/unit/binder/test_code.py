"""The code rule: a node that holds a model with code holds models of that one namespace."""

import pytest

from agent.admission.backends import BACKENDS
from berth.contract.report import CODE_BACKENDS, CodeRule, Failure, ModelReport, ModelState
from binder.engine.decision import Refusal
from binder.engine.explain import summary
from binder.pod.demand import parse_demand
from binder.rules.registry import RULES
from tests.fakes.objects import GIB, KEYS, pod
from tests.fakes.tenants import AMONG, ANY, APART, NEVER, NONE, OTHERS, REQUIRES, Tenants, row


@pytest.mark.parametrize(
    ("rule", "code", "models", "asks", "why"),
    [
        (APART, "a", ("a1",), ("a2", False), ""),
        (APART, "a", ("a1",), ("a2", True), ""),
        (APART, "a", ("a1",), ("b1", False), OTHERS),
        (APART, "a", ("a1",), ("b1", True), OTHERS),
        (APART, "a", (), ("b1", False), OTHERS),  # whatever it is: the agent says so
        (APART, None, ("a1",), ("b1", False), ""),
        (APART, None, ("a1",), ("b1", True), AMONG),
        (APART, None, ("a1",), ("a2", True), ""),
        (APART, None, ("a1", "b1"), ("a2", True), AMONG),
        (APART, None, (), ("b1", True), ""),
        (ANY, "a", ("a1",), ("b1", True), ""),
        (NONE, None, ("a1",), ("b1", True), NEVER),
        (NONE, None, ("a1",), ("b1", False), ""),
        (NONE, "a", ("a1",), ("b1", False), ""),
    ],
)
def test_who_may_be_beside_whom(
    rule: CodeRule, code: str | None, models: tuple[str, ...], asks: tuple[str, bool], why: str
) -> None:
    bench = Tenants()
    bench.nodes("n1", rule, code, *(row(uid, "n1") for uid in models))
    assert bench.verdict(asks[0], code=asks[1]) == {"n1": why}


def test_each_node_has_its_own_rule() -> None:
    bench = Tenants()
    for name, rule in (("n1", APART), ("n2", ANY), ("n3", NONE)):
        bench.nodes(name, rule, "a", row("a1", name))
    assert bench.verdict("b1") == {"n1": OTHERS, "n2": "", "n3": ""}
    assert bench.verdict("b1", code=True) == {"n1": OTHERS, "n2": "", "n3": NEVER}


def test_the_binder_and_the_agents_call_the_same_backends_programs() -> None:
    assert {name for name, backend in BACKENDS.items() if backend.is_program} == CODE_BACKENDS


async def test_two_namespaces_with_code_that_come_at_once_get_a_node_each() -> None:
    async with Tenants() as bench:
        bench.nodes("n1")
        bench.nodes("n2")
        for uid in ("a1", "b1", "a2", "b2"):
            bench.pod(uid, code=True)
        await bench.until_quiet()
        at = {uid: bench.api.pods[uid]["spec"]["nodeName"] for uid in ("a1", "a2", "b1", "b2")}
        assert at["a1"] == at["a2"] != at["b1"] == at["b2"]


async def test_code_goes_where_the_namespaces_code_is_and_no_further_than_its_owner_wants() -> None:
    """The strategy alone would take the fuller node."""
    async with Tenants(strategy="binpack") as bench:
        bench.nodes("n1", APART, None, row("a1", "n1", requested_bytes=8 * GIB))
        bench.nodes("n2", APART, "a", row("a2", "n2"))
        bench.pod("a3", code=True)
        bench.pod("a4")
        prefers = [
            {
                "weight": 1,
                "preference": {
                    "matchExpressions": [
                        {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}
                    ]
                },
            }
        ]
        wish = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": prefers}}
        bench.pod("a5", code=True, affinity=wish)
        await bench.until_quiet()
        at = {uid: bench.api.pods[uid]["spec"]["nodeName"] for uid in ("a3", "a4", "a5")}
        assert at == {"a3": "n2", "a4": "n1", "a5": "n1"}


async def test_code_that_waits_for_the_models_of_others_is_woken_by_the_end_of_the_last() -> None:
    async with Tenants() as bench:
        nameless = {"requested_bytes": 0, "model_id": None, "model_name": None}
        there = [row(uid, "n1", **nameless) for uid in ("a1", "c1")]
        bench.nodes("n1", APART, None, *there)
        bench.pod("b1", code=True)
        await bench.grow_patient()
        bench.nodes("n1", APART, None, *there[1:])
        await bench.step(4, seconds=1)
        assert not bench.is_placed("b1")
        bench.nodes("n1")
        await bench.step(4, seconds=1)
        assert bench.is_placed("b1")


@pytest.mark.parametrize(
    ("here", "evicted"),
    [
        ({"a1": 0, "a2": 0}, {"a1", "a2"}),  # both have to go, though one would make room enough
        ({"a1": 0, "a2": 10}, set()),  # the code of one that stays is in the way
    ],
)
async def test_room_is_made_only_where_those_who_go_take_their_code_along(
    here: dict[str, int], evicted: set[str]
) -> None:
    async with Tenants() as bench:
        for uid, priority in here.items():
            bench.pod(uid, on="n1", priority=priority)
        bench.nodes("n1", APART, "a", *(row(uid, "n1") for uid in here))
        bench.pod("b1", priority=5)
        await bench.until_quiet()
        await bench.step(5, seconds=1)
        assert set(bench.api.evicted) == evicted


async def test_a_pod_that_does_not_say_that_it_brings_code_comes_to_rest() -> None:
    """The agents refuse what the binder could not know, each its node, and nobody is sent round in circles."""
    async with Tenants() as bench:
        there = {"n1": "a", "n2": "c", "n3": "d", "n4": "e"}

        def told(node: str, *more: ModelReport) -> None:
            bench.nodes(node, APART, None, row(f"{there[node]}0", node), *more)

        for name in there:
            told(name)
        seen: list[str] = []
        for generation in range(20):
            uid = f"b{generation}"
            bench.pod(uid, template="b")
            await bench.step(4, seconds=1)
            seen.append(bench.api.pods[uid]["spec"]["nodeName"])
            told(
                seen[-1], row(uid, seen[-1], state=ModelState.FAILED, failure=Failure.CAPACITY, reason="code")
            )
            await bench.step(4, seconds=1)
            if uid not in bench.api.evicted:
                break
            bench.gone(uid)
            told(seen[-1])
        assert len(seen) == len(set(seen)) == 3  # then its owner is told, and it stays


def test_a_refusal_says_what_is_in_the_way_and_not_whose_it_is() -> None:
    bench = Tenants()
    bench.nodes("n1", APART, "secret", row("a1", "n1"))
    bench.nodes("n2", APART, None, row("a1", "n2"))
    one = pod("b1", annotations=REQUIRES)
    decider = bench.scheduler.cluster.decider
    demand = parse_demand(one, KEYS)
    outcome = decider.decide(demand)
    assert isinstance(outcome, Refusal)
    assert {CODE_OF[int(code)] for code in outcome.codes} == {OTHERS, AMONG}
    assert "secret" not in summary(decider, demand, outcome)


CODE_OF = {code: name for name, code in RULES.codes.items()}
