"""What the ValidatingAdmissionPolicies of `deploy/base` let through and what they do not, on the real API
server. Where somebody is refused here it is the administrator: nobody has more rights, and RBAC asks nothing."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from berth.contract.keys import Keys
from berth.contract.pod import parse_model_pod
from berth.kube import paths
from berth.kube.client import STRATEGIC_PATCH, KubeClient
from berth.kube.errors import Conflict, Denied, Invalid
from localcluster.cluster import LocalCluster
from tests.cluster.accounts import agent_of, speaking_as
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

Json = dict[str, Any]
KEYS = Keys()
PODS = paths.pods("default")
OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"
CHOICE = '{"v":1,"uuid":"GPU-1-0","index":0,"bytes":1}'
BY_THE_BINDER = "by Berth's binder"
AS_PLACED = "are what it was placed by"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"


def pod(name: str = "probe", *, asks: str | None = "1Gi", **meta: Any) -> Json:
    """A pod that is placed by nobody: its scheduler is none."""
    limits = {} if asks is None else {KEYS.gpu_mem: asks}
    container = {"name": "main", "image": "any", "resources": {"limits": limits}}
    spec = {
        "schedulerName": "nobody",
        "automountServiceAccountToken": False,
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **meta}, "spec": spec}


def with_spec(body: Json, **spec: Any) -> Json:
    return {**body, "spec": {**body["spec"], **spec}}


def annotated(**annotations: str | None) -> Json:
    """A patch; the keys without their prefix and with _ for -."""
    return {"metadata": {"annotations": {named(k): v for k, v in annotations.items()}}}


def named(key: str) -> str:
    return f"{KEYS.prefix}{key.replace('_', '-')}"


def init(asks: str) -> Json:
    return {"name": "init", "image": "any", "resources": {"limits": {KEYS.gpu_mem: asks}}}


# --- pods are made -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        pod(annotations={KEYS.gpu: CHOICE}),
        pod(annotations={KEYS.gpu: ""}),
        pod(asks=None, annotations={KEYS.gpu: CHOICE}),
        with_spec(pod(annotations={KEYS.gpu: CHOICE}), nodeName="gpu-1"),
        with_spec(pod(annotations={KEYS.gpu: CHOICE}), schedulerName="trtis-scheduler"),
        with_spec(pod(annotations={KEYS.gpu: CHOICE}), schedulerName="trtis-kube-scheduler"),
        {**pod(), "metadata": {"generateName": "probe-", "annotations": {KEYS.gpu: CHOICE}}},
    ],
)
async def test_nobody_makes_a_pod_that_has_a_gpu_already(cluster: LocalCluster, body: Json) -> None:
    with pytest.raises(Denied, match=f"403 Forbidden: .*{BY_THE_BINDER} when it places the pod"):
        await cluster.client.create(PODS, body, dryRun="All")


async def test_nor_by_way_of_apply(cluster: LocalCluster) -> None:
    with pytest.raises(Denied, match=BY_THE_BINDER):
        await cluster.client.apply(
            paths.pod("default", "probe"), pod(annotations={KEYS.gpu: CHOICE}), manager="t", dryRun="All"
        )


@pytest.mark.parametrize("asks", [None, "0", "0Gi"])
async def test_a_pod_for_berth_says_how_much_gpu_memory_it_takes(
    cluster: LocalCluster, asks: str | None
) -> None:
    body = with_spec(pod(asks=asks), schedulerName="trtis-scheduler")
    with pytest.raises(Invalid, match=r"give a container the limit seldon\.io/trtis-gpu-mem, above 0"):
        await cluster.client.create(PODS, body, dryRun="All")


@pytest.mark.parametrize(
    "body",
    [
        with_spec(pod(asks="1"), schedulerName="trtis-scheduler"),
        with_spec(pod(annotations={KEYS.model_id: "m"}), schedulerName="trtis-scheduler"),
        with_spec(pod(asks=None), schedulerName="trtis-scheduler", initContainers=[init("11Gi")]),
        with_spec(pod(asks=None), schedulerName="default-scheduler"),
        with_spec(pod(asks="0"), schedulerName="trtis-kube-scheduler"),
        with_spec(pod(asks=None, annotations={KEYS.model_id: "m"}), nodeName="gpu-1"),
    ],
)
async def test_every_other_pod_is_made(cluster: LocalCluster, body: Json) -> None:
    await cluster.client.create(PODS, body, dryRun="All")


SERVERS = "berth-server"


@pytest.mark.parametrize("scheduler", ["trtis-scheduler", "default-scheduler", "nobody"])
async def test_only_berths_own_pods_have_the_priority_of_its_servers(
    cluster: LocalCluster, scheduler: str
) -> None:
    """node D6: a tenant's model pod with it had a neighbour's serving model evicted."""
    body = with_spec(pod(), schedulerName=scheduler, priorityClassName=SERVERS)
    with pytest.raises(
        Denied, match=r"403 Forbidden: .*PriorityClass berth-server is for pods of berth-system"
    ):
        await cluster.client.create(PODS, body, dryRun="All")
    await cluster.client.create(
        paths.pods("berth-system"), with_spec(body, schedulerName="nobody"), dryRun="All"
    )


async def test_its_number_is_not_to_be_had_without_its_name(cluster: LocalCluster) -> None:
    """node D6: by the API server's own rule, on which the policy rests."""
    with pytest.raises(Denied, match=r"the integer value of priority .* must not be provided in pod spec"):
        await cluster.client.create(PODS, with_spec(pod(), priority=10**9), dryRun="All")


async def test_a_quota_keeps_a_namespace_from_classes_of_priority(cluster: LocalCluster) -> None:
    """node D6: as docs/operating.md writes it, for classes that are not Berth's."""
    client, path = cluster.client, "/api/v1/namespaces/ordinary"
    (text,) = re.findall(
        r"```yaml\n(apiVersion: v1\nkind: ResourceQuota.*?)```", OPERATING.read_text(), re.DOTALL
    )
    await client.create(paths.NAMESPACES, {"metadata": {"name": "ordinary"}})
    await client.create(f"{path}/resourcequotas", {**yaml.safe_load(text), "metadata": {"name": "classes"}})

    async def counted() -> None:
        found = await client.get(f"{path}/resourcequotas/classes")
        assert found.get("status", {}).get("used") == {"pods": "0"}

    await eventually(counted, what="the quota's first count")
    with pytest.raises(Denied, match="exceeded quota: classes"):
        await client.create(f"{path}/pods", with_spec(pod(), priorityClassName="system-node-critical"))
    await client.create(f"{path}/pods", pod(), dryRun="All")
    await client.delete(path)


@pytest_asyncio.fixture(loop_scope="session")
async def quota(cluster: LocalCluster) -> AsyncIterator[str]:
    """A namespace whose pods may take 10 GiB of GPU memory; its path."""
    client, path, resource = cluster.client, "/api/v1/namespaces/bounded", f"requests.{KEYS.gpu_mem}"
    await client.create(paths.NAMESPACES, {"metadata": {"name": "bounded"}})
    limit = {"metadata": {"name": "gpu-memory"}, "spec": {"hard": {resource: "10Gi"}}}
    await client.create(f"{path}/resourcequotas", limit)

    async def counted() -> None:  # by its controller: until then no pod is admitted
        found = await client.get(f"{path}/resourcequotas/gpu-memory")
        assert found.get("status", {}).get("used") == {resource: "0"}

    await eventually(counted, seconds=60, what="the quota's first count")
    yield path
    await client.delete(path)


async def test_a_quota_counts_what_a_pod_of_several_gpus_takes(cluster: LocalCluster, quota: str) -> None:
    """ecosystem A4: the limit is the total, so what the API server counts is what the GPUs carry together."""
    pods, four = f"{quota}/pods", {KEYS.gpu_count: "4"}
    made = await cluster.client.create(pods, pod("eight", asks="8Gi", annotations=four))
    asked = parse_model_pod(made, KEYS)
    assert asked.request_bytes * asked.gpu_count == 8 * 1024**3
    with pytest.raises(Denied, match=r"exceeded quota: gpu-memory, requested: .*=4Gi, used: .*=8Gi, limited"):
        await cluster.client.create(pods, pod("four", asks="4Gi", annotations=four))


# --- pods are bound ------------------------------------------------------------------------------------------


def binding(name: str, **annotations: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": {named(k): v for k, v in annotations.items()}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "nowhere"},
    }


@pytest_asyncio.fixture(loop_scope="session")
async def make(cluster: LocalCluster) -> AsyncIterator[Callable[..., Any]]:
    """Makes pods that are gone when the test ends."""
    made: list[str] = []

    async def one(body: Json) -> str:
        made.append(paths.pod("default", body["metadata"]["name"]))
        await cluster.client.create(PODS, body)
        return made[-1]

    yield one
    for path in made:
        await cluster.client.delete(path, grace_seconds=0)


@pytest_asyncio.fixture(loop_scope="session")
async def binder(cluster: LocalCluster, tmp_path: Path) -> AsyncIterator[KubeClient]:
    async with speaking_as(cluster, "berth-binder", tmp_path) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def placed(make: Any, binder: KubeClient) -> str:
    """A pod as the binder leaves it."""
    path: str = await make(pod("placed", annotations={KEYS.model_id: "m"}))
    await binder.create(f"{path}/binding", binding("placed", gpu=CHOICE))
    return path


@pytest_asyncio.fixture(loop_scope="session")
async def waiting(make: Any) -> str:
    """A pod that has no node yet."""
    path: str = await make(pod("waiting", annotations={KEYS.model_id: "m"}))
    return path


@pytest.mark.parametrize("key", ["gpu", "model_id", "server", "anything"])
@pytest.mark.parametrize("by_way_of", [f"{PODS}/waiting/binding", "/api/v1/namespaces/default/bindings"])
async def test_nobody_but_the_binder_gives_berths_annotations_in_a_binding(
    cluster: LocalCluster, waiting: str, by_way_of: str, key: str
) -> None:
    with pytest.raises(Denied, match=r"403 Forbidden: .*only Berth's binder gives a pod annotations"):
        await cluster.client.create(by_way_of, binding("waiting", **{key: CHOICE}))
    assert "nodeName" not in (await cluster.client.get(waiting))["spec"]


async def test_nor_does_an_account_of_the_binders_name_in_another_namespace(
    cluster: LocalCluster, waiting: str, tmp_path: Path
) -> None:
    """It may bind pods, as a scheduler of a tenant's own would be allowed to."""
    client = cluster.client
    meta = {"name": "berth-binder", "namespace": "default"}
    role = {
        "metadata": meta,
        "rules": [{"apiGroups": [""], "resources": ["pods/binding"], "verbs": ["create"]}],
    }
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "berth-binder"}
    rights = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    await client.create("/api/v1/namespaces/default/serviceaccounts", {"metadata": meta})
    await client.create(f"{rights}/roles", role)
    await client.create(
        f"{rights}/rolebindings",
        {"metadata": meta, "roleRef": reference, "subjects": [{"kind": "ServiceAccount", **meta}]},
    )
    async with speaking_as(cluster, "berth-binder", tmp_path, namespace="default") as tenant:

        async def only_the_policy_is_in_the_way() -> None:
            with pytest.raises(Denied) as refused:
                await tenant.create(f"{waiting}/binding", binding("waiting", gpu=CHOICE))
            assert "only Berth's binder" in str(refused.value)

        await eventually(only_the_policy_is_in_the_way, seconds=20)
        await tenant.create(f"{waiting}/binding", binding("waiting"))
    assert KEYS.gpu not in (await client.get(waiting))["metadata"]["annotations"]


async def test_the_binder_places_pods_and_others_bind_theirs(
    cluster: LocalCluster, placed: str, waiting: str
) -> None:
    found = await cluster.client.get(placed)
    assert (found["spec"]["nodeName"], found["metadata"]["annotations"][KEYS.gpu]) == ("nowhere", CHOICE)
    await cluster.client.create(f"{waiting}/binding", binding("waiting"))


# --- pods are changed ----------------------------------------------------------------------------------------

WAYS = ["", "/status"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("content_type", ["application/merge-patch+json", STRATEGIC_PATCH])
@pytest.mark.parametrize("value", [CHOICE.replace(":1}", ":9}"), "", None])
async def test_nobody_changes_the_gpu_of_a_pod_or_takes_it_away(
    cluster: LocalCluster, placed: str, way: str, content_type: str, value: str | None
) -> None:
    with pytest.raises(Denied, match=f"403 Forbidden: .*{BY_THE_BINDER}, once"):
        await cluster.client.patch(f"{placed}{way}", annotated(gpu=value), content_type=content_type)
    found = await cluster.client.get(placed)
    assert found["metadata"]["annotations"][KEYS.gpu] == CHOICE


@pytest.mark.parametrize("way", WAYS)
async def test_nobody_adds_a_gpu_to_a_pod_that_has_none(
    cluster: LocalCluster, waiting: str, way: str
) -> None:
    with pytest.raises(Denied, match=BY_THE_BINDER):
        await cluster.client.patch(f"{waiting}{way}", annotated(gpu=CHOICE))
    await cluster.client.create(f"{waiting}/binding", binding("waiting"))
    with pytest.raises(Denied, match=BY_THE_BINDER):
        await cluster.client.patch(f"{waiting}{way}", annotated(gpu=CHOICE))


@pytest.mark.parametrize("way", ["/ephemeralcontainers", "/resize"])
async def test_the_other_subresources_leave_annotations_alone(
    cluster: LocalCluster, placed: str, way: str
) -> None:
    """Or would be held to the same."""
    body = {**annotated(gpu="x", model_id="x"), "spec": {"ephemeralContainers": []}}
    with suppress(Denied):
        await cluster.client.patch(f"{placed}{way}", body, content_type=STRATEGIC_PATCH)
    annotations = (await cluster.client.get(placed))["metadata"]["annotations"]
    assert (annotations[KEYS.gpu], annotations[KEYS.model_id]) == (CHOICE, "m")


async def test_nor_by_putting_another_pod_in_its_place(cluster: LocalCluster, placed: str) -> None:
    found = await cluster.client.get(placed)
    del found["metadata"]["annotations"][KEYS.gpu]
    for way in WAYS:
        with pytest.raises(Denied, match=BY_THE_BINDER):
            await cluster.client.replace(f"{placed}{way}", found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "change",
    [
        annotated(model_id="other"),
        annotated(model_id=None),
        annotated(server="s"),
        annotated(requirements=""),
    ],
)
async def test_what_a_pod_was_placed_by_stays_as_it_was(
    cluster: LocalCluster, placed: str, way: str, change: Json
) -> None:
    with pytest.raises(Denied, match=f"403 Forbidden: .*{AS_PLACED}"):
        await cluster.client.patch(f"{placed}{way}", change)


async def test_a_pod_that_waits_may_still_ask_for_something_else(cluster: LocalCluster, waiting: str) -> None:
    for change in (annotated(model_id="other"), annotated(requirements="python"), annotated(model_id=None)):
        await cluster.client.patch(waiting, change)


async def test_whatever_else_is_written_on_a_placed_pod_is_written(
    cluster: LocalCluster, placed: str, binder: KubeClient
) -> None:
    await cluster.client.patch(
        placed, {"metadata": {"annotations": {"example.com/a": "b"}, "labels": {"c": "d"}}}
    )
    await cluster.client.patch(placed, {"metadata": {"finalizers": ["example.com/f"]}})
    condition = {"type": KEYS.loaded_condition, "status": "False", "reason": "Probe"}
    await binder.patch(
        f"{placed}/status", {"status": {"conditions": [condition]}}, content_type=STRATEGIC_PATCH
    )
    found = await cluster.client.patch(placed, {"metadata": {"finalizers": []}})
    assert found["metadata"]["annotations"]["example.com/a"] == "b"
    assert condition["type"] in {c["type"] for c in found["status"]["conditions"]}


# --- Leases --------------------------------------------------------------------------------------------------

AGENTS, BINDERS = paths.leases("berth-system-nodes"), paths.leases("berth-system")
OF_AN_AGENT, OF_THE_BINDERS = (
    "an agent writes to the Lease of its own node only",
    "only Berth's binders write",
)


def lease(name: str) -> Json:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {"holderIdentity": "somebody"},
    }


HOLD = {"spec": {"holderIdentity": "me"}}


@pytest_asyncio.fixture(loop_scope="session")
async def leases(cluster: LocalCluster, binder: KubeClient, tmp_path: Path) -> None:
    """They are there, as agents and binders make them."""
    async with agent_of(cluster, "gpu-1", tmp_path) as agent:
        for client, where, name in (
            (agent, AGENTS, "berth-agent-gpu-1"),
            (binder, BINDERS, "berth-binder"),
        ):
            with suppress(Conflict):
                await client.create(where, lease(name))


@pytest.mark.usefixtures("leases")
async def test_nobody_touches_the_lease_of_an_agent_or_of_the_binders(cluster: LocalCluster) -> None:
    admin = cluster.client
    for path, message in (
        (f"{AGENTS}/berth-agent-gpu-1", OF_AN_AGENT),
        (f"{BINDERS}/berth-binder", OF_THE_BINDERS),
    ):
        for write in (admin.patch(path, HOLD), admin.delete(path), admin.delete(path.rpartition("/")[0])):
            with pytest.raises(Denied, match=f"403 Forbidden: .*{message}"):
                await write
        assert await admin.get(path)


@pytest.mark.usefixtures("leases")
async def test_nor_makes_one_in_their_place(cluster: LocalCluster, tmp_path: Path) -> None:
    for where, name in (
        (AGENTS, "berth-agent-gpu-3"),
        (AGENTS, "anything"),
        (BINDERS, "berth-agent-gpu-3"),
    ):
        with pytest.raises(Denied, match=OF_AN_AGENT):
            await cluster.client.create(where, lease(name), dryRun="All")
    async with agent_of(cluster, "gpu-1", tmp_path) as agent:
        with pytest.raises(Denied, match=OF_AN_AGENT):
            await agent.create(AGENTS, lease("berth-agent-gpu-2"))


@pytest.mark.usefixtures("leases")
async def test_agents_and_binders_renew_their_own(
    cluster: LocalCluster, binder: KubeClient, tmp_path: Path
) -> None:
    held = await binder.get(f"{BINDERS}/berth-binder")
    await binder.replace(f"{BINDERS}/berth-binder", held)
    async with agent_of(cluster, "gpu-1", tmp_path) as agent:
        await agent.patch(f"{AGENTS}/berth-agent-gpu-1", {"metadata": {"labels": {"probe": None}}})


async def test_other_leases_are_none_of_berths(cluster: LocalCluster) -> None:
    for namespace, name in (("berth-system", "anybodys"), ("default", "berth-binder")):
        await cluster.client.create(paths.leases(namespace), lease(name), dryRun="All")


async def test_a_lease_goes_with_its_node(cluster: LocalCluster, tmp_path: Path) -> None:
    """The cluster's garbage collector is not kept from it."""
    node = await cluster.client.create(paths.NODES, {"metadata": {"name": "gone"}})
    owner = {"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": node["metadata"]["uid"]}
    body = lease("berth-agent-gone")
    body["metadata"]["ownerReferences"] = [owner]
    async with speaking_as(cluster, "berth-agent", tmp_path, bound_to=node) as agent:
        await agent.create(AGENTS, body)
    await cluster.client.delete(paths.node("gone"))

    async def gone() -> None:
        left = {one["metadata"]["name"] for one in (await cluster.client.get(AGENTS))["items"]}
        assert "berth-agent-gone" not in left

    await eventually(gone, seconds=60, what="the Lease of a Node that is gone")


# --- the policies themselves ---------------------------------------------------------------------------------


async def test_the_api_server_finds_no_fault_in_an_expression(cluster: LocalCluster) -> None:
    """It checks the types of what they speak of, and says so in their status."""

    async def checked() -> None:
        policies = (await cluster.client.get(POLICIES))["items"]
        ours = {p["metadata"]["name"]: p for p in policies if p["metadata"]["name"].startswith("berth-")}
        assert set(ours) == {
            *("berth-agent-node", "berth-leases"),
            *("berth-pod-bound", "berth-pod-changed", "berth-pod-created", "berth-priority"),
        }
        for name, policy in ours.items():
            status = policy.get("status", {})
            assert status.get("observedGeneration") == policy["metadata"]["generation"], name
            assert not status["typeChecking"].get("expressionWarnings"), (name, status)

    await eventually(checked, seconds=60)
