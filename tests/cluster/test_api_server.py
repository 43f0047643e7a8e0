"""What the binder takes for granted of a real API server: which amounts it lets in, that it keeps to the time
that a write names, and that an eviction can be rehearsed."""

import asyncio
import json
import ssl
import tempfile
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientTimeout, web

from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, pod_ref
from berth.contract.quantity import MOST
from berth.kube import client as kube_client
from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.errors import Conflict, Invalid, KubeError, KubeResponseError, NotFound
from binder.cache.reservations import bound_reservation
from binder.loop.bind import may_have_happened
from binder.loop.evict import evict
from binder.pod.demand import parse_demand
from localcluster.addresses import cluster_network
from localcluster.binaries import control_plane_directory
from localcluster.controlplane import ControlPlane
from localcluster.credentials import make_serving_certificate

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = Keys()
Json = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane() -> AsyncIterator[tuple[KubeClient, str]]:
    """A client of an API server without controllers, and an address of this machine."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-api-")))
        host = f"{stack.enter_context(cluster_network())}.0.1"
        plane = ControlPlane(
            directory,
            host=host,
            binaries=await asyncio.to_thread(control_plane_directory),
            users=[],
            env={},
            api_flags=["--disable-admission-plugins=ServiceAccount"],
            controllers=False,
        )
        stack.push_async_callback(plane.stop)
        await plane.start()
        kubeconfig = plane.kubeconfig(plane.admin, directory / "kubeconfig")
        yield await stack.enter_async_context(open_client(str(kubeconfig))), host


def manifest(name: str, **resources: Any) -> Json:
    container = {"name": "main", "image": "any", "resources": resources}
    return {"metadata": {"name": name}, "spec": {"containers": [container]}}


AMOUNTS = (
    "5E",
    "9E",
    "7Ei",
    "1e400",
    "1e9999",
    "1e-400",
    "123456789E",
    "9223372036854775808",
    "0",
    "-1",
    "1.5",
)


@pytest.mark.parametrize("resource", ["cpu", "memory", "example.com/fpga", KEYS.gpu_mem])
async def test_every_amount_that_the_api_server_lets_in_can_be_read(
    plane: tuple[KubeClient, str], resource: str
) -> None:
    client, _ = plane
    admitted = {}
    for number, amount in enumerate(AMOUNTS):
        name = f"{resource.replace('/', '-').replace('.', '-')}-{number}"
        try:
            pod = await client.create(
                paths.pods("default"), manifest(name, requests={resource: amount}, limits={resource: amount})
            )
        except Invalid:
            continue
        demand = parse_demand(pod, KEYS)
        pod["metadata"]["annotations"] = {KEYS.gpu: "{"}
        reservation = bound_reservation(pod, NodeName("n"), KEYS)
        asked = demand.shape.request_bytes if resource == KEYS.gpu_mem else demand.amounts[resource]
        held = reservation.bytes if resource == KEYS.gpu_mem else reservation.amounts[resource]
        assert asked == held
        admitted[amount] = asked
    assert admitted["5E"] == admitted["9E"] == MOST
    assert admitted["0"] == 0
    assert not {"-1"} & admitted.keys()


# A webhook may not be waited for any longer.
HOLDS_SECONDS = 30


@asynccontextmanager
async def holding_bindings(
    client: KubeClient, host: str
) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Admission asks a webhook about every Binding; it answers yes once it may. The events: asked, may answer."""
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def admit(request: web.Request) -> web.Response:
        uid = (await request.json())["request"]["uid"]
        asked.set()
        await may_answer.wait()
        return web.json_response(
            {
                "apiVersion": "admission.k8s.io/v1",
                "kind": "AdmissionReview",
                "response": {"uid": uid, "allowed": True},
            }
        )

    with tempfile.TemporaryDirectory() as directory:
        certificate, key = Path(directory, "hook.crt"), Path(directory, "hook.key")
        make_serving_certificate(certificate, key, hosts=[host])
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        application = web.Application()
        application.router.add_post("/", admit)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)  # 0 is without end
        await runner.setup()
        await web.TCPSite(runner, host, 0, ssl_context=context).start()
        hook = {
            "name": "holds.example.com",
            "clientConfig": {
                "url": f"https://{host}:{runner.addresses[0][1]}/",
                "caBundle": b64encode(certificate.read_bytes()).decode(),
            },
            "rules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["pods/binding"],
                }
            ],
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "timeoutSeconds": HOLDS_SECONDS,
        }
        hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
        await client.create(hooks, {"metadata": {"name": "holds"}, "webhooks": [hook]})
        try:
            yield asked, may_answer
        finally:
            may_answer.set()
            try:
                await client.delete(f"{hooks}/holds")
            finally:
                await runner.cleanup()


async def test_a_write_that_is_held_beyond_its_time_is_never_written(
    plane: tuple[KubeClient, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, host = plane
    await client.create(paths.pods("default"), manifest("held"))
    body = {"metadata": {"name": "held"}, "target": {"kind": "Node", "name": "anywhere"}}
    path = f"{paths.pod('default', 'held')}/binding"
    async with holding_bindings(client, host) as (asked, may_answer):
        with monkeypatch.context() as patched:
            patched.setattr(kube_client, "_WRITE_PARAMS", {"timeout": "1s"})
            # So that it is the API server that ends the write, and before the webhook's time is over.
            patched.setattr(kube_client, "_WRITE_TIMEOUT", ClientTimeout(total=2 * HOLDS_SECONDS))
            async with asyncio.timeout(60):
                while not asked.is_set():  # until the API server knows of the webhook
                    with suppress(KubeError):
                        await client.create(path, body, dryRun="All")
            begun = asyncio.get_running_loop().time()
            # An answer, or a connection that is closed without one: which of them is a race in the API server.
            with pytest.raises(KubeError) as refused:
                await client.create(path, body)
            assert asyncio.get_running_loop().time() - begun < HOLDS_SECONDS
            assert may_have_happened(refused.value)
        may_answer.set()
        await asyncio.sleep(1)
        assert "nodeName" not in json.dumps(await client.get(paths.pod("default", "held")))
        await client.create(path, body)
    assert (await client.get(paths.pod("default", "held")))["spec"]["nodeName"] == "anywhere"


async def running(client: KubeClient, name: str, **labels: str) -> PodRef:
    """A pod that runs on a node, as its kubelet would say."""
    body = manifest(name)
    body["metadata"]["labels"] = labels
    body["spec"]["nodeName"] = "anywhere"
    pod = await client.create(paths.pods("default"), body)
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    await client.patch(f"{paths.pod('default', name)}/status", {"status": status})
    return pod_ref(pod)


async def budget(client: KubeClient, name: str, allowed: int, **labels: str) -> str:
    """As the disruption controller would keep it. Returns its path."""
    budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    spec = {"minAvailable": 1, "selector": {"matchLabels": labels}}
    made = await client.create(budgets, {"metadata": {"name": name}, "spec": spec})
    status = {
        "disruptionsAllowed": allowed,
        "currentHealthy": 1,
        "desiredHealthy": 1,
        "expectedPods": 1,
        "observedGeneration": made["metadata"]["generation"],
    }
    await client.patch(f"{budgets}/{name}/status", {"status": status})
    return f"{budgets}/{name}"


async def goes(client: KubeClient, ref: PodRef) -> bool:
    try:
        return "deletionTimestamp" in (await client.get(paths.pod("default", ref.name)))["metadata"]
    except NotFound:
        return True


async def test_a_dry_run_of_an_eviction_asks_the_budgets_and_ends_nobody(
    plane: tuple[KubeClient, str],
) -> None:
    client, _ = plane
    free, kept, twice = [await running(client, name, app=name) for name in ("free", "kept", "counted-twice")]
    allows = await budget(client, "allows", 1, app="free")
    for name, allowed, app in (
        ("forbids", 0, "kept"),
        ("one", 1, "counted-twice"),
        ("two", 1, "counted-twice"),
    ):
        await budget(client, name, allowed, app=app)
    for _ in range(3):  # a dry run uses nothing up
        await evict(client, free, dry_run=True)
    assert (await client.get(allows))["status"]["disruptionsAllowed"] == 1
    for dry_run in (True, False):
        with pytest.raises(KubeResponseError) as refused:
            await evict(client, kept, dry_run=dry_run)
        assert refused.value.status == 429
        with pytest.raises(KubeResponseError) as refused:
            await evict(client, twice, dry_run=dry_run)
        assert refused.value.status == 500
    assert [await goes(client, one) for one in (free, kept, twice)] == [False, False, False]
    await evict(client, free)
    assert await goes(client, free)
    assert (await client.get(allows))["status"]["disruptionsAllowed"] == 0


async def test_an_eviction_is_of_the_pod_that_was_meant(plane: tuple[KubeClient, str]) -> None:
    """A successor of the same name, or nobody, is no victim."""
    client, _ = plane
    successor = await running(client, "successor")
    with pytest.raises(Conflict):
        await evict(client, replace(successor, uid=PodUid("another")))
    assert not await goes(client, successor)
    for dry_run in (True, False):
        await evict(client, replace(successor, name="nobody"), dry_run=dry_run)
