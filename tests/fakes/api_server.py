"""An API server in memory: lists, watches and the writes of a binder, without sockets."""

import asyncio
import copy
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from berth.kube import paths
from berth.kube.errors import KubeError, KubeUnreachable, response_error
from tests.fakes.reader import LISTS

Json = dict[str, Any]
LEASES = paths.leases("berth-system")


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
        if not self.silent:
            self._told[path].append({"type": kind, "object": there[name]})
            for watched, chosen, queue in self._watches:
                if watched == path and chosen in ("", name):
                    queue.put_nowait({"type": kind, "object": copy.deepcopy(item)})
        return copy.deepcopy(item)

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
    """The one name that a field selector asks for, "" without one."""
    return str(params.get("fieldSelector", "")).removeprefix("metadata.name=")
