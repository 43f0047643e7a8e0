"""The extender's wire: Go's field names, names instead of nodes, one clear error for what cannot be read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from aiohttp.test_utils import TestClient, TestServer

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import CodeReport, CodeRule
from berth.kube.errors import response_error
from berth.kube.informer import Change, ChangeKind
from binder.api.extender import BEST_SCORE, Extender
from binder.api.leader import LeaderOnly
from binder.loop.scheduler import Scheduler
from tests.fakes.binder import scheduler_of
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report


class Api:
    """Holds one pod; takes its Binding."""

    def __init__(self) -> None:
        self.pod: dict[str, Any] | None = pod("p1", mem="4Gi", schedulerName="other")
        self.bound: list[dict[str, Any]] = []

    async def get(self, path: str) -> dict[str, Any]:
        if self.pod is None:
            raise response_error(404, "NotFound", path)
        return self.pod

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.bound.append(body)
        return {}


def make(leader: str = "") -> tuple[Api, Scheduler, Extender]:
    """n1 has 16 GiB free, n2 8 of 16, n3 too little and a taint that is not Berth's affair."""
    api = Api()
    scheduler = scheduler_of(api)
    nodes = {
        "n1": {"says": report(gpu("GPU-1"))},
        "n2": {"says": report(gpu("GPU-2", other_use_bytes=8 * GIB)), "unschedulable": True},
        "n3": {"says": report(gpu("GPU-3", total=2 * GIB))},
    }
    for name, facts in nodes.items():
        scheduler.on_node(Change(ChangeKind.SET, node(name, **facts)))  # type: ignore[arg-type]
        scheduler.cluster.decider.table.beat(NodeName(name), np.inf)
    scheduler.leads = not leader
    return (
        api,
        scheduler,
        Extender(scheduler, api, LeaderOnly(lambda: scheduler.leads, lambda: leader), keys=KEYS),
    )  # type: ignore[arg-type]


async def post(extender: Extender, verb: str, body: Any) -> tuple[int, Any]:
    async with TestClient(TestServer(extender.application())) as client:
        answer = await client.post(f"/{verb}", json=body, allow_redirects=False)
        return answer.status, (await answer.json()) if answer.status != 307 else answer.headers["Location"]


ARGS = {"Pod": pod("p1", mem="4Gi"), "NodeNames": ["n1", "n2", "n3", "n4"]}


async def test_filter_judges_gpu_memory_and_leaves_the_rest_to_kube_scheduler() -> None:
    _, _, extender = make()
    status, answer = await post(extender, "filter", ARGS)
    assert (status, answer["NodeNames"]) == (200, ["n1", "n2"])
    failed = answer["FailedAndUnresolvableNodes"]
    assert failed["n3"] == "GPUMemoryInsufficient: 2 GiB short on the best GPU"
    assert "not known" in failed["n4"]


async def test_filter_tells_each_node_s_own_reason_and_not_what_kube_scheduler_sees_to() -> None:
    """Here a claim that waits for its first consumer, which is kube-scheduler's to bind."""
    _, scheduler, extender = make()
    volumes = scheduler.cluster.facts.volumes
    volumes.claims["team", "c"] = {
        "metadata": {"namespace": "team", "name": "c"},
        "spec": {"storageClassName": "late"},
    }
    volumes.classes["late"] = {"volumeBindingMode": "WaitForFirstConsumer"}
    scheduler.cluster.decider.table.beat(NodeName("n1"), -np.inf)
    scheduler.on_node(Change(ChangeKind.SET, node("n2", says="{")))
    claim = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    names = ["n1", "n2", "n3"]
    _, answer = await post(
        extender, "filter", {"Pod": pod("p1", mem="4Gi", volumes=claim), "NodeNames": names}
    )
    failed = answer["FailedAndUnresolvableNodes"]
    assert failed["n1"].startswith("StaleNodeFacts: no heartbeat")
    assert failed["n2"].startswith("UnreadableNodeReport: node report")
    assert failed["n3"] == "GPUMemoryInsufficient: 2 GiB short on the best GPU"


async def test_filter_and_bind_keep_namespaces_apart_where_a_node_does() -> None:
    api, scheduler, extender = make()
    apart = report(gpu("GPU-1"), code=CodeReport(CodeRule.NAMESPACE, "other"))
    scheduler.on_node(Change(ChangeKind.SET, node("n1", says=apart)))
    _, answer = await post(extender, "filter", ARGS)
    assert answer["NodeNames"] == ["n2"]
    assert answer["FailedAndUnresolvableNodes"]["n1"].startswith("CodeOfAnotherNamespace: ")
    _, answer = await post(
        extender, "bind", {"PodName": "p1", "PodNamespace": "team", "PodUID": "p1", "Node": "n1"}
    )
    assert answer["Error"].startswith("node n1: CodeOfAnotherNamespace")
    assert api.bound == []


NO_PODS: dict[str, dict[str, Any]] = {
    "containers that are no list": {"containers": 7},
    "a container that is no object": {"containers": ["x"]},
    "resources that are a list": {"containers": [{"name": "c", "resources": [1]}]},
    "volumes that are text": {"containers": [], "volumes": "abc"},
    "affinity that is a list": {"containers": [], "affinity": ["x"]},
    "tolerations that are a number": {"containers": [], "tolerations": 3},
    "a priority that is text": {"containers": [], "priority": "high"},
    "claims that are named by a number": {"containers": [], "volumes": [{"name": "v", "ephemeral": 1}, 2]},
    "spread over nothing": {"containers": [], "topologySpreadConstraints": [{}]},
    "ports that are text": {"containers": [{"name": "c", "ports": [{"hostPort": "x", "protocol": []}]}]},
}


@pytest.mark.parametrize("case", sorted(NO_PODS))
@pytest.mark.parametrize("verb", ["filter", "prioritize"])
async def test_what_is_no_pod_is_one_clear_error(case: str, verb: str) -> None:
    _, _, extender = make()
    body = {"Pod": {"metadata": {"name": "p1", "uid": "p1"}, "spec": NO_PODS[case]}, "NodeNames": ["n1"]}
    status, answer = await post(extender, verb, body)
    assert status in (200, 400), answer
    if status == 400:
        assert answer["error"]


TOO_MUCH = {
    "cpu": ({"cpu": "3900m"}, "ResourceInsufficient: cpu"),
    "memory": ({"memory": "7Gi"}, "ResourceInsufficient: memory"),
    "ephemeral storage": ({"ephemeral-storage": "9Gi"}, "ResourceInsufficient: ephemeral-storage"),
    "pods": ({}, "TooManyPods"),
}


@pytest.mark.parametrize("case", sorted(TOO_MUCH))
async def test_bind_refuses_what_the_kubelet_would_refuse_after_it(case: str) -> None:
    """Pods of the binder's own have been given a place since kube-scheduler looked."""
    asks, why = TOO_MUCH[case]
    api, scheduler, extender = make()
    allocatable = {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "10Gi", "pods": "1"}
    scheduler.on_node(Change(ChangeKind.SET, node("n1", says=report(gpu("GPU-1")), allocatable=allocatable)))
    api.pod = pod("p1", mem="4Gi", requests=asks)
    requests = {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "2Gi"}
    binding = {"PodName": "p1", "PodNamespace": "team", "PodUID": "p1", "Node": "n1"}
    other = pod("other", mem=None, requests=requests, on="n1", phase="Running")
    if case != "pods":
        allocatable["pods"] = "10"
        scheduler.on_node(
            Change(ChangeKind.SET, node("n1", says=report(gpu("GPU-1")), allocatable=allocatable))
        )
    scheduler.on_pod(Change(ChangeKind.SET, other))
    _, answer = await post(extender, "bind", binding)
    assert why in answer["Error"]
    assert (api.bound, scheduler.state.assumed_count) == ([], 0)
    scheduler.on_pod(Change(ChangeKind.GONE, other))
    assert await post(extender, "bind", binding) == (200, {"Error": ""})


async def test_bind_leaves_to_kube_scheduler_what_it_may_count_otherwise() -> None:
    """A resource that another extender manages is on no node's list."""
    api, _, extender = make()
    api.pod = pod("p1", mem="4Gi", requests={"example.com/managed-elsewhere": "1"})
    binding = {"PodName": "p1", "PodNamespace": "team", "PodUID": "p1", "Node": "n1"}
    assert await post(extender, "bind", binding) == (200, {"Error": ""})


def test_kube_scheduler_shows_the_extender_every_node_that_is_feasible() -> None:
    """Left to itself it looks at a part of a large cluster, and the best GPU may be in the other."""
    root = Path(__file__).parents[3]
    settings = yaml.safe_load((root / "deploy/extender/scheduler.yaml").read_text())
    assert settings["percentageOfNodesToScore"] == 100


async def test_prioritize_gives_the_best_node_alone_the_highest_score() -> None:
    _, _, extender = make()
    _, answer = await post(extender, "prioritize", ARGS)
    assert {one["Host"]: one["Score"] for one in answer} == {"n1": 0, "n2": BEST_SCORE, "n3": 0, "n4": 0}


async def test_bind_writes_the_gpu_and_counts_it_at_once() -> None:
    api, scheduler, extender = make()
    binding = {"PodName": "p1", "PodNamespace": "team", "PodUID": "p1", "Node": "n2"}
    assert await post(extender, "bind", binding) == (200, {"Error": ""})
    (body,) = api.bound
    choice = GpuChoice(GpuUuid("GPU-2"), 0, 4 * GIB)
    assert GpuChoice.decode(body["metadata"]["annotations"][KEYS.gpu]) == choice
    assert scheduler.state.view(NodeName("n2")).reserved_on(GpuUuid("GPU-2")) == 4 * GIB
    _, answer = await post(extender, "bind", binding)
    assert "being placed already" in answer["Error"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no room": ({"Node": "n3"}, "GPUMemoryInsufficient"),
    "no such node": ({"Node": "n9"}, "not known"),
    "another pod of that name": ({"PodUID": "other"}, "not a pending model pod"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
async def test_bind_says_why_not_and_nothing_is_held(case: str) -> None:
    changes, why = REFUSED[case]
    api, scheduler, extender = make()
    binding = {"PodName": "p1", "PodNamespace": "team", "PodUID": "p1", "Node": "n1", **changes}
    status, answer = await post(extender, "bind", binding)
    assert status == 200
    assert why in answer["Error"]
    assert (api.bound, scheduler.state.assumed_count) == ([], 0)


async def test_a_pod_that_is_no_model_pod_cannot_be_bound_through_it() -> None:
    api, _, extender = make()
    api.pod = pod("p1", mem=None)
    _, answer = await post(
        extender, "bind", {"PodName": "p1", "PodNamespace": "team", "PodUID": "p1", "Node": "n1"}
    )
    assert "not a pending model pod" in answer["Error"]


@pytest.mark.parametrize("body", [[], {}, {"Pod": 1, "NodeNames": []}, {"Pod": {}, "NodeNames": [1]}])
async def test_what_cannot_be_read_is_one_clear_error(body: Any) -> None:
    _, _, extender = make()
    status, answer = await post(extender, "filter", body)
    assert status == 400
    assert "request body" in answer["error"]


async def test_a_standby_sends_its_caller_to_the_leader() -> None:
    _, _, extender = make(leader="http://10.0.0.7:8481")
    assert await post(extender, "filter", ARGS) == (307, "http://10.0.0.7:8481/filter")


BINDING = {"PodName": "p1", "PodNamespace": "team", "PodUID": "p1", "Node": "n1"}
KUBE_SCHEDULERS_AFFAIRS: dict[str, dict[str, Any]] = {
    "selector": {"nodeSelector": {"zone": "a"}},
    "affinity": {
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}},
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]},
        }
    },
    "taints and cordon": {"tolerations": []},
    "host port": {
        "containers": [
            {"name": "c", "ports": [{"hostPort": 80}], "resources": {"limits": {KEYS.gpu_mem: "4Gi"}}}
        ]
    },
    "claim": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "none"}}]},
    "device claims": {"resourceClaims": [{"name": "r"}]},
    "CPU": {"requests": {"cpu": "100"}},
}


@pytest.mark.parametrize("case", KUBE_SCHEDULERS_AFFAIRS)
async def test_filter_leaves_to_kube_scheduler_what_it_decides_itself(case: str) -> None:
    _, scheduler, extender = make()
    taken = pod("taken", mem=None, on="n1", containers=[{"name": "c", "ports": [{"hostPort": 80}]}])
    scheduler.on_pod(Change(ChangeKind.SET, taken))
    one = {"Pod": pod("p1", **{"mem": "4Gi", **KUBE_SCHEDULERS_AFFAIRS[case]}), "NodeNames": ["n1"]}
    _, answer = await post(extender, "filter", one)
    assert answer == {"NodeNames": ["n1"], "FailedAndUnresolvableNodes": {}}


async def test_filter_tells_what_is_wrong_with_a_pod() -> None:
    _, _, extender = make()
    _, answer = await post(extender, "filter", {"Pod": pod("p1", mem="1.5"), "NodeNames": ["n1"]})
    assert answer["Error"].startswith("the pod cannot be placed: container 'proxy'")


def bound_to(node_name: str) -> dict[str, Any]:
    return pod("p1", mem="4Gi", on=node_name)


def going() -> dict[str, Any]:
    one = pod("p1", mem="4Gi")
    one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return one


# The pod as it is when kube-scheduler asks to bind it to n1; the answer. "" is done.
AS_IT_IS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "gone": (None, "pod team/p1: 404 NotFound"),
    "bound there already": (bound_to("n1"), ""),
    "bound elsewhere": (bound_to("n2"), "pod team/p1 is on node n2 already"),
    "being deleted": (going(), "pod team/p1 is not a pending model pod with uid p1"),
    "unreadable": (pod("p1", mem="1.5"), "the pod cannot be placed: container 'proxy'"),
}


@pytest.mark.parametrize("case", AS_IT_IS)
async def test_bind_looks_at_the_pod_as_it_is_now(case: str) -> None:
    api, scheduler, extender = make()
    api.pod, error = AS_IT_IS[case]
    _, answer = await post(extender, "bind", BINDING)
    assert answer["Error"].startswith(error)
    assert bool(answer["Error"]) is bool(error)
    assert (api.bound, scheduler.state.assumed_count) == ([], 0)


async def test_a_binding_that_fails_is_reported_and_holds_nothing() -> None:
    api, scheduler, extender = make()

    async def refuse(path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise response_error(403, "Forbidden", "no")

    api.create = refuse  # type: ignore[method-assign]
    assert await post(extender, "bind", BINDING) == (200, {"Error": "403 Forbidden: no"})
    assert scheduler.state.assumed_count == 0


@pytest.mark.parametrize("verb", ["filter", "prioritize", "bind"])
async def test_a_body_that_is_no_text_is_one_clear_error(verb: str) -> None:
    _, _, extender = make()
    async with TestClient(TestServer(extender.application())) as client:
        answer = await client.post(f"/{verb}", data=b"\xff\xfe{}")
        assert answer.status == 400
        assert (await answer.json())["error"].startswith("request body is not UTF-8")


@pytest.mark.parametrize(
    ("free", "points"),
    [
        ({"a": 16, "b": 12, "c": 8, "d": 4}, {"a": 0, "b": 3, "c": 6, "d": 10}),
        ({"a": 8, "b": 8, "c": 8, "d": 8}, {"a": 10, "b": 0, "c": 0, "d": 0}),
        ({"a": 2, "b": 8, "c": 4, "d": 2}, {"a": 0, "b": 0, "c": 10, "d": 0}),
        ({"a": 2, "b": 2, "c": 2, "d": 2}, {"a": 0, "b": 0, "c": 0, "d": 0}),
    ],
)
async def test_points_follow_the_strategy_and_the_best_is_one(
    free: dict[str, int], points: dict[str, int]
) -> None:
    """The fullest first; 0 for those that do not take it."""
    _, scheduler, extender = make()
    for name, gib in free.items():
        scheduler.on_node(Change(ChangeKind.SET, node(name, says=report(gpu(name, total=gib * GIB)))))
    args = {"Pod": pod("p1", mem="4Gi"), "NodeNames": [*free, "unknown"]}
    _, answer = await post(extender, "prioritize", args)
    assert {one["Host"]: one["Score"] for one in answer} == points | {"unknown": 0}


async def test_what_is_requested_is_learned_once_for_each_pod() -> None:
    _, scheduler, extender = make()
    learned: list[str] = []
    scheduler.prices.note = lambda demand: learned.append(demand.model.ref.name)  # type: ignore[method-assign]
    for uid in ("p1", "p2", "p1", "p1"):
        await post(extender, "filter", {"Pod": pod(uid), "NodeNames": []})
    assert learned == ["p1", "p2"]


UNREADABLE_PODS: dict[str, tuple[str, Any]] = {
    "uid a list": ("uid", []),
    "uid an object": ("uid", {}),
    "uid a number": ("uid", 7),
    "namespace a list": ("namespace", ["team"]),
    "namespace an object": ("namespace", {"a": "b"}),
    "labels a list": ("labels", ["a"]),
    "a label a list": ("labels", {"a": []}),
    "a label an object": ("labels", {"a": {"b": "c"}}),
    "a label null": ("labels", {"a": None}),
    "annotations a text": ("annotations", "x"),
    "an annotation a list": ("annotations", {"x": []}),
}


@pytest.mark.parametrize("verb", ["filter", "prioritize"])
@pytest.mark.parametrize("case", sorted(UNREADABLE_PODS))
async def test_metadata_that_no_api_server_gives_is_one_clear_error(case: str, verb: str) -> None:
    """binder L8: what could not be hashed was a 500."""
    key, value = UNREADABLE_PODS[case]
    one = pod("p1", mem="4Gi")
    one["metadata"][key] = value
    _, _, extender = make()
    status, answer = await post(extender, verb, {"Pod": one, "NodeNames": ["n1"]})
    assert status == 400
    assert answer["error"].startswith(f"request body.Pod.metadata.{key}")
    assert ": Expected `" in answer["error"]


@pytest.mark.parametrize("place", ["nodeSelector", "tolerations", "affinity", "topologySpreadConstraints"])
@pytest.mark.parametrize(
    "value", [[[]], {"a": []}, {"a": {"b": []}}, [{"key": []}], [{"a": {}}], "x", 7, [7]]
)
async def test_no_spec_is_a_500(place: str, value: Any) -> None:
    """binder L8."""
    one = pod("p1", mem="4Gi")
    one["spec"][place] = value
    _, _, extender = make()
    for verb in ("filter", "prioritize"):
        status, _ = await post(extender, verb, {"Pod": one, "NodeNames": ["n1"]})
        assert status in (200, 400)


@pytest.mark.parametrize("verb", ["filter", "prioritize"])
async def test_more_nodes_than_a_cluster_has_are_refused_before_anything_is_done(verb: str) -> None:
    """binder L8: 400 000 names held the loop for 0.6 s."""
    _, _, extender = make()
    names = [f"n{i}" for i in range(20_001)]
    status, answer = await post(extender, verb, {"Pod": pod("p1"), "NodeNames": names})
    assert status == 400
    assert "NodeNames has 20001 names; 20000 at most are answered" in answer["error"]
    status, answer = await post(extender, verb, {"Pod": pod("p1"), "NodeNames": names[:-1]})
    assert status == 200
