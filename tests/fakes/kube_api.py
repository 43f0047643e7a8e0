"""An API server in memory with one Node, as the agent of that node sees it through its KubeClient."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

from berth.kube.errors import KubeError, NotFound
from tests.fakes.objects import Json, node

NODE = "/api/v1/nodes/n1"
PODS = "/api/v1/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/berth-system-nodes/leases"
LEASE = f"{LEASES}/berth-agent-n1"
EVENTS = "/api/v1/namespaces/team/events"
TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


class FakeApiServer:
    """Every token is of the pod that it names."""

    host = "https://fake"

    def __init__(self) -> None:
        self.node: Json = node("n1")
        self.pods: dict[str, Json] = {}
        self.lease: Json | None = None
        self.beats = 0
        self.events: list[Json] = []
        # What requests meet, by method and path.
        self.refuses: dict[str, KubeError] = {}
        # Requests to these paths get no answer while they stand here.
        self.silent: set[str] = set()
        self._watch: asyncio.Queue[Json] = asyncio.Queue()

    @asynccontextmanager
    async def opened(self, kubeconfig: str | None) -> AsyncIterator["FakeApiServer"]:
        """In place of `berth.kube.client.open_client`."""
        assert kubeconfig == "the-kubeconfig"
        yield self

    def bind(self, pod: Json) -> None:
        """The pod is on the node; or what is there has changed."""
        name = pod["metadata"]["name"]
        kind = "MODIFIED" if name in self.pods else "ADDED"
        pod["metadata"]["resourceVersion"] = str(self._watch.qsize() + 2)
        self.pods[name] = pod
        self._watch.put_nowait({"type": kind, "object": pod})

    def remove(self, name: str) -> None:
        pod = self.pods.pop(name)
        self._watch.put_nowait({"type": "DELETED", "object": pod})

    @property
    def annotations(self) -> Mapping[str, str]:
        annotations: Mapping[str, str] = self.node["metadata"]["annotations"]
        return annotations

    async def get(self, path: str, **params: str) -> Json:
        await self._answer("GET", path)
        if path == NODE:
            return self.node
        if path == PODS:
            assert params["fieldSelector"] == "spec.nodeName=n1"
            return {"items": list(self.pods.values()), "metadata": {"resourceVersion": "1"}}
        found = self.pods.get(path.removeprefix("/api/v1/namespaces/team/pods/"))
        if found is None:
            raise NotFound(404, "NotFound", path)
        return found

    async def stream(
        self, path: str, params: Mapping[str, str], *, idle_timeout_seconds: float
    ) -> AsyncGenerator[Json, None]:
        assert (path, params["fieldSelector"]) == (PODS, "spec.nodeName=n1")
        while True:
            yield await self._watch.get()

    async def patch(self, path: str, body: Json) -> Json:
        await self._answer("PATCH", path)
        if path == NODE:
            return _merged(self.node, body)
        assert path == LEASE
        if self.lease is None:
            raise NotFound(404, "NotFound", "no such Lease")
        self.beats += 1
        return _merged(self.lease, body)

    async def create(self, path: str, body: Json) -> Json:
        await self._answer("POST", path)
        if path == LEASES:
            assert self.lease is None
            self.lease = body
            body["metadata"].setdefault("annotations", {})
            return body
        if path == TOKEN_REVIEWS:
            return {"status": _review(body["spec"]["token"], body["spec"]["audiences"])}
        assert path == EVENTS
        self.events.append(body)
        return {"metadata": {"name": f"event-{len(self.events)}"}}

    async def _answer(self, method: str, path: str) -> None:
        if path in self.silent:
            await asyncio.Event().wait()
        if error := self.refuses.get(f"{method} {path}"):
            raise error


def _merged(target: Json, body: Json) -> Json:
    annotations = target["metadata"]["annotations"]
    for key, value in body["metadata"].get("annotations", {}).items():
        annotations.pop(key, None) if value is None else annotations.__setitem__(key, value)
    return target


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
