"""For how long a node is left out after failed loads of a model, and when no node is tried any more."""

from typing import Any

from berth.contract.ids import NodeName, PodUid
from binder.cache.load_failures import EXCLUDED_SECONDS, MOST_FAILURES, LoadFailures
from binder.engine.cluster import Cluster
from binder.engine.decision import Decider, Placement, Refusal
from binder.pod.demand import parse_demand
from binder.rules.registry import RULES
from tests.fakes.objects import KEYS, node, pod, report

N1 = NodeName("n1")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def owned(uid: str, **more: Any) -> dict[str, Any]:
    one = pod(uid, annotations={KEYS.model_id: "m", **more.pop("annotations", {})}, **more)
    one["metadata"]["ownerReferences"] = [{"uid": "rs-1", "controller": True}]
    return one


def test_the_node_is_left_out_for_a_while_and_only_for_that_model() -> None:
    clock = Clock()
    cluster = Cluster(KEYS, clock=clock)
    failures = cluster.facts.load_failures
    decider: Decider = cluster.decider
    cluster.state.set_node(node("n1", says=report()))
    decider.table.beat(N1, 1e9)
    same = parse_demand(owned("p2"), KEYS)
    assert failures.note(("team", "m"), N1, PodUid("p1"))
    refusal = decider.decide(same)
    assert isinstance(refusal, Refusal)
    assert refusal.codes[0] == RULES.codes["ExcludedAfterLoadFailure"]
    assert isinstance(decider.decide(parse_demand(pod("other"), KEYS)), Placement)
    clock.now = EXCLUDED_SECONDS
    assert isinstance(decider.decide(same), Placement)


def test_after_so_many_failures_nothing_is_tried_any_more() -> None:
    failures = LoadFailures(Clock())
    pods = [PodUid(f"p{i}") for i in range(MOST_FAILURES)]
    tries = [failures.note(("team", "m"), NodeName(f"n-{uid}"), uid) for uid in pods]
    assert tries == [True] * (MOST_FAILURES - 1) + [False]


def test_a_failure_that_is_reported_again_counts_once() -> None:
    failures = LoadFailures(Clock())
    assert all(failures.note(("team", "m"), N1, PodUid("p1")) for _ in range(10 * MOST_FAILURES))
