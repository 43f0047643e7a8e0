"""kill -9 of each process in mid-operation: whatever dies, what is loaded comes to equal what is wanted.

After each round: no model without a pod, no pod Ready without its model, no GPU over its memory.
"""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from aiohttp import ClientError
from tritonclient.utils import InferenceServerException

from berth.contract.gateway import server_name_of
from berth.contract.gpu_choice import GpuChoice
from berth.contract.memory import free_bytes, reserved_bytes
from berth.contract.report import ModelState, NodeReport
from berth.kube import paths
from binder.cli import top
from localcluster.inference import infer_rest
from localcluster.parts import Part
from localcluster.samples import SIMPLE_MODEL, model_deployment, packed
from tests.e2e.support import KEYS, User, brief, is_ready
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODELS = ("red", "green", "blue")


async def settled(user: User) -> None:
    """Every model serves, and the three invariants hold."""

    async def check() -> None:
        listed = (await user.client.get("/api/v1/namespaces/default/pods"))["items"]
        live = {pod["metadata"]["uid"]: pod for pod in listed}
        for app in MODELS:
            pods = await user.pods(app)
            assert any(is_ready(pod) for pod in pods), [
                (brief(pod), [event["message"] for event in await user.events(pod)]) for pod in pods
            ]
        for name in user.cluster.nodes:
            node = await user.client.get(f"/api/v1/nodes/{name}")
            report = NodeReport.decode(node["metadata"]["annotations"][KEYS.report])
            for model in report.models:
                assert model.pod_uid in live, f"{model.model_name} on {name} has no pod"
            for gpu in report.gpus:
                models = [m for m in report.models if gpu.uuid in m.gpus]
                held = sum(reserved_bytes(m.requested_bytes, m.measured_bytes) for m in models)
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


class SlowModel:
    """The sample model, but for loads that last for as long as they are held, each with a file while it does."""

    def __init__(self, store: Callable[[str, bytes], str], directory: Path) -> None:
        self._directory = directory
        program = (SIMPLE_MODEL / "1" / "model.py").read_text() + _SLOWLY.format(
            directory=str(directory), hold=_HOLD
        )
        config = (SIMPLE_MODEL / "config.pbtxt").read_bytes()
        self.url = store("slow.tar.gz", packed(**{"config.pbtxt": config, "1/model.py": program.encode()}))

    def forget(self) -> None:
        """Of a load that was killed the file stays."""
        for path in self._directory.iterdir():
            path.unlink()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Loads that begin in the block do not end in it."""
        hold = self._directory / _HOLD
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    async def loading(self, app: str) -> Path:
        """The file of the app's load, once it has begun."""

        async def check() -> Path:
            found = list(self._directory.glob(f"{app}-*"))  # by its name in Triton
            assert found, f"{app} is not being loaded"
            return found[0]

        return await eventually(check, seconds=120, what="a load to begin")


_HOLD = "hold"
_SLOWLY = """
    def initialize(self, args):
        import os, pathlib, time

        directory = pathlib.Path({directory!r})
        mark, until = directory / f"{{args['model_name']}}.{{os.getpid()}}", time.monotonic() + 100
        mark.touch()
        while (directory / {hold!r}).exists() and time.monotonic() < until:
            time.sleep(0.05)
        mark.unlink()
"""


@pytest.fixture
def slow(url: Callable[[str, bytes], str], tmp_path: Path) -> SlowModel:
    return SlowModel(url, tmp_path)


@asynccontextmanager
async def comes_back(part: Part) -> AsyncIterator[int]:
    """The process to kill in the block; after it, another one runs in its place."""
    before = part.pid
    assert before is not None, part.name
    yield before

    async def runs_again() -> None:
        assert part.pid not in (None, before)

    await eventually(runs_again, what=f"{part.name} to run again")


async def kill_in_a_load(user: User, victim: str, app: str, bystander: str, slow: SlowModel) -> None:
    """`app`'s model is being loaded when the victim dies: the agent or Triton of that node, or another pod's proxy."""
    mark = await slow.loading(app)
    loading = await user.pod_of(app)
    node = user.cluster.nodes[loading["spec"]["nodeName"]]
    if victim == "proxy":
        (pod,) = await user.ready(bystander)
        name, kubelet = pod["metadata"]["name"], user.cluster.nodes[pod["spec"]["nodeName"]].kubelet
        part = Part(f"proxy of {name}", "proxy", lambda: kubelet.runner("default", name))
    else:
        part = node.agent if victim == "agent" else node.triton
    async with comes_back(part) as pid:
        os.kill(pid, signal.SIGKILL)
        assert mark.exists(), "the load was over before the kill"


async def kill_with_a_pod_to_place(user: User, app: str, delete: Awaitable[object], seconds: float) -> None:
    """The leader stands still until there is a pod to place, and dies `seconds` after it has gone on."""
    leader = user.cluster.binders[await user.leader()]
    async with comes_back(leader) as pid:
        os.kill(pid, signal.SIGSTOP)
        await delete

        async def waits() -> None:
            assert "nodeName" not in (await user.pod_of(app))["spec"]

        await eventually(waits, what=f"a pod of {app} to place")
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["agent", "binder", "proxy", "triton"])
async def test_killed_in_mid_operation_again_and_again(user: User, slow: SlowModel, victim: str) -> None:
    rng = random.Random(victim)
    await deploy_all(user, slow.url)
    await settled(user)
    for _ in range(3):
        app, bystander = rng.sample(MODELS, 2)
        (pod,) = await user.ready(app)
        path = paths.pod("default", pod["metadata"]["name"])
        delete = user.client.delete(path, grace_seconds=rng.choice([0, 30]))
        slow.forget()
        if victim == "binder":
            await kill_with_a_pod_to_place(user, app, delete, rng.uniform(0, 0.05))
        else:
            with slow.held():
                await delete
                await kill_in_a_load(user, victim, app, bystander, slow)
        await settled(user)


@pytest.mark.nightly
@pytest.mark.parametrize("agent", ["runs", "starts"])
async def test_files_that_are_gone_come_back_with_a_new_pod(user: User, source: str, agent: str) -> None:
    await user.apply(model_deployment("red", source=source, gpu_mem="3Gi"))
    (before,) = await user.ready("red")
    node = user.cluster.nodes[before["spec"]["nodeName"]]
    if agent == "starts":
        await node.agent.stop()
    shutil.rmtree(node.repository / "models" / server_name_of("red", before["metadata"]["uid"]))
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


@pytest.mark.nightly
async def test_a_node_whose_agent_stops_gets_no_new_pods(user: User, source: str) -> None:
    node = user.cluster.nodes["gpu-2"]
    await node.agent.stop()
    try:

        async def stale() -> None:
            view = await top.collect(user.client, KEYS, "berth-system")
            assert [n.problem for n in view.nodes if n.name == "gpu-2"] == ["StaleNodeFacts"]

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
