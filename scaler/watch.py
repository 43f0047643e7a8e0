"""Watches Deployments, pods, Services, their slices and priority classes, for the cache and the routes.

A standby keeps all of it warm. Of the fifty thousand pods of a cluster only the fields that are read are kept; which replicas
run on which node, and where that node's gateway is, goes to the scraper.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

from berth.contract.endpoint import Endpoint
from berth.contract.pod import has_ended, is_deleting
from berth.contract.scaling import ModelKey
from berth.kube import paths
from berth.kube.client import KubeClient
from berth.kube.informer import Change, ChangeKind, Informer
from scaler.activation.addresses import keep_client
from scaler.core.cache import Cache, keep_deployment, keep_pod
from scaler.route_controller import RouteController
from scaler.scrape import Gateway

JsonObject = dict[str, Any]

GATEWAY_PORT: Final = 8473
_SERVER_LABEL: Final = "app.kubernetes.io/name"
_SERVER: Final = "berth-server"


class Watch:
    """Tells `cache` and `routes`."""

    def __init__(
        self,
        client: KubeClient,
        cache: Cache,
        routes: RouteController,
        *,
        system_namespace: str,
        clock_ns: Callable[[], int],
        gateway_port: int = GATEWAY_PORT,
    ) -> None:
        self._cache, self._routes, self._system = cache, routes, system_namespace
        self._clock_ns = clock_ns
        self._gateway_port = gateway_port
        # By node: the pod of its gateway and its address.
        self._servers: dict[str, tuple[str, str]] = {}
        self._gateways: dict[str, Gateway] | None = None
        self.informers = {
            "priorityclasses": Informer(client, paths.PRIORITY_CLASSES, on_change=self._on_priority_class),
            "services": Informer(client, paths.SERVICES, on_change=routes.on_service, keep=keep_service),
            "endpointslices": Informer(
                client, paths.ENDPOINT_SLICES, on_change=routes.on_slice, keep=keep_slice
            ),
            "deployments": Informer(
                client, paths.DEPLOYMENTS, on_change=self._on_deployment, keep=keep_deployment
            ),
            "pods": Informer(client, paths.PODS, on_change=self._on_pod, keep=self._keep_pod),
        }

    @property
    def models(self) -> int:
        """How many are scaled."""
        return len(self._cache.deployments)

    def gateways(self) -> Mapping[str, Gateway]:
        """Of the nodes that run replicas of models that are scaled."""
        if self._gateways is None:
            self._gateways = self._found_gateways()
        return self._gateways

    def _found_gateways(self) -> dict[str, Gateway]:
        replicas: dict[str, set[str]] = defaultdict(set)
        for model in self._cache.deployments:
            for pod in self._cache.pods(model):
                replicas[pod.node].add(pod.uid)
        return {
            node: Gateway(Endpoint(self._servers[node][1], self._gateway_port), uids)
            for node, uids in replicas.items()
            if node in self._servers
        }

    # The watched objects.

    def _on_deployment(self, change: Change) -> None:
        meta = change.object["metadata"]
        model = ModelKey(meta.get("namespace", ""), meta["name"])
        if change.kind is ChangeKind.GONE:
            self._cache.deployment_gone(change.object)
        else:
            self._cache.observe_deployment(change.object)
        self._gateways = None
        self._routes.touch(model)

    def _on_pod(self, change: Change) -> None:
        pod, uid = change.object, change.object["metadata"]["uid"]
        before = self._cache.pod(uid)
        if change.kind is ChangeKind.GONE:
            self._cache.pod_gone(pod)
        else:
            self._cache.observe_pod(pod, self._clock_ns())
        self._on_server(change)
        self._routes.on_client(change)
        after = self._cache.pod(uid)
        for model in {pod.key for pod in (before, after) if pod is not None}:
            self._gateways = None
            self._routes.touch(model)

    def _on_server(self, change: Change) -> None:
        """The pod that has a node's gateway in it."""
        pod, meta = change.object, change.object["metadata"]
        if not self._is_server(meta):
            return
        node, address = pod["spec"].get("nodeName", ""), pod["status"].get("podIP")
        is_over = change.kind is ChangeKind.GONE or has_ended(pod) or not address
        known = self._servers.get(node)
        if is_over and known is not None and known[0] == meta["uid"]:
            del self._servers[node]
        elif not is_over and (known is None or not is_deleting(pod)):  # its successor may be there already
            self._servers[node] = meta["uid"], address
        self._gateways = None

    def _is_server(self, meta: JsonObject) -> bool:
        return meta.get("namespace") == self._system and (
            (meta.get("labels") or {}).get(_SERVER_LABEL) == _SERVER
        )

    def _on_priority_class(self, change: Change) -> None:
        if change.kind is ChangeKind.GONE:
            self._cache.priority_class_gone(change.object)
        else:
            self._cache.observe_priority_class(change.object)

    # What is kept.

    def _keep_pod(self, item: JsonObject) -> JsonObject:
        """Of a pod that is no replica of a Deployment its address is enough: it may be a client's."""
        source, meta = keep_client(item), item["metadata"]
        if any(owner.get("kind") == "ReplicaSet" for owner in meta.get("ownerReferences") or ()):
            replica = keep_pod(item)
            return {part: replica[part] | source[part] for part in ("metadata", "spec", "status")}
        if self._is_server(meta):
            source["metadata"]["labels"] = {_SERVER_LABEL: _SERVER}
            source["spec"] |= {"nodeName": item["spec"].get("nodeName", "")}
            source["metadata"] |= _picked(meta, "deletionTimestamp")
        return source


def keep_service(item: JsonObject) -> JsonObject:
    return {
        "metadata": _picked(item["metadata"], "name", "namespace", "uid", "resourceVersion"),
        "spec": _picked(item.get("spec") or {}, "selector", "ports", "type", "ipFamilies", "clusterIP"),
    }


def keep_slice(item: JsonObject) -> JsonObject:
    names = "name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences", "creationTimestamp"
    endpoints = [_picked(one, "addresses", "conditions") for one in item.get("endpoints") or ()]
    return {
        "metadata": _picked(item["metadata"], *names),
        **_picked(item, "addressType", "ports"),
        "endpoints": endpoints,
    }


def _picked(data: Mapping[str, Any], *names: str) -> JsonObject:
    return {name: data[name] for name in names if name in data}
