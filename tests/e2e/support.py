"""What the end-to-end tests share: waiting for a state with a bound, and speaking to the cluster as a user does."""

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import ClientSession, ClientTimeout

from berth.contract.gateway import public_name_of
from berth.contract.ids import ServerName
from berth.contract.keys import Keys
from berth.kube import paths
from berth.kube.errors import NotFound
from localcluster.cluster import BINDER_ADMIN_PORT
from localcluster.processes import reaping
from tests.fakes.eventually import eventually

T = TypeVar("T")
Json = dict[str, Any]
KEYS = Keys()


class User:
    """A person with kubectl and a Triton client."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.client = cluster, cluster.client

    async def apply(self, *documents: Json) -> None:
        await self.cluster.apply(list(documents))

    async def pods(self, app: str, namespace: str = "default") -> list[Json]:
        """The pods of one Deployment that are not ending."""
        listed = await self.client.get(paths.pods(namespace), labelSelector=f"app={app}")
        return [pod for pod in listed["items"] if "deletionTimestamp" not in pod["metadata"]]

    async def pod_of(self, app: str) -> Json:
        """The only pod of a Deployment. Raises AssertionError while there is none, or several."""
        pods = await self.pods(app)
        assert len(pods) == 1, [brief(pod) for pod in pods]
        return pods[0]

    async def pod(self, name: str, namespace: str = "default") -> Json:
        found: Json = await self.client.get(paths.pod(namespace, name))
        return found

    async def delete_deployment(self, name: str, namespace: str = "default") -> None:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"
        await self.client.delete(path)

    async def ready(self, app: str, *, count: int = 1, seconds: float = 90) -> list[Json]:
        """The Deployment's pods once `count` of them are Ready."""

        async def check() -> list[Json]:
            pods = [pod for pod in await self.pods(app) if is_ready(pod)]
            assert len(pods) == count, [brief(pod) for pod in await self.pods(app)]
            return pods

        return await eventually(check, seconds=seconds, what=f"{count} Ready pods of {app}")

    async def gone(self, app: str, seconds: float = 60) -> None:
        async def check() -> None:
            listed = await self.client.get(paths.pods("default"), labelSelector=f"app={app}")
            assert not listed["items"], [brief(pod) for pod in listed["items"]]

        await eventually(check, seconds=seconds, what=f"no pods of {app}")

    async def gone_pod(self, name: str, seconds: float = 60) -> None:
        async def check() -> None:
            with suppress(NotFound):
                await self.pod(name)
                raise AssertionError(f"{name} is still there")

        await eventually(check, seconds=seconds)

    async def clean_up(self) -> None:
        """Delete every Deployment and pod of the namespace and wait until no node holds a model."""
        deployments = "/apis/apps/v1/namespaces/default/deployments"
        for found in (await self.client.get(deployments))["items"]:
            await self.client.delete(f"{deployments}/{found['metadata']['name']}")
        for found in (await self.client.get(paths.pods("default")))["items"]:
            await self._delete_if_there(paths.pod("default", found["metadata"]["name"]))

        async def empty() -> None:
            assert not (await self.client.get(paths.pods("default")))["items"]
            for node in self.cluster.nodes:
                assert not await self.models_on(node), node

        await eventually(empty, seconds=90, what="an empty cluster")

    async def _delete_if_there(self, path: str) -> None:
        with suppress(NotFound):
            await self.client.delete(path, grace_seconds=1)

    async def events(self, pod: Json) -> list[Json]:
        meta = pod["metadata"]
        listed = await self.client.get(
            paths.events(meta["namespace"]), fieldSelector=f"involvedObject.uid={meta['uid']}"
        )
        items: list[Json] = listed["items"]
        return items

    async def events_of(self, app: str) -> list[Json]:
        """Events about pods of one Deployment, those that are gone among them."""
        listed = await self.client.get(paths.events("default"))
        return [e for e in listed["items"] if e["involvedObject"]["name"].startswith(f"{app}-")]

    async def event(self, pod: Json, reason: str, *, seconds: float = 60) -> str:
        """The newest message of one reason."""

        async def check() -> str:
            said = [event for event in await self.events(pod) if event["reason"] == reason]
            assert said, [(event["reason"], event["message"]) for event in await self.events(pod)]
            newest: str = max(said, key=lambda event: event["lastTimestamp"])["message"]
            return newest

        return await eventually(check, seconds=seconds, what=f"event {reason}")

    async def report(self, node: str) -> Json:
        """Raises AssertionError while the node's agent has not reported yet."""
        annotations = (await self.client.get(paths.node(node)))["metadata"].get("annotations") or {}
        assert KEYS.report in annotations, f"no report of {node} yet"
        report: Json = json.loads(annotations[KEYS.report])
        return report

    def repository(self, node: str) -> list[str]:
        """What lies in the node's Triton repository, and in its staging area; models by the names that people use."""
        directory = self.cluster.nodes[node].repository
        names = [path.name for part in ("models", "staging") for path in (directory / part).iterdir()]
        return sorted(public_name_of(ServerName(name)) for name in names)

    async def models_on(self, node: str) -> dict[str, str]:
        """Model name to state, as the node's report tells it."""
        return {model["modelName"]: model["state"] for model in (await self.report(node))["models"]}

    async def leaders(self) -> list[int]:
        """The binders that say that they lead."""
        leading = []
        for index in range(len(self.cluster.binders)):
            with suppress(OSError):
                address = f"{self.cluster.binder_address(index)}:{BINDER_ADMIN_PORT}"
                _, metrics = await get(f"http://{address}/metrics")
                if "berth_binder_leader 1.0" in metrics:
                    leading.append(index)
        return leading

    async def leader(self) -> int:
        """The one binder that leads, once there is one."""

        async def check() -> int:
            found = await self.leaders()
            assert len(found) == 1, found
            return found[0]

        return await eventually(check, what="one binder to lead")


def is_ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def brief(pod: Json) -> str:
    """A pod in one line, for failures."""
    status = pod.get("status", {})
    states = [
        f"{c['name']}={json.dumps(c.get('state', {}))}"
        for c in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    ]
    return (
        f"{pod['metadata']['name']} on {pod['spec'].get('nodeName')} {status.get('phase')} {' '.join(states)}"
    )


async def get(url: str, **headers: str) -> tuple[int, str]:
    session = ClientSession(timeout=ClientTimeout(total=10))
    async with session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


async def berth(
    *arguments: str, timeout: float = 60, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Run the console script; exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "berth.cli",
        *arguments,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with reaping(process), asyncio.timeout(timeout):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()
