"""kill -9 of each process in mid-operation: whatever dies, what is loaded comes to equal what is wanted.

After each round: no model without a pod, no pod Ready without its model, no GPU over its memory.
"""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Callable

import pytest
from aiohttp import ClientError
from tritonclient.utils import InferenceServerException

from berth.contract.gpu_choice import GpuChoice
from berth.contract.memory import free_bytes, held_bytes
from berth.contract.report import ModelState, NodeReport
from binder import top
from localcluster.inference import infer_rest
from localcluster.parts import Part
from localcluster.samples import SIMPLE_MODEL, model_deployment
from tests.e2e.support import KEYS, User, eventually, is_ready, packed

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODELS = ("red", "green", "blue")


async def settled(user: User) -> None:
    """Every model serves, and the three invariants hold."""

    async def check() -> None:
        listed = (await user.client.get("/api/v1/namespaces/default/pods"))["items"]
        live = {pod["metadata"]["uid"]: pod for pod in listed}
        for app in MODELS:
            assert any(is_ready(pod) for pod in await user.pods(app)), app
        for name in user.cluster.nodes:
            node = await user.client.get(f"/api/v1/nodes/{name}")
            report = NodeReport.decode(node["metadata"]["annotations"][KEYS.report])
            for model in report.models:
                assert model.pod_uid in live, f"{model.model_name} on {name} has no pod"
            for gpu in report.gpus:
                models = [m for m in report.models if gpu.uuid in m.gpus]
                held = sum(held_bytes(m.requested_bytes, m.measured_bytes) for m in models)
                left = free_bytes(gpu, held)
                assert left is not None
                assert left >= 0, f"{gpu.uuid} is over its memory by {-left}"
            loaded = {m.pod_uid for m in report.models if m.state is ModelState.READY}
            for uid, pod in live.items():
                if pod["spec"].get("nodeName") == name and is_ready(pod):
                    assert uid in loaded, f"{pod['metadata']['name']} is Ready without its model"
                    assert GpuChoice.decode(pod["metadata"]["annotations"][KEYS.gpu])
            assert sorted(user.repository(name)) == sorted(str(m.model_name) for m in report.models)

    async def check_and_use() -> None:
        await check()
        for app in MODELS:
            pod = next((pod for pod in await user.pods(app) if is_ready(pod)), None)
            assert pod is not None, app
            try:
                await infer_rest(f"{pod['status']['podIP']}:9000", app)
            except (InferenceServerException, ClientError) as error:
                # A probe needs a moment to notice what has just been killed.
                raise AssertionError(f"{app} does not answer yet: {error}") from error

    await eventually(check_and_use, seconds=120, what="every model to serve again")


async def deploy_all(user: User, source: str) -> None:
    for app in MODELS:
        # One of them is placed by kube-scheduler with the extender.
        spec = {"schedulerName": "trtis-kube-scheduler"} if app == "blue" else {}
        await user.apply(model_deployment(app, source=source, gpu_mem="3Gi", pod_spec=spec))


@pytest.fixture
def slow(url: Callable[[str, bytes], str]) -> str:
    """The URL of the sample model, but for a load of three seconds: long enough to be hit by a kill."""
    model = (SIMPLE_MODEL / "1" / "model.py").read_bytes()
    model += b"\n    def initialize(self, args):\n        import time\n\n        time.sleep(3)\n"
    config = (SIMPLE_MODEL / "config.pbtxt").read_bytes()
    return url("slow.tar.gz", packed(**{"config.pbtxt": config, "1/model.py": model}))


async def loading(user: User, app: str, *, not_of: str) -> str:
    """The node whose Triton is loading the app's model right now, for another pod than that one."""

    async def check() -> str:
        for node in user.cluster.nodes:
            for model in (await user.report(node))["models"]:
                if model["modelName"] == app and model["podUid"] != not_of and model["state"] == "loading":
                    return node
        raise AssertionError(f"{app} is not being loaded")

    return await eventually(check, seconds=60, what="a load to begin")


async def killed(part: Part) -> None:
    """kill -9, and it is there again."""

    async def runs() -> int:
        assert part.pid is not None
        return part.pid

    before = await eventually(runs, what=f"{part.name} to run")
    part.kill()

    async def runs_again() -> None:
        assert part.pid not in (None, before)

    await eventually(runs_again, what=f"{part.name} to run again")


async def killed_proxy(user: User, app: str) -> None:
    (pod,) = await user.ready(app)

    async def pid() -> int:
        try:
            return user.cluster.pid_of("default", pod["metadata"]["name"], "proxy")
        except ProcessLookupError as error:
            raise AssertionError from error

    before = await pid()
    os.kill(before, signal.SIGKILL)

    async def runs_again() -> None:
        assert await pid() != before

    await eventually(runs_again, what="the proxy to run again")


@pytest.mark.parametrize("victim", ["agent", "binder", "proxy", "triton"])
async def test_killed_in_mid_operation_again_and_again(user: User, slow: str, victim: str) -> None:
    rng = random.Random(victim)
    await deploy_all(user, slow)
    await settled(user)
    for number in range(3):
        app, bystander = rng.sample(MODELS, 2)
        (pod,) = await user.ready(app)
        meta = pod["metadata"]
        await user.client.delete(
            f"/api/v1/namespaces/default/pods/{meta['name']}", grace_seconds=rng.choice([0, 30])
        )
        if victim == "binder":  # while there is a pod to place; one of two that follow on each other leads
            await asyncio.sleep(rng.uniform(0, 0.5))
            await killed(user.cluster.binders[number % 2])
        else:
            node = user.cluster.nodes[await loading(user, app, not_of=meta["uid"])]
            if victim == "proxy":
                await killed_proxy(user, bystander)
            else:
                await killed(node.agent if victim == "agent" else node.triton)
        await settled(user)


@pytest.mark.parametrize("agent", ["runs", "starts"])
async def test_files_that_are_gone_come_back_with_a_new_pod(user: User, source: str, agent: str) -> None:
    await user.apply(model_deployment("red", source=source, gpu_mem="3Gi"))
    (before,) = await user.ready("red")
    node = user.cluster.nodes[before["spec"]["nodeName"]]
    if agent == "starts":
        await node.agent.stop()
    shutil.rmtree(node.repository / "models" / "red")
    if agent == "starts":
        await node.agent.start()
    assert "files are gone" in await user.event(before, "ModelLost")

    async def replaced() -> None:
        (pod,) = [pod for pod in await user.pods("red") if is_ready(pod)] or [before]
        assert pod["metadata"]["uid"] != before["metadata"]["uid"]

    await eventually(replaced, seconds=90, what="a new pod to serve")


async def test_a_pod_killed_hard_leaves_no_model(user: User, source: str) -> None:
    await user.apply(model_deployment("red", source=source, gpu_mem="3Gi"))
    (pod,) = await user.ready("red")
    node = pod["spec"]["nodeName"]
    await user.client.delete("/apis/apps/v1/namespaces/default/deployments/red")
    await user.client.delete(f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}", grace_seconds=0)

    async def unloaded() -> None:
        assert await user.models_on(node) == {}

    await eventually(unloaded)
    assert user.repository(node) == []


async def test_a_node_whose_agent_stops_gets_no_new_pods(user: User, source: str) -> None:
    node = user.cluster.nodes["gpu-2"]
    await node.agent.stop()
    try:

        async def stale() -> None:
            view = await top.collect(user.client, KEYS, "berth-system")
            assert [n.trouble for n in view.nodes if n.name == "gpu-2"] == ["StaleNodeFacts"]

        await eventually(stale, what="the agent's Lease to end")
        pinned = {"nodeSelector": {"kubernetes.io/hostname": "gpu-2"}}
        await user.apply(model_deployment("late", source=source, gpu_mem="1Gi", pod_spec=pinned))

        async def refused() -> str:
            return await user.event(await user.pod_of("late"), "FailedScheduling")

        message = await eventually(refused)
        assert "1 StaleNodeFacts" in message
        assert "1 NodeSelectorMismatch" in message
    finally:
        await node.agent.start()
    await user.ready("late")
