"""The extender's wire: Go's field names, names instead of nodes, one clear error for what cannot be read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.kube.errors import response_error
from berth.kube.informer import Change, ChangeKind
from binder.extender import BEST_SCORE, Extender
from binder.metrics import BinderMetrics
from binder.scheduler import Scheduler
from binder.strategies import make_strategy
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


class Events:
    def record(self, *_: object) -> None:
        pass


def make(leader: str = "") -> tuple[Api, Scheduler, Extender]:
    """n1 has 16 GiB free, n2 8 of 16, n3 too little and a taint that is not Berth's affair."""
    api = Api()
    scheduler = Scheduler(
        api,  # type: ignore[arg-type]
        keys=KEYS,
        scheduler_name="trtis-scheduler",
        strategy=make_strategy("binpack", np.random.default_rng(1)),
        events=Events(),  # type: ignore[arg-type]
        metrics=BinderMetrics(CollectorRegistry()),
    )
    nodes = {
        "n1": {"says": report(gpu("GPU-1"))},
        "n2": {"says": report(gpu("GPU-2", foreign_bytes=8 * GIB)), "unschedulable": True},
        "n3": {"says": report(gpu("GPU-3", total=2 * GIB))},
    }
    for name, facts in nodes.items():
        scheduler.on_node(Change(ChangeKind.SET, node(name, **facts)))  # type: ignore[arg-type]
        scheduler.cluster.decider.table.beat(NodeName(name), np.inf)
    scheduler.leads = not leader
    return api, scheduler, Extender(scheduler, KEYS, lambda: leader)


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
    volumes = scheduler.cluster.volumes
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
    assert scheduler.state.view(NodeName("n2")).held_on(GpuUuid("GPU-2")) == 4 * GIB
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


async def test_a_standby_sends_its_caller_to_the_leader_or_says_that_there_is_none() -> None:
    _, _, extender = make(leader="http://10.0.0.7:8481")
    assert await post(extender, "filter", ARGS) == (307, "http://10.0.0.7:8481/filter")
    _, scheduler, extender = make()
    scheduler.leads = False
    status, _ = await post(extender, "filter", ARGS)
    assert status == 503
