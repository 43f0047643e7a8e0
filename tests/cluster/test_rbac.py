"""What the ServiceAccounts of `deploy/base` may not do. What they may is shown by every other test:
agents and binders run under them and nothing else."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from berth.kube import paths
from berth.kube.client import KubeClient
from berth.kube.errors import Denied, NotFound
from localcluster.cluster import LocalCluster
from tests.cluster.accounts import agent_of, speaking_as

pytestmark = pytest.mark.asyncio(loop_scope="session")

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": []}}
FORBIDDEN = {
    "agent": [
        ("get", "/api/v1/secrets"),
        ("get", "/api/v1/namespaces/berth-system/configmaps"),
        ("get", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"),
        ("create", "/api/v1/namespaces/default/pods"),
        ("delete", "/api/v1/nodes/gpu-2"),
        ("delete", "/api/v1/namespaces/default/pods/x"),
        ("create", "/api/v1/namespaces/default/pods/x/binding"),
        ("patch", "/api/v1/namespaces/default/pods/x"),
        ("patch", "/api/v1/nodes/gpu-1/status"),
        ("patch", "/api/v1/nodes/gpu-2"),
        ("patch", "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases/berth-binder"),
        ("create", "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases"),
        ("delete", "/apis/coordination.k8s.io/v1/namespaces/berth-system-nodes/leases/berth-agent-gpu-1"),
    ],
    "binder": [
        ("get", "/api/v1/secrets"),
        ("get", "/api/v1/namespaces/berth-system/configmaps"),
        ("get", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"),
        ("create", "/api/v1/namespaces/default/pods"),
        ("delete", "/api/v1/namespaces/default/pods/x"),
        ("patch", "/api/v1/namespaces/default/pods/x"),
        ("patch", "/api/v1/nodes/gpu-1"),
        ("create", "/apis/authentication.k8s.io/v1/tokenreviews"),
        ("patch", "/apis/coordination.k8s.io/v1/namespaces/berth-system-nodes/leases/berth-agent-gpu-1"),
        ("patch", "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases/berth-agent-gpu-1"),
    ],
    "server": [  # no right at all
        ("get", "/api/v1/namespaces/berth-system/pods"),
        ("get", "/api/v1/nodes/gpu-1"),
        ("patch", "/api/v1/nodes/gpu-1"),
        ("create", "/apis/authentication.k8s.io/v1/tokenreviews"),
        ("create", "/api/v1/namespaces/default/events"),
    ],
}


ACCOUNTS: dict[str, Callable[[LocalCluster, Path], AbstractAsyncContextManager[KubeClient]]] = {
    "agent": lambda cluster, directory: agent_of(cluster, "gpu-1", directory),
    "binder": lambda cluster, directory: speaking_as(cluster, "berth-binder", directory),
    "server": lambda cluster, directory: speaking_as(cluster, "berth-server", directory),
}


@pytest.mark.parametrize(
    ("account", "verb", "path"), [(account, *call) for account, calls in FORBIDDEN.items() for call in calls]
)
async def test_what_is_not_needed_is_not_allowed(
    cluster: LocalCluster, tmp_path: Path, account: str, verb: str, path: str
) -> None:
    async with ACCOUNTS[account](cluster, tmp_path) as client:
        call = {
            "get": lambda: client.get(path),
            "create": lambda: client.create(path, POD),
            "patch": lambda: client.patch(path, {"metadata": {"labels": {"x": "y"}}}),
            "delete": lambda: client.delete(path),
        }[verb]
        with pytest.raises(Denied, match="403 Forbidden"):
            await call()


OWN, OTHER = paths.node("gpu-1"), paths.node("gpu-2")
LEASES = paths.leases("berth-system-nodes")
NODE_ONLY = "an agent writes to its own node only"
ANNOTATIONS_ONLY = "nothing on a node but annotations that begin with seldon.io/trtis-"
LEASE_ONLY = "an agent writes to the Lease of its own node only"
Json = dict[str, Any]


def annotated(key: str, value: str | None) -> Json:
    return {"metadata": {"annotations": {key: value}}}


def lease_of(name: str) -> Json:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": {}}


@pytest.mark.parametrize(
    ("path", "patch", "message"),
    [
        (OTHER, annotated("seldon.io/trtis-report", "{}"), NODE_ONLY),
        (OTHER, {"spec": {"unschedulable": True}}, NODE_ONLY),
        (OWN, {"spec": {"unschedulable": True}}, ANNOTATIONS_ONLY),
        (OWN, {"spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}}, ANNOTATIONS_ONLY),
        (OWN, {"metadata": {"labels": {"nvidia.com/gpu.present": "false"}}}, ANNOTATIONS_ONLY),
        (OWN, {"metadata": {"labels": {"kubernetes.io/hostname": None}}}, ANNOTATIONS_ONLY),
        (OWN, {"metadata": {"finalizers": ["example.com/mine"]}}, ANNOTATIONS_ONLY),
        (OWN, annotated("example.com/new", "x"), ANNOTATIONS_ONLY),
        (OWN, annotated("example.com/theirs", "changed"), ANNOTATIONS_ONLY),
        (OWN, annotated("example.com/theirs", None), ANNOTATIONS_ONLY),
        (f"{LEASES}/berth-agent-gpu-2", {"spec": {"holderIdentity": "me"}}, LEASE_ONLY),
    ],
)
async def test_an_agent_speaks_for_its_own_node_alone(
    cluster: LocalCluster, tmp_path: Path, path: str, patch: Json, message: str
) -> None:
    await cluster.client.patch(OWN, annotated("example.com/theirs", "x"))
    async with agent_of(cluster, "gpu-1", tmp_path) as agent:
        with pytest.raises(Denied, match=f"403 Forbidden: .*{message}"):
            await agent.patch(path, patch)


async def test_an_agent_writes_and_removes_berths_annotations_on_its_own_node(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    async with agent_of(cluster, "gpu-1", tmp_path) as agent:
        for value in ("one", "two", None):
            node = await agent.patch(OWN, annotated("seldon.io/trtis-probe", value))
            assert node["metadata"]["annotations"].get("seldon.io/trtis-probe") == value


async def test_an_agent_makes_no_lease_but_its_own(cluster: LocalCluster, tmp_path: Path) -> None:
    async with agent_of(cluster, "gpu-1", tmp_path) as agent:
        for name in ("berth-agent-gpu-3", "berth-binder", "gpu-1"):
            with pytest.raises(Denied, match=LEASE_ONLY):
                await agent.create(LEASES, lease_of(name))
            with pytest.raises(NotFound):
                await cluster.client.get(f"{LEASES}/{name}")


async def test_a_token_that_is_bound_to_no_node_writes_to_none(cluster: LocalCluster, tmp_path: Path) -> None:
    async with speaking_as(cluster, "berth-agent", tmp_path) as unbound:
        with pytest.raises(Denied, match=NODE_ONLY):
            await unbound.patch(OWN, annotated("seldon.io/trtis-probe", "x"))
        with pytest.raises(Denied, match=LEASE_ONLY):
            await unbound.patch(f"{LEASES}/berth-agent-gpu-1", {"spec": {"holderIdentity": "me"}})


async def test_a_token_that_is_bound_to_a_pod_writes_to_the_pods_node(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """As the DaemonSet's agents have it."""
    spec = {
        "serviceAccountName": "berth-agent",
        "automountServiceAccountToken": False,
        "nodeName": "gpu-1",
        "containers": [{"name": "agent", "image": "none", "command": ["sleep", "60"]}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent-probe"}, "spec": spec}
    created = await cluster.client.create(paths.pods("berth-system"), pod)
    try:
        async with speaking_as(cluster, "berth-agent", tmp_path, bound_to=created) as agent:
            for value in ("x", None):
                await agent.patch(OWN, annotated("seldon.io/trtis-probe", value))
            with pytest.raises(Denied, match=NODE_ONLY):
                await agent.patch(OTHER, annotated("seldon.io/trtis-probe", "x"))
            with pytest.raises(Denied, match=LEASE_ONLY):
                await agent.patch(f"{LEASES}/berth-agent-gpu-2", {"spec": {"holderIdentity": "me"}})
    finally:
        await cluster.client.delete(paths.pod("berth-system", "agent-probe"), grace_seconds=0)


async def test_the_policies_bind_agents_and_nobody_else(cluster: LocalCluster) -> None:
    node = await cluster.client.patch(OWN, {"metadata": {"labels": {"example.com/probe": "x"}}})
    assert node["metadata"]["labels"]["example.com/probe"] == "x"
    await cluster.client.patch(OWN, {"metadata": {"labels": {"example.com/probe": None}}})


async def test_an_agents_lease_goes_when_its_node_goes(cluster: LocalCluster) -> None:
    node = await cluster.client.get(OWN)
    lease = await cluster.client.get(f"{LEASES}/berth-agent-gpu-1")
    (owner,) = lease["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", "gpu-1", node["metadata"]["uid"])
