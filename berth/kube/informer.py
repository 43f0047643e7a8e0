"""A mirror of one collection of objects, kept by list and watch.

The watch resumes from the last resourceVersion it has seen, also over bookmarks; after 410 the
collection is listed again and the difference is reported as changes, so that a consumer never misses
a deletion. A watch that stays silent beyond `idle_timeout_seconds` is opened anew.

Whatever the API server answers, and however soon it ends what it has begun, the next request follows after a
pause that grows until a watch has lasted HEALTHY_SECONDS. A watch that has lasted so long is resumed at once.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
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
# Longer than the client waits for a connection.
HEALTHY_SECONDS = 6.0


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

    `keep` returns the part of an object that is kept and reported; its metadata must stay. An object that it cannot read is
    kept whole.
    """

    def __init__(self, keep: Callable[[JsonObject], JsonObject] = whole) -> None:
        self._keep = keep
        self.objects: dict[str, JsonObject] = {}

    def keep(self, item: JsonObject) -> JsonObject:
        try:
            return self._keep(item)
        except Exception as error:  # one unforeseen object must not hide the others
            log.error("object kept whole", extra=_named(item), exc_info=error)
            return item

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
    """Keeps a Mirror up to date and reports each change to `on_change`, in order, on the event loop."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        *,
        on_change: Callable[[Change], object],
        params: Mapping[str, str] | None = None,
        idle_timeout_seconds: float = 120.0,
        keep: Callable[[JsonObject], JsonObject] = whole,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._client, self._path, self._params = client, path, dict(params or {})
        self._on_change, self._idle_timeout = on_change, idle_timeout_seconds
        self._clock, self._sleep = clock, sleep
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
            from_list, began = not self._version, math.inf
            failure: KubeError | None = None
            try:
                if from_list:
                    await self.relist()
                lists, began = self._lists, self._clock()
                await self._watch(lists)
                if self._lists != lists:
                    continue  # a relist came in between: watch on from there
            except Gone as error:
                self._version, failure = "", error
                if not from_list:
                    continue  # it has been away for long: one list, at once, is the remedy
            except KubeError as error:
                failure = error
            if self._clock() - began >= HEALTHY_SECONDS:
                backoff.reset()
            else:
                await self._pause(backoff, failure)

    async def _pause(self, backoff: Backoff, failure: KubeError | None) -> None:
        delay = backoff.next()
        log.warning(
            "watch failed" if failure else "watch ended early",
            extra=fields(path=self._path, error=failure, retry_seconds=round(delay, 2)),
        )
        await self._sleep(delay)

    async def relist(self) -> None:
        """List the collection, report the difference, and remember where to watch from.

        Also beside `run()`: a watch that is open then is given up, for what it has yet to deliver
        may be older than the list.
        """
        async with self._listing:  # or the older of two lists could come second
            await self._relist()

    async def _relist(self) -> None:
        items: list[JsonObject] = []
        params = {**self._params, "limit": str(_LIST_CHUNK)}
        while True:
            page, meta = await self._page(params)
            items += map(self._mirror.keep, page)
            token = meta.get("continue")
            if not token:
                break
            if token == params.get("continue"):
                raise KubeUnreachable("the list goes round in circles")
            params["continue"] = token
        self._version = meta["resourceVersion"]
        self._lists += 1
        self._tell(self._mirror.replace(items))
        self.synced.set()

    async def _page(self, params: Mapping[str, str]) -> tuple[list[JsonObject], JsonObject]:
        """Some of the objects, and the list's metadata. Raises KubeUnreachable for what is no list."""
        page = await self._client.get(self._path, **params)
        items, meta = page.get("items") or [], page.get("metadata") or {}
        if not isinstance(items, list) or not all(map(_is_object, items)) or not meta.get("resourceVersion"):
            raise KubeUnreachable("unreadable list")
        return items, meta

    async def _watch(self, lists: int) -> None:
        """Until the server ends the watch, or the collection has been listed again since there were so many lists."""
        params = {
            **self._params,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_SERVER_TIMEOUT_SECONDS),
        }
        stream = self._client.stream(self._path, params, idle_timeout_seconds=self._idle_timeout)
        async with aclosing(stream) as events:
            async for event in events:
                if self._lists != lists:
                    return
                self._take(event)

    def _take(self, event: JsonObject) -> None:
        kind, item = event.get("type"), event.get("object")
        if kind == "ERROR":
            raise _error_of(item)
        readable = _has_version(item) if kind == "BOOKMARK" else _is_object(item)
        if kind not in {"ADDED", "MODIFIED", "DELETED", "BOOKMARK"} or not readable:
            raise KubeUnreachable(f"unreadable watch event of type {kind!r}")
        assert isinstance(item, dict)
        self._version = item["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self._tell(self._mirror.apply(kind, item))

    def _tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            try:
                self._on_change(change)
            except Exception as error:  # one unforeseen object must not hide the others
                log.error("change not taken", extra=_named(change.object), exc_info=error)


def _has_version(item: object) -> bool:
    meta = item.get("metadata") if isinstance(item, dict) else None
    return isinstance(meta, dict) and bool(meta.get("resourceVersion"))


def _is_object(item: object) -> bool:
    return _has_version(item) and isinstance(item, dict) and bool(item["metadata"].get("uid"))


async def catch_up(informers: Iterable[Informer]) -> None:
    """List each anew, in this order, until all have: a leader before may have written what their watches have not shown."""
    backoff = Backoff(initial_seconds=0.2, cap_seconds=2.0)
    for informer in informers:
        while True:
            try:
                await informer.relist()
                break
            except KubeError as error:
                log.warning("not caught up yet", extra=fields(path=informer._path, error=error))
                await asyncio.sleep(backoff.next())


def _error_of(status: object) -> KubeError:
    """What a watch says when it cannot go on."""
    said = status if isinstance(status, dict) else {}
    code = said.get("code")
    return response_error(
        code if isinstance(code, int) else 500, str(said.get("reason", "")), str(said.get("message", ""))
    )


def _named(item: JsonObject) -> dict[str, Any]:
    meta = item["metadata"]
    return fields(kind=item.get("kind"), namespace=meta.get("namespace"), name=meta.get("name"))
