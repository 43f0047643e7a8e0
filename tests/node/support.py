"""What the tests on a real node share."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from tritonclient.utils import InferenceServerException

from berth.kube import paths
from localcluster.inference import infer_grpc, infer_rest
from localcluster.node.cluster import NODE, RealCluster
from tests.e2e.support import Json, User, brief, is_ready
from tests.fakes.eventually import eventually

SYSTEM = "berth-system"
SERVICE: Json = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "simple", "namespace": "default"},
    "spec": {
        "selector": {"app": "simple"},
        "ports": [{"name": "http", "port": 9000}, {"name": "grpc", "port": 9001}],
    },
}


class NodeUser(User):
    """A person with kubectl and a Triton client, and root on the node."""

    cluster: RealCluster

    def __init__(self, cluster: RealCluster) -> None:
        super().__init__(cluster)

    async def berth_is_ready(self, seconds: float = 120) -> list[Json]:
        """Berth's own pods, once each wanted one is Ready."""

        async def check() -> list[Json]:
            daemons = (await self.client.get(f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets"))["items"]
            assert len(daemons) == 2
            for daemon in daemons:
                status = daemon["status"]
                assert status.get("numberReady", 0) == status["desiredNumberScheduled"] > 0, status
            pods: list[Json] = (await self.client.get(paths.pods(SYSTEM)))["items"]
            assert len(pods) == 4, [brief(pod) for pod in pods]
            assert all(is_ready(pod) for pod in pods), [brief(pod) for pod in pods]
            return pods

        return await eventually(check, seconds=seconds, what="Berth")

    async def daemon(self, name: str) -> Json:
        """The one pod of a DaemonSet. Raises AssertionError while there is not exactly one."""
        listed = await self.client.get(paths.pods(SYSTEM), labelSelector=f"app.kubernetes.io/name={name}")
        pods = [pod for pod in listed["items"] if "deletionTimestamp" not in pod["metadata"]]
        assert len(pods) == 1, [brief(pod) for pod in pods]
        return pods[0]

    async def proxy_of(self, pod: Json, port: int) -> str:
        """HOST:PORT on this side of the network for a port of a pod."""
        return await self.cluster.reach(pod["status"]["podIP"], port)

    def processes(self, pod: Json, container: str) -> list[int]:
        """Who runs in a container, its first process first, by the pids of this side."""
        identity = container_status(pod, container)["containerID"].removeprefix("containerd://")
        return sorted(pid for pid in self.cluster.namespaces.processes() if identity in cgroup_of(pid))

    def files(self, pod: Json, container: str, directory: str) -> set[str]:
        """What is below a directory of a container, but for directories."""
        place = Path(f"/proc/{self.processes(pod, container)[0]}/root{directory}")
        return {str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir()}

    def kill(self, pod: Json, container: str, program: str) -> None:
        """kill -9 of a program in a container."""
        pids = [pid for pid in self.processes(pod, container) if command_of(pid).startswith(program)]
        assert pids, f"no {program} in {container}"
        os.kill(pids[0], signal.SIGKILL)

    async def clean_up(self) -> None:
        """Delete what is not `simple`'s and wait until its models are gone."""
        deployments = "/apis/apps/v1/namespaces/default/deployments"
        for found in (await self.client.get(deployments))["items"]:
            if found["metadata"]["name"] != "simple":
                await self.client.delete(f"{deployments}/{found['metadata']['name']}")
        for pod in await self._strangers():
            with suppress(Exception):
                await self.client.delete(paths.pod("default", pod["metadata"]["name"]), grace_seconds=1)

        async def gone() -> None:
            assert [brief(pod) for pod in await self._strangers()] == []
            assert set(await self.models_on(NODE)) <= {"simple"}

        await eventually(gone, seconds=60, what="the test's pods to go")

    async def _strangers(self) -> list[Json]:
        listed = await self.client.get(paths.pods("default"))
        return [pod for pod in listed["items"] if pod["metadata"].get("labels", {}).get("app") != "simple"]


class Served:
    """A copy of the sample model under a name, and what its clients see."""

    def __init__(self, user: NodeUser, app: str = "simple") -> None:
        self._user, self._app = user, app

    async def pod(self) -> Json:
        """The only one that is not ending. Raises AssertionError if it is not one."""
        return await self._user.pod_of(self._app)

    async def infer(self, pod: Json | None = None) -> None:
        """Right answers from both front ends of the pod."""
        pod = pod or await self.pod()
        await infer_rest(await self._user.proxy_of(pod, 9000), self._app)
        await infer_grpc(await self._user.proxy_of(pod, 9001), self._app)

    async def answers(self, seconds: float = 120) -> Json:
        """Wait until the pod is Ready and answers; the pod."""

        async def check() -> Json:
            pod = await self.pod()
            assert is_ready(pod), brief(pod)
            try:
                await self.infer()
            except (InferenceServerException, aiohttp.ClientError, OSError) as error:
                # A probe needs a moment to notice what has just been killed.
                raise AssertionError(f"does not answer yet: {error}") from error
            return pod

        return await eventually(check, seconds=seconds, what=f"{self._app} to be served")


def container_status(pod: Json, name: str) -> Json:
    """Of a container or an init container. Raises KeyError until there is one."""
    status = pod["status"]
    everyone = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    found: Json = {each["name"]: each for each in everyone}[name]
    return found


def cgroup_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:  # it has just gone
        return ""


def command_of(pid: int) -> str:
    """The program's name, as in /proc/PID/comm."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status by name."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def finished(user: NodeUser, name: str, *, seconds: float = 60) -> Json:
    """A pod once it has Succeeded or Failed."""

    async def check() -> Json:
        pod = await user.pod(name)
        assert pod["status"]["phase"] in ("Succeeded", "Failed"), brief(pod)
        return pod

    return await eventually(check, seconds=seconds, what=f"{name} to end")


def client_pod(name: str, script: str, **environment: str) -> Json:
    """A pod that runs Python with Berth's image, once; what it prints last is its termination message on failure."""
    container: dict[str, Any] = {
        "name": "client",
        "image": "berth",
        "command": ["python", "-c", script],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }


async def steadily(served: Served, until: "asyncio.Event") -> int:
    """Infer again and again; how often. Raises what the first failure raised."""
    count = 0
    while not until.is_set():
        await served.infer()
        count += 1
        await asyncio.sleep(0.1)
    return count
