"""HorizontalPodAutoscalers of a real control plane, by the figures of a scaler behind its aggregator.

The API server, etcd and the controllers of Deployments and autoscalers are real; the figures are set. No node is needed:
what an autoscaler writes is the Deployment's.
"""

import asyncio
import os
import ssl
import subprocess
import tempfile
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from yarl import URL

from berth.contract.endpoint import Endpoint
from berth.kube.client import KubeClient, open_client
from berth.runtime.options import parse_options
from localcluster.addresses import cluster_network, free_port
from localcluster.binaries import control_plane_directory
from localcluster.controlplane import CLIENT_RATE, ControlPlane, User
from localcluster.credentials import make_client_certificate, make_serving_certificate, write_kubeconfig
from localcluster.processes import end, spawn
from scaler.config import ScalerOptions
from scaler.core.models_view import Averages
from scaler.export.external_metrics import ExternalMetrics
from scaler.export.front_proxy import FrontProxyPort
from scaler.export.tls import TlsFiles
from tests.fakes.eventually import eventually
from tests.fakes.models_view import FakeModels

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
DEPLOY = Path(__file__).parents[2] / "deploy"
SAMPLES = DEPLOY / "samples" / "autoscaling"
COMPONENTS = ("autoscaling", "external-metrics", "keda")
SERVICE, SYSTEM = "berth-scaler", "berth-system"
HPA = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
METRICS = "/apis/external.metrics.k8s.io/v1beta1"
TENANT = User("tenant")
# The aggregator finds a Service by name only, and on this machine there is no kube-proxy: it goes to this one's name.
HOST = "127.0.0.1"
PLURALS = {"Deployment": "deployments", "NetworkPolicy": "networkpolicies"}


@dataclass(frozen=True, slots=True)
class Plane:
    """What a test speaks to: the API server, and the scaler's figures."""

    client: KubeClient
    tenant: KubeClient
    models: FakeModels
    certificate: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane() -> AsyncIterator[Plane]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-hpa-")))
        proxy = directory / "proxy.crt", directory / "proxy.key"
        make_client_certificate(*proxy, user="front-proxy-client", group="g")
        manager = User("system:kube-controller-manager")
        control = ControlPlane(
            directory,
            host=f"{stack.enter_context(cluster_network())}.0.1",
            binaries=await asyncio.to_thread(control_plane_directory),
            users=[manager, TENANT],
            env={},
            api_flags=[
                "--disable-admission-plugins=ServiceAccount",
                f"--requestheader-client-ca-file={proxy[0]}",
                "--requestheader-allowed-names=front-proxy-client",
                "--requestheader-username-headers=X-Remote-User",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                f"--proxy-client-cert-file={proxy[0]}",
                f"--proxy-client-key-file={proxy[1]}",
            ],
            controllers=False,
        )
        stack.push_async_callback(control.stop)
        await control.start()
        clients = [
            await stack.enter_async_context(open_client(str(control.kubeconfig(user, directory / user.name))))
            for user in (control.admin, TENANT)
        ]
        await start_controllers(stack, control, manager, directory)
        models = FakeModels()
        await start_scaler(stack, control, clients[0], models, directory)
        yield Plane(clients[0], clients[1], models, control.certificate)


async def start_controllers(
    stack: AsyncExitStack, control: ControlPlane, user: User, directory: Path
) -> None:
    """Those of Deployments, and of autoscalers with the rights that they have everywhere."""
    child = await spawn(
        [
            str(await asyncio.to_thread(control_plane_directory) / "kube-controller-manager"),
            f"--kubeconfig={control.kubeconfig(user, directory / 'manager')}",
            "--controllers=deployment-controller,replicaset-controller,horizontal-pod-autoscaler-controller",
            "--horizontal-pod-autoscaler-sync-period=1s",
            f"--cert-dir={directory / 'manager-certificates'}",
            f"--root-ca-file={control.certificate}",
            f"--service-account-private-key-file={control.signing_key}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--secure-port=0",
            *CLIENT_RATE,
        ],
        log=directory / "manager.log",
        env={},
    )
    stack.push_async_callback(end, child, grace_seconds=0)


async def start_scaler(
    stack: AsyncExitStack, control: ControlPlane, client: KubeClient, models: FakeModels, directory: Path
) -> None:
    """With no more rights than the manifests give it, and registered as they register it."""
    port = free_port(HOST)
    files = TlsFiles(directory / "tls.crt", directory / "tls.key")
    make_serving_certificate(files.cert, files.key, hosts=[f"{SERVICE}.{SYSTEM}.svc"])
    await client.create("/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
    own = await stack.enter_async_context(as_scaler(control, client, directory))
    serving = asyncio.create_task(
        FrontProxyPort(own, files, ExternalMetrics(models).application).run(Endpoint(HOST, port))
    )
    stack.callback(serving.cancel)
    spec: Json = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    await client.create(
        f"/api/v1/namespaces/{SYSTEM}/services", {"metadata": {"name": SERVICE}, "spec": spec}
    )
    registered = manifest("api-service.yaml")
    registered["spec"]["service"]["port"] = port
    registered["spec"]["caBundle"] = b64encode(files.cert.read_bytes()).decode()
    await client.create("/apis/apiregistration.k8s.io/v1/apiservices", registered)

    async def served() -> None:
        found = await client.get(
            "/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.external.metrics.k8s.io"
        )
        conditions = (found.get("status") or {}).get("conditions") or ()
        assert [one["status"] for one in conditions] == ["True"], conditions

    await eventually(served, what="the aggregator finds the scaler")


def manifest(name: str) -> Json:
    found: Json = yaml.safe_load((DEPLOY / "external-metrics" / name).read_text())
    return found


@asynccontextmanager
async def as_scaler(control: ControlPlane, client: KubeClient, directory: Path) -> AsyncIterator[KubeClient]:
    accounts = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts"
    await client.create(accounts, {"metadata": {"name": SERVICE}})
    await client.create(
        "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings", manifest("rbac.yaml")
    )
    asked: Json = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = (await client.create(f"{accounts}/{SERVICE}/token", asked))["status"]["token"]
    config = write_kubeconfig(
        directory / "scaler", server=control.server, certificate=control.certificate, token=token
    )
    async with open_client(str(config)) as own:
        yield own


async def make_deployment(client: KubeClient, name: str, *, replicas: int = 1) -> None:
    labels = {"app": name}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "any"}]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": pod}
    await client.create(DEPLOYMENTS, {"metadata": {"name": name}, "spec": spec})


def sample(name: str, *, of: str) -> Json:
    """The manifest of a sample, for a Deployment of another name."""
    text = (SAMPLES / name).read_text().replace("name: simple", f"name: {of}")
    manifest: Json = yaml.safe_load(text.replace("model: simple", f"model: {of}"))
    return manifest


async def replicas(client: KubeClient, name: str, wanted: int) -> None:
    async def are_there() -> None:
        hpa = await client.get(f"{HPA}/{name}")
        spec = (await client.get(f"{DEPLOYMENTS}/{name}"))["spec"]
        assert spec["replicas"] == wanted, (spec["replicas"], hpa.get("status"))

    await eventually(are_there, what=f"{name} has {wanted} replicas")


async def condition(client: KubeClient, name: str, kind: str, *, reason: str) -> None:
    async def is_notified() -> None:
        conditions = (await client.get(f"{HPA}/{name}"))["status"].get("conditions") or ()
        assert reason in [one["reason"] for one in conditions if one["type"] == kind], conditions

    await eventually(is_notified, what=f"{name} says {reason}")


async def test_an_autoscaler_follows_the_models_concurrency(plane: Plane) -> None:
    client, models = plane.client, plane.models
    await make_deployment(client, "busy")
    model = models.add("default/busy", concurrency=Averages(7.0, 0.0))
    models.add("default/other", concurrency=Averages(1000.0, 1000.0))
    models.add("elsewhere/busy", concurrency=Averages(1000.0, 1000.0))
    await client.create(HPA, sample("hpa-concurrency.yaml", of="busy"))
    await replicas(client, "busy", 4)  # 7 by 2 of a replica
    # Nothing that is known is nothing to go by: the replicas stay.
    models.change(model, concurrency=Averages())
    await condition(client, "busy", "ScalingActive", reason="FailedGetExternalMetric")
    await replicas(client, "busy", 4)
    models.change(model, concurrency=Averages(11.0, 0.0))
    await replicas(client, "busy", 6)
    models.leads = False
    await condition(client, "busy", "ScalingActive", reason="FailedGetExternalMetric")
    models.leads = True
    await condition(client, "busy", "ScalingActive", reason="ValidMetricFound")


async def test_an_autoscaler_writes_what_berth_has_decided(plane: Plane) -> None:
    """Up and down at once, and nothing while Berth has the model at zero."""
    client, models = plane.client, plane.models
    await make_deployment(client, "decided")
    model = models.add("default/decided", desired=6, capacity_limited=3)
    await client.create(HPA, sample("hpa-desired.yaml", of="decided"))
    await replicas(client, "decided", 3)
    models.change(model, desired=1, capacity_limited=0)
    await replicas(client, "decided", 1)
    await client.patch(f"{DEPLOYMENTS}/decided/scale", {"spec": {"replicas": 0}})
    models.change(model, desired=4)
    await condition(client, "decided", "ScalingActive", reason="ScalingDisabled")
    await replicas(client, "decided", 0)
    await client.patch(f"{DEPLOYMENTS}/decided/scale", {"spec": {"replicas": 1}})
    await replicas(client, "decided", 4)


async def test_the_sample_for_cpu_is_an_autoscaler(plane: Plane) -> None:
    """There is no metrics-server here: it says so, and leaves the replicas alone."""
    await make_deployment(plane.client, "computes")
    await plane.client.create(HPA, sample("hpa-cpu.yaml", of="computes"))
    await condition(plane.client, "computes", "ScalingActive", reason="FailedGetResourceMetric")
    await replicas(plane.client, "computes", 1)


async def test_the_components_go_together_and_the_api_server_takes_them(plane: Plane, tmp_path: Path) -> None:
    """All of them over the base: what the patches leave is a scaler with both ports, and one Service of them."""
    where = {name: os.path.relpath(DEPLOY / name, tmp_path) for name in ("base", *COMPONENTS)}
    kustomization = {"resources": [where["base"]], "components": [where[name] for name in COMPONENTS]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    command = [str(await asyncio.to_thread(control_plane_directory) / "kubectl"), "kustomize", str(tmp_path)]
    text = (
        await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    ).stdout
    found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}
    scaler, service = found["Deployment", SERVICE], found["Service", SERVICE]
    (container,) = scaler["spec"]["template"]["spec"]["containers"]
    options = parse_options(
        ScalerOptions,
        process="scaler",
        summary="",
        argv=[flag.replace("$(POD_IP)", "10.0.0.7") for flag in container["args"][1:]],
        environ={},
    )
    assert (str(options.external_metrics_listen), str(options.keda_listen)) == (
        "10.0.0.7:8491",
        "10.0.0.7:9094",
    )
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    led_to = {port["name"]: named[port["targetPort"]] for port in service["spec"]["ports"]}
    assert led_to == {"control": 9093, "metrics-api": 8491, "keda": 9094}
    assert found["APIService", "v1beta1.external.metrics.k8s.io"]["spec"]["service"]["port"] == 8491
    for kind, path in (("Deployment", "/apis/apps/v1"), ("NetworkPolicy", "/apis/networking.k8s.io/v1")):
        for (has, _), one in found.items():
            if has == kind and one["metadata"]["name"].startswith(SERVICE):
                collection = f"{path}/namespaces/{SYSTEM}/{PLURALS[kind]}"
                await plane.client.create(collection, one, dryRun="All", fieldValidation="Strict")


async def test_a_tenant_sees_the_models_of_its_namespace_alone(plane: Plane) -> None:
    """All that a tenant may be given in its namespace, and every way to write another one's path."""
    plane.models.add("mine/m", requests_per_second=Averages(1.0, 1.0))
    plane.models.add("theirs/secret", requests_per_second=Averages(1.0, 1.0))
    rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/mine"
    await plane.client.create("/api/v1/namespaces", {"metadata": {"name": "mine"}})
    everything = [{"apiGroups": ["*"], "resources": ["*", "*/*"], "verbs": ["*"]}]
    await plane.client.create(f"{rbac}/roles", {"metadata": {"name": "owner"}, "rules": everything})
    owner = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "owner"}
    tenant = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": TENANT.name}
    bound = {"metadata": {"name": "owner"}, "roleRef": owner, "subjects": [tenant]}
    await plane.client.create(f"{rbac}/rolebindings", bound)

    async def sees_its_own() -> None:
        assert await seen(plane, f"{METRICS}/namespaces/mine/berth-rps") == (200, True, False)

    await eventually(sees_its_own, what="RBAC has heard of the tenant")
    for path in (
        *("namespaces/theirs/berth-rps", "namespaces/mine/../theirs/berth-rps", "namespaces/*/berth-rps"),
        *("namespaces/mine%2f..%2ftheirs/berth-rps", "namespaces/mine/%2e%2e/theirs/berth-rps"),
        *("namespaces/mine/..%2ftheirs%2fberth-rps", "namespaces/mine/berth-rps/../../theirs/berth-rps"),
    ):
        status, _, theirs = await seen(plane, f"{METRICS}/{path}")
        assert status >= 300, path
        assert not theirs, path


async def seen(plane: Plane, path: str) -> tuple[int, bool, bool]:
    """The status that the tenant gets for this very path, and whose models the answer names."""
    context = ssl.create_default_context(cafile=str(plane.certificate))
    headers = {"Authorization": f"Bearer {TENANT.token}", "X-Remote-User": "admin"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            URL(plane.tenant.host + path, encoded=True), ssl=context, headers=headers, allow_redirects=False
        ) as response,
    ):
        text = await response.text()
        return response.status, '"model": "m"' in text, '"model": "secret"' in text
