"""The order in which a process ends."""

import asyncio

from proxy.drain import Stage, in_order


async def test_an_end_comes_to_its_end_in_order() -> None:
    log: list[str] = []

    async def note(name: str) -> None:
        log.append(name)

    async def fails() -> None:
        raise RuntimeError("boom")

    stages = [
        Stage("one", lambda: note("one"), 1),
        Stage("stuck", lambda: asyncio.sleep(60), 0.05),
        Stage("broken", fails, 1),
        Stage("last", lambda: note("last"), 1),
    ]
    async with asyncio.timeout(5):
        await in_order(stages)
    assert log == ["one", "last"]
