"""An API server that is only read: objects and lists by path, without sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from berth.contract.keys import agent_lease_namespace
from berth.kube import paths
from berth.kube.errors import response_error

Json = dict[str, Any]
LISTS = (
    paths.NODES,
    paths.PODS,
    paths.NAMESPACES,
    paths.VOLUMES,
    paths.CLAIMS,
    paths.STORAGE_CLASSES,
    paths.BUDGETS,
    paths.leases("berth-system"),
    paths.leases(agent_lease_namespace("berth-system")),
)


class Reader:
    """`refused`: paths that answer 403."""

    host = "http://api"

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {path: {"items": []} for path in LISTS}
        self.refused: set[str] = set()
        self.asked: list[str] = []

    def add(self, path: str, item: Json) -> None:
        """To its list, and by its own path."""
        self.objects[path]["items"].append(item)
        self.objects[f"{path}/{item['metadata']['name']}"] = item

    async def get(self, path: str, **_: str) -> Json:
        self.asked.append(path)
        if path in self.refused:
            raise response_error(403, "Forbidden", path)
        if path not in self.objects:
            raise response_error(404, "NotFound", path)
        return self.objects[path]

    @asynccontextmanager
    async def open(self, kubeconfig: str | None) -> AsyncIterator["Reader"]:
        yield self
