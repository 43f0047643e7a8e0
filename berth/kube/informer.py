"""A mirror of one collection of objects, kept by list and watch.

The watch resumes from the last resourceVersion it has seen, also over bookmarks; after 410 the
collection is listed again and the difference is told as changes, so that a consumer never misses
a deletion. A watch that stays silent beyond `idle_timeout_seconds` is opened anew.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from berth.kube.client import KubeClient
from berth.kube.errors import Gone, KubeError, KubeUnreachable, response_error
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]

# The server closes a watch after this time; it is renewed without a list.
_SERVER_TIMEOUT_SECONDS = 300
_LIST_CHUNK = 500


def whole(item: JsonObject) -> JsonObject:
    """Keep all of an object."""
    return item


class ChangeKind(Enum):
    SET = "set"  # the object is new or different
    GONE = "gone"  # the object has been deleted; `object` is its last known state


@dataclass(frozen=True, slots=True)
class Change:
    kind: ChangeKind
    object: JsonObject


class Mirror:
    """The objects of one collection by uid. Pure: it turns lists and watch events into changes.

    `keep` gives what of an object is kept and told; its metadata must stay.
    """

    def __init__(self, keep: Callable[[JsonObject], JsonObject] = whole) -> None:
        self.keep = keep
        self.objects: dict[str, JsonObject] = {}

    def replace(self, items: Iterable[JsonObject]) -> list[Change]:
        """Take a complete list of kept objects; whatever it lacks is gone. Deletions come first, so that a consumer
        that keys by name sees the old object go before its successor arrives."""
        fresh = {item["metadata"]["uid"]: item for item in items}
        gone = [Change(ChangeKind.GONE, old) for uid, old in self.objects.items() if uid not in fresh]
        changed = [Change(ChangeKind.SET, new) for uid, new in fresh.items() if self._differs(uid, new)]
        self.objects = fresh
        return gone + changed

    def apply(self, kind: str, item: JsonObject) -> list[Change]:
        """Take one watch event of type ADDED, MODIFIED or DELETED."""
        item = self.keep(item)
        uid = item["metadata"]["uid"]
        if kind == "DELETED":
            self.objects.pop(uid, None)
            return [Change(ChangeKind.GONE, item)]
        if not self._differs(uid, item):
            return []
        self.objects[uid] = item
        return [Change(ChangeKind.SET, item)]

    def _differs(self, uid: str, item: JsonObject) -> bool:
        known = self.objects.get(uid)
        return known is None or (
            known["metadata"].get("resourceVersion") != item["metadata"].get("resourceVersion")
        )


class Informer:
    """Keeps a Mirror up to date and tells each change to `on_change`, in order, on the event loop."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        *,
        on_change: Callable[[Change], object],
        params: Mapping[str, str] | None = None,
        idle_timeout_seconds: float = 120.0,
        keep: Callable[[JsonObject], JsonObject] = whole,
    ) -> None:
        self._client, self._path, self._params = client, path, dict(params or {})
        self._on_change, self._idle_timeout = on_change, idle_timeout_seconds
        self._mirror = Mirror(keep)
        self._version = ""
        self._listing = asyncio.Lock()
        self._lists = 0
        self.synced = asyncio.Event()

    @property
    def objects(self) -> Mapping[str, JsonObject]:
        """The mirrored objects by uid."""
        return self._mirror.objects

    async def run(self) -> None:
        """Mirror for ever. Errors are retried after a growing pause."""
        backoff = Backoff(initial_seconds=0.2, cap_seconds=15.0)
        while True:
            try:
                if not self._version:
                    await self.relist()
                await self._watch(backoff)
            except Gone:
                self._version = ""
            except KubeError as error:
                delay = backoff.next()
                log.warning(
                    "watch failed",
                    extra=fields(path=self._path, error=error, retry_seconds=round(delay, 2)),
                )
                await asyncio.sleep(delay)

    async def relist(self) -> None:
        """List the collection, tell the difference, and remember where to watch from.

        Also beside `run()`: a watch that is open then is given up, for what it has yet to deliver
        may be older than the list.
        """
        async with self._listing:  # or the older of two lists could come second
            await self._relist()

    async def _relist(self) -> None:
        items: list[JsonObject] = []
        params = {**self._params, "limit": str(_LIST_CHUNK)}
        while True:
            page = await self._client.get(self._path, **params)
            items += map(self._mirror.keep, page.get("items") or [])
            token = page["metadata"].get("continue")
            if not token:
                break
            params["continue"] = token
        self._version = page["metadata"]["resourceVersion"]
        self._lists += 1
        self._tell(self._mirror.replace(items))
        self.synced.set()

    async def _watch(self, backoff: Backoff) -> None:
        params = {
            **self._params,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_SERVER_TIMEOUT_SECONDS),
        }
        stream = self._client.stream(self._path, params, idle_timeout_seconds=self._idle_timeout)
        lists = self._lists
        async with aclosing(stream) as events:
            async for event in events:
                if self._lists != lists:
                    return  # listed meanwhile: watch on from there
                self._take(event)
                backoff.reset()

    def _take(self, event: JsonObject) -> None:
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise response_error(item.get("code", 500), item.get("reason", ""), item.get("message", ""))
        if kind not in {"ADDED", "MODIFIED", "DELETED", "BOOKMARK"} or "metadata" not in item:
            raise KubeUnreachable(f"unreadable watch event of type {kind!r}")
        self._version = item["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self._tell(self._mirror.apply(kind, item))

    def _tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self._on_change(change)
