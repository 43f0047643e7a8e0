"""`berth upgrade-node` on the real API server, with its DaemonSet, eviction and disruption controllers. Scheduler,
kubelet and agent of the node are played: a pod runs as soon as it is there and ends as soon as it is told to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.report import ModelReport, ModelState, NodeReport, TritonReport
from berth.kube import paths
from berth.kube.client import KubeClient
from berth.kube.errors import Conflict, KubeResponseError, NotFound
from berth.kube.times import micro_time, utc_now
from berth.runtime.options import parse_options
from binder.cli.upgrade_node import NodeUpgrade, UpgradeOptions
from localcluster.cluster import LocalCluster
from tests.cluster.accounts import speaking_as
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

Json = dict[str, Any]
KEYS = Keys()
NODE, SYSTEM = "upgrade-1", "upgrade-probe"
PODS, NODES = paths.pods(SYSTEM), paths.node(NODE)
APPS = "/apis/apps/v1/namespaces"
BUDGET = f"/apis/policy/v1/namespaces/{SYSTEM}/poddisruptionbudgets"
NAMES = ("berth-server", "berth-agent")
CHOICE = GpuChoice(GpuUuid("GPU-x"), 0, 1).encode()


def template(name: str, **spec: Any) -> Json:
    return {
        "metadata": {"labels": {"app": name}},
        "spec": {
            "schedulerName": "nobody",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "any", "env": []}],
            **spec,
        },
    }


def daemon_set(name: str) -> Json:
    spec = {
        "selector": {"matchLabels": {"app": name}},
        "updateStrategy": {"type": "OnDelete"},
        "template": template(name, nodeSelector={"probe": "upgrade"}),
    }
    return {"metadata": {"name": name}, "spec": spec}


class Node:
    """What a scheduler, a kubelet and an agent do for this one."""

    def __init__(self, client: KubeClient, binder: KubeClient) -> None:
        self._client, self._binder = client, binder
        self.models = 1  # pods of the Deployment that are placed here; others wait for another node

    async def live(self) -> None:
        while True:
            with suppress(NotFound, Conflict, KubeResponseError):
                await self._turn()
            await asyncio.sleep(0.1)

    async def _turn(self) -> None:
        pods = (await self._client.get(PODS))["items"]
        for pod in pods:
            await self._care_for(pod)
        here = [pod for pod in pods if KEYS.gpu in (pod["metadata"].get("annotations") or {})]
        report = NodeReport(
            server="triton",
            capabilities=(),
            triton=TritonReport(ready=True, version="2"),
            gpus=(),
            models=tuple(_model(pod) for pod in here),
        )
        await self._client.patch(NODES, {"metadata": {"annotations": {KEYS.report: report.encode()}}})
        lease = paths.leases(f"{SYSTEM}-nodes")
        beat = {"spec": {"renewTime": micro_time(utc_now()), "leaseDurationSeconds": 40}}
        try:
            await self._client.patch(f"{lease}/berth-agent-{NODE}", beat)
        except NotFound:
            await self._client.create(lease, {**beat, "metadata": {"name": f"berth-agent-{NODE}"}})

    async def _care_for(self, pod: Json) -> None:
        meta, path = pod["metadata"], paths.pod(SYSTEM, pod["metadata"]["name"])
        if "deletionTimestamp" in meta:
            await self._client.delete(path, grace_seconds=0)
        elif "nodeName" not in pod["spec"]:
            await self._place(meta, path)
        elif pod.get("status", {}).get("phase") != "Running":
            ready = {"type": "Ready", "status": "True"}
            await self._client.patch(
                f"{path}/status", {"status": {"phase": "Running", "conditions": [ready]}}
            )

    async def _place(self, meta: Json, path: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        if meta["labels"]["app"] in NAMES:
            await self._client.create(
                f"{path}/binding", {"metadata": {"name": meta["name"]}, "target": target}
            )
        elif self.models:
            self.models -= 1
            chosen = {"name": meta["name"], "annotations": {KEYS.gpu: CHOICE}}
            await self._binder.create(f"{path}/binding", {"metadata": chosen, "target": target})


def _model(pod: Json) -> ModelReport:
    meta = pod["metadata"]
    return ModelReport(
        pod_uid=PodUid(meta["uid"]),
        namespace=SYSTEM,
        pod_name=meta["name"],
        model_name=ModelName("m"),
        gpu=GpuUuid("GPU-x"),
        requested_bytes=1,
        state=ModelState.READY,
    )


@pytest_asyncio.fixture(loop_scope="session")
async def node(cluster: LocalCluster, tmp_path: Path) -> AsyncIterator[KubeClient]:
    """A node with both pods of Berth, of which there is a newer revision, and one model with a budget that
    lets no pod go."""
    client = cluster.client
    for name in (SYSTEM, f"{SYSTEM}-nodes"):
        await client.create(paths.NAMESPACES, {"metadata": {"name": name}})
        with suppress(Conflict):
            account = {"metadata": {"name": "default"}}
            await client.create(f"{paths.NAMESPACES}/{name}/serviceaccounts", account)
    await client.create(paths.NODES, {"metadata": {"name": NODE, "labels": {"probe": "upgrade"}}})
    for name in NAMES:
        await client.create(f"{APPS}/{SYSTEM}/daemonsets", daemon_set(name))
    selector = {"matchLabels": {"app": "model"}}
    deployment = {"replicas": 1, "selector": selector, "template": template("model")}
    await client.create(f"{APPS}/{SYSTEM}/deployments", {"metadata": {"name": "model"}, "spec": deployment})
    await client.create(
        BUDGET, {"metadata": {"name": "model"}, "spec": {"maxUnavailable": 0, "selector": selector}}
    )
    async with speaking_as(cluster, "berth-binder", tmp_path) as binder:
        living = asyncio.create_task(Node(client, binder).live())
        try:
            await eventually(lambda: _running(client, 3), what="the node's pods")
            for name in NAMES:
                await _change(client, name)
            yield client
        finally:
            await client.delete(f"{APPS}/{SYSTEM}/deployments/model")
            for name in NAMES:
                await client.delete(f"{APPS}/{SYSTEM}/daemonsets/{name}")
            await eventually(lambda: _running(client, 0), what="an empty namespace")
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            await client.delete(NODES)


async def _running(client: KubeClient, count: int) -> None:
    pods = (await client.get(PODS))["items"]
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    assert len(running) == count, [pod["metadata"]["name"] for pod in pods]


async def _change(client: KubeClient, name: str) -> None:
    """A new revision, as a new image would be."""
    env = [{"name": "main", "image": "any", "env": [{"name": "NEW", "value": "yes"}]}]
    path = f"{APPS}/{SYSTEM}/daemonsets/{name}"
    await client.patch(path, {"spec": {"template": {"spec": {"containers": env}}}})


async def _is_new(client: KubeClient) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for pod in (await client.get(PODS))["items"]:
        new = bool(pod["spec"]["containers"][0].get("env"))
        found.setdefault(pod["metadata"]["labels"]["app"], []).append(new)
    return found


def upgrade(client: KubeClient, *argv: str, say: Callable[[str], None]) -> Awaitable[None]:
    argv = (NODE, f"--system-namespace={SYSTEM}", "--timeout=60", *argv)
    options = parse_options(UpgradeOptions, process="upgrade-node", summary="", argv=argv, environ={})
    return NodeUpgrade(client, options, say=say, pause_seconds=0.2).run(asyncio.Event())


async def test_a_node_is_upgraded_within_the_budgets_of_its_models(node: KubeClient) -> None:
    said: list[str] = []
    # The agent first, and its model stays; OnDelete: a change alone replaces nothing.
    assert await _is_new(node) == {"berth-server": [False], "berth-agent": [False], "model": [False]}
    (model,) = (await node.get(PODS, labelSelector="app=model"))["items"]
    await upgrade(node, "--agent-only", say=said.append)
    assert await _is_new(node) == {"berth-server": [False], "berth-agent": [True], "model": [False]}
    assert (await node.get(paths.pod(SYSTEM, model["metadata"]["name"])))["metadata"]["uid"] == model[
        "metadata"
    ]["uid"]
    assert not any("cordoned" in line for line in said)

    # Then Triton, for which the model must go, which its budget does not allow at first.
    waits = asyncio.Event()

    def hear(line: str) -> None:
        said.append(line)
        if "disruption budget" in line:
            waits.set()

    running = asyncio.ensure_future(upgrade(node, say=hear))
    async with asyncio.timeout(60):
        await waits.wait()
    assert any("The disruption budget model needs 1 healthy pods" in line for line in said)  # node D8
    assert (await node.get(NODES))["spec"]["unschedulable"] is True
    assert (await _is_new(node))["berth-server"] == [False]
    await node.patch(f"{BUDGET}/model", {"spec": {"maxUnavailable": 1}})
    await running
    assert await _is_new(node) == {"berth-server": [True], "berth-agent": [True], "model": [False]}
    (successor,) = (await node.get(PODS, labelSelector="app=model"))["items"]
    assert "nodeName" not in successor["spec"]
    found = await node.get(NODES)
    assert "unschedulable" not in found["spec"]
    assert KEYS.cordoned_by not in found["metadata"]["annotations"]
    assert said[-2:] == [f"uncordoned {NODE}", f"{NODE} is up to date"]
