"""What is kept of the API server's objects, and who hears of them."""

from typing import Any

import pytest

from berth.contract.keys import Keys
from berth.contract.scaling import ModelKey
from berth.kube.informer import Change, ChangeKind
from scaler.core.cache import Cache, PodState
from scaler.decision.defaults import BERTH, read_defaults
from scaler.watch import Watch

Json = dict[str, Any]
A = ModelKey("team", "a")
CLASS = {"autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev"}


class Route:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.touched: list[ModelKey] = []
        self.clients: list[Change] = []
        self.services: list[Json] = []
        self.slices: list[Json] = []

    def touch(self, model: ModelKey) -> None:
        self.touched.append(model)

    def on_client(self, change: Change) -> None:
        self.clients.append(change)

    def on_service(self, change: Change) -> None:
        self.services.append(change.object)

    def on_slice(self, change: Change) -> None:
        self.slices.append(change.object)


class Here:
    def __init__(self) -> None:
        self.cache, self.route = Cache(read_defaults(BERTH), Keys()), Route()
        self.watch = Watch(
            None,  # type: ignore[arg-type]
            self.cache,
            self.route,  # type: ignore[arg-type]
            system_namespace="berth-system",
            clock_ns=lambda: 5,
        )

    def tell(self, what: str, item: Json, kind: ChangeKind = ChangeKind.SET) -> Json:
        """As the informer does; gives what it keeps."""
        informer = self.watch.informers[what]
        kept = informer._mirror.keep(item)
        assert kept is not item or what == "priorityclasses", "not kept whole for an error"
        informer._on_change(Change(kind, kept))
        return kept

    @property
    def asked(self) -> dict[str, tuple[str, set[str]]]:
        return {node: (str(one.address), set(one.replicas)) for node, one in self.watch.gateways().items()}  # type: ignore[call-overload]


@pytest.fixture
def here() -> Here:
    return Here()


def deployment(name: str = "a", **more: Any) -> Json:
    meta = {
        "name": name,
        "namespace": "team",
        "uid": f"d-{name}",
        "resourceVersion": "1",
        "annotations": CLASS,
    }
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {"containers": [{"name": "c", "args": ["proxy"]}]},
    }
    return {
        "metadata": {**meta, **more},
        "spec": {"replicas": 1, "template": template},
        "status": {"huge": "x" * 999},
    }


def pod(name: str, *, of: str = "a", node: str = "n1", address: str = "10.0.0.1", **meta: Any) -> Json:
    owner = {"kind": "ReplicaSet", "name": f"{of}-5f", "controller": True, "uid": "r"}
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": name,
            "resourceVersion": "1",
            "labels": {"pod-template-hash": "5f", "app": of},
            "annotations": {"large": "x" * 999},
            "ownerReferences": [owner],
            "managedFields": ["x" * 999],
            **meta,
        },
        "spec": {"nodeName": node, "containers": [{"name": "c", "env": ["x" * 999]}], "volumes": ["x" * 999]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "c", "state": {"running": {}}, "image": "x" * 999}],
        },
    }


def server(node: str, address: str, name: str = "", **meta: Any) -> Json:
    labels = {"app.kubernetes.io/name": "berth-server"}
    owner = [{"kind": "DaemonSet", "name": "berth-server", "controller": True}]
    more = {"namespace": "berth-system", "labels": labels, "ownerReferences": owner, **meta}
    return pod(name or f"server-{node}", node=node, address=address, **more)


def test_gateways_of_nodes_with_replicas_are_asked_about_those_alone(here: Here) -> None:
    here.tell("deployments", deployment())
    here.tell("pods", pod("p1"))
    assert here.asked == {}  # its gateway is not known yet
    here.tell("pods", server("n1", "10.1.0.1"))
    here.tell("pods", server("n2", "10.1.0.2"))
    here.tell("pods", pod("p2"))
    here.tell("pods", pod("another", of="b"))  # of a Deployment that has not asked
    assert here.asked == {"n1": ("10.1.0.1:8473", {"p1", "p2"})}
    here.tell("pods", pod("p3", node="n2"))
    here.tell("pods", pod("p2"), ChangeKind.GONE)
    assert here.asked == {"n1": ("10.1.0.1:8473", {"p1"}), "n2": ("10.1.0.2:8473", {"p3"})}
    here.tell("deployments", deployment(annotations={}))
    assert here.asked == {}


def test_a_gateways_successor_is_asked_whichever_of_the_two_is_reported_last(here: Here) -> None:
    here.tell("deployments", deployment())
    here.tell("pods", pod("p1"))
    here.tell("pods", server("n1", "10.1.0.1", "old"))
    here.tell("pods", server("n1", "10.1.0.9", "new"))
    here.tell("pods", server("n1", "10.1.0.1", "old", deletionTimestamp="2026-01-01T00:00:00Z"))
    assert here.asked["n1"][0] == "10.1.0.9:8473"
    here.tell("pods", server("n1", "10.1.0.1", "old"), ChangeKind.GONE)
    assert here.asked["n1"][0] == "10.1.0.9:8473"
    here.tell("pods", server("n1", "10.1.0.9", "new"), ChangeKind.GONE)
    assert here.asked == {}


def test_a_gateway_that_is_only_known_on_its_way_out_is_asked_as_long_as_it_is_there(here: Here) -> None:
    here.tell("deployments", deployment())
    here.tell("pods", pod("p1"))
    here.tell("pods", server("n1", "10.1.0.1", deletionTimestamp="2026-01-01T00:00:00Z"))
    assert here.asked["n1"][0] == "10.1.0.1:8473"


@pytest.mark.parametrize("status", [{"phase": "Failed"}, {"podIP": ""}])
def test_a_gateway_that_has_ended_or_has_no_address_is_not_asked(here: Here, status: Json) -> None:
    here.tell("deployments", deployment())
    here.tell("pods", pod("p1"))
    item = server("n1", "10.1.0.1")
    here.tell("pods", item)
    assert here.asked
    item["status"] |= status
    here.tell("pods", item)
    assert here.asked == {}


@pytest.mark.parametrize("where", [{"namespace": "team"}, {"labels": {"app.kubernetes.io/name": "berth"}}])
def test_nobody_else_passes_for_a_gateway(here: Here, where: Json) -> None:
    here.tell("deployments", deployment())
    here.tell("pods", pod("p1"))
    here.tell("pods", server("n1", "10.6.6.6", **where))
    assert here.asked == {}


def test_a_pod_is_reported_to_the_cache_to_the_routes_and_as_a_client(here: Here) -> None:
    here.tell("deployments", deployment())
    here.route.touched.clear()
    here.tell("pods", pod("p1"))
    (found,) = here.cache.pods(A)
    assert (found.state, found.node, found.address) == (PodState.READY, "n1", "10.0.0.1")
    assert here.route.touched == [A]
    here.tell("pods", pod("p1"), ChangeKind.GONE)
    assert not list(here.cache.pods(A))
    assert here.route.touched == [A, A]
    assert [change.kind for change in here.route.clients] == [ChangeKind.SET, ChangeKind.GONE]


def test_whoever_is_no_replica_may_be_a_client(here: Here) -> None:
    here.tell("pods", pod("p1", ownerReferences=[], labels={}))
    (change,) = here.route.clients
    assert change.object["status"]["podIP"] == "10.0.0.1"
    assert here.route.touched == []


@pytest.mark.parametrize("item", [pod("p"), pod("p", ownerReferences=[]), server("n", "10.0.0.1")])
def test_little_is_kept_of_fifty_thousand_pods(here: Here, item: Json) -> None:
    kept = here.tell("pods", item)
    assert "x" * 999 not in repr(kept)
    assert kept["metadata"]["uid"] == item["metadata"]["uid"]


def test_little_is_kept_of_services_and_slices(here: Here) -> None:
    meta = {
        "name": "s",
        "namespace": "team",
        "uid": "s",
        "resourceVersion": "1",
        "managedFields": ["x" * 999],
    }
    here.tell(
        "services", {"metadata": meta, "spec": {"clusterIP": "10.0.0.1", "selector": {"app": "a"}, "x": 1}}
    )
    endpoints = [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}, "targetRef": {"x": "x" * 999}}]
    here.tell(
        "endpointslices", {"metadata": meta, "addressType": "IPv4", "endpoints": endpoints, "ports": []}
    )
    assert "x" * 999 not in repr([here.route.services, here.route.slices])
    assert here.route.services[0]["spec"]["selector"] == {"app": "a"}
    assert here.route.slices[0]["endpoints"][0]["conditions"] == {"ready": True}


def test_a_priority_class_is_known(here: Here) -> None:
    here.tell("deployments", deployment())
    meta = {"name": "all", "uid": "c", "resourceVersion": "1"}
    here.tell("priorityclasses", {"metadata": meta, "value": 7, "globalDefault": True})
    assert here.cache.priority(A) == 7
    here.tell("priorityclasses", {"metadata": meta, "value": 7, "globalDefault": True}, ChangeKind.GONE)
    assert here.cache.priority(A) == 0
