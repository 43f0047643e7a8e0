"""Models that are scaled, as their user sees them: a Deployment, a Service, and what the scaler says of them."""

import asyncio
from typing import Any, Final

from bench.scaler.traffic import Client
from berth.contract.endpoint import Endpoint
from berth.contract.scaling import Scaled
from berth.kube import paths
from berth.kube.errors import KubeError
from localcluster.cluster import LocalCluster
from localcluster.samples import model_deployment, model_service
from localcluster.services import ServicePort
from tests.e2e.support import KEYS, Json, User, brief, is_ready
from tests.fakes.eventually import eventually

HTTP_PORT: Final = 9000


class Owner(User):
    """Who has models that are scaled."""

    cluster: LocalCluster

    async def serve(
        self, name: str, *, source: str, annotations: Json, namespace: str = "default", **options: Any
    ) -> None:
        """A Deployment with its Service, at no replica."""
        options = {"gpu_mem": "1Gi", "replicas": 0, **options}
        deployment = model_deployment(
            name, source=source, scaling=annotations, namespace=namespace, **options
        )
        await self.apply(model_service(name, namespace=namespace), deployment)

    async def deployment(self, name: str, namespace: str = "default") -> Json:
        found: Json = await self.client.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}")
        return found

    async def scaled(self, name: str, namespace: str = "default") -> Scaled:
        """What the scaler says. Raises AssertionError while it says nothing."""
        meta = (await self.deployment(name, namespace))["metadata"]
        assert KEYS.scaled in meta.get("annotations", {}), "nothing said yet"
        return Scaled.from_text(meta["annotations"][KEYS.scaled])

    async def replicas(self, name: str, count: int, *, seconds: float = 60) -> None:
        """Until so many are Ready and no more are asked for."""

        async def check() -> None:
            asked = (await self.deployment(name))["spec"]["replicas"]
            pods = await self.pods(name)
            ready = [pod for pod in pods if is_ready(pod)]
            assert (asked, len(ready)) == (count, count), f"{asked} asked for, {[brief(p) for p in pods]}"

        await eventually(check, seconds=seconds, what=f"{count} replicas of {name}:")

    async def ready_pod(self, name: str) -> None:
        async def check() -> None:
            pod = await self.pod(name)
            assert is_ready(pod), brief(pod)

        await eventually(check)

    async def listens(self, name: str) -> None:
        """Until connections to the Service's address are taken."""

        async def check() -> None:
            try:
                _, writer = await asyncio.open_connection(self.address(name), HTTP_PORT)
            except OSError as error:
                raise AssertionError(str(error)) from error
            writer.close()

        await eventually(check)

    async def leads_to(self, name: str, port: str = "http", *, seconds: float = 30) -> None:
        """Until the Service leads somewhere."""

        async def check() -> None:
            assert self.backends(name, port), f"{name} leads nowhere"

        await eventually(check, seconds=seconds)

    def backends(self, name: str, port: str = "http", namespace: str = "default") -> tuple[Endpoint, ...]:
        return self.cluster.services.backends(ServicePort(namespace, name, port))

    def address(self, name: str, namespace: str = "default") -> str:
        """The Service's."""
        return self.cluster.services.address(namespace, name)

    async def pending(self) -> list[str]:
        """Model pods that no node has."""
        listed = await self.client.get(paths.PODS)
        return [
            brief(pod)
            for pod in listed["items"]
            if pod["spec"].get("schedulerName") and not pod["spec"].get("nodeName") and _was_refused(pod)
        ]

    async def client_pod(self, namespace: str) -> str:
        """Make a pod that does nothing, in a namespace that is made as well; its address."""
        if namespace != "default":
            head = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
            await self.apply(head)
        sleeping = {"name": "client", "image": "none", "command": ["sleep", "infinity"]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "client", "namespace": namespace},
            "spec": {"automountServiceAccountToken": False, "containers": [sleeping]},
        }

        async def made() -> None:  # the namespace's account comes a little later
            try:
                await self.apply(pod)
            except KubeError as error:
                raise AssertionError(str(error)) from error

        async def running() -> str:
            found = await self.pod("client", namespace)
            assert is_ready(found), brief(found)
            return str(found["status"]["podIP"])

        await eventually(made)
        return await eventually(running)

    async def clean_up(self) -> None:
        services = "/api/v1/namespaces/default/services"
        await super().clean_up()
        for found in (await self.client.get(services))["items"]:
            if found["metadata"]["name"] != "kubernetes":
                await self.client.delete(f"{services}/{found['metadata']['name']}")


def client_of(owner: Owner, model: str, source: str, *, namespace: str = "default") -> Client:
    """A client of a model's Service in a pod that has this address."""
    return Client(lambda: owner.backends(model, namespace=namespace), source)


def _was_refused(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions)
