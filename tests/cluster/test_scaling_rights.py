"""What the scaler and the activators may do on the real API server, each under its own ServiceAccount, and what whoever has
stolen their tokens may not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from berth.contract.endpoint import Endpoint
from berth.contract.keys import Keys
from berth.contract.scaling import ModelKey, Scaled, Schedulable, SchedulableAnswer, SchedulableRequest
from berth.kube import paths
from berth.kube.client import KubeClient
from berth.kube.election import Election
from berth.kube.errors import Conflict, Denied, KubeError, NotFound
from berth.kube.events import EventRecorder, ObjectRef
from berth.kube.token_review import TokenRefused, review_pod_token
from localcluster.cluster import LocalCluster
from localcluster.deployment import AUTOSCALED
from scaler.activation.route import Apply, Delete
from scaler.activation.slices import BerthSlice, ServiceRef, SlicePort
from scaler.app import Replica, read_config
from scaler.config import ScalerOptions
from scaler.core.actions import NoRecord
from scaler.core.pods import DELETION_COST
from scaler.metrics import ScalerMetrics
from scaler.writer import DeploymentWrite, Writer
from tests.cluster.accounts import speaking_as
from tests.cluster.test_manifests import rendered
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

Json = dict[str, Any]
Call = Callable[[], Awaitable[Json]]
NS = "scaling-rights"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NS}/deployments"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NS}/endpointslices"
LEASES = paths.leases("berth-system")
CLASS, MIN_SCALE = "autoscaling.knative.dev/class", "autoscaling.knative.dev/min-scale"
SCALED = Keys().scaled
NOT_ASKED = "has not asked for it"
REPLICAS_ONLY = "but its replicas and the annotation"
COST_ONLY = "but the annotation controller.kubernetes.io/pod-deletion-cost"
# What may run is no part of what is looked at here.
_RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
_ADMISSION = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


def deployment(name: str, *, of_template: bool = False, asked: bool = True) -> Json:
    asks = {CLASS: "kpa.autoscaling.knative.dev"} if asked else {}
    template = {
        "metadata": {"labels": {"app": name}, "annotations": {"mine": "x"} | (asks if of_template else {})},
        "spec": {
            "schedulerName": "nobody",
            "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "any"}],
        },
    }
    meta = {"name": name, "annotations": {"mine": "x"} | ({} if of_template else asks), "labels": {"a": "b"}}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}


def service(name: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"ports": [{"port": 80}]},
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def scaler(cluster: LocalCluster, tmp_path_factory: Any) -> AsyncIterator[KubeClient]:
    """Speaks as the scaler; the rights and policies of `deploy/autoscaling` are in force."""
    documents = [d for d in rendered(str(AUTOSCALED)) if d["kind"] in (*_RIGHTS, *_ADMISSION)]
    await cluster.apply(documents)
    await cluster.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NS}}])
    bodies = (deployment("model"), deployment("by-pods", of_template=True), deployment("others", asked=False))
    for body in bodies:
        await cluster.client.create(DEPLOYMENTS, body)
    await cluster.client.create(f"/api/v1/namespaces/{NS}/services", service("model"))
    async with speaking_as(cluster, "berth-scaler", tmp_path_factory.mktemp("scaler")) as client:

        async def in_force() -> None:
            await _is_denied(client.patch(f"{DEPLOYMENTS}/others", {"spec": {"replicas": 2}}))
            await _is_denied(client.patch(pod_of(await pods(cluster)), LABEL))
            await _is_denied(client.create(SLICES, a_slice("u", port=1).to_json()))
            await _is_denied(client.create(LEASES, lease("somebody-elses")))
            await _is_denied(cluster.client.create(SLICES, a_slice("u").to_json(), dryRun="All"))

        await eventually(in_force, what="the admission policies to be in force")
        yield client
    await cluster.client.delete(f"/api/v1/namespaces/{NS}")
    for document in reversed(documents):
        if document["kind"] in _ADMISSION:
            kind = "validatingadmissionpolic" + ("ies" if document["kind"] == _ADMISSION[0] else "ybindings")
            with suppress(NotFound):
                name = document["metadata"]["name"]
                if name.startswith("berth-scaler"):
                    await cluster.client.delete(f"/apis/admissionregistration.k8s.io/v1/{kind}/{name}")

    async def out_of_force() -> None:
        try:
            body = {**a_slice("u").to_json()}
            await cluster.client.create(SLICES.replace(NS, "default"), _moved(body), dryRun="All")
        except Denied as error:
            raise AssertionError from error

    await eventually(out_of_force, what="the admission policies to be gone")


def _moved(body: Json) -> Json:
    return {**body, "metadata": {**body["metadata"], "namespace": "default"}}


async def _is_denied(call: Awaitable[Json]) -> None:
    """By a policy: the API server reads one some moments after it has been written."""
    try:
        await call
    except Denied as error:
        if "ValidatingAdmissionPolicy" not in str(error):
            raise AssertionError("denied by others") from error
    except Conflict as error:
        raise AssertionError("it was created") from error
    else:
        raise AssertionError("it is taken")


LABEL: Json = {"metadata": {"labels": {"x": "y"}}}


async def pods(cluster: LocalCluster, app: str = "model") -> list[Json]:
    """Of one of the Deployments; there is one at least."""
    found: list[Json] = (await cluster.client.get(paths.pods(NS), labelSelector=f"app={app}"))["items"]
    assert found
    return found


def pod_of(found: list[Json]) -> str:
    return paths.pod(NS, found[0]["metadata"]["name"])


def lease(name: str) -> Json:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": {}}


def a_slice(uid: str, *, port: int = 20_000, name: str = "model") -> BerthSlice:
    return BerthSlice(ServiceRef(NS, name), uid, (SlicePort("", port),), ("10.1.2.3",))


# --- what it does ------------------------------------------------------------------------------------------------


async def test_all_that_a_scaler_reads_it_may_read(scaler: KubeClient) -> None:
    for path in (
        paths.DEPLOYMENTS,
        paths.PODS,
        paths.SERVICES,
        paths.ENDPOINT_SLICES,
        paths.PRIORITY_CLASSES,
    ):
        assert "items" in await scaler.get(path, limit="1")


async def test_all_that_a_scaler_writes_it_may_write(cluster: LocalCluster, scaler: KubeClient) -> None:
    writer = Writer(scaler, Keys(), ScalerMetrics(CollectorRegistry()), lambda: True)
    name = (await pods(cluster))[0]["metadata"]["name"]
    for model in ("model", "by-pods"):
        uid = (await cluster.client.get(f"{DEPLOYMENTS}/{model}"))["metadata"]["uid"]
        costs = {name: 7} if model == "model" else {}
        told = Scaled(desired=2, requested=2)
        writer.put(DeploymentWrite(model=ModelKey(NS, model), uid=uid, replicas=2, scaled=told, costs=costs))
    uid = (await cluster.client.get(f"/api/v1/namespaces/{NS}/services/model"))["metadata"]["uid"]
    writer.put(Apply(a_slice(uid)))

    async def written() -> None:
        for model in ("model", "by-pods"):
            found = await cluster.client.get(f"{DEPLOYMENTS}/{model}")
            assert found["spec"]["replicas"] == 2
            assert Scaled.from_text(found["metadata"]["annotations"][SCALED]).desired == 2
        cost = (await cluster.client.get(paths.pod(NS, name)))["metadata"]["annotations"][DELETION_COST]
        assert cost == "7"
        assert (await cluster.client.get(f"{SLICES}/model-berth"))["ports"][0]["port"] == 20_000

    await eventually(written, what="everything to be written")
    writer.put(Apply(a_slice(uid, port=20_002)))
    await eventually(lambda: _has_port(cluster, 20_002), what="another port")
    writer.put(Delete(a_slice(uid)))
    await eventually(lambda: _is_gone(cluster, f"{SLICES}/model-berth"), what="the slice to go")
    await writer.close()


async def _has_port(cluster: LocalCluster, port: int) -> None:
    assert (await cluster.client.get(f"{SLICES}/model-berth"))["ports"][0]["port"] == port


async def _is_gone(cluster: LocalCluster, path: str) -> None:
    try:
        await cluster.client.get(path)
    except NotFound:
        return
    raise AssertionError("it is still there")


async def test_a_scaler_tells_a_deployment_and_leads(cluster: LocalCluster, scaler: KubeClient) -> None:
    found = await cluster.client.get(f"{DEPLOYMENTS}/model")
    events = EventRecorder(scaler, component="berth-scaler")
    about = ObjectRef("apps/v1", "Deployment", NS, "model", found["metadata"]["uid"])
    for _ in range(2):  # the second one raises a count
        events.record(about, "Warning", "CapacityLimited", "no room")
    await events.flush()
    told = (await cluster.client.get(paths.events(NS), fieldSelector="reason=CapacityLimited"))["items"]
    assert [(one["count"], one["involvedObject"]["kind"]) for one in told] == [(2, "Deployment")]
    election = Election(scaler, namespace="berth-system", name="berth-scaler", identity="a test")
    await election.acquire()
    await scaler.get(LEASES, fieldSelector="metadata.name=berth-scaler")
    await election.release()
    with pytest.raises(TokenRefused):
        await review_pod_token(scaler, "no token", audience="berth-scaler")


async def test_a_write_for_a_deployment_is_none_for_its_successor(
    cluster: LocalCluster, scaler: KubeClient
) -> None:
    with pytest.raises(KubeError) as refused:
        await scaler.patch(f"{DEPLOYMENTS}/model", {"metadata": {"uid": "another"}, "spec": {"replicas": 5}})
    assert refused.value.status in (409, 422)
    assert (await cluster.client.get(f"{DEPLOYMENTS}/model"))["spec"]["replicas"] != 5


class Fits:
    """A binder that has room for everybody."""

    async def ask(self, question: SchedulableRequest) -> SchedulableAnswer:
        missing = {one.model: one.desired - one.running - one.starting for one in question.models}
        models = {model: Schedulable(name=str(model), now=count) for model, count in missing.items()}
        return SchedulableAnswer(generation=1, models=models)


@asynccontextmanager
async def replica(cluster: LocalCluster, directory: Path) -> AsyncIterator[None]:
    """`berth scaler` in this process, as the ServiceAccount that it has."""
    nowhere = Endpoint("127.0.0.1", 0)
    options = ScalerOptions(admin_listen=nowhere, control_listen=nowhere)
    stop = asyncio.Event()
    async with speaking_as(cluster, "berth-scaler", directory) as client, asyncio.TaskGroup() as group:
        group.create_task(Replica(options, read_config(None), client, Fits(), NoRecord()).run(stop))
        try:
            yield
        finally:
            stop.set()


async def test_a_scaler_scales_who_asked_and_the_next_one_goes_on(
    cluster: LocalCluster, scaler: KubeClient, tmp_path: Path
) -> None:
    """No pod of these runs: what is asked for is the bounds' doing, and nothing is known of any load."""
    path = f"{DEPLOYMENTS}/bounded"
    body = deployment("bounded")
    body["metadata"]["annotations"] |= {MIN_SCALE: "3"}
    await cluster.client.create(DEPLOYMENTS, body)
    await cluster.client.create(DEPLOYMENTS, {**deployment("hands-off", asked=False)})

    async def has(replicas: int) -> None:
        found = await cluster.client.get(path)
        assert found["spec"]["replicas"] == replicas
        assert Scaled.from_text(found["metadata"]["annotations"][SCALED]).requested == replicas

    async with replica(cluster, tmp_path):
        await eventually(lambda: has(3), what="three replicas")
        await cluster.client.patch(
            path, {"spec": {"replicas": 1}}
        )  # by hand: the next decision overwrites it
        await eventually(lambda: has(3), what="three replicas again")
        await cluster.client.patch(path, {"metadata": {"annotations": {MIN_SCALE: "many"}}})
        await eventually(lambda: _is_told(cluster, "InvalidAnnotation", "many"), what="a warning")
        await has(3)
        holder = (await cluster.client.get(f"{LEASES}/berth-scaler"))["spec"]["holderIdentity"]
    assert "@127.0.0.1:" in holder
    # Let go of at the end, so that the next one need not wait.
    assert not (await cluster.client.get(f"{LEASES}/berth-scaler"))["spec"]["holderIdentity"]
    await cluster.client.patch(path, {"metadata": {"annotations": {MIN_SCALE: "4"}}})
    async with replica(cluster, tmp_path):
        await eventually(lambda: has(4), what="four replicas")
        await cluster.client.patch(path, {"metadata": {"annotations": {CLASS: None}}})
        await cluster.client.patch(path, {"spec": {"replicas": 1}})
        await asyncio.sleep(3)  # longer than it takes to decide anew
    assert (await cluster.client.get(path))["spec"]["replicas"] == 1
    assert (await cluster.client.get(f"{DEPLOYMENTS}/hands-off"))["spec"]["replicas"] == 1


async def _is_told(cluster: LocalCluster, reason: str, text: str) -> None:
    told = (await cluster.client.get(paths.events(NS), fieldSelector=f"reason={reason}"))["items"]
    assert any(text in one["message"] for one in told)


# --- what a stolen token of it does not -----------------------------------------------------------------------------


def image(name: str) -> Json:
    return {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": name}]}}}}


@pytest.mark.parametrize(
    ("name", "patch", "message"),
    [
        ("others", {"spec": {"replicas": 0}}, NOT_ASKED),
        ("others", {"metadata": {"annotations": {SCALED: "{}"}}}, NOT_ASKED),
        ("others", {"metadata": {"annotations": {CLASS: "kpa.autoscaling.knative.dev"}}}, NOT_ASKED),
        ("model", image("evil"), REPLICAS_ONLY),
        ("model", {"spec": {"template": {"spec": {"serviceAccountName": "admin"}}}}, REPLICAS_ONLY),
        ("model", {"spec": {"template": {"metadata": {"annotations": {"x": "y"}}}}}, REPLICAS_ONLY),
        ("model", {"spec": {"paused": True}}, REPLICAS_ONLY),
        ("model", {"spec": {"strategy": {"type": "Recreate", "rollingUpdate": None}}}, REPLICAS_ONLY),
        ("model", {"spec": {"minReadySeconds": 9}}, REPLICAS_ONLY),
        ("model", {"spec": {"revisionHistoryLimit": 1}}, REPLICAS_ONLY),
        ("model", {"spec": {"progressDeadlineSeconds": 9}}, REPLICAS_ONLY),
        ("model", {"metadata": {"annotations": {"mine": "theirs"}}}, REPLICAS_ONLY),
        ("model", {"metadata": {"annotations": {"mine": None}}}, REPLICAS_ONLY),
        ("model", {"metadata": {"annotations": {CLASS: None}}}, REPLICAS_ONLY),
        ("model", {"metadata": {"annotations": {"seldon.io/trtis-clients": "*"}}}, REPLICAS_ONLY),
        ("model", {"metadata": {"labels": {"a": "c"}}}, REPLICAS_ONLY),
        ("model", {"metadata": {"finalizers": ["example.com/x"]}}, REPLICAS_ONLY),
    ],
    ids=str,
)
async def test_of_a_deployment_it_writes_replicas_and_its_annotation(
    scaler: KubeClient, name: str, patch: Json, message: str
) -> None:
    with pytest.raises(Denied, match=f"403 Forbidden: .*{message}"):
        await scaler.patch(f"{DEPLOYMENTS}/{name}", patch)


@pytest.mark.parametrize(
    "patch",
    [
        LABEL,
        {"metadata": {"annotations": {"mine": None}}},
        {"metadata": {"annotations": {"example.com/new": "x"}}},
        {"metadata": {"finalizers": ["example.com/x"]}},
        {"metadata": {"ownerReferences": None}},
        {"spec": {"containers": [{"name": "main", "image": "evil"}]}},
        {"spec": {"activeDeadlineSeconds": 1}},
    ],
    ids=str,
)
async def test_of_a_pod_it_writes_the_cost_of_its_deletion(
    cluster: LocalCluster, scaler: KubeClient, patch: Json
) -> None:
    with pytest.raises(Denied, match=f"403 Forbidden: .*{COST_ONLY}"):
        await scaler.patch(pod_of(await pods(cluster)), patch)


async def test_of_a_pod_that_is_no_replica_it_writes_nothing(
    cluster: LocalCluster, scaler: KubeClient
) -> None:
    (own, *_) = (await cluster.client.get(paths.pods("berth-system")))["items"]
    daemon = next(
        (
            p
            for p in (await cluster.client.get(paths.pods("berth-system")))["items"]
            if p["metadata"]["ownerReferences"][0]["kind"] == "DaemonSet"
        ),
        own,
    )
    patch = {"metadata": {"annotations": {DELETION_COST: "1"}}}
    with pytest.raises(Denied, match="on the pods of Deployments only"):
        await scaler.patch(paths.pod("berth-system", daemon["metadata"]["name"]), patch)


async def test_slices_of_others_are_not_its_to_change(cluster: LocalCluster, scaler: KubeClient) -> None:
    body = {**a_slice("u").to_json()}
    theirs = {**body, "metadata": {"name": "theirs", "labels": {"kubernetes.io/service-name": "model"}}}
    await cluster.client.create(SLICES, theirs)
    calls: tuple[Call, ...] = (
        lambda: scaler.delete(f"{SLICES}/theirs"),
        lambda: scaler.patch(f"{SLICES}/theirs", {"endpoints": []}),
        lambda: scaler.patch(
            f"{SLICES}/theirs",
            {"metadata": {"labels": {"endpointslice.kubernetes.io/managed-by": "berth-scaler"}}},
        ),
    )
    for call in calls:
        with pytest.raises(Denied, match="no EndpointSlice of another's"):
            await call()
    await cluster.client.delete(f"{SLICES}/theirs")


@asynccontextmanager
async def tenant(cluster: LocalCluster, directory: Path) -> AsyncIterator[KubeClient]:
    """Whoever edits the namespace. Clusters that were made before Kubernetes 1.22 let an editor write slices, too."""
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NS}"
    await cluster.client.create(f"/api/v1/namespaces/{NS}/serviceaccounts", {"metadata": {"name": "tenant"}})
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["*"]}
    await cluster.client.create(f"{rbac}/roles", {"metadata": {"name": "slices"}, "rules": [rule]})
    for kind, name in (("ClusterRole", "edit"), ("Role", "slices")):
        body = {
            "metadata": {"name": f"tenant-{name}"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": "tenant", "namespace": NS}],
        }
        await cluster.client.create(f"{rbac}/rolebindings", body)
    async with speaking_as(cluster, "tenant", directory, namespace=NS) as client:

        async def may_read() -> None:
            try:
                await client.get(SLICES)
            except Denied as error:
                raise AssertionError("its rights are not known yet") from error

        await eventually(may_read)
        yield client


async def test_nobody_makes_up_a_slice_of_the_scalers(
    cluster: LocalCluster, scaler: KubeClient, tmp_path: Path
) -> None:
    """With another model's ports it would be led that model's requests after the next change of the leader."""
    uid = (await cluster.client.get(f"/api/v1/namespaces/{NS}/services/model"))["metadata"]["uid"]
    made_up, label = a_slice(uid, name="model").to_json(), "endpointslice.kubernetes.io/managed-by"
    plain = {**made_up, "metadata": {"name": "plain", "labels": {"kubernetes.io/service-name": "model"}}}
    path = f"{SLICES}/model-berth"
    async with tenant(cluster, tmp_path) as client:
        await client.create(SLICES, plain)  # what is its own it may write
        await scaler.create(SLICES, made_up)
        calls: tuple[Call, ...] = (
            lambda: client.create(
                SLICES, made_up | {"metadata": made_up["metadata"] | {"name": "other-berth"}}
            ),
            lambda: client.patch(f"{SLICES}/plain", {"metadata": {"labels": {label: "berth-scaler"}}}),
            lambda: client.patch(path, {"ports": [{"name": "", "port": 20_002}]}),
            lambda: client.patch(path, {"endpoints": [{"addresses": ["10.9.9.9"]}]}),
            lambda: client.patch(path, {"metadata": {"labels": {label: "me"}}}),
            lambda: client.apply(
                path, {**made_up, "ports": [{"name": "", "port": 20_002}]}, manager="berth-scaler"
            ),
            lambda: cluster.client.create(
                SLICES, made_up | {"metadata": made_up["metadata"] | {"name": "other-berth"}}
            ),
        )
        for call in calls:
            with pytest.raises(Denied, match="written by Berth's scaler and nobody else"):
                await call()
        await client.patch(f"{SLICES}/plain", {"metadata": {"labels": {"x": "y"}}})
        await client.delete(path)
        await client.delete(f"{SLICES}/plain")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": {"kubernetes.io/service-name": "model"}}, "managed by berth-scaler"),
        ({"labels": {"endpointslice.kubernetes.io/managed-by": "berth-scaler"}}, "managed by berth-scaler"),
        ({"name": "another-name"}, "managed by berth-scaler"),
        ({"ownerReferences": []}, "managed by berth-scaler"),
        ({"port": 8443}, "the activators' ports"),
        ({"port": 30_000}, "the activators' ports"),
    ],
    ids=str,
)
async def test_a_slice_of_its_own_is_what_one_is(scaler: KubeClient, change: Json, message: str) -> None:
    body = a_slice("u", port=change.pop("port", 20_000)).to_json()
    body["metadata"] |= change
    with pytest.raises(Denied, match=f"403 Forbidden: .*{message}"):
        await scaler.create(SLICES, body)


async def test_nobody_else_writes_the_scalers_lease_and_they_no_other(
    cluster: LocalCluster, scaler: KubeClient
) -> None:
    for name in ("somebody-elses", "berth-binder-2"):
        with pytest.raises(Denied, match="only Berth's scalers"):
            await scaler.create(LEASES, lease(name))
    with pytest.raises(Denied):
        await scaler.patch(f"{LEASES}/berth-binder", {"spec": {"holderIdentity": "me"}})
    calls: tuple[Call, ...] = (
        lambda: cluster.client.patch(f"{LEASES}/berth-scaler", {"spec": {"holderIdentity": "me"}}),
        lambda: cluster.client.delete(f"{LEASES}/berth-scaler"),
    )
    for call in calls:
        with pytest.raises(Denied, match="only Berth's scalers"):
            await call()


FORBIDDEN = [
    ("get", "/api/v1/secrets"),
    ("get", "/api/v1/nodes"),
    ("get", "/api/v1/namespaces"),
    ("get", f"/api/v1/namespaces/{NS}/configmaps"),
    ("get", f"{LEASES}/berth-binder"),
    ("get", LEASES),
    ("get", "/apis/apps/v1/replicasets"),
    ("create", DEPLOYMENTS),
    ("delete", f"{DEPLOYMENTS}/model"),
    ("patch", f"{DEPLOYMENTS}/model/status"),
    ("patch", f"{DEPLOYMENTS}/model/scale"),
    ("create", paths.pods(NS)),
    ("delete", f"{paths.pods(NS)}/x"),
    ("create", f"{paths.pods(NS)}/x/eviction"),
    ("create", f"{paths.pods(NS)}/x/binding"),
    ("create", f"{paths.pods(NS)}/x/exec"),
    ("patch", f"{paths.pods(NS)}/x/status"),
    ("patch", f"/api/v1/namespaces/{NS}/services/model"),
    ("create", f"/api/v1/namespaces/{NS}/services"),
    ("create", f"/api/v1/namespaces/{NS}/endpoints"),
    ("delete", f"{LEASES}/berth-scaler"),
    ("patch", "/api/v1/nodes/gpu-1"),
    ("create", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"),
    ("create", "/api/v1/namespaces/berth-system/serviceaccounts/berth-binder/token"),
]
ACTIVATOR_FORBIDDEN = [
    ("get", paths.PODS),
    ("get", paths.SERVICES),
    ("get", paths.DEPLOYMENTS),
    ("get", paths.ENDPOINT_SLICES),
    ("get", f"{LEASES}/berth-scaler"),
    ("get", "/api/v1/secrets"),
    ("patch", f"{DEPLOYMENTS}/model"),
    ("create", SLICES),
    ("create", paths.TOKEN_REVIEWS),
    ("create", paths.events(NS)),
]


@pytest.mark.parametrize(
    ("account", "verb", "path"),
    [("berth-scaler", *call) for call in FORBIDDEN]
    + [("berth-activator", *call) for call in ACTIVATOR_FORBIDDEN],
)
async def test_what_is_not_needed_is_not_allowed(
    cluster: LocalCluster, scaler: KubeClient, tmp_path: Any, account: str, verb: str, path: str
) -> None:
    async with speaking_as(cluster, account, tmp_path) as client:
        calls: dict[str, Call] = {
            "get": lambda: client.get(path),
            "create": lambda: client.create(path, {"metadata": {"name": "x"}}),
            "patch": lambda: client.patch(path, LABEL),
            "delete": lambda: client.delete(path),
        }
        with pytest.raises(Denied, match="403 Forbidden"):
            await calls[verb]()
