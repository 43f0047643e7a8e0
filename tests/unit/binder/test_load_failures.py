"""Failed loads: where a pod is sent away, where it must stay, and for how long a node is left out."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.report import Failure, ModelReport, ModelState
from berth.kube.errors import KubeUnreachable, response_error
from berth.kube.informer import Change, ChangeKind
from binder.api.metrics import BinderMetrics
from binder.cache.cluster import Cluster
from binder.engine.decision import Decider, Placement, Refusal
from binder.engine.score import make_strategy
from binder.loop import replacing
from binder.loop.replacing import Replacer
from binder.loop.scheduler import Scheduler
from binder.pod.demand import parse_demand
from binder.rules.filters import CODE
from binder.rules.load_failures import EXCLUDED_SECONDS, MOST_FAILURES, LoadFailures
from binder.rules.reasons import Kind
from tests.fakes.objects import KEYS, gpu, listed, node, pod, report
from tests.fakes.values import replace

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
    assert failures.note(("team", "m"), N1, PodUid("p1"))
    refusal = decider.decide(same)
    assert isinstance(refusal, Refusal)
    assert refusal.codes[0] == CODE[Kind.EXCLUDED]
    assert isinstance(decider.decide(parse_demand(pod("other"), KEYS)), Placement)
    clock.now = EXCLUDED_SECONDS
    assert isinstance(decider.decide(same), Placement)


def test_after_so_many_failures_nothing_is_tried_any_more() -> None:
    failures = LoadFailures(Clock())
    pods = [PodUid(f"p{i}") for i in range(MOST_FAILURES)]
    tries = [failures.note(("team", "m"), NodeName(f"n-{uid}"), uid) for uid in pods]
    assert tries == [True] * (MOST_FAILURES - 1) + [False]


def test_a_failure_that_is_told_again_counts_once() -> None:
    failures = LoadFailures(Clock())
    assert all(failures.note(("team", "m"), N1, PodUid("p1")) for _ in range(10 * MOST_FAILURES))


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
    "quarantined": (
        owned("p1", on="n1"),
        Failure.QUARANTINED,
        "kubectl annotate node n1 seldon.io/trtis-lift-quarantine=all",
    ),
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


class Refusing(Api):
    """A budget, or an API server in trouble, in the way of so many evictions."""

    def __init__(self, *pods: dict[str, Any], errors: list[Exception]) -> None:
        super().__init__(*pods)
        self.errors, self.tries = errors, 0

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return await super().create(path, body)


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause is waited for."""
    sleep = asyncio.sleep
    monkeypatch.setattr(replacing.asyncio, "sleep", lambda _: sleep(0))


ERRORS = {
    "budget": response_error(429, "TooManyRequests", "disruption budget"),
    "server": response_error(500, "", "x"),
    "silence": KubeUnreachable("timed out"),
}


@pytest.mark.parametrize("case", sorted(ERRORS))
async def test_an_eviction_that_is_refused_for_a_while_is_one_failed_load(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch)
    api = Refusing(owned("p1", on="n1"), errors=[ERRORS[case]] * 4)
    await deal_with(api, Failure.CAPACITY)
    assert (api.tries, api.evicted, api.conditions) == (5, ["p1"], [])


class Two:
    """A scheduler with two nodes, n1 of which could not load p1."""

    def __init__(self, api: Api, *, free_gib: int) -> None:
        self.events = Events()
        self.scheduler = Scheduler(
            api,  # type: ignore[arg-type]
            keys=KEYS,
            scheduler_name="trtis-scheduler",
            strategy=make_strategy("binpack", np.random.default_rng(1)),
            events=self.events,  # type: ignore[arg-type]
            metrics=BinderMetrics(CollectorRegistry()),
        )
        self.node("n2", report(gpu("GPU-2", total=free_gib * 1024**3)))
        self.node("n1", report(gpu(), models=(failed("p1", Failure.CAPACITY),)))
        for one in api.pods.values():
            self.scheduler.on_pod(Change(ChangeKind.SET, one))

    def node(self, name: str, says: Any, kind: ChangeKind = ChangeKind.SET) -> None:
        self.scheduler.on_node(Change(kind, node(name, says=says)))
        self.scheduler.cluster.decider.table.beat(NodeName(name), math.inf)

    async def work(self) -> None:
        """What a leader does about failed loads, until it waits."""
        background = self.scheduler.background()
        task = asyncio.create_task(background.pop("replacing"))
        for other in background.values():
            other.close()
        for _ in range(30):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def on_n1(**more: Any) -> dict[str, Any]:
    return owned("p1", on="n1", choice=GpuChoice(GpuUuid("GPU-a"), 0, 1), mem="4Gi", **more)


async def test_a_pod_is_moved_only_where_another_node_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(on_n1())
    two = Two(api, free_gib=2)
    await two.work()
    assert api.evicted == []
    (condition,) = api.conditions
    assert "no other node has room" in condition["message"]
    await two.work()
    assert len(api.conditions) == 1  # told once
    two.node("n2", report(gpu("GPU-2")))
    await two.work()
    assert api.evicted == ["p1"]


async def test_the_pod_itself_does_not_stand_in_the_way_of_its_move() -> None:
    term = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "m"}}}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    one = on_n1(affinity=apart)
    one["metadata"]["labels"] = {"app": "m"}
    api = Api(one)
    two = Two(api, free_gib=16)
    for name, says in (
        ("n1", report(gpu(), models=(failed("p1", Failure.CAPACITY),), generation=2)),
        ("n2", report(gpu("GPU-2"))),
    ):
        two.scheduler.on_node(Change(ChangeKind.SET, node(name, says=says, labels={"zone": "a"})))
    await two.work()
    assert api.evicted == ["p1"]


async def test_a_standby_remembers_only_the_failures_that_there_are() -> None:
    """For weeks it hears of failed loads whose pods come and go, and then it leads."""
    api = Api(*(owned(f"p{i}", on="n1") for i in range(60)))
    two = Two(api, free_gib=16)
    for number in range(60):
        failing = (failed(f"p{number}", Failure.INVALID_MODEL),)
        two.node("n1", report(gpu(), models=failing, generation=number + 2))
    two.node("n3", report(gpu("GPU-3"), models=(failed("p3", Failure.INVALID_MODEL),)))
    two.node("n3", report(gpu("GPU-3")), ChangeKind.GONE)
    await two.work()
    assert len(api.conditions) == 1  # p59's
    assert two.events.said == ["ModelLoadFailed"]


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


async def test_a_pod_that_is_no_model_is_not_replaced_whatever_a_report_says_of_it() -> None:
    one = initialized(owned("p1", on="n1"))
    one["spec"]["containers"][0]["resources"] = {}
    api = Api(one)
    await deal_with(api, None, state=ModelState.LOST)
    assert (api.evicted, api.conditions) == ([], [])


async def test_a_quarantine_is_told_as_such_once_whichever_binder_leads() -> None:
    api = Api(on_n1())
    two = Two(api, free_gib=16)
    two.node("n1", report(gpu(), models=(failed("p1", Failure.QUARANTINED),)))
    await two.work()
    (condition,) = api.conditions
    assert (condition["status"], condition["reason"]) == ("False", "ModelQuarantined")
    assert condition["message"].startswith("out of memory (no node takes these files")
    assert (two.events.said, api.evicted) == (["ModelQuarantined"], [])
    api.pods["p1"]["status"]["conditions"] = [condition]
    successor = Two(api, free_gib=16)
    successor.node("n1", report(gpu(), models=(failed("p1", Failure.QUARANTINED),), generation=2))
    await successor.work()
    assert (successor.events.said, len(api.conditions)) == ([], 1)


async def test_what_was_said_is_taken_back_when_the_model_is_loaded_after_all() -> None:
    api = Api(on_n1())
    two = Two(api, free_gib=16)
    two.node("n1", report(gpu(), models=(failed("p1", Failure.QUARANTINED),)))
    await two.work()
    two.node("n1", report(gpu(), models=(listed("p1"),)))
    await two.work()
    assert [(one["status"], one["reason"]) for one in api.conditions][1:] == [("True", "ModelLoaded")]
    two.node("n1", report(gpu(), models=(listed("p1"),), generation=3))
    await two.work()
    assert len(api.conditions) == 2


@pytest.mark.parametrize("kind", ChangeKind)
async def test_a_standby_knows_where_the_successor_of_a_replaced_pod_is_not_to_go(kind: ChangeKind) -> None:
    """It never dealt with the failed load itself, and leads from now on."""
    two = Two(Api(on_n1()), free_gib=16)
    decider, successor = two.scheduler.cluster.decider, parse_demand(owned("p2"), KEYS)

    def refused() -> list[int]:
        return [int(code) for code in decider.codes(successor) if code == CODE[Kind.EXCLUDED]]

    assert refused() == []
    going = on_n1()
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    two.scheduler.on_pod(Change(kind, going))
    assert len(refused()) == 1


@pytest.mark.parametrize(
    ("failure", "more"),
    [
        (Failure.INVALID_MODEL, {}),
        (Failure.QUARANTINED, {}),
        (Failure.CAPACITY, {"annotations": {KEYS.server: "triton"}}),
    ],
)
async def test_a_pod_that_nobody_has_replaced_and_that_ends_leaves_no_node_out(
    failure: Failure, more: dict[str, Any]
) -> None:
    two = Two(Api(on_n1(**more)), free_gib=16)
    two.node("n1", report(gpu(), models=(failed("p1", failure),), generation=2))
    two.scheduler.on_pod(Change(ChangeKind.GONE, on_n1(**more)))
    two.node("n1", report(gpu(), generation=3))
    codes = two.scheduler.cluster.decider.codes(parse_demand(owned("p2"), KEYS))
    assert CODE[Kind.EXCLUDED] not in codes
