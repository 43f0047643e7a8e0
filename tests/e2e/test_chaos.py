"""kill -9 of each process in mid-operation: whatever dies, what is loaded comes to equal what is wanted.

After each round: no model without a pod, no pod Ready without its model, no GPU over its memory.
"""

import asyncio
import os
import random
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
from localcluster.samples import model_deployment
from tests.e2e.support import KEYS, User, eventually, is_ready

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


def kill_proxy(user: User, rng: random.Random) -> Callable[[], object]:
    async def kill() -> None:
        pod = (await user.pods(rng.choice(MODELS)))[0]
        os.kill(user.cluster.pid_of("default", pod["metadata"]["name"], "proxy"), signal.SIGKILL)

    return kill


VICTIMS: dict[str, Callable[[User, random.Random], Callable[[], object]]] = {
    "agent": lambda user, rng: user.cluster.nodes[rng.choice(sorted(user.cluster.nodes))].agent.kill,
    "triton": lambda user, rng: user.cluster.nodes[rng.choice(sorted(user.cluster.nodes))].triton.kill,
    "binder": lambda user, rng: rng.choice(user.cluster.binders).kill,
    "proxy": kill_proxy,
}


@pytest.mark.parametrize("victim", sorted(VICTIMS))
async def test_killed_in_mid_operation_again_and_again(user: User, source: str, victim: str) -> None:
    rng = random.Random(victim)
    await deploy_all(user, source)
    await settled(user)
    for _ in range(3):
        # In mid-operation: a pod is being replaced, so something is unloading, being placed, staged or loaded.
        pod = rng.choice(await user.pods(rng.choice(MODELS)))
        await user.client.delete(
            f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}", grace_seconds=rng.choice([0, 30])
        )
        await asyncio.sleep(rng.uniform(0, 2.5))
        try:
            result = VICTIMS[victim](user, rng)()
            if asyncio.iscoroutine(result):
                await result
        except (ProcessLookupError, KeyError, IndexError):
            pass  # it was not running at this moment; that is a round too
        await settled(user)


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
