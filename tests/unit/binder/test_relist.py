"""A new leader's list beside a watch that lags: what is older must not come back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from berth.kube.informer import Change, Informer


def pod(version: int, node: str = "") -> dict[str, Any]:
    return {"metadata": {"uid": "p1", "resourceVersion": str(version)}, "spec": {"nodeName": node}}


class LaggingApi:
    """Its first watch delivers, after the second list, what happened before it."""

    def __init__(self) -> None:
        self.listed = [pod(1)]
        self.release = asyncio.Event()
        self.watched_from: list[str] = []

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        version = self.listed[0]["metadata"]["resourceVersion"]
        return {"metadata": {"resourceVersion": version}, "items": self.listed}

    async def stream(self, path: str, params: Any, **_: Any) -> AsyncIterator[dict[str, Any]]:
        self.watched_from.append(params["resourceVersion"])
        if len(self.watched_from) == 1:
            await self.release.wait()
            yield {"type": "MODIFIED", "object": pod(5)}
        await asyncio.Event().wait()


async def test_a_watch_that_was_open_before_the_list_is_given_up() -> None:
    api, changes = LaggingApi(), list[Change]()
    informer = Informer(api, "/api/v1/pods", on_change=changes.append)  # type: ignore[arg-type]
    task = asyncio.create_task(informer.run())
    async with asyncio.timeout(5):
        while not api.watched_from:
            await asyncio.sleep(0)
        api.listed = [pod(9, "n1")]
        await informer.relist()
        api.release.set()
        while len(api.watched_from) < 2:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [c.object["metadata"]["resourceVersion"] for c in changes] == ["1", "9"]
    assert api.watched_from == ["1", "9"]
