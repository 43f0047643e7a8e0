"""An API server in memory, without sockets: lists, watches and writes, as a process sees them through its KubeClient.

`ApiServer` holds any objects, and takes what a binder or a scaler writes; `NodeApiServer` is that of one node's agent.
"""

import asyncio
import copy
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from berth.kube import paths
from berth.kube.errors import KubeError, KubeUnreachable, NotFound, response_error
from tests.fakes.objects import node
from tests.fakes.reader import LISTS

Json = dict[str, Any]
LEASES = paths.leases("berth-system")
# Of one node and its agent.
NODE = paths.node("n1")
AGENT_LEASES = paths.leases("berth-system-nodes")
AGENT_LEASE = f"{AGENT_LEASES}/berth-agent-n1"
EVENTS = paths.events("team")


class ApiServer:
    """`silent`: no watch tells anything. `hidden`: lists that have no answer. `binds`: False when a Binding is
    taken and never answered."""

    host = "http://api"

    def __init__(self) -> None:
        self.collections: dict[str, dict[str, Json]] = {path: {} for path in LISTS}
        self.version = 0
        self.silent, self.binds = False, True
        self.hidden: set[str] = set()
        self.fails: list[KubeError] = []
        self.bindings: list[tuple[str, str]] = []
        self.events: list[Json] = []
        self.lists: list[str] = []
        self._watches: list[tuple[str, str, asyncio.Queue[Json]]] = []
        # By collection: what a watch that begins at an earlier version is told first.
        self._told: dict[str, list[Json]] = defaultdict(list)

    @asynccontextmanager
    async def open(self, kubeconfig: str | None) -> AsyncIterator["ApiServer"]:
        yield self

    def put(self, path: str, item: Json) -> Json:
        """An object as it is from now on."""
        name, there = item["metadata"]["name"], self.collections[path]
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        item["metadata"].setdefault("uid", f"uid-{name}")
        kind = "MODIFIED" if name in there else "ADDED"
        there[name] = copy.deepcopy(item)
        self._watched(path, kind, there[name])
        return copy.deepcopy(item)

    def remove(self, path: str, name: str) -> None:
        self.version += 1
        gone = self.collections[path].pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._watched(path, "DELETED", gone)

    def _watched(self, path: str, kind: str, item: Json) -> None:
        if self.silent:
            return
        self._told[path].append({"type": kind, "object": item})
        for watched, chosen, queue in self._watches:
            if watched == path and chosen in ("", item["metadata"]["name"]):
                queue.put_nowait({"type": kind, "object": copy.deepcopy(item)})

    async def get(self, path: str, **params: str) -> Json:
        if self.fails:
            raise self.fails.pop(0)
        if path in self.hidden:
            await asyncio.Event().wait()
        if path in self.collections:
            self.lists.append(path)
            chosen = _chosen(params)
            items = [copy.deepcopy(i) for n, i in self.collections[path].items() if chosen in ("", n)]
            return {"metadata": {"resourceVersion": str(self.version)}, "items": items}
        return copy.deepcopy(self._find(path)[1])

    async def stream(self, path: str, params: Any, **_: Any) -> AsyncGenerator[Json, None]:
        watch = (path, _chosen(params), asyncio.Queue[Json]())
        for event in self._told[path]:
            meta = event["object"]["metadata"]
            if int(meta["resourceVersion"]) > int(params["resourceVersion"]) and watch[1] in (
                "",
                meta["name"],
            ):
                watch[2].put_nowait(copy.deepcopy(event))
        self._watches.append(watch)
        try:
            while True:
                yield await watch[2].get()
        finally:
            self._watches.remove(watch)

    async def create(self, path: str, body: Json, **_: str) -> Json:
        if path.endswith("/binding"):
            return await self._bind(path.removesuffix("/binding"), body)
        if path.endswith("/events"):
            self.events.append(body)
            return {"metadata": {"name": f"e{len(self.events)}"}}
        return self.put(path, body)

    async def replace(self, path: str, body: Json) -> Json:
        collection, known = self._find(path)
        if known["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise response_error(409, "Conflict", path)
        return self.put(collection, body)

    async def patch(self, path: str, body: Json, *, content_type: str = "") -> Json:
        return {"metadata": {"name": "e"}}

    async def _bind(self, path: str, body: Json) -> Json:
        name = body["metadata"]["name"]
        self.bindings.append((name, body["target"]["name"]))
        if not self.binds:
            raise KubeUnreachable("no answer")
        collection, known = self._find(path)
        known["spec"]["nodeName"] = body["target"]["name"]
        known["metadata"]["annotations"] |= body["metadata"]["annotations"]
        self.put(collection, known)
        return {}

    def _find(self, path: str) -> tuple[str, Json]:
        """Of a collection of one namespace or of all."""
        whole, name = path.rsplit("/", 1)
        collection = whole if whole in self.collections else paths.PODS
        if name not in self.collections[collection]:
            raise response_error(404, "NotFound", path)
        return collection, self.collections[collection][name]


def _chosen(params: Any) -> str:
    """The one name that a field selector requests, "" without one: all pods are on the one node."""
    by, _, name = str(params.get("fieldSelector", "")).partition("=")
    return name if by == "metadata.name" else ""


class NodeApiServer(ApiServer):
    """With the Node `n1`. Every token is of the pod that it names.

    `refuses`: what requests meet, by method and path. `unanswered`: paths whose requests get no answer.
    """

    host = "https://fake"

    def __init__(self) -> None:
        super().__init__()
        self.collections[AGENT_LEASES] = {}
        self.put(paths.NODES, node("n1"))
        self.beats = 0
        self.refuses: dict[str, KubeError] = {}
        self.unanswered: set[str] = set()

    @property
    def node(self) -> Json:
        return self.collections[paths.NODES]["n1"]

    @property
    def annotations(self) -> Mapping[str, str]:
        annotations: Mapping[str, str] = self.node["metadata"]["annotations"]
        return annotations

    @property
    def lease(self) -> Json | None:
        return self.collections[AGENT_LEASES].get("berth-agent-n1")

    @asynccontextmanager
    async def opened(self, kubeconfig: str | None) -> AsyncIterator["NodeApiServer"]:
        """In place of `berth.kube.client.open_client`."""
        assert kubeconfig == "the-kubeconfig"
        yield self

    def bind(self, pod: Json) -> None:
        """The pod is on the node; or what is there has changed."""
        self.put(paths.PODS, pod)

    def delete(self, name: str) -> None:
        self.remove(paths.PODS, name)

    async def get(self, path: str, **params: str) -> Json:
        await self._answer("GET", path)
        if path == paths.PODS:
            assert params["fieldSelector"] == "spec.nodeName=n1"
        return self.node if path == NODE else await super().get(path, **params)

    async def patch(self, path: str, body: Json, *, content_type: str = "") -> Json:
        await self._answer("PATCH", path)
        target = self.node if path == NODE else self.lease
        assert path in (NODE, AGENT_LEASE)
        if target is None:
            raise NotFound(404, "NotFound", "no such Lease")
        self.beats += path == AGENT_LEASE
        annotations = target["metadata"].setdefault("annotations", {})
        for key, value in body["metadata"].get("annotations", {}).items():
            annotations.pop(key, None) if value is None else annotations.__setitem__(key, value)
        return target

    async def create(self, path: str, body: Json, **_: str) -> Json:
        await self._answer("POST", path)
        if path == paths.TOKEN_REVIEWS:
            return {"status": _review(body["spec"]["token"], body["spec"]["audiences"])}
        return await super().create(path, body)

    async def _answer(self, method: str, path: str) -> None:
        if path in self.unanswered:
            await asyncio.Event().wait()
        if error := self.refuses.get(f"{method} {path}"):
            raise error


def _review(token: str, audiences: list[str]) -> Json:
    return {
        "authenticated": True,
        "audiences": audiences,
        "user": {
            "username": "system:serviceaccount:team:default",
            "extra": {
                "authentication.kubernetes.io/pod-name": [token],
                "authentication.kubernetes.io/pod-uid": [token],
            },
        },
    }
