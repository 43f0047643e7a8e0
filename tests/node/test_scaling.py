"""From no replica to one and back on a real node: `deploy/autoscaling` as it is, kubelet's probes, kube-proxy's rules, DNS."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from bench.scaler.models import scaling
from berth.kube import paths
from localcluster.node import cluster as node
from localcluster.node.cluster import RealCluster
from localcluster.samples import model_deployment, model_service
from tests.e2e.support import Json, brief, is_ready
from tests.fakes.eventually import eventually
from tests.node.support import SYSTEM, NodeUser, client_pod, container_status
from tests.node.test_serving import check_container

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly]

MODEL, TENANT, FRIEND, STRANGER = "sleeper", "tenant", "friend", "stranger"
PARTS = {"berth-scaler": "scaler", "berth-activator": "activator"}
# One request, at once as the pod starts; what it came to, and when, as time since 1970.
CALLER = """
import http.client, json, os, time

tensors = [{"name": n, "datatype": "INT32", "shape": [16], "data": [1] * 16} for n in ("INPUT0", "INPUT1")]
body = json.dumps({"inputs": tensors})
said = {"began": time.time()}
try:
    call = http.client.HTTPConnection(os.environ["SERVICE"], 9000, timeout=100)
    call.connect()
    said["connected"] = time.time()
    call.request("POST", f"/v2/models/{os.environ['MODEL']}/infer", body)
    answer = call.getresponse()
    said |= {"status": answer.status, "body": answer.read().decode()}
except OSError as error:
    said["error"] = repr(error)
said["ended"] = time.time()
with open("/dev/termination-log", "w") as log:
    log.write(json.dumps(said))
"""


class ScaledUser(NodeUser):
    """One whose models are scaled, in a namespace of theirs."""

    async def alone(self) -> None:
        """Until nothing of other namespaces is on the node: it takes code of one namespace at a time."""
        await self._delete_if_there(paths.deployment("default", "simple"))

        async def empty() -> None:
            assert not await self.models_on(node.NODE)

        await eventually(empty, seconds=90, what="an empty node")

    async def parts(self, name: str) -> list[Json]:
        """The pods of Berth's Deployment that are not ending, once both are Ready."""

        async def check() -> list[Json]:
            listed = await self.client.get(paths.pods(SYSTEM), labelSelector=f"app.kubernetes.io/name={name}")
            pods = [pod for pod in listed["items"] if "deletionTimestamp" not in pod["metadata"]]
            assert len(pods) == 2, [brief(pod) for pod in pods]
            assert all(is_ready(pod) for pod in pods), [brief(pod) for pod in pods]
            return pods

        return await eventually(check, seconds=90, what=name)

    async def replicas(self, count: int, *, seconds: float = 60) -> None:
        """Until so many are Ready, and no more are asked for or left."""

        async def check() -> None:
            asked = (await self.client.get(paths.deployment(TENANT, MODEL)))["spec"]["replicas"]
            pods = (await self.client.get(paths.pods(TENANT)))["items"]
            ready = [pod for pod in pods if is_ready(pod)]
            assert (asked, len(pods), len(ready)) == (count, count, count), [asked, *map(brief, pods)]

        await eventually(check, seconds=seconds, what=f"{count} replicas")

    async def leads_to_activators(self) -> None:
        """Until the additional slice names both of them."""
        wanted = {pod["status"]["podIP"] for pod in await self.parts("berth-activator")}

        async def check() -> None:
            found = await self.client.get(paths.endpoint_slice(TENANT, f"{MODEL}-berth"))
            assert {address for one in found["endpoints"] for address in one["addresses"]} == wanted, found

        await eventually(check, seconds=30, what="the slice")

    async def standing(self) -> list[Any]:
        """What is said of the model and of its replicas."""
        deployment = await self.client.get(paths.deployment(TENANT, MODEL))
        pods = (await self.client.get(paths.pods(TENANT)))["items"]
        events = (await self.client.get(paths.events(TENANT)))["items"]
        told = [f"{one['involvedObject']['name']}: {one['reason']}: {one['message']}" for one in events]
        return [
            deployment["spec"]["replicas"],
            deployment["metadata"]["annotations"],
            *map(brief, pods),
            *told,
        ]

    async def call(self, namespace: str, name: str) -> None:
        """Start a pod there that calls the model through its Service, once."""
        service = f"{MODEL}.{TENANT}.svc"
        pod = client_pod(name, CALLER, SERVICE=service, MODEL=MODEL)
        pod["metadata"]["namespace"] = namespace
        await self.apply(pod)

    async def answer(self, namespace: str, name: str, *, seconds: float = 90) -> Any:
        """What that one has come to."""

        async def check() -> Any:
            pod = await self.pod(name, namespace)
            assert pod["status"]["phase"] in ("Succeeded", "Failed"), [brief(pod), *await self.standing()]
            return json.loads(container_status(pod, "client")["state"]["terminated"]["message"])

        return await eventually(check, seconds=seconds, what=f"{name} to end")


@pytest_asyncio.fixture(loop_scope="session")
async def owner(cluster: RealCluster, source: str) -> AsyncIterator[ScaledUser]:
    """Berth scales while the test lasts; the others find it as `deploy/base` has it."""
    user = ScaledUser(cluster)
    plain = {identity(one) for one in await cluster.rendered(node.OVERLAY)}
    more = [one for one in await cluster.rendered(node.SCALED) if identity(one) not in plain]
    await cluster.deploy(node.SCALED)
    try:
        for name in (TENANT, FRIEND, STRANGER):
            await user.apply(namespace(name))
        await user.alone()
        yield user
    finally:
        for name in (TENANT, FRIEND, STRANGER):
            await cluster.kubectl("delete", "namespace", name, "--wait=false")
        for one in more:
            kind, name, where = identity(one)
            await cluster.kubectl(
                "delete", kind, name, *([f"--namespace={where}"] if where else []), "--wait=false"
            )
        await cluster.deploy()
        await user.berth_is_ready()


def identity(document: Json) -> tuple[str, str, str]:
    meta = document["metadata"]
    return document["kind"], meta["name"], meta.get("namespace", "")


def namespace(name: str) -> Json:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"} if name == TENANT else {}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


async def test_a_model_scales_to_zero_and_back_and_to_zero_again(owner: ScaledUser, source: str) -> None:
    pods = {name: await owner.parts(name) for name in PARTS}
    deployment = model_deployment(
        MODEL,
        source=source,
        gpu_mem="400Mi",
        namespace=TENANT,
        replicas=0,
        scaling=scaling(target="1", clients=FRIEND),
    )
    await owner.apply(model_service(MODEL, namespace=TENANT), deployment)
    await owner.leads_to_activators()

    # Whoever may not is refused, by its own address, and nothing comes of it.
    await owner.call(STRANGER, "first")
    refused = await owner.answer(STRANGER, "first")
    assert "status" not in refused, refused
    assert (await owner.client.get(paths.deployment(TENANT, MODEL)))["spec"]["replicas"] == 0

    await owner.call(FRIEND, "first")
    first = await owner.answer(FRIEND, "first")
    assert first.get("status") == 200, first
    await owner.replicas(0)
    await owner.leads_to_activators()

    # Both scalers are replaced at once, while a request waits whose client nobody could tell the activators of.
    await owner.cluster.kubectl(
        "-n", SYSTEM, "delete", "pods", "-l", "app.kubernetes.io/name=berth-scaler", "--wait=false"
    )
    await owner.call(FRIEND, "second")
    second = await owner.answer(FRIEND, "second")
    assert second.get("status") == 200, second
    await owner.replicas(0, seconds=90)

    for name, container in PARTS.items():
        for pod in await owner.parts(name):
            assert check_container(owner, pod, pod["spec"]["containers"][0]) == container
            assert container_status(pod, container)["restartCount"] == 0, brief(pod)
    same = {pod["metadata"]["uid"] for pod in await owner.parts("berth-activator")}
    assert same == {pod["metadata"]["uid"] for pod in pods["berth-activator"]}
