"""Failed loads: where a pod is sent away, where it must stay, and for how long a node is left out."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from berth.contract.ids import NodeName
from berth.contract.report import Failure, ModelReport, ModelState
from berth.kube.errors import response_error
from binder.cluster import Cluster
from binder.decision import Decider, Placement, Refusal
from binder.demand import parse_demand
from binder.filters import CODE
from binder.load_failures import EXCLUDED_SECONDS, MOST_FAILURES, LoadFailures
from binder.reasons import Kind
from binder.replacing import Replacer
from tests.fakes.objects import KEYS, gpu, listed, node, pod, report

N1, N2 = NodeName("n1"), NodeName("n2")


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
    failures = LoadFailures(clock)
    cluster = Cluster(KEYS, clock=clock, excluded=failures.excluded)
    decider: Decider = cluster.decider
    cluster.state.set_node(node("n1", says=report()))
    decider.table.beat(N1, 1e9)
    same = parse_demand(owned("p2"), KEYS)
    assert failures.note(("team", "m"), N1)
    refusal = decider.decide(same)
    assert isinstance(refusal, Refusal)
    assert refusal.codes[0] == CODE[Kind.EXCLUDED]
    assert isinstance(decider.decide(parse_demand(pod("other"), KEYS)), Placement)
    clock.now = EXCLUDED_SECONDS
    assert isinstance(decider.decide(same), Placement)


def test_after_so_many_failures_nothing_is_tried_any_more() -> None:
    failures = LoadFailures(Clock())
    tries = [failures.note(("team", "m"), NodeName(f"n{i}")) for i in range(MOST_FAILURES)]
    assert tries == [True] * (MOST_FAILURES - 1) + [False]


class Api:
    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods = {one["metadata"]["name"]: one for one in pods}
        self.evicted: list[str] = []
        self.conditions: list[dict[str, Any]] = []

    async def get(self, path: str) -> dict[str, Any]:
        found = self.pods.get(path.rpartition("/")[2])
        if found is None:
            raise response_error(404, "NotFound", path)
        return found

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path.endswith("/eviction")
        assert body["deleteOptions"]["preconditions"]["uid"]
        self.evicted.append(body["metadata"]["name"])
        return {}

    async def patch(self, path: str, body: dict[str, Any], *, content_type: str) -> dict[str, Any]:
        self.conditions.append(body["status"]["conditions"][0])
        return {}


class Events:
    def __init__(self) -> None:
        self.said: list[str] = []

    def record(self, ref: Any, kind: str, reason: str, message: str) -> None:
        self.said.append(reason)


def failed(uid: str, failure: Failure | None, state: ModelState = ModelState.FAILED) -> ModelReport:
    return replace(listed(uid), state=state, reason="out of memory", failure=failure)


async def deal_with(
    api: Api, failure: Failure | None, uid: str = "p1", *, state: ModelState = ModelState.FAILED
) -> LoadFailures:
    """What the replacer makes of one failed load on n1, or of a model that is lost there."""
    failures = LoadFailures(Clock())
    replacer = Replacer(api, KEYS, "trtis-scheduler", failures, Events())  # type: ignore[arg-type]
    cluster = Cluster(KEYS, clock=Clock())
    cluster.state.set_node(node("n1", says=report(gpu(), models=(failed(uid, failure, state),))))
    replacer.look_at(cluster.state.view(N1))
    task = asyncio.create_task(replacer.run())
    for _ in range(20):
        await asyncio.sleep(0)
    replacer.look_at(cluster.state.view(N1))  # the report still says so: it has been dealt with
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return failures


@pytest.mark.parametrize("failure", [Failure.CAPACITY, Failure.TRANSIENT])
async def test_a_failure_that_another_node_could_cure_replaces_the_pod_once(failure: Failure) -> None:
    api = Api(owned("p1", on="n1"))
    failures = await deal_with(api, failure)
    assert api.evicted == ["p1"]
    assert failures.excluded(parse_demand(owned("p2"), KEYS)) == [N1]
    assert api.conditions == []


STAYS: dict[str, tuple[dict[str, Any], Failure, str]] = {
    "invalid": (owned("p1", on="n1"), Failure.INVALID_MODEL, "every node"),
    "pinned": (owned("p1", on="n1", annotations={KEYS.server: "triton"}), Failure.CAPACITY, "pinned"),
    "bare": (pod("p1", on="n1"), Failure.CAPACITY, "nothing would replace"),
}


@pytest.mark.parametrize("case", sorted(STAYS))
async def test_a_pod_that_must_stay_says_why(case: str) -> None:
    one, failure, why = STAYS[case]
    api = Api(one)
    await deal_with(api, failure)
    assert api.evicted == []
    (condition,) = api.conditions
    assert (condition["type"], condition["status"]) == (KEYS.loaded_condition, "False")
    assert "out of memory" in condition["message"]
    assert why in condition["message"]


@pytest.mark.parametrize(
    "one", [owned("p1", on="n2"), owned("p1", on="n1", schedulerName="other"), owned("p9", on="n1")]
)
async def test_a_pod_that_is_not_there_any_more_or_not_ours_is_left_alone(one: dict[str, Any]) -> None:
    api = Api(one)
    await deal_with(api, Failure.CAPACITY)
    assert (api.evicted, api.conditions) == ([], [])


def initialized(one: dict[str, Any], status: str = "True") -> dict[str, Any]:
    one["status"]["conditions"] = [{"type": "Initialized", "status": status}]
    return one


@pytest.mark.parametrize("more", [{}, {"annotations": {KEYS.server: "triton"}}, {"schedulerName": "other"}])
async def test_a_pod_whose_model_is_lost_is_replaced_once_and_may_come_back(more: dict[str, Any]) -> None:
    api = Api(initialized(owned("p1", on="n1", **more)))
    failures = await deal_with(api, None, state=ModelState.LOST)
    assert api.evicted == ["p1"]
    assert failures.excluded(parse_demand(owned("p2"), KEYS)) == []
    assert api.conditions == []


@pytest.mark.parametrize("one", [owned("p1", on="n1"), initialized(owned("p1", on="n1"), "False")])
async def test_a_pod_whose_loader_is_still_at_it_has_lost_nothing(one: dict[str, Any]) -> None:
    api = Api(one)
    await deal_with(api, None, state=ModelState.LOST)
    assert (api.evicted, api.conditions) == ([], [])


async def test_a_lost_model_of_a_pod_that_nothing_would_replace_is_told() -> None:
    api = Api(initialized(pod("p1", on="n1")))
    await deal_with(api, None, state=ModelState.LOST)
    assert api.evicted == []
    assert "nothing would replace the pod" in api.conditions[0]["message"]
