"""A slice of Berth's beside the controller's own, on the real API server with its real controllers; and whose a token is."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from berth.contract.activation import SLICE_MANAGER
from berth.contract.ids import PodUid
from berth.contract.scaling import ModelKey
from berth.kube import paths
from localcluster.cluster import LocalCluster
from scaler.activation.activators import RETURN_NS
from scaler.activation.authentication import PermissionDenied, TokenAuthenticator, Unauthenticated
from scaler.activation.ports import PortPair
from scaler.activation.route import Apply, Delete, RouteDecision, RouteSpec
from scaler.activation.routes import RouteReconciler
from scaler.activation.service_index import Template
from scaler.activation.slices import ProxyPorts, is_ours
from scaler.go import SECOND_NS
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

Json = dict[str, Any]
SPACE, NODE = "switched", "paper"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{SPACE}/endpointslices"
MODEL = ModelKey(SPACE, "m")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def space(cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """A namespace, and a node that is an object only: endpoints are of pods whose node exists."""
    client = cluster.client
    await client.create(paths.NAMESPACES, {"metadata": {"name": SPACE}})
    await client.create(paths.NODES, {"metadata": {"name": NODE}, "spec": {"unschedulable": True}})
    yield cluster
    await client.delete(f"{paths.NAMESPACES}/{SPACE}")
    await client.delete(paths.node(NODE))


async def pod(cluster: LocalCluster, name: str, address: str, **spec: Any) -> Json:
    """One that a kubelet calls ready."""
    body = {
        "metadata": {"name": name, "labels": {"app": "m"}},
        "spec": {
            "nodeName": NODE,
            "containers": [{"name": "main", "image": "any"}],
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            **spec,
        },
    }
    made = await cluster.client.create(paths.pods(SPACE), body)
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": ready}
    await cluster.client.patch(paths.pod(SPACE, name) + "/status", {"status": status})
    return made


class Place:
    """What a scaler sees of it, and what it does."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.client = cluster.client
        self.now = 1_700_000_000 * SECOND_NS
        self.routes = RouteReconciler(began_ns=self.now - RETURN_NS)
        self.routes.set_model(MODEL, Template({"app": "m"}, ProxyPorts(9000, 9001, {"http": 9000})))
        self.activator = self.routes.activators.connect(PodUid("act"), "act", "10.77.9.1", None)
        self.known: list[Json] = []

    async def see(self) -> list[Json]:
        slices: list[Json] = (await self.client.get(SLICES))["items"]
        for service in (await self.client.get(f"/api/v1/namespaces/{SPACE}/services"))["items"]:
            self.routes.services.set_service(service)
        for one in self.known:
            self.routes.services.delete_slice(one)
        for one in slices:
            self.routes.services.set_slice(one)
        self.known = slices
        return slices

    def reconcile(self, *, needs_proxy: bool) -> RouteDecision:
        return self.routes.reconcile(
            RouteSpec(model=MODEL, needs_proxy=needs_proxy, public_name="m"), self.now
        )

    async def do(self, action: Apply | Delete) -> None:
        path = f"{SLICES}/{action.slice.name}"
        if isinstance(action, Apply):
            await self.client.apply(path, action.slice.to_json(), manager=SLICE_MANAGER)
        else:
            await self.client.delete(path)

    async def ready(self, *addresses: str) -> None:
        """Wait until the Service's own slices have these endpoints ready."""

        async def check() -> None:
            others = [one for one in await self.see() if not is_ours(one)]
            found = {
                address
                for one in others
                for endpoint in one.get("endpoints") or ()
                if endpoint["conditions"].get("ready")
                for address in endpoint["addresses"]
            }
            assert found == set(addresses)

        await eventually(check, what="the controller's slice")

    async def ours(self) -> Json:
        (one,) = [one for one in await self.see() if is_ours(one)]
        return one


async def test_to_zero_and_back_on_real_slices(space: LocalCluster) -> None:
    place, client = Place(space), space.client
    ports = [
        {"name": "http", "port": 80, "targetPort": "http"},
        {"name": "grpc", "port": 90, "targetPort": 9001, "appProtocol": "kubernetes.io/h2c"},
    ]
    await client.create(
        f"/api/v1/namespaces/{SPACE}/services",
        {"metadata": {"name": "m"}, "spec": {"selector": {"app": "m"}, "ports": ports}},
    )
    await pod(space, "m-1", "10.77.0.1")
    await place.ready("10.77.0.1")

    # To zero: assigned, listening, written; what exists is what was desired, to the last default of the API server.
    assignment = place.reconcile(needs_proxy=True).assignments[place.activator.uid]
    pair = PortPair(assignment.rest_port, assignment.grpc_port)
    place.routes.activators.set_open(place.activator, MODEL, pair)
    place.activator.has_reported = True
    (apply,) = place.reconcile(needs_proxy=True).slices
    await place.do(apply)
    await place.see()
    decision = place.reconcile(needs_proxy=True)
    assert decision.slices == ()
    assert decision.proven
    written = await place.ours()
    # Written again, it is the same object.
    await place.do(apply)
    assert (await place.ours())["metadata"]["resourceVersion"] == written["metadata"]["resourceVersion"]

    # It stands beside the controller's, whatever becomes of the pods.
    await pod(space, "m-2", "10.77.0.2")
    await place.ready("10.77.0.1", "10.77.0.2")
    for name in ("m-1", "m-2"):
        await client.delete(paths.pod(SPACE, name), grace_seconds=0)
    await place.ready()
    assert await place.ours() == written

    # Up: ours stays until a replica is ready in the controller's, then it goes.
    assert place.reconcile(needs_proxy=False).slices == ()
    await pod(space, "m-3", "10.77.0.3")
    await place.ready("10.77.0.3")
    (delete,) = place.reconcile(needs_proxy=False).slices
    assert isinstance(delete, Delete)
    await place.do(delete)
    await place.see()
    assert place.reconcile(needs_proxy=False).slices == ()

    # A Service that is deleted takes its slice along.
    await place.do(apply)
    await client.delete(f"/api/v1/namespaces/{SPACE}/services/m")

    async def is_gone() -> None:
        assert not [one for one in await place.see() if is_ours(one)]

    await eventually(is_gone, what="the slice's end with its Service")


async def test_an_activator_is_known_by_its_pods_projected_token(space: LocalCluster) -> None:
    client = space.client
    authenticator = TokenAuthenticator(client, system_namespace="berth-system")
    accounts = f"/api/v1/namespaces/{SPACE}/serviceaccounts"
    for name in ("berth-activator", "other"):
        await client.create(accounts, {"metadata": {"name": name}})

    async def token(account: str, bound: Json | None, audience: str = "berth-scaler") -> dict[str, str]:
        spec: Json = {"audiences": [audience]}
        if bound is not None:
            meta = bound["metadata"]
            spec["boundObjectRef"] = {
                "kind": "Pod",
                "apiVersion": "v1",
                "name": meta["name"],
                "uid": meta["uid"],
            }
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        made = await client.create(f"{accounts}/{account}/token", asked)
        return {"authorization": f"Bearer {made['status']['token']}"}

    own = await pod(space, "act", "10.77.9.2", serviceAccountName="berth-activator")
    others = await pod(space, "no-act", "10.77.9.3", serviceAccountName="other")
    good = await token("berth-activator", own)
    identity = await authenticator.authenticate(good, "test")
    assert (identity.uid, identity.scope, identity.addresses) == (
        own["metadata"]["uid"],
        SPACE,
        {"10.77.9.2"},
    )
    with pytest.raises(PermissionDenied):
        await authenticator.authenticate(await token("other", others), "test")
    for bad in (await token("berth-activator", None), await token("berth-activator", own, "berth-agent")):
        with pytest.raises(Unauthenticated):
            await authenticator.authenticate(bad, "test")
    # The API server believes a token for a while after its pod; the pod itself is gone.
    await client.delete(paths.pod(SPACE, "act"), grace_seconds=0)
    with pytest.raises((PermissionDenied, Unauthenticated)):
        await authenticator.authenticate(good, "test")
