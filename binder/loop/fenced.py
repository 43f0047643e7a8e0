"""The client by which a binder writes: only while no other replica can lead.

Leadership is asked in the step that sends, after every wait of the caller, so that no writer can forget it or ask too
early. Reads are free: a standby may look at what it likes.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from berth.kube.client import MERGE_PATCH, JsonObject, KubeClient
from berth.kube.errors import KubeError


class PodClient(Protocol):
    """What is asked of the API server about one pod, by a binder (`FencedClient`) or by a command (`KubeClient`)."""

    async def get(self, path: str, **params: str) -> JsonObject: ...

    async def create(self, path: str, body: Mapping[str, Any], **params: str) -> JsonObject: ...

    async def patch(self, path: str, body: Mapping[str, Any], *, content_type: str = ...) -> JsonObject: ...


class NotLeading(KubeError):
    """Nothing was sent: another replica may lead by now, and decides."""


class FencedClient:
    """`may_write`: whether this replica leads for as long as a write that begins now can take."""

    def __init__(self, client: KubeClient, may_write: Callable[[], bool]) -> None:
        self._client, self.may_write = client, may_write

    async def get(self, path: str, **params: str) -> JsonObject:
        return await self._client.get(path, **params)

    async def create(self, path: str, body: Mapping[str, Any], **params: str) -> JsonObject:
        """Raises KubeError; NotLeading where nothing was sent."""
        self._require()
        return await self._client.create(path, body, **params)

    async def patch(
        self, path: str, body: Mapping[str, Any], *, content_type: str = MERGE_PATCH
    ) -> JsonObject:
        """Raises KubeError; NotLeading where nothing was sent."""
        self._require()
        return await self._client.patch(path, body, content_type=content_type)

    def _require(self) -> None:
        if not self.may_write():
            raise NotLeading("this replica is not sure to lead any more")
